"""The names that a session has released to waiters of other clients a moment ago."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock._options import QUORUM_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.rules.model import Kind


class YieldedNames:
    """The names that were released to waiters of other clients a moment ago. The servers have notified those waiters. A
    task of this process that comes a moment later enqueues behind them, so that it does not overtake them."""

    __slots__ = ("_at", "_now", "_used")

    def __init__(self, now: Callable[[], float], used: bool) -> None:
        self._now = now
        self._used = used  # not at a single node: a notice grants there, so that no waiter can be overtaken
        self._at: dict[str, float] = {}  # name -> when it was released, oldest first

    def __bool__(self) -> bool:
        return bool(self._at)

    def add(self, kind: Kind, name: str) -> None:
        """Only the plain mutex needs this. The nodes keep the order of the other kinds."""
        if not self._used or kind.fair or kind.shared:
            return
        now = self._now()
        self._at.pop(name, None)
        while self._at and now - next(iter(self._at.values())) > QUORUM_TIMEOUT:
            del self._at[next(iter(self._at))]
        self._at[name] = now

    def take(self, name: str) -> bool:
        """Whether the name was released a moment ago. True at most once for each release."""
        at = self._at.pop(name, None)
        return at is not None and self._now() - at <= QUORUM_TIMEOUT
