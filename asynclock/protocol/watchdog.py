"""The watchdog: one per client and loop. It checks each hold when an action may be due, and renews it.

It is a timer wheel with one timer, not a task: a program that cancels "all tasks" does not cancel it, and a hold costs
it one entry. A check that raises is logged and repeated. Each check looks at the deadline first, so that a loss is
noticed even if renewing never works again.

Its timer also shows how late the loop is (`LoopLag`): it fires at least once in a twelfth of a lease.

Many holds may be due at once. They are renewed in slices, with a turn of the loop between two, so that other tasks of
the loop do not wait for all of them.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from asynclock.protocol.core import uniform
from asynclock.quorum.ballot import drift

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock._time import Clock, Timer


# -- when a hold is renewed, and when it is over -----------------------------------------------------------------------


RENEW_BELOW = 2 / 3
"""A hold is renewed once less than this share of its lease remains."""

RETRY = 1 / 12
"""A renewal without a reply is sent again after this share of the lease."""


class Due(Enum):
    """The action that is due for a hold."""

    NOTHING = "nothing"
    RENEWAL = "renewal"
    EXPIRED = "expired"
    MAX_HOLD = "max_hold"


def due(now: float, ends: float, renew_at: float, hold_until: float) -> Due:
    """The action that is due now. The ends are checked first, because a hold that is over is not renewed. Pure."""
    if now >= hold_until:
        return Due.MAX_HOLD
    if now >= ends:
        return Due.EXPIRED
    if now >= renew_at:
        return Due.RENEWAL
    return Due.NOTHING


def thread_extends_by(now: float, ends: float, lease: float, limit: float) -> float:
    """The seconds for which the renewal thread extends a hold now, so that it ends by `limit`; 0.0: it is not due, it
    is over, or it may not be held for longer. Pure."""
    if now >= ends or ends - now >= lease * RENEW_BELOW:
        return 0.0
    length = min(lease, limit - now)
    return length if now + length - drift(length) > ends else 0.0


def retry_after(lease: float, random: Callable[[], float]) -> float:
    """Seconds until an unanswered renewal is tried again: lease/12, with jitter, so that the clients of a fleet do not
    all retry at the same moment."""
    return lease * RETRY * uniform(random, 0.8, 1.0)


_SOON = 0.001
"""Seconds until the nodes that refused a contested win are asked again, at least."""


class Lacking:
    """The nodes that refused a hold which a majority granted (rule 5 of `hold.py`). Times are seconds."""

    __slots__ = ("at", "nodes", "pause")

    def __init__(self, now: float, pause: float) -> None:
        self.nodes = 0  # bit i: node i
        self.pause = max(pause, _SOON)
        self.at = now + self.pause  # when they are asked again

    def later(self, now: float) -> Lacking | None:
        """They were asked: the next time is after a pause that is twice as long. None: each has it."""
        if not self.nodes:
            return None
        self.pause *= 2
        self.at = now + self.pause
        return self


RENEWED = Lacking(math.inf, math.inf)
"""The hold was renewed: what a node lacks is repaired by the renewals from now on."""


# -- how late the loop is ----------------------------------------------------------------------------------------------


BEAT = 1 / 12
"""The longest pause between two beats, as a share of the shortest lease."""

REPORT_ABOVE = 1 / 3
"""A lag of more than this share of the shortest lease is reported. Renewals are due by then."""


class Blocked(NamedTuple):
    """A time in which the event loop ran nothing."""

    seconds: float  # at least so long; perhaps longer, by BEAT of the lease at most
    ended: float  # on the client's clock


class LoopLag:
    """How late the event loop is. A loop is late while a call blocks it, and while its process gets no CPU time.

    While a hold exists, the watchdog's one timer fires at least every BEAT of the shortest lease that the session has
    used. If it fires late, the loop ran nothing in the meantime. Without holds there is no timer. Times are seconds of
    the client's clock. `report` is called with the seconds of a long lag.

    Only the event loop changes this object. Another thread may read `expected`, which is one float:
    `runtime/renewal_thread.py` learns from it that the loop is late."""

    __slots__ = ("_last", "_report", "expected", "lease", "period")

    def __init__(self, report: Callable[[float], object] = lambda seconds: None) -> None:
        self._report = report
        self.period = math.inf  # seconds between two beats
        self.expected = math.inf  # when the next beat is due; math.inf: none is due
        self.lease = math.inf  # the shortest lease that the session has used
        self._last: Blocked | None = None

    def use(self, lease: float) -> None:
        """The session uses a lease of so many seconds."""
        self.lease = min(lease, self.lease)
        self.period = self.lease * BEAT

    def expect(self, at: float) -> None:
        """The next beat is due then."""
        self.expected = at

    def rest(self) -> None:
        """No beat is due any more."""
        self.expected = math.inf

    def beat(self, now: float) -> None:
        """The loop runs."""
        late = now - self.expected
        self.expected = now + self.period
        if late > self.period:
            self._last = Blocked(late, now)
            if late > self.lease * REPORT_ABOVE:
                self._report(late)

    def late(self, now: float, due: float, since: float) -> float:
        """The seconds for which the loop was late: the delay of a check that was due at `due`, or the last block if it
        ended after `since`, whichever is longer."""
        block = self.last_block(now)
        blocked = block.seconds if block is not None and block.ended > since else 0.0
        return max(blocked, now - due if due > -math.inf else 0.0)

    def last_block(self, now: float) -> Blocked | None:
        """The last time in which the loop ran nothing for longer than a beat; None: there was none. It may be going on:
        a task that blocked the loop calls this before any timer has fired."""
        late = now - self.expected
        return Blocked(late, now) if late > self.period else self._last


# -- the wheel ---------------------------------------------------------------------------------------------------------


TICK = 0.01
"""Seconds between two slots of the wheel."""

RENEWALS = 0.001
"""Seconds that one slice of renewals takes at most. Handling the replies to them takes about as long again."""

_AGAIN = 0.05  # seconds until a check that raised is repeated


class Watched(Protocol):
    """A hold, as the watchdog sees it."""

    def check(self, now: float) -> None:
        """Do what is due, and let the watchdog check it again when something may be due next."""

    def watch_at(self, at: float) -> None:
        """Let the watchdog check it then."""


class Watchdog:
    """See the module."""

    def __init__(
        self,
        clock: Clock,
        lag: LoopLag | None = None,
        spent: Callable[[], float] = lambda: 0.0,
        fault: Callable[[object, Exception], object] = lambda where, error: None,
    ) -> None:
        self._clock = clock
        self._spent = spent  # see Core
        self._fault = fault
        self._lag = lag or LoopLag()
        self._wheel: dict[int, dict[Watched, None]] = {}  # slot -> its holds
        self._timer: Timer | None = None
        self._timer_slot = 0

    def watch(self, hold: Watched, at: float) -> None:
        """Check it at that time, or at most one tick later."""
        slot = int(at / TICK) + 1
        holds = self._wheel.get(slot)
        if holds is None:
            self._wheel[slot] = {hold: None}
            if self._timer is None or slot < self._timer_slot:
                self._arm(slot)
        else:
            holds[hold] = None

    def forget(self, hold: Watched, at: float) -> None:
        """Do not check it then; harmless for a hold that is not watched."""
        slot = int(at / TICK) + 1
        holds = self._wheel.get(slot)
        if holds is not None:
            holds.pop(hold, None)
            if not holds:
                del self._wheel[slot]

    @property
    def is_armed(self) -> bool:
        """Whether its timer runs."""
        return self._timer is not None

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
        now, began = self._clock.now(), self._spent()
        try:
            self._lag.beat(now)
            for slot in sorted(slot for slot in self._wheel if slot * TICK <= now):
                holds = self._wheel.get(slot, {})  # the check of another hold may have emptied the slot
                while holds:
                    self._check(holds.popitem()[0], now)
                    if self._spent() - began > RENEWALS:
                        return  # the timer is due at once; the loop runs other ready tasks before it
                if self._wheel.get(slot) is holds:
                    del self._wheel[slot]
        finally:
            if self._wheel and (self._timer is None or min(self._wheel) < self._timer_slot):
                self._arm(min(self._wheel))
            elif self._timer is None:
                self._lag.rest()

    def _check(self, hold: Watched, now: float) -> None:
        try:
            hold.check(now)
        except Exception as error:
            self._fault(hold, error)
            hold.watch_at(now + _AGAIN)
