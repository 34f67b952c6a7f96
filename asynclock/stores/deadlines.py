"""The deadlines of many things that are under way, with one timer for all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

from asynclock._clock import reading_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asynclock._time import Clock, Timer

_T = TypeVar("_T")


class Deadlines(Generic[_T]):
    """Calls `overdue` with each thing that is still here when it is due, and forgets it. A timer for each op would cost
    as much as the op.

    After the loop was blocked it first reads what has come: then only things that were due at the last such look are
    overdue."""

    __slots__ = ("_blocked_at", "_clock", "_due", "_looks_at", "_overdue", "_timer")

    def __init__(self, clock: Clock, overdue: Callable[[_T], object]) -> None:
        self._clock = clock
        self._overdue = overdue
        self._due: dict[_T, float] = {}
        self._timer: Timer | None = None
        self._looks_at = math.inf  # when that timer fires
        self._blocked_at = -math.inf  # when it last fired late

    def __len__(self) -> int:
        return len(self._due)

    def add(self, thing: _T, due: float) -> None:
        """It is under way."""
        self._due[thing] = due
        if due < self._looks_at:
            self._look_at(due)

    def remove(self, thing: _T) -> None:
        """It has ended. A second call does nothing."""
        self._due.pop(thing, None)

    def __iter__(self) -> Iterator[_T]:
        """Those that are under way now."""
        return iter(list(self._due))

    def stop(self) -> None:
        """Nothing is overdue any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at, self._timer = math.inf, None

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at, self._timer = when, self._clock.call_at(when, self._look)

    def _look(self) -> None:
        now = self._clock.now()
        late, self._looks_at, self._timer = now - self._looks_at, math.inf, None
        due = now
        if reading := reading_time(late):
            due, self._blocked_at = self._blocked_at, now
        try:
            for thing in [each for each, its in self._due.items() if its <= due]:
                if self._due.get(thing, math.inf) <= due:  # else another one has ended it, or has put it off
                    del self._due[thing]
                    self._overdue(thing)
        finally:  # it may raise an exception: the others are told in the next turn
            if self._due:
                self._look_at(max(now + reading, min(self._due.values())))
