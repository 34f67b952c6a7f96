"""Lease: one tenure, from the grant to its end, and how its end is told. Its fencing token is after
https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html

The rules:

1. `held` and `remaining` read the clock; no flag is trusted. Unknown is not lost: a renewal without an answer leaves
   the lease as it is until its validity runs out. A majority that says "not yours" is a loss at once.
2. The task inside `async with` is cancelled on a loss, and LockLost takes the place of the CancelledError; a cancel
   from outside, before or after, wins (`cancellation.py`).
3. A block that ends after its lease did raises LockLost, unless it raises something of its own.
4. Renewal stops before the release is sent. A release is sent before anything is awaited, and waited for whoever
   cancels.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import ref

from asynclock._clock import wake
from asynclock._errors import ConfigError, LockLost, LockNotHeld, Reason, Unsupported, brief
from asynclock._options import lock_settings, same_terms
from asynclock.acquire.handle import handle_of
from asynclock.acquire.local_queue import may_pass
from asynclock.acquire.watchdog import Due, due, retry_after
from asynclock.locks.cancellation import Block
from asynclock.locks.tenure import (
    DETACHED,
    GIVEN,
    HELD,
    LOST,
    OPEN,
    RELEASED,
    UNKNOWN,
    ended,
    log_unattended,
    warn_dropped,
)
from asynclock.quorum.ballot import UNREACHABLE, WON

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import TracebackType

    from asynclock._options import LockSettings, Seconds
    from asynclock.acquire.hold import Hold
    from asynclock.locks.tenure import Tenure
    from asynclock.quorum.ballot import Ballot


class Recipe(Protocol):
    """The Lock it was taken through."""

    def _forget(self, lease: Lease) -> None: ...


class Lease:
    """One tenure of a lock. Never made by hand; belongs to its event loop."""

    __slots__ = (
        "__weakref__", "_block", "_fence", "_hold", "_hold_until", "_lock", "_own", "_owner", "_reason", "_rest",
        "_session", "_settings", "_since", "_slot", "_taker", "_task", "_tenure", "_unattended", "_waiters",
    )  # fmt: skip

    def __init__(
        self, hold: Hold, lock: Recipe, task: asyncio.Task[Any] | None, settings: LockSettings, fence: int, since: float
    ) -> None:
        self._hold = hold
        self._session = session = hold.session
        self._lock = ref(lock)
        self._taker = task
        self._task = task  # the taker, then whoever entered it
        self._settings = settings
        self._fence = fence
        self._since = since
        self._hold_until = math.inf if settings.max_hold is None else since + settings.max_hold
        self._reason: Reason = "expired"
        self._rest = 0.0  # seconds for which the name is marked as done after its release (`once`)
        self._tenure = HELD
        self._block: Block | None = None  # the body that it guards
        self._waiters: set[asyncio.Future[None]] | None = None  # mostly nobody asks
        self._slot = 0
        self._unattended = False  # its task has ended, and the log says so
        self._owner: Hashable = None  # who may enter again
        self._own = ref(self)
        for name in hold.names:
            session.held.setdefault(name, {})[self._own] = None
        hold.tenures.append(self._own)
        session.watchdog.watch(self, min(hold.renew_at, hold.valid_until, self._hold_until))

    def __repr__(self) -> str:
        return f"<Lease {brief(self.name)} {self._tenure.value}, {self.remaining:.3g} s left>"

    # -- what it says --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._hold.op.name

    @property
    def fence(self) -> int:
        """The fencing token, greater than those of all holds before it. Raises Unsupported with fencing=False."""
        if not self._settings.fencing:
            raise Unsupported(
                f"{brief(self.name)} has no fencing token: it was made with fencing=False", name=self.name
            )
        return self._fence

    @property
    def held(self) -> bool:
        """Whether it is ours now, by the clock."""
        return self._tenure in OPEN and self._session.clock.now() < self._ends and not self._session.forked

    @property
    def remaining(self) -> float:
        """Seconds of validity left; 0.0 once ended."""
        return max(0.0, self._ends - self._session.clock.now()) if self.held else 0.0

    @property
    def _ends(self) -> float:
        return min(self._hold.valid_until, self._hold_until)

    def ensure_held(self) -> None:
        """Raise LockLost or LockNotHeld unless it is ours now."""
        if not self.held:
            raise self._ended()

    async def wait_lost(self) -> bool:
        """Wait for its end. True: lost; False: released."""
        self._session.check()
        self._look_at_clock()
        if self._tenure in OPEN:
            waiter = self._session.loop.create_future()
            self._waiters = self._waiters or set()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self._tenure is LOST

    @property
    def _open(self) -> bool:
        """Whether it was neither given back nor lost, as far as we were told."""
        return self._tenure in OPEN

    # -- what it does --------------------------------------------------------------------------------------------

    async def extend(self, *, lease: Seconds | None = None) -> None:
        """Let it end `lease` seconds from now (default: the lock's lease); never sooner than it would.

        Raises LockLost, LockNotHeld, QuorumUnavailable (it is still ours until its validity runs out), ConfigError.
        """
        self._session.check()
        self._look_at_clock()
        self.ensure_held()
        length = self._settings.lease
        if lease is not None:
            length = lock_settings(self.name, {"lease": lease, "min_hold": 0}, self._session.settings).lease
        ballot = self._hold.extend(length)
        await ballot.settled(self._session.loop)
        if self._tenure not in OPEN:
            raise self._ended()
        if ballot.outcome is not WON:
            raise self._session.quorum.unavailable(ballot, self.name)

    async def release(self) -> None:
        """Give it back; sent before anything is awaited. Raises LockLost, LockNotHeld; an outage is
        logged, a refusal is a ConfigError."""
        self._session.check()
        self._look_at_clock()
        if self._tenure in GIVEN:
            raise self._ended()
        await self._give_back()

    async def detach(self, *, lease: Seconds | None = None) -> str:
        """End this tenure without freeing the name. The answer is a secret: who gives it to `adopt`, once, before the
        hold ends, `lease` seconds from now (default: the lock's lease) or later, has it. The block ends in peace.

        Raises LockLost, LockNotHeld, QuorumUnavailable (it is still ours), ConfigError.
        """
        if self._hold.op.kind.parts:
            raise Unsupported(f"{brief(self.name)} is a multi lock: detach() moves one name", name=self.name)
        await self.extend(lease=lease)
        self.ensure_held()
        if len(self._hold.tenures) > 1:
            raise ConfigError(f"{brief(self.name)} was entered more than once: leave the inner blocks before detach()")
        self._hold.over = True
        self._end_as(DETACHED)
        self._forget()
        self._session.next_in_line(self._hold.names)
        return handle_of(self._hold.op, self._hold.token)

    async def __aenter__(self) -> Self:
        """Guard the body: this task is cancelled if the lease is lost. Raises LockLost, LockNotHeld, ConfigError."""
        self._session.check()
        if self._block is not None:
            raise ConfigError(
                f"the lease of {brief(self.name)} guards a block already: acquire another", name=self.name
            )
        self._look_at_clock()
        if self._tenure is LOST:
            await self._give_back()
        self.ensure_held()
        self._guard(asyncio.current_task())
        return self

    def _guard(self, task: asyncio.Task[Any] | None) -> None:
        """From here to `__aexit__` the task is cancelled if the lease is lost."""
        self._block = Block(task)
        self._task = task

    async def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        """Release. Raises LockLost if it was lost meanwhile, or what release raises; the body's own goes first."""
        block, self._block = self._block, None
        ours = block is not None and block.cancelled and await block.leave(e)
        self._look_at_clock()
        try:
            if self._tenure in GIVEN:  # by hand, inside
                self._forget()
            else:
                await self._give_back()
        except (LockLost, ConfigError) as lost:
            if e is None or ours:
                raise lost from e
            if not isinstance(e, LockLost):
                e.add_note(str(lost))

    # -- its end -------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> float | None:
        """The watchdog's look: renew what is due, deliver what is over."""
        hold = self._hold
        if self._tenure not in OPEN or hold.over:  # over: it was dropped, and a warnings recorder brought it back
            return None
        match due(now, hold.valid_until, hold.renew_at, self._hold_until):
            case Due.MAX_HOLD:
                self._lose("max_hold")
                return None
            case Due.EXPIRED:
                self._lose("expired")
                return None
            case Due.RENEWAL:
                if not self._unattended and self._block is None and self._task is not None and self._task.done():
                    self._unattended = True
                    log_unattended(self.name)
                hold.renew_at = now + retry_after(self._settings.lease)
                hold.extend(self._settings.lease)
        return min(hold.renew_at, self._ends)

    def _close(self) -> None:
        """Its client closes, or it never began: send the release; whoever thinks it holds is told."""
        if self._tenure in OPEN:
            self._lose("closed")
            self._release()

    def __reduce__(self) -> str:
        raise TypeError("a Lease belongs to its event loop: it can be neither pickled nor copied")

    def __del__(self) -> None:
        if getattr(self, "_tenure", None) not in OPEN:
            return
        if self._leave_hold():
            return
        self._hold.over = True
        if self._session.lines and not self._session.loop.is_closed():
            self._session.loop.call_soon_threadsafe(self._session.next_in_line, self._hold.names)
        if self.held:
            warn_dropped(self.name, self.remaining, self)

    def _lose(self, reason: Reason) -> None:
        self._reason = reason
        self._hold.over = True
        self._end_as(LOST)
        while others := self._hold.shared():  # the owner's who entered again
            others[0]._lose(reason)
        self._session.next_in_line(self._hold.names)
        if self._block is not None and self._settings.cancel_on_lost:
            self._block.interrupt()

    def _end_as(self, tenure: Tenure) -> None:
        self._tenure = tenure
        self._session.watchdog.forget(self)
        self._leave_hold()
        for waiter in self._waiters or ():
            wake(waiter)

    def _leave_hold(self) -> bool:
        """Whether it goes on without this tenure."""
        for name in self._hold.names:
            self._session.gone(name, self._own)
        return self._hold.leave(self._own)

    def _look_at_clock(self) -> None:
        """A loop that was blocked beyond the lease finds out here, before any timer runs."""
        now = self._session.clock.now()
        if self._tenure in OPEN and (now >= self._hold.valid_until or now >= self._hold_until):
            self._lose("max_hold" if now >= self._hold_until else "expired")

    def _ended(self) -> LockLost | LockNotHeld:
        over = self._session.clock.now() >= self._hold_until
        return ended(self.name, self._tenure, "max_hold" if over else self._reason)

    async def _give_back(self) -> None:
        """Release, and tell what became of it. Raises LockLost."""
        hold, session = self._hold, self._session
        if session.hung_up:
            raise self._unsent()
        lost = self._tenure is LOST
        if not lost and len(hold.tenures) > 1:  # its owner entered it more often than left it
            self._end_as(RELEASED)
            self._forget()
            return
        if not lost and session.lines and self._pass_on():
            self._forget()
            return
        # Somebody waits for it elsewhere? It leaves before all else; in one write with who asks behind it here.
        ballot = self._release(at_once=hold.contended and not session.lines)
        if hold.contended:
            if not lost:
                session.cede(hold.op.kind, hold.name)
            if session.lines:
                session.next_in_line(hold.names)
                session.quorum.flush()
        if not lost:
            self._end_as(RELEASED)
        self._forget()
        session.next_in_line(hold.names)
        if lost:
            raise self._ended()
        if ballot.outcome is None:
            await session.finished(ballot)
        if ballot.outcome is not WON:
            self._check_released(ballot)

    def _check_released(self, ballot: Ballot) -> None:
        """Raise LockLost where a majority says that it was not ours any more; log an outage."""
        if ballot.no > ballot.nodes // 2:
            raise LockLost(self.name, ballot.who_took())
        if ballot.outcome is UNREACHABLE:
            self._session.not_released(ballot, self.name)

    def _unsent(self) -> LockLost | LockNotHeld:
        """Its client has hung up, so that no release can be sent."""
        if self._tenure in OPEN:
            self._lose("closed")
        self._forget()
        return self._ended()

    def _again(self, lock: Recipe, task: asyncio.Task[Any] | None, settings: LockSettings) -> Lease:
        """Another tenure beside this one, for its owner; the hold ends with the last of them."""
        lease = Lease(self._hold, lock, task, settings, self._fence, self._session.clock.now())
        lease._owner = self._owner
        return lease

    def _pass_on(self) -> bool:
        """Make the next in the local line the holder, if it may be (`local_queue.py`)."""
        session = self._session
        line = None if self._hold.op.kind.shared else session.lines.get(self.name)
        heir = line.first() if line is not None and line.asker is None and not session.closed else None
        if line is None or heir is None or self._rest or not self.held or not same_terms(self._settings, heir.settings):
            return False
        hold = self._hold
        left = hold.token - self._fence
        if not may_pass(session.clock.now(), hold.tripped, hold.valid_until, self._settings.lease, left):
            return False
        line.pop(session.lines)
        self._end_as(RELEASED)
        heir.take(Lease(hold, heir.lock, heir.task, heir.settings, self._fence + 1, session.clock.now()))
        return True

    def _hand_back(self) -> None:
        """Whoever it was passed to is gone: on to the next, or back."""
        if self._tenure in OPEN and not self._pass_on():
            self._end_as(RELEASED)
            self._release()
            self._session.next_in_line(self._hold.names)

    def _forget(self) -> None:
        if (lock := self._lock()) is not None:
            lock._forget(self)

    def _release(self, at_once: bool = False) -> Ballot:
        rest = self._rest
        if self._settings.min_hold:
            rest = max(rest, self._since + self._settings.min_hold - self._session.clock.now())
        return self._hold.release(rest, at_once, done=self._rest > 0)

    def _renewed(self, ballot: Ballot) -> None:
        """A renewal or an extend is decided."""
        if ballot.outcome is WON:
            self._tenure = HELD
        else:  # a majority that says "not ours" was counted vote by vote, and this lease is lost
            self._tenure = UNKNOWN
