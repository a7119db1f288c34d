"""What commands that ask a served model share: where it is, and its keys."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:30000"

Url = Annotated[str, typer.Argument(metavar="URL", help="Where the server answers.")]
Key = Annotated[
    str,
    typer.Option(
        "--api-key", metavar="KEY", envvar="SGLANG_API_KEY", help="The server's API key, if any."
    ),
]
AdminKey = Annotated[
    str,
    typer.Option(
        "--admin-api-key",
        metavar="KEY",
        envvar="SGLANG_ADMIN_API_KEY",
        help="Its administrator's, if that is another one: for emptying caches.",
    ),
]
