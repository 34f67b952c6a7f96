"""RenewalThread: extends the holds with renew="thread" while the event loop is blocked. One daemon thread per session,
started by the first such hold.

While the loop is on time, the watchdog renews these holds, as it renews all others, and the thread only compares two
numbers every twelfth of a lease. Once the loop's beat (`loop_lag.py`) is late by another twelfth, the thread extends
each hold that is due, until the loop has been blocked for `max_block`. Then the process is taken for one that hangs,
and its leases end.

The thread has an event loop of its own, and there a Quorum with a Node of its own for each store: the same code as in
the session's loop, so a restarted server is in quarantine here, too. No command of the thread can delay or overtake a
reply of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING

from asynclock._loop import start_thread
from asynclock._options import node_timeout
from asynclock.acquire.shutdown import all_ended
from asynclock.acquire.threaded_hold import ThreadedHold
from asynclock.quorum.quorum import quorum_over
from asynclock.rules.model import TAG_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.acquire.session import Session
    from asynclock.quorum.quorum import Quorum
    from asynclock.stores.port import Notice, Store

log = logging.getLogger("asynclock")

LONGEST = 1.0
"""The longest pause between two looks at the lag, in seconds."""

SLICE = 0.001
"""Seconds of work between two turns of the thread's loop, so that it reads replies while it sends."""

CLOSING = 2.0
"""Seconds for which the thread waits for its nodes at its end."""

_LONGER = 0.5
"""Seconds for which a client that closes waits for the thread in addition."""


class RenewalThread:
    """See the module. The session's loop calls `start`, `look_again` and `aclose`."""

    def __init__(self, session: Session, stores: Sequence[Store]) -> None:
        self._session = session
        self._stores = stores
        self._clock = session.clock
        self._max_block = session.settings.max_block
        self._loop = asyncio.new_event_loop()  # the thread runs and closes it
        self._woken = asyncio.Event()  # it belongs to the thread's loop
        self._stopped = False
        self._ended: asyncio.Future[None] = session.loop.create_future()
        self._thread = threading.Thread(target=self._run, name="asynclock renewals", daemon=True)
        self._gave_up_at = 0.0  # the beat that was missed when it gave up

    def start(self) -> None:
        """Raises RuntimeError: the system gives no thread."""
        start_thread(self._thread, self._loop)

    def look_again(self) -> None:
        """The pause between two looks became shorter, or the thread is stopped."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._woken.set)

    async def aclose(self) -> None:
        """Stop the thread, close its connections, and wait for that for a limited time."""
        self._stopped = True
        self.look_again()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING + _LONGER):
                await self._ended
                self._thread.join(_LONGER)  # it is at its last line

    # -- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._renew())
        except Exception:  # leases are renewed by the loop alone from now on
            log.exception("asynclock: the renewal thread has ended")
        finally:
            with contextlib.suppress(RuntimeError):  # the session's loop is closed
                self._session.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _renew(self) -> None:
        quorum = quorum_over(self._stores, self._session.settings, self._clock, IgnoredNotices(), lambda event: None)
        opening = asyncio.create_task(_open(quorum))
        try:
            while not (self._stopped or self._session.loop.is_closed()):
                await self._wait(await self._turn(quorum))
        finally:
            opening.cancel()
            await all_ended([node.aclose() for node in quorum.nodes], CLOSING)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
                self._woken.clear()

    async def _turn(self, quorum: Quorum) -> float:
        """Extend what is due if the loop is late. Returns the seconds until the next turn."""
        lag, now = self._session.lag, self._clock.now()
        expected, period = lag.expected, min(lag.period, LONGEST)
        late = now - expected  # -math.inf without a hold: a new one is noticed a pause later, long before it is due
        if late < period:
            return min(period - late, period)
        if late < self._max_block:
            try:
                await self._extend(quorum, expected + self._max_block)
            except Exception:  # it must not end while holds depend on it
                log.exception("asynclock: the renewal thread failed and will try again")
        elif self._gave_up_at != expected:
            self._gave_up_at = expected
            log.warning(
                "asynclock: the event loop has not run for %.3g s (max_block=%g s), so the thread does not renew its "
                "leases any more",
                late,
                self._max_block,
            )
        return period

    async def _extend(self, quorum: Quorum, limit: float) -> None:
        began, settings = time.perf_counter(), self._session.settings
        within = node_timeout(settings, settings.lock, len(quorum.nodes), measured=quorum.limits.longest)
        for hold in self._session.holds.copied():
            if isinstance(hold, ThreadedHold):
                hold.extend_in_thread(quorum, within, limit)
                if time.perf_counter() - began > SLICE:
                    await asyncio.sleep(0)
                    began = time.perf_counter()


def started_thread(session: Session, stores: Sequence[Store]) -> RenewalThread | None:
    """The thread of a session; None if the system gives none. The next lease then tries again."""
    try:
        thread = RenewalThread(session, stores)
        thread.start()
    except (OSError, RuntimeError):  # no more files, or no more threads
        if session.journal.admits_fault("times that the renewal thread could not start"):
            log.exception("asynclock: the renewal thread cannot start: leases end if the event loop is blocked")
        return None
    return thread


class IgnoredNotices:
    """The NoticeListener of the thread. Nobody sends it notices, since no id begins with its tag."""

    def __init__(self) -> None:
        self.tag = secrets.token_hex(TAG_LENGTH // 2)

    def received(self, index: int, notice: Notice) -> None: ...

    def connected(self, index: int, *, missed: bool = True) -> None: ...


async def _open(quorum: Quorum) -> None:
    """Connect. A node that is up is asked before the others are."""
    with contextlib.suppress(Exception):  # the session's own nodes have the same error, and raise it
        await quorum.open()
