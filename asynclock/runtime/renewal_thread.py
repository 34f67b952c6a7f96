"""RenewalThread: extends the holds with renew="thread" while the event loop is blocked. One daemon thread per session,
started by the first such hold.

While the loop is on time, the watchdog renews these holds, as it renews all others, and the thread only compares two
numbers every twelfth of a lease. Once the loop's beat (`LoopLag`) is late by another twelfth, the thread extends
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
import math
import random
import secrets
import threading
import time
from typing import TYPE_CHECKING

from asynclock._loop import start_thread
from asynclock._options import node_timeout
from asynclock.protocol.hold import Hold
from asynclock.protocol.watchdog import retry_after, thread_extends_by
from asynclock.quorum.ballot import drift
from asynclock.rules.model import EXTEND, TAG_LENGTH, Op
from asynclock.runtime.opening import open_nodes, quorum_over
from asynclock.runtime.shutdown import all_ended
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._errors import Reason
    from asynclock._options import LockSettings
    from asynclock.protocol.causes import Cause
    from asynclock.protocol.holds import Holds
    from asynclock.protocol.machine import Machine
    from asynclock.protocol.watchdog import LoopLag
    from asynclock.quorum.ballot import Ballot
    from asynclock.quorum.quorum import Quorum
    from asynclock.stores.port import Notice, Store

log = logging.getLogger("asynclock")


# -- the hold ----------------------------------------------------------------------------------------------------------


PATIENCE = 1 / 4
"""A vote counts if it comes within this share of the lease. No task waits for it, and a blocked loop slows the
thread."""


class ThreadedHold(Hold):
    """A hold with renew="thread". Two threads count votes for it: that of the event loop, as for each hold, and the
    renewal thread while the loop is blocked. It takes votes of another loop, so it is no part of the machine.

    The rules:

    1. The thread only extends. It sends no fencing token, does not heal a node without the key, and does not release.
       Commands on its connections and on those of the loop may arrive in any order. So an extend of the thread may
       arrive after the release: then the node refuses it, because an extend checks the owner and never creates a key,
       and a later hold has another id.
    2. A grant moves `valid_until` at once, so `held` and `remaining` are right for code that blocks the loop. Reading
       them needs no lock: `valid_until` is one float. The computation of `valid_until` from the ends at the nodes runs
       under a threading.Lock, so that neither thread overwrites the result of the other with an older one. No other
       code runs under that lock.
    3. The order of two replies of one node is unknown if they came on different connections. So a grant counts only
       if it was sent after the node's last refusal had arrived.
    4. A majority that refuses ends the hold: `held` is False at once, and the loop learns of the loss when it runs
       again.
    """

    __slots__ = ("_guard", "_loop", "_lost_in", "_refused_at", "_retry_at")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        holds: Holds,
        settings: LockSettings,
        grant: Ballot,
        token: int,
        contended: bool = False,
    ) -> None:
        self._loop = loop
        self._guard = threading.Lock()
        self._refused_at = [-math.inf] * grant.nodes  # when the last refusal of each node arrived
        self._retry_at = -math.inf  # when the thread may extend it again; only the thread uses it
        self._lost_in: Ballot | None = None  # the round of the thread that a majority refused
        super().__init__(holds, settings, grant, token, contended)

    def lose(self, loss: Reason) -> None:
        super().lose(self._seen(loss))

    def _why(self, loss: Reason) -> Cause:
        cause, ballot = super()._why(self._seen(loss)), self._lost_in
        if ballot is None:
            return cause
        denials = {index: vote for index, vote in enumerate(ballot.votes) if isinstance(vote, Refused)}
        return cause._replace(errors=dict(ballot.errors()), denials=denials)

    def _seen(self, loss: Reason) -> Reason:
        """What the thread found out about a hold that seems to have expired."""
        ballot = self._lost_in
        return loss if ballot is None or loss != "expired" else ballot.loss_reason()

    # -- in the event loop ---------------------------------------------------------------------------------------

    def count(self, ballot: Ballot, index: int) -> None:
        super().count(ballot, index)
        if isinstance(ballot.votes[index], tuple) and ballot.sent <= self._refused_at[index]:
            with self._guard:  # rule 3: drop its end, unless a later grant has moved it since
                if self._ends[index] <= _end_of(ballot):
                    self._ends[index] = -math.inf
                    super()._recount()

    def _recount(self) -> None:
        with self._guard:
            super()._recount()

    def _refused_by(self, ballot: Ballot, index: int, refusal: Refused) -> None:
        with self._guard:
            self._refused_at[index] = self.core.clock.now()
            self._ends[index] = -math.inf
        super()._refused_by(ballot, index, refusal)

    def _lose_after_notices(self) -> None:
        """The thread found the loss. In this turn the loop reads what the servers have sent while it was blocked: who
        broke the lock, for example. So the loss is reported in the next turn."""
        self.core.later(self.lose, "expired")

    # -- in the renewal thread -----------------------------------------------------------------------------------

    def extend_in_thread(self, quorum: Quorum, within: float, limit: float) -> None:
        """Ask the nodes of the thread to extend it, if that is due, so that it ends by `limit`."""
        now, lease = quorum.clock.now(), self._settings.lease
        length = thread_extends_by(now, self.valid_until, lease, min(limit, self._until))
        # Without tenures it was dropped, and the loop, which is blocked, has not ended it yet.
        if self.over or not (length and self.tenures) or now < self._retry_at:
            return
        self._retry_at = now + retry_after(lease, random.random)
        grant = self.op
        op = Op(EXTEND, grant.kind, grant.name, grant.id, length, 0, grant.memory)
        quorum.ask(op, max(within, lease * PATIENCE), on_vote=self.count_in_thread)

    def count_in_thread(self, ballot: Ballot, index: int) -> None:
        """Count one node's vote on an extend of the thread."""
        vote = ballot.votes[index]
        if self.over:
            return
        if isinstance(vote, Exception):
            self._errors = {**(self._errors or {}), index: vote}
        elif isinstance(vote, tuple):
            end = _end_of(ballot)
            with self._guard:
                if ballot.sent > self._refused_at[index] and end > self._ends[index]:
                    self._ends[index] = end
                    super()._recount()
            if ballot.yes > ballot.nodes // 2:
                self._renewed_at, self._errors = ballot.sent, None
        elif isinstance(vote, Refused):
            lost = ballot.no > ballot.nodes // 2 and self._lost_in is None
            if lost:
                self._lost_in = ballot  # first, so that code that then finds `held` False can learn the reason
            with self._guard:
                self._refused_at[index] = self.core.clock.now()
                self._ends[index] = -math.inf
                super()._recount()
            if lost:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._lose_after_notices)


