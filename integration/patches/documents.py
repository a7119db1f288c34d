"""Documents of Anthropic's Messages API as text, for models that read text only."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import io
from collections.abc import Mapping
from typing import Any

MAX_PDF_BYTES = 32 * 2**20
MAX_PAGES = 200
MAX_CHARACTERS = 2_000_000
"""A request with more gets the beginning, and a line that says so."""

_remembered: dict[bytes, str] = {}
_REMEMBERED = 64
"""Agents send the same document again in every turn."""


def as_blocks(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A `document` block as blocks of text, and of images where it has any.

    The same block gives the same text, so that the prompt's prefix stays the same.
    """
    source = block.get("source")
    source = source if isinstance(source, Mapping) else {}
    kind, data = source.get("type"), source.get("data")
    inner = source.get("content")
    if kind == "content" and isinstance(inner, list):
        return [_text(_title(block)), *(dict(part) for part in inner)]
    if kind == "content" and isinstance(inner, str):
        return [_text(_title(block), inner)]
    if kind == "text" and isinstance(data, str):
        return [_text(_title(block), data[:MAX_CHARACTERS])]
    if kind == "base64" and isinstance(data, str):
        return [_text(_title(block), _pdf_text(data))]
    return [_text(_title(block), f"(This server cannot fetch a document by {kind or 'nothing'}.)")]


def _text(*lines: str) -> dict[str, Any]:
    return {"type": "text", "text": "\n".join(lines)}


def _title(block: Mapping[str, Any]) -> str:
    named = [str(block[key]) for key in ("title", "context") if block.get(key)]
    return f"[Document{': ' + ' - '.join(named) if named else ''}]"


def _pdf_text(data: str) -> str:
    if len(data) > MAX_PDF_BYTES * 4 / 3:
        return f"(A PDF of more than {MAX_PDF_BYTES >> 20} MiB is not read.)"
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return "(The document is no valid base64.)"
    digest = hashlib.sha256(content).digest()
    if digest not in _remembered:
        while len(_remembered) >= _REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)
        _remembered[digest] = _extract(content)
    return _remembered[digest]


def _extract(content: bytes) -> str:
    try:
        pypdf = importlib.import_module("pypdf")
    except ImportError:
        return "(This server cannot read PDF: pypdf is not installed beside SGLang.)"
    try:
        pages = pypdf.PdfReader(io.BytesIO(content)).pages
        found = [page.extract_text().strip() for page in list(pages)[:MAX_PAGES]]
        count = len(pages)
    except Exception as error:  # a damaged file raises almost anything
        return f"(The PDF cannot be read: {type(error).__name__}.)"
    if not any(found):
        return f"(The PDF has {count} pages and no text; pages that are images are not read.)"
    text = "\n\n".join(f"Page {number}:\n{page}" for number, page in enumerate(found, 1))
    if count > len(found) or len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + f"\n(The document has {count} pages; the rest is left out.)"
    return text
