"""A connection is not given up because its server has no CPU for a while."""

from __future__ import annotations

import pytest

from asynclock.stores.redis import handlers
from tests.support.waiters import LIMIT


@pytest.fixture
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent server is not taken for one that is down."""
    monkeypatch.setattr(handlers, "_SILENCE", 2 * LIMIT)
