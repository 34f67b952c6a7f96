"""The local line: tasks of one process that want the same name. Only its head asks the servers.

Who releases may pass the hold to the next in line without a round trip: within the fences that came with the hold, at
most PASSING seconds after the last round trip, and while a third of the lease remains. So whoever waits elsewhere
waits for a few tenures of ours at most, whether we know of him or not. Then the release leaves, and the next in line
asks behind it, in one write.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    from asynclock._options import LockSettings

SPAN = 16
"""So many tenures one round trip may serve, each with a fence of its own."""

PASSING = 0.005
"""Seconds after a round trip for which a hold may be passed on."""


def may_pass(now: float, tripped: float, valid_until: float, lease: float, fences_left: int) -> bool:
    """Whether a hold that came by the round trip of `tripped` may be passed on once more. Pure."""
    return fences_left > 0 and now - tripped <= PASSING and valid_until - now >= lease / 3


class Stander(Protocol):
    """Who stands in line."""

    lock: Any
    task: asyncio.Task[Any] | None
    settings: LockSettings

    @property
    def standing(self) -> bool:
        """Whether it still does."""

    def take(self, lease: Any) -> None:
        """The hold is passed to it."""

    def ask(self) -> None:
        """It is the head now, and asks at once."""

    def ask_alone(self) -> None:
        """The line is dissolved."""


class Line:
    """One name's line. It is there while somebody asks or stands."""

    __slots__ = ("asker", "broken", "name", "standers")

    def __init__(self, name: str, asker: Any = None) -> None:
        self.name = name
        self.asker = asker  # whom the servers hear; None: a task of this process holds it
        self.broken = False  # a majority is out of reach: each asks for itself
        self.standers: OrderedDict[Stander, None] | None = None  # in order; each can leave in constant time

    def stand(self, stander: Stander) -> None:
        if self.standers is None:
            self.standers = OrderedDict()
        self.standers[stander] = None

    def leave(self, stander: Stander, lines: dict[str, Line]) -> None:
        """Harmless for one that does not stand here."""
        if self.standers:
            self.standers.pop(stander, None)
        if not self.standers and self.asker is None:
            self._end(lines)

    def first(self) -> Stander | None:
        """Who is next."""
        while self.standers:
            stander = next(iter(self.standers))
            if stander.standing:
                return stander
            del self.standers[stander]
        return None

    def pop(self, lines: dict[str, Line]) -> None:
        """The first in line leaves it, with the hold."""
        if self.standers:
            self.standers.popitem(last=False)
        if not self.standers and self.asker is None:
            self._end(lines)

    def next(self, lines: dict[str, Line]) -> None:
        """Nobody asks, and nobody here holds it: the first in line becomes the head."""
        self.asker = self.first()
        if self.asker is None:
            self._end(lines)
        else:
            self.standers.popitem(last=False)  # type: ignore[union-attr]  # it was in there
            self.asker.ask()

    def asked(self, has_it: bool, lines: dict[str, Line]) -> None:
        """The head has come to its end."""
        if self.standers is None:  # as mostly
            self._end(lines)
        elif not has_it:
            self.next(lines)
        elif self.first() is None:
            self._end(lines)
        else:
            self.asker = None

    def dissolve(self) -> None:
        """A majority is out of reach: each tells its own task so, in its own time."""
        self.broken = True
        standers, self.standers = self.standers or (), None
        for stander in standers:
            stander.ask_alone()

    def _end(self, lines: dict[str, Line]) -> None:
        self.asker = None
        if lines.get(self.name) is self:
            del lines[self.name]
