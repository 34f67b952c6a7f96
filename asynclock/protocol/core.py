"""Core: what the machine needs from its environment (time, timers, nodes). `runtime/session.py` implements it for an
event loop; a simulation has its own.

No call to it delivers an answer: if an op fails at once, its ballot settles in the next turn. Work that goes through
many claims is done in slices, by `later`.
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
        """A monotonic time in seconds, to limit slices of work: a slice compares two readings. 0.0 in a simulation."""

    def later(self, call: Callable[..., object], *args: object) -> None:
        """Call it in the next turn."""

    def result(self) -> Result:
        """A future for the caller of a claim."""

    def judge_again(self) -> None:
        """An acquire finds no majority. Servers that came up after the client was opened may be new, and then need no
        quarantine: decide again."""

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


_DRAWN = 2**53
"""The number of values that `random` can have, at most."""


def any_slot(random: Callable[[], float], slots: int) -> int:
    """One of the slots of a kind. Those of a `multi` lock are the combinations of the slots of its parts: there may be
    more than a float can count, so this draws as often as each part of the result needs."""
    if slots <= _DRAWN:
        return int(random() * slots)
    drawn, values = 0, 1
    while values < slots * _DRAWN:
        drawn, values = drawn * _DRAWN + int(random() * _DRAWN), values * _DRAWN
    return drawn * slots // values
