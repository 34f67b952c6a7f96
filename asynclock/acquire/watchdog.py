"""The watchdog: one per client and loop, it looks at each lease when it said it wants to be looked at.

It is a timer wheel and one timer, not a task: nobody can cancel it together with "all tasks", and a lease costs it
one set entry. It holds leases weakly, so that a lease that was dropped is collected, warns, and is renewed no more.
A look that raises is logged and repeated; since each look checks the lease's deadline first, the loss is delivered
even if renewing never works again.
"""

from __future__ import annotations

import logging
import random
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from weakref import ref

    from asynclock._clock import Clock, Timer

log = logging.getLogger("asynclock")

TICK = 0.01
"""The wheel's spokes, in seconds."""

RENEW_BELOW = 2 / 3
"""A lease is renewed once less than this share of it remains."""

RETRY = 1 / 12
"""After this share of the lease a renewal without an answer is tried again."""


class Due(Enum):
    """What is due for a lease."""

    NOTHING = "nothing"
    RENEWAL = "renewal"
    EXPIRED = "expired"
    MAX_HOLD = "max_hold"


def due(now: float, ends: float, renew_at: float, hold_until: float) -> Due:
    """What is due now. The ends come first: nobody renews what is over. Pure."""
    if now >= hold_until:
        return Due.MAX_HOLD
    if now >= ends:
        return Due.EXPIRED
    if now >= renew_at:
        return Due.RENEWAL
    return Due.NOTHING


def retry_after(lease: float) -> float:
    """Seconds until an unanswered renewal is tried again: lease/12, jittered so that a fleet does not march in step."""
    return lease * RETRY * random.uniform(0.8, 1.0)  # noqa: S311 - jitter


class Watched(Protocol):
    """What the watchdog looks at."""

    _slot: int
    _own: ref[Any]  # a reference to itself, made once

    def _look(self, now: float) -> float | None:
        """Do what is due; answer when to look again (None: never)."""


class Watchdog:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wheel: dict[int, set[ref[Any]]] = {}
        self._timer: Timer | None = None
        self._timer_slot = 0

    def __iter__(self) -> Iterator[Watched]:
        """All that are watched."""
        refs = [known for spoke in self._wheel.values() for known in spoke]
        return (watched for known in refs if (watched := known()) is not None)

    def watch(self, watched: Watched, when: float) -> None:
        """Look at it at `when`, at the latest one tick later."""
        slot = int(when / TICK) + 1
        watched._slot = slot
        spoke = self._wheel.get(slot)
        if spoke is None:
            self._wheel[slot] = {watched._own}
            if self._timer is None or slot < self._timer_slot:
                self._arm(slot)
        else:
            spoke.add(watched._own)

    def forget(self, watched: Watched) -> None:
        """Stop looking at it; harmless for one that is not watched."""
        spoke = self._wheel.get(watched._slot)
        if spoke is not None:
            spoke.discard(watched._own)
            if not spoke:
                del self._wheel[watched._slot]

    def stop(self) -> None:
        self._wheel.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_slot = slot
        self._timer = self._clock.call_at(slot * TICK, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now = self._clock.now()
        try:
            for slot in sorted(slot for slot in self._wheel if slot * TICK <= now):
                for known in self._wheel.pop(slot, ()):
                    self._look(known, now)
        finally:
            if self._wheel and (self._timer is None or min(self._wheel) < self._timer_slot):
                self._arm(min(self._wheel))

    def _look(self, known: ref[Any], now: float) -> None:
        watched = known()
        if watched is None:
            return
        try:
            again = watched._look(now)
        except Exception:
            log.exception("asynclock: the watchdog failed on %r and will try again", watched)
            again = now + 0.05
        if again is not None:
            self.watch(watched, again)
