"""Ops of a cluster that wait until their slot can be asked again.

The ops of one slot wait in the order in which they were sent, and new ops of the slot wait behind them. So no undo and
no release is overtaken by a later attempt for its name."""

from __future__ import annotations

import math
from bisect import insort
from functools import partial
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

_RATE = 2000
"""The greatest number of ops that are sent again in a second. A cluster that serves no slot (CLUSTERDOWN) refuses the
ops of all names."""

_TRIAL = int(_RATE * _PAUSES[1])
"""The number of ops of one slot that are sent first after a pause. If none of them waits again, the others follow."""

_SLICE = 256
"""The greatest number of ops that are sent in one turn of the loop, in about 5 ms."""


class Parked:
    """The ops of one cluster that wait. `ready` is called with a slot and its ops once they can be sent."""

    def __init__(self, clock: Clock, ready: Callable[[int, list[Entry]], object]) -> None:
        self._clock = clock
        self._ready = ready
        self._entries: dict[int, list[Entry]] = {}
        self._count = 0  # of all ops
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
        """The op waits for a pause that grows while the slot stays unavailable. It also grows with the number of ops
        that wait, but for that not beyond the deadline of the first one."""
        entries = self._entries.setdefault(slot, [])
        insort(entries, (handler, error), key=_sent)
        self._count += 1
        if slot not in self._timers:
            self._start(slot)

    def _start(self, slot: int) -> None:
        now, entries = self._clock.now(), self._entries[slot]
        last, ended = self._pauses.get(slot, (0.0, -math.inf))
        pause = min(2 * last, _PAUSES[1]) if last and now - ended < _FORGET else _PAUSES[0]
        share = min(len(entries), _TRIAL) / (_RATE * len(entries) / self._count)  # all slots together keep the rate
        due = now + max(pause, min(share, entries[0][0].deadline - now))
        self._pauses[slot] = pause, due
        self._timers[slot] = self._clock.call_at(due, lambda: self.release(slot, _TRIAL, _PAUSES[1]))

    def release(self, slot: int, most: int = _SLICE, pause: float = _PAUSES[0]) -> int:
        """The slot may be available now: its oldest ops wait no longer, at most so many of them. The next ones follow
        after `pause`, unless some of the first ones wait again. Returns how many were released."""
        if (timer := self._timers.pop(slot, None)) is not None:
            timer.cancel()
        now, entries = self._clock.now(), self._entries.pop(slot, [])
        some, later = entries[:most], list[Entry]()
        for each in entries[most:]:
            (later if now < each[0].deadline else some).append(each)
        self._count -= len(entries)
        if some:
            self._ready(slot, some)
        if later:
            self._entries[slot] = sorted([*self._entries.get(slot, ()), *later], key=_sent)
            self._count += len(later)
            if slot not in self._timers:
                released = _sent(entries[most - 1])
                self._timers[slot] = self._clock.call_at(now + pause, lambda: self._go_on(slot, released))
        return len(some)

    def _go_on(self, slot: int, released: float) -> None:
        """The ops that were sent until then have been released."""
        if _sent(self._entries[slot][0]) > released:
            self.release(slot)
        else:
            self._start(slot)

    def release_all(self, wanted: Callable[[int], bool] = lambda slot: True) -> None:
        """The slots for which `wanted` is true may be available now. After a slice of ops the others follow in later
        turns of the loop."""
        self._release_some([slot for slot in self._entries if wanted(slot)])

    def _release_some(self, slots: list[int]) -> None:
        sent = 0
        for at, slot in enumerate(slots):
            if sent >= _SLICE:
                self._clock.call_at(self._clock.now(), partial(self._release_some, slots[at:]))
                return
            sent += self.release(slot)
        self._forget()

    def end(self) -> None:
        """The cluster is closed: all ops wait no longer."""
        for slot in list(self._entries):
            self.release(slot, self._count)
        self._forget()

    def _forget(self) -> None:
        if not self._entries:
            now = self._clock.now()
            self._pauses = {slot: known for slot, known in self._pauses.items() if now - known[1] < _FORGET}


def _sent(entry: Entry) -> float:
    return entry[0].sent
