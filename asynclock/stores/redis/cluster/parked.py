"""Ops of a cluster that wait until their slot can be asked again.

The ops of one slot wait in the order in which they were sent, and new ops of the slot wait behind them. So no undo and
no release is overtaken by a later attempt for its name."""

from __future__ import annotations

import math
from bisect import insort
from typing import TYPE_CHECKING, TypeAlias

from asynclock.rules.model import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock, Timer
    from asynclock.stores.port import ReplyHandler

Entry: TypeAlias = "tuple[ReplyHandler, Exception]"
"""An op, and why it waits."""

_PAUSES = (0.005, 0.05)
"""Seconds until a slot is asked again: first, and at most. A slot that is moved key by key is there after some
milliseconds."""

_FORGET = 1.0  # seconds after which a slot that waits again begins with the first pause


class Parked:
    """The ops of one cluster that wait. `ready` is called with a slot and its ops once they can be sent."""

    def __init__(self, clock: Clock, ready: Callable[[int, list[Entry]], object]) -> None:
        self._clock = clock
        self._ready = ready
        self._entries: dict[int, list[Entry]] = {}
        self._timers: dict[int, Timer] = {}
        self._pauses: dict[int, tuple[float, float]] = {}  # slot -> the last pause, and its end

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def releases(self) -> bool:
        """Whether a release waits."""
        return any(handler.op.verb is RELEASE for entries in self._entries.values() for handler, _ in entries)

    def add(self, slot: int, handler: ReplyHandler, error: Exception) -> None:
        """The op waits for a pause that grows while the slot stays unavailable, but not beyond its deadline."""
        entries = self._entries.setdefault(slot, [])
        insort(entries, (handler, error), key=lambda entry: entry[0].sent)
        if len(entries) == 1:
            self._start(slot)

    def _start(self, slot: int) -> None:
        now = self._clock.now()
        last, ended = self._pauses.get(slot, (0.0, -math.inf))
        pause = min(2 * last, _PAUSES[1]) if last and now - ended < _FORGET else _PAUSES[0]
        self._pauses[slot] = pause, now + pause
        self._timers[slot] = self._clock.call_at(now + pause, lambda: self.release(slot))

    def release(self, slot: int) -> None:
        """The slot may be available now: its ops wait no longer."""
        if (timer := self._timers.pop(slot, None)) is not None:
            timer.cancel()
        entries = self._entries.pop(slot, None)
        if entries:
            self._ready(slot, entries)

    def release_all(self, wanted: Callable[[int], bool] = lambda slot: True) -> None:
        """The slots for which `wanted` is true may be available now."""
        for slot in [slot for slot in self._entries if wanted(slot)]:
            self.release(slot)
        if not self._entries:
            now = self._clock.now()
            self._pauses = {slot: known for slot, known in self._pauses.items() if now - known[1] < _FORGET}
