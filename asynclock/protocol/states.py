"""The states of a claim (`machine.py`) and of a tenure (`hold.py`). Each state of a claim carries its data and has a
repr. NEXT lists the allowed transitions; docs/diagrams draws them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asynclock._time import Timer
    from asynclock.protocol.local_queue import Enqueued, Entry, LocalWaiter
    from asynclock.quorum.ballot import Ballot


class ClaimState:
    """What all have in common."""

    __slots__ = ()

    def end(self) -> None:
        """The next state begins: cancel the timer of this one, or leave the local queue."""


class Began(ClaimState):
    """Nothing was sent, and it has no place in a queue."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "begins"


class Done(ClaimState):
    """Its future is completed, with or without an error, or is cancelled."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "done"


class Queued(ClaimState):
    """Another task of this process asks the servers, or holds the name."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: LocalWaiter) -> None:
        self.waiter = waiter

    def __repr__(self) -> str:
        return "queued locally"

    def end(self) -> None:
        self.waiter.leave()


class OwnerEntering(ClaimState):
    """Of a reentrant lock: another task of its owner asks for the hold."""

    __slots__ = ("_claim", "_entry")

    def __init__(self, entry: Entry, claim: Enqueued) -> None:
        self._entry = entry
        self._claim = claim

    def __repr__(self) -> str:
        return "waits while its owner enters"

    def end(self) -> None:
        self._entry.leave(self._claim)


class Asking(ClaimState):
    """A round is under way."""

    __slots__ = ("ballot", "timer")

    def __init__(self, ballot: Ballot) -> None:
        self.ballot = ballot
        self.timer: Timer | None = None  # ends the round with the time of the caller, or its patience

    def __repr__(self) -> str:
        return f"asking, {self.ballot!r}"

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Confirming(Asking):
    """The second round is under way, which raises the counters of the nodes to the token of a round that was won."""

    __slots__ = ("won",)

    def __init__(self, ballot: Ballot, won: Ballot) -> None:
        super().__init__(ballot)
        self.won = won

    def __repr__(self) -> str:
        return f"confirming, {self.ballot!r}"


class Pausing(ClaimState):
    """It asks again at `until`, or earlier after a notice."""

    __slots__ = ("last", "probe", "timer", "until")

    def __init__(self, until: float, probe: bool, last: Ballot | None) -> None:
        self.until = until
        self.probe = probe  # the next round is a probe (`Rounds.send`)
        self.last = last  # the last round; None: it yields to remote waiters before its first one
        self.timer: Timer | None = None

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Waiting(Pausing):
    """The servers keep its ticket, and will notify it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"waiting until {self.until:.3f}"


class BackingOff(Pausing):
    """It has no ticket that would be served."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"backing off until {self.until:.3f}"


BEGAN, DONE = Began(), Done()


NEXT: Mapping[type[ClaimState], Mapping[type[ClaimState], str]] = {
    Began: {
        OwnerEntering: "a task of its owner asks",
        Queued: "a task of this process asks or holds",
        Asking: "it is the first",
        BackingOff: "notified clients go first",
        Done: "its owner has the hold, or asks (timeout=0)",
    },
    OwnerEntering: {
        OwnerEntering: "the next of its owner asks",
        Queued: "it asks for its owner",
        Asking: "it asks for its owner",
        BackingOff: "it asks for its owner",
        Done: "the owner has entered, or time is up",
    },
    Queued: {
        Queued: "time is up, and nobody has asked lately",
        Asking: "it is its turn",
        Done: "the hold is passed on, or time is up",
    },
    Asking: {
        Asking: "the one try beside an own hold is over",
        Confirming: "granted, and the counters differ",
        Waiting: "no hold, and it has a ticket",
        BackingOff: "no hold, and no ticket",
        Done: "granted, or time is up",
    },
    Confirming: {
        Asking: "the one try beside an own hold is over",
        Waiting: "no majority of witnesses",
        BackingOff: "no majority of witnesses",
        Done: "a majority are witnesses, or time is up",
    },
    Waiting: {Asking: "a notice, or it is time", Done: "its ticket was granted, or time is up"},
    BackingOff: {Asking: "it is time", Done: "time is up"},
    Done: {},
}
"""From each state to the next: the event. A cancel of the caller, a close of the client and an error lead to Done from
each of them."""


# -- of a tenure -------------------------------------------------------------------------------------------------------


class TenureState(Enum):
    """The state of a tenure."""

    HELD = "held"
    UNKNOWN = "unknown"  # held, but no majority granted the last renewal
    LOST = "lost"
    RELEASED = "released"
    DETACHED = "detached"  # another process may adopt it


HELD, UNKNOWN, LOST, RELEASED, DETACHED = TenureState  # faster to read than members of the class, as in `model.py`
OPEN = (HELD, UNKNOWN)
GIVEN_BACK = (RELEASED, DETACHED)
