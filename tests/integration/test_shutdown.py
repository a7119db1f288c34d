"""SIGTERM: what was put is committed before the process ends as it would have."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parent.parent / "core"

SCRIPT = """
import signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from making import contents, keys, put, identity, settings
from kvtier.integration import shutdown
shutdown.SECONDS = 60.0
from kvtier.store import Store

if sys.argv[3] == "handler":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
store = Store.open(settings(Path(sys.argv[1]), commit_interval=60.0))
namespace = store.namespace(identity())
shutdown.commit_at_sigterm(store)
chain = keys("chain", 10)
put(namespace, chain, contents(chain, 5000))
print("put", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("before", "status"), [("default", -signal.SIGTERM), ("handler", 7)])
def test_sigterm_commits_first(tmp_path: Path, before: str, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(CORE), before],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "put\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == status
    finally:
        process.kill()
        process.wait()
    sys.path.insert(0, str(CORE))
    from making import contents, get, keys, opened

    with opened(tmp_path) as (_, namespace):
        chain = keys("chain", 10)
        assert get(namespace, chain, 5000) == contents(chain, 5000)