def _end_of(ballot: Ballot) -> float:
    """When the grants of a ballot end."""
    return ballot.sent + ballot.op.lease - drift(ballot.op.lease)


# -- the thread --------------------------------------------------------------------------------------------------------


LONGEST = 1.0
"""The longest pause between two checks of the lag, in seconds."""

SLICE = 0.001
"""Seconds of work between two turns of the thread's loop, so that it reads replies while it sends."""

CLOSING = 2.0
"""Seconds for which the thread waits for its nodes at its end."""

_LONGER = 0.5
"""Seconds for which a client that closes waits for the thread in addition."""


class RenewalThread:
    """See the module. The session's loop calls `start`, `look_again` and `aclose`."""

    def __init__(
        self, machine: Machine, lag: LoopLag, loop: asyncio.AbstractEventLoop, stores: Sequence[Store]
    ) -> None:
        self._holds = machine.holds
        self._lag = lag
        self._session_loop = loop
        self._stores = stores
        self._clock = machine.core.clock
        self._settings = machine.core.settings
        self._loop = asyncio.new_event_loop()  # the thread runs and closes it
        self._woken = asyncio.Event()  # it belongs to the thread's loop
        self._stopped = False
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="asynclock renewals", daemon=True)
        self._gave_up_at = 0.0  # the beat that was missed when it gave up

    def start(self) -> None:
        """Raises RuntimeError: the system gives no thread."""
        start_thread(self._thread, self._loop)

    def look_again(self) -> None:
        """The pause between two checks became shorter, or the thread is stopped."""
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
                self._session_loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _renew(self) -> None:
        quorum = quorum_over(self._stores, self._settings, self._clock, IgnoredNotices(), lambda event: None)
        opening = asyncio.create_task(_open(quorum))
        try:
            while not (self._stopped or self._session_loop.is_closed()):
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
        lag, now = self._lag, self._clock.now()
        expected, period = lag.expected, min(lag.period, LONGEST)
        late = now - expected  # -math.inf without a hold: a new one is noticed a pause later, long before it is due
        if late < period:
            return min(period - late, period)
        if late < self._settings.max_block:
            try:
                await self._extend(quorum, expected + self._settings.max_block)
            except Exception:  # it must not end while holds depend on it
                log.exception("asynclock: the renewal thread failed and will try again")
        elif self._gave_up_at != expected:
            self._gave_up_at = expected
            log.warning(
                "asynclock: the event loop has not run for %.3g s (max_block=%g s), so the thread does not renew its "
                "leases any more",
                late,
                self._settings.max_block,
            )
        return period

    async def _extend(self, quorum: Quorum, limit: float) -> None:
        began, settings = time.perf_counter(), self._settings
        within = node_timeout(settings, settings.lock, len(quorum.nodes), measured=quorum.limits.longest)
        for hold in self._holds.copied():
            if isinstance(hold, ThreadedHold):
                hold.extend_in_thread(quorum, within, limit)
                if time.perf_counter() - began > SLICE:
                    await asyncio.sleep(0)
                    began = time.perf_counter()


class IgnoredNotices:
    """The NoticeListener of the thread. Nobody sends it notices, since no id begins with its tag."""

    def __init__(self) -> None:
        self.tag = secrets.token_hex(TAG_LENGTH // 2)

    def received(self, index: int, notice: Notice) -> None: ...

    def connected(self, index: int, *, missed: bool = True) -> None: ...


async def _open(quorum: Quorum) -> None:
    """Connect. A node that is up can be asked before the others are connected."""
    with contextlib.suppress(Exception):  # the session's own nodes have the same error, and raise it
        await open_nodes(quorum)
