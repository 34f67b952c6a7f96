"""A client asks its servers for nothing but what the test lets it ask for."""

from __future__ import annotations

import pytest

from asynclock.stores.redis import rights
from tests.support.waiters import LONG


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with waiters tries from time to time whether its servers publish still. On a busy machine these trials
    would come while a test counts what the servers send, or picks one of their replies."""
    monkeypatch.setattr(rights, "LOOK", LONG)
