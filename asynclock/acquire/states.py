"""The states of an acquisition (`acquisition.py`). Each has its data, and prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynclock._clock import Timer
    from asynclock.acquire.acquisition import Acquisition
    from asynclock.acquire.holds import Entry
    from asynclock.acquire.local_queue import LocalWaiter
    from asynclock.quorum.ballot import Ballot


class Began:
    """Nothing was sent, and it has no place in a queue."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "begins"

    def end(self) -> None:
        """The next state begins: cancel the timer of this one, or leave the local queue."""


class Done(Began):
    """Its future has the result, or is cancelled."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "done"


class Queued(Began):
    """Another task of this process asks the servers, or holds the name."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: LocalWaiter) -> None:
        self.waiter = waiter

    def __repr__(self) -> str:
        return "queued locally"

    def end(self) -> None:
        self.waiter.leave()


class OwnerEntering(Began):
    """Another task of its owner asks for the hold, of a reentrant lock."""

    __slots__ = ("_call", "_entry")

    def __init__(self, entry: Entry, call: Acquisition) -> None:
        self._entry = entry
        self._call = call
        entry.join(call)

    def __repr__(self) -> str:
        return "waits while its owner enters"

    def end(self) -> None:
        self._entry.leave(self._call)


class Asking(Began):
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


class Pausing(Began):
    """It asks again at `until`, or earlier after a notice."""

    __slots__ = ("last", "probe", "timer", "until")

    def __init__(self, until: float, probe: bool, last: Ballot | None) -> None:
        self.until = until
        self.probe = probe  # the next round renews the ticket only
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
