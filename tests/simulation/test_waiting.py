"""The simulation notices what only makes a client wait: that no promise is broken does not show it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from asynclock.protocol import planner
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.local_queue import LocalWaiter
from asynclock.protocol.planner import Next, Pace, Planner
from asynclock.rules.decide import Decision
from simulation.plan import plan_of
from simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind, Reply, Ticket
    from asynclock.stores.port import Notice

_TIME_UP, _NOTIFIED, _LIMIT = LocalWaiter.time_up, Acquisition.notified, Pace.outage_limit
_REFUSED, _GRANT, _ADOPT = planner.after_refusal, Decision._grant, Decision.adopt  # noqa: SLF001 - they are patched


def _later(self: Any) -> None:
    clock = self.core.clock
    clock.call_at(clock.now() + 1.0, partial(_TIME_UP, self))


def _patient(self: Pace, began: float, give_up: float) -> float:
    _LIMIT(self, began, give_up)
    return min(give_up, began + 60.0)


def _deaf(kind: Callable[[Kind], bool]) -> Callable[..., None]:
    def notified(self: Acquisition, index: int, notice: Notice) -> None:
        if not kind(self.terms.kind):
            _NOTIFIED(self, index, notice)

    return notified


def _stops_at_split_votes(facts: planner.Refusal) -> Next:
    step = _REFUSED(facts)
    return Next.STOP if step is Next.BACK_OFF_AFTER_SPLIT else step


def _grants_one(self: Decision, head: Ticket, last: bool) -> bool | None:
    return None if (received := _GRANT(self, head, last)) else received


def _no_slot(self: Planner, ballot: Ballot) -> bool:
    del self, ballot
    return False


def _adopts_sometimes(self: Decision) -> Reply:
    return self._no() if self.now % 3 < 1 else _ADOPT(self)


LATE = "served late"

PATCHES = {
    "a time that is up is noticed late": (LocalWaiter, "time_up", _later, "an acquire ended late", 0, 2),
    "patience without an end": (Pace, "outage_limit", _patient, "an outage outlasts the patience", 0, 4),
    "an outage that has ended lasts": (Pace, "outage_limit", _patient, "an outage without a fault", 0, 2),
    "split votes refuse": (planner, "after_refusal", _stops_at_split_votes, "refused without a reason", 0, 0),
    "one slot is tried": (Planner, "_choose_slot", _no_slot, "refused without a reason", 19, 9),
    "a reader has no notice": (Acquisition, "notified", _deaf(lambda kind: kind.letter == "r"), LATE, 0, 1),
    "a writer has no notice": (Acquisition, "notified", _deaf(lambda kind: kind.letter == "w"), LATE, 3, 4),
    "a permit has no notice": (Acquisition, "notified", _deaf(lambda kind: kind.slots > 0), LATE, 3, 9),
    "several names have no notice": (Acquisition, "notified", _deaf(lambda kind: bool(kind.parts)), LATE, 0, 1),
    "one reader of many is served": (Decision, "_grant", _grants_one, LATE, 23, 10),
    "an adoption is refused": (Decision, "adopt", _adopts_sometimes, "an adoption failed", 0, 0),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_what_makes_a_client_wait_is_found(
    patch: str, monkeypatch: pytest.MonkeyPatch, checked_alone: Callable[[str], None]
) -> None:
    """In a run that has no flaw without the patch, by the check that it is for."""
    owner, attribute, instead, what, seed, run = PATCHES[patch]
    plan = plan_of(seed, run)
    assert simulate(plan).flaw is None
    checked_alone(what)
    monkeypatch.setattr(owner, attribute, instead)
    flaw = simulate(plan).flaw
    assert flaw is not None
    assert flaw.what == what
