"""Deadlines for tests of what is right, on machines of which nobody knows how slow they are."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """A busy drive is no fault: with the defaults a server goes on without a store on which its
    test page is not there after 8 s. Tests of the deadlines set their own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("KVTIER_PUT_DEADLINE", "KVTIER_READ_DEADLINE"):
            monkeypatch.setenv(name, "120")
        yield
