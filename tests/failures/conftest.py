"""What the tests of failures share."""

from __future__ import annotations

import pytest

from asynclock import _options


@pytest.fixture(autouse=True)
def patient_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several nodes a client gives each node 50 ms, unless it is told otherwise. A busy machine needs more, and
    then a healthy node counts as one that failed. A test of the time itself sets node_timeout."""
    monkeypatch.setattr(_options, "QUORUM_TIMEOUT", 1.0)
