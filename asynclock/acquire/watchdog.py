"""The watchdog: one per client and loop. It checks each hold when an action may be due, and renews it.

It is a timer wheel with one timer, not a task: a program that cancels "all tasks" does not cancel it, and a hold costs
it one set entry. A check that raises is logged and repeated. Each check looks at the deadline first, so that a loss is
noticed even if renewing never works again.

Its timer also shows how late the loop is (`loop_lag.py`): it fires at least once in a twelfth of a lease.

Many holds may be due at once. They are renewed in slices, with a turn of the loop between two, so that other tasks of
the loop do not wait for all of them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from asynclock.acquire.loop_lag import LoopLag
from asynclock.acquire.renewal import Due
from asynclock.acquire.tenure import Loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._clock import Clock, Timer
    from asynclock.acquire.hold import Hold

log = logging.getLogger("asynclock")

TICK = 0.01
"""Seconds between two slots of the wheel."""

SLICE = 0.001
"""Seconds that one slice takes at most. The replies to its renewals take the loop for about as long once more."""

_AGAIN = 0.05  # seconds until a check that raised is repeated


class Watchdog:
    """See the module."""

    def __init__(
        self, clock: Clock, lag: LoopLag | None = None, admits_fault: Callable[[str], bool] = lambda several: True
    ) -> None:
        self._clock = clock
        self._admits_fault = admits_fault
        self._lag = lag or LoopLag()
        self._wheel: dict[int, set[Hold]] = {}
        self._timer: Timer | None = None
        self._timer_slot = 0

    def watch(self, hold: Hold, at: float) -> None:
        """Look at it at that moment, or at most one tick later."""
        slot = int(at / TICK) + 1
        holds = self._wheel.get(slot)
        if holds is None:
            self._wheel[slot] = {hold}
            if self._timer is None or slot < self._timer_slot:
                self._arm(slot)
        else:
            holds.add(hold)

    def forget(self, hold: Hold, at: float) -> None:
        """Do not look at it then; harmless for a hold that is not watched."""
        slot = int(at / TICK) + 1
        holds = self._wheel.get(slot)
        if holds is not None:
            holds.discard(hold)
            if not holds:
                del self._wheel[slot]

    def stop(self) -> None:
        self._wheel.clear()
        self._lag.rest()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = self._clock.now()
        self._lag.beat(now)  # the timer that was cancelled may have been overdue
        self._timer_slot = slot
        at = min(slot * TICK, now + self._lag.period)
        self._lag.expect(max(at, now))  # a slot of the past is due now; the loop is not late for it
        self._timer = self._clock.call_at(at, self._turn)

    def _turn(self) -> None:
        """One slice of the checks that are due."""
        self._timer = None
        now, began = self._clock.now(), time.perf_counter()
        try:
            self._lag.beat(now)
            for slot in sorted(slot for slot in self._wheel if slot * TICK <= now):
                holds = self._wheel.get(slot, set())  # a look at another hold may have emptied the slot
                while holds:
                    self._check(holds.pop(), now)
                    if time.perf_counter() - began > SLICE:
                        return  # the timer is due at once; the loop runs other ready tasks before it
                if self._wheel.get(slot) is holds:
                    del self._wheel[slot]
        finally:
            if self._wheel and (self._timer is None or min(self._wheel) < self._timer_slot):
                self._arm(min(self._wheel))
            elif self._timer is None:
                self._lag.rest()

    def _check(self, hold: Hold, now: float) -> None:
        try:
            match hold.due(now):
                case Due.MAX_HOLD:
                    hold.lose(Loss.MAX_HOLD)
                case Due.EXPIRED:
                    hold.lose(Loss.EXPIRED)
                case Due.RENEWAL:
                    hold.renew(now)
            hold.watch()
        except Exception:
            if self._admits_fault("checks of the watchdog that failed"):
                log.exception("asynclock: the watchdog failed on %r and will try again", hold)
            hold.watch_at(now + _AGAIN)
