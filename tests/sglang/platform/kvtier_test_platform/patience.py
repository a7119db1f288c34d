"""Deadlines for tests of what is right, on machines of which nobody knows how slow they are."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """A busy drive is no fault: with the defaults a server starts without its store if the test
    page does not come back within 8 s. Tests of the deadlines set their own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("KVTIER_PUT_DEADLINE", "KVTIER_READ_DEADLINE"):
            monkeypatch.setenv(name, "120")
        yield
