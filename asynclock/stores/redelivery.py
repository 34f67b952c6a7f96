"""Sends the undelivered releases of a node again (`undelivered.py`).

They are sent in slices: one at first and after a failure, so that releases that cannot be delivered take one of the
connections of a store, not all of them; and twice as many after each that was delivered. A release whose name gets
another op is sent before that op, whether or not it is due. While the node is known to be down, none is sent: all are
due when it is open again.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from asynclock.stores.port import WrongKind
from asynclock.stores.undelivered import PAUSES, Undelivered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asynclock._time import Clock, Timer
    from asynclock.rules.model import Op
    from asynclock.stores.undelivered import PendingRelease

SLICE = 8
"""Releases that are sent at the same time, at most."""


class Redelivery:
    """Of one node. `send` carries a release out in its turn, and calls back with its error. `is_open`: whether the node
    is open; one that is not begins to open, if it does not do so already."""

    def __init__(
        self,
        clock: Clock,
        send: Callable[[PendingRelease, Callable[[Exception | None], object]], object],
        is_open: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._send = send
        self._is_open = is_open
        self._not_open = 0  # how often it was not, since it was open last
        self._undelivered = Undelivered()
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._sending = 0  # those that were due, and are under way
        self._slice = 1  # so many at most
        self._delivered: asyncio.Event | None = None  # of a node that closes: set when none is left
        self._stopped = False

    def __len__(self) -> int:
        """The number of releases that are kept."""
        return len(self._undelivered)

    @property
    def note(self) -> str:
        """What to say of those that are kept; "": there are none."""
        number = len(self._undelivered)
        return f"{number} releases could not be delivered yet: {self._undelivered.error}" if number else ""

    def keep(self, op: Op, sent: float, error: Exception) -> None:
        """A release that was first sent at `sent` has failed. Of a name that is in use as another kind, there is
        nothing to release."""
        if not isinstance(error, WrongKind):
            self._undelivered.add(op, self._clock.now(), sent, error)
            self._schedule()

    def keep_undone(self, releases: Iterable[Op]) -> None:
        """These were carried out, and an outage may have undone them."""
        now, error = self._clock.now(), ConnectionError("an outage may have undone them")
        for op in releases:
            self._undelivered.add(op, now, now, error, answered=True)
        self._schedule()

    def send_before(self, op: Op) -> None:
        """Send the releases of the names of an op, which follows. If that is a release which waits until the node is
        open, they wait, too."""
        if not self._is_open():
            return
        for release in self._undelivered.before(op, self._clock.now()):
            self._send(release, partial(self._sent, release))

    def retry(self) -> None:
        """The node is connected again: all are due."""
        self._undelivered.all_due(self._clock.now())
        self._not_open = 0
        self._schedule()

    def _schedule(self) -> None:
        """Set the timer for the next one that is due."""
        if (at := self._undelivered.due_at()) is not None and self._not_open:
            at = self._clock.now() + PAUSES[min(self._not_open, len(PAUSES)) - 1]
        if (
            self._stopped
            or self._sending >= self._slice
            or at is None
            or (self._timer is not None and self._timer_at <= at)
        ):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._clock.call_at(at, self._send_next), at

    def _send_next(self) -> None:
        self._timer, now = None, self._clock.now()
        if not self._is_open():
            self._not_open += 1
            self._schedule()
            return
        self._not_open = 0
        for _ in range(self._slice - self._sending):
            if (release := self._undelivered.take(now)) is None:
                break
            self._sending += 1
            self._send(release, partial(self._sent_next, release))
        self._schedule()

    def _sent_next(self, release: PendingRelease, error: Exception | None) -> None:
        self._sending -= 1
        self._slice = min(2 * self._slice, SLICE) if error is None else 1
        self._sent(release, error)

    def _sent(self, release: PendingRelease, error: Exception | None) -> None:
        if error is None or isinstance(error, WrongKind):
            self._undelivered.delivered(release)
        else:
            self._undelivered.failed(release, self._clock.now(), error)
        if self._delivered is not None and not self._undelivered:
            self._delivered.set()
        self._schedule()

    async def finish(self, until: float) -> None:
        """The node closes: deliver those that are left, as far as that is possible until that moment. All are tried
        once, and then in the order of their pauses, so that those that cannot be delivered keep back no others."""
        self.retry()
        while self._undelivered and (left := until - self._clock.now()) > 0:
            self._delivered = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._delivered.wait()

    def stop(self) -> None:
        """Send no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
