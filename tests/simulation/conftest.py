"""The simulation and the stack draw the node timeouts themselves, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from simulation.checks import Judge

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def patient_nodes() -> None:
    """In place of the fixture for real servers: with a second for each node, most drawn leases would be too short."""


@pytest.fixture
def checked_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Of the checks only the one that finds this flaw counts."""
    fail = Judge.fail

    def check(only: str) -> None:
        def fails(judge: Judge, what: str, about: object) -> None:
            if what == only:
                fail(judge, what, about)

        monkeypatch.setattr(Judge, "fail", fails)

    return check


@pytest.fixture
def histories_only(checked_alone: Callable[[str], None]) -> None:
    """What the programs saw is checked, and nothing else."""
    checked_alone("not linearizable")
