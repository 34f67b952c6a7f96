"""Core: the outside of the machine. `runtime/session.py` is the one of an event loop; a simulation has its own.

Nothing answers inside a call to it: an op that fails at once settles its ballot, and the event comes in the next turn.
Work that goes through many claims is done in slices, by `later`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asynclock.quorum.ballot import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from asynclock._errors import Reason
    from asynclock._options import ClientSettings, LockSettings
    from asynclock._time import Clock
    from asynclock.events import Event
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.quorum import Quorum

SLICE = 0.002
"""Seconds of work in one turn of the loop, for what goes through all claims or all holds."""


class Result(Waiter, Protocol):
    """The future for which the caller of a claim waits. Its result is None: it says that the claim has ended."""

    def set_exception(self, error: BaseException, /) -> None: ...

    def cancel(self) -> Any: ...

    def cancelled(self) -> bool: ...

    def exception(self) -> Any: ...

    def __await__(self) -> Generator[Any, Any, None]: ...


class Listeners(Protocol):
    """The listeners of the client."""

    @property
    def active(self) -> Sequence[object]:
        """Empty while nobody listens: then no event of an acquire or a release is made."""

    def tell(self, event: Event) -> None: ...


class Core(Protocol):
    """See the module. Times are seconds of `clock`."""

    settings: ClientSettings
    clock: Clock  # the time, and timers
    quorum: Quorum  # asks the nodes
    closed: bool  # nothing new begins
    forked: bool  # this is a forked child: the connections are the parent's

    @property
    def observers(self) -> Listeners: ...

    def within(self, settings: LockSettings) -> float:
        """The node timeout of a lock, in seconds. Raises ConfigError for a lease that is too short for it."""

    def random(self) -> float:
        """A number from 0.0 up to 1.0, for jitter and other choices that are no secret."""

    def new_id(self, seed: int, metadata: str, mode: str = "") -> str:
        """A fresh id."""

    def spent(self) -> float:
        """Seconds of work, on a clock that measures it. A slice compares two readings. 0.0 in a simulation."""

    def later(self, call: Callable[..., object], *args: object) -> None:
        """Call it in the next turn."""

    def result(self) -> Result:
        """For a caller that waits."""

    def judge_again(self) -> None:
        """An acquire finds no majority: servers that came up since may be new, and need no quarantine."""

    def renews(self, tenures: Sequence[Any]) -> None:
        """A hold with these tenures is renewed now."""

    def dropped(self, tenure: Any) -> None:
        """The program no longer refers to that tenure. A garbage collector calls this in any thread, and between any
        two steps of the machine. `Hold.dropped` follows in a turn of its own."""

    def tell_lost(self, terms: Terms, reason: Reason, held_for: float, why: Callable[[], object]) -> None:
        """A lease was lost. `why` makes the error that says so, if it is logged."""

    def fault(self, where: object, error: Exception) -> None:
        """A check of the watchdog has raised. It is repeated."""


def uniform(random: Callable[[], float], least: float, most: float) -> float:
    """A number between these, for jitter."""
    return least + (most - least) * random()
