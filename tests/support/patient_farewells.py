"""A client that closes has the time that a busy machine needs to deliver its pending releases."""

from __future__ import annotations

import pytest

from asynclock.runtime import shutdown
from asynclock.stores.redis import node
from tests.support.waiters import LIMIT


@pytest.fixture
def patient_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives a new connection and the releases there one second. On a busy machine they may need more, and then their
    keys stay."""
    monkeypatch.setattr(node, "_FAREWELL", LIMIT)
    monkeypatch.setattr(shutdown, "CLOSING", 2 * LIMIT)
