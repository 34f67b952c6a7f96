"""The simulation and the stack draw the node timeouts themselves, in virtual time."""

from __future__ import annotations

import pytest

from simulation.checks import Judge


@pytest.fixture(autouse=True)
def patient_nodes() -> None:
    """In place of the fixture for real servers: with a second for each node, most drawn leases would be too short."""


@pytest.fixture
def histories_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the programs saw is checked, and nothing else."""
    fail = Judge.fail

    def fails(judge: Judge, what: str, about: object) -> None:
        if what == "not linearizable":
            fail(judge, what, about)

    monkeypatch.setattr(Judge, "fail", fails)
