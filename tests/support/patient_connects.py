"""A connect has the time that a busy machine needs, for the tests of a folder that imports this fixture."""

from __future__ import annotations

from functools import partial

import pytest

from asynclock import _options

CONNECT_TIMEOUT = 5.0


@pytest.fixture(autouse=True)
def patient_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives a connect one second, unless it is told otherwise. On a busy machine one may need more. Then a
    first use fails, or a new server that comes up later than the others counts as restarted, and casts no vote for a
    minute. A test of the time itself sets connect_timeout."""
    patient = partial(_options.ClientSettings, connect_timeout=CONNECT_TIMEOUT)
    monkeypatch.setattr(_options, "ClientSettings", patient)
