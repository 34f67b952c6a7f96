"""Lock, a recipe that tasks may share, and the one loop in which it waits.

The rules of an acquire:

1. Each attempt has a fresh id, and goes to all nodes at once. What an attempt was granted is either handed to the
   caller as a Lease or undone; there is no third way, whoever is cancelled and whenever.
2. "Held by somebody" and "out of reach" never mix: a refusal waits for the holder and ends in None; without a
   majority the acquire goes on trying, with back-off, and ends in QuorumUnavailable.
3. An attempt is undone before the next begins, so it never blocks its own successor.
4. A lease counts once a majority are witnesses of its fencing token, and while it has validity left.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING, Any, overload

from asynclock._errors import ConfigError, LockNotHeld, LockTimeout, SelfDeadlock, brief
from asynclock._lease import Lease
from asynclock._op import Op, Verb
from asynclock._options import seconds
from asynclock._quorum import Ballot, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from asynclock._op import Kind
    from asynclock._options import LockSettings, Seconds
    from asynclock._session import Session

_UNSET: Any = object()

_PAUSE = (0.002, 0.25)
"""Between two tries while somebody holds the lock: the first pause, doubled up to the last; in seconds."""

_OUTAGE_PAUSE = (0.02, 0.5)
"""The same while a majority is out of reach."""


class Lock:
    """A name and how to hold it. Making one does no I/O; any number of tasks may share it, each tenure being its own
    `Lease`. After Redlock (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/)."""

    __slots__ = ("__weakref__", "_kind", "_name", "_purge_at", "_session_of", "_settings", "_tenures")

    def __init__(
        self,
        name: str,
        kind: Kind,
        settings: LockSettings,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
    ) -> None:
        self._name = name
        self._kind = kind
        self._settings = settings
        self._session_of = session_of
        self._tenures: dict[asyncio.Task[Any] | None, list[Lease]] = {}  # by the task that took it
        self._purge_at = 64  # so many tasks, and those that are gone and hold nothing are forgotten

    def __repr__(self) -> str:
        return f"<Lock {self._kind.name} {brief(self._name)}>"

    @property
    def name(self) -> str:
        """The name, without the client's prefix."""
        return self._name

    @overload
    async def acquire(self, *, timeout: None) -> Lease: ...
    @overload
    async def acquire(self, *, timeout: Seconds = ...) -> Lease | None: ...
    async def acquire(self, *, timeout: Seconds | None = _UNSET) -> Lease | None:
        """Wait for the lock, at most `timeout` seconds (None: as long as it takes; 0: try once; unset: the lock's).

        Answers a Lease, or None: somebody else held it all that time. Raises QuorumUnavailable while a majority is
        out of reach, SelfDeadlock where this task would wait for itself, ConfigError where a server refuses to serve.
        """
        if timeout is _UNSET:
            wait = self._settings.timeout
        else:
            wait = None if timeout is None else seconds("timeout", timeout, zero=True)
        task = asyncio.current_task()
        session = self._session_of(task)
        if not session.ready:
            await session.open(self._settings, _connect_limit(wait, session))
        if wait != 0 and self._name in session.held:
            self._check_deadlock(session, task)
        lease = await self._wait(session, task, wait)
        if lease is not None:
            self._remember(lease)
        return lease

    async def release(self) -> None:
        """Give back what this task took through this lock; or, of a task that is gone, its one open tenure.

        Raises LockNotHeld where there is nothing to give back, LockLost where it ended under us. Servers out of reach
        are logged: the lease ends by itself.
        """
        await self._taken().release()

    async def locked(self) -> bool:
        """Whether anybody holds it, on a majority of the nodes. Raises QuorumUnavailable."""
        session = self._session_of(None)
        if not session.ready:
            await session.open(self._settings, _connect_limit(None, session))
        op = Op(Verb.EXTEND, self._kind, self._name, "", 0.0)
        ballot = session.quorum.ask(op, session.within(self._settings), everyone=True)
        if await ballot.settled(session.loop) is Outcome.UNREACHABLE:
            raise session.quorum.unavailable(ballot, self._name)
        holders = [holder for pttl, holder in ballot.denials() if pttl != -2]
        return any(holders.count(holder) > len(session.quorum.nodes) // 2 for holder in holders)

    async def __aenter__(self) -> Lease:
        """Wait and guard the body. Raises LockTimeout where `acquire` answers None, and what acquire raises."""
        lease = await self.acquire()
        if lease is None:
            raise LockTimeout(f"{brief(self._name)} was held by somebody else all the time", name=self._name)
        lease._guard(lease._taker)
        return lease

    async def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self._entered().__aexit__(t, e, tb)

    # -- tenures -------------------------------------------------------------------------------------------------

    def _forget(self, lease: Lease) -> None:
        """The tenure was given back; a block that it guards still has to find it at its end."""
        leases = self._tenures.get(lease._taker)
        if leases and lease in leases and not lease._entered:
            leases.remove(lease)
            if not leases:
                del self._tenures[lease._taker]

    def _remember(self, lease: Lease) -> None:
        self._tenures.setdefault(lease._taker, []).append(lease)
        if len(self._tenures) > self._purge_at:
            ended = [
                each for task, leases in self._tenures.items() if _is_gone(task) for each in leases if not each._open
            ]
            for each in ended:
                self._forget(each)
            self._purge_at = 64 + 2 * len(self._tenures)

    def _taken(self) -> Lease:
        """What this task took last; else the one open tenure whose task is gone (a fixture's)."""
        mine = self._tenures.get(asyncio.current_task())
        if mine:
            return mine[-1]
        gone = [each for task, leases in self._tenures.items() if _is_gone(task) for each in leases if each._open]
        if len(gone) == 1:
            return gone[0]
        raise LockNotHeld(f"this task does not hold {brief(self._name)} through this Lock", name=self._name)

    def _entered(self) -> Lease:
        """Whose block ends here; another task than the one that entered may end it (a fixture, an async generator)."""
        for lease in reversed(self._tenures.get(asyncio.current_task(), ())):
            if lease._entered:
                return lease
        others = [lease for leases in self._tenures.values() for lease in leases if lease._entered]
        return others[0] if len(others) == 1 else self._taken()

    def _check_deadlock(self, session: Session, task: asyncio.Task[Any] | None) -> None:
        mine = session.held[self._name]()
        if mine is not None and mine._task is task and mine.held:
            raise SelfDeadlock(
                f"this task holds {brief(self._name)} already and would wait for itself: "
                "pass the Lease on instead of acquiring again",
                name=self._name,
            )

    # -- the one wait loop ---------------------------------------------------------------------------------------

    async def _wait(self, session: Session, task: asyncio.Task[Any] | None, wait: float | None) -> Lease | None:
        within = session.within(self._settings)
        pace: _Pace | None = None
        while True:
            ballot = session.quorum.ask(self._attempt(session), within)
            give_up = pace.give_up if pace else ballot.sent + wait if wait else None
            session.attempts.add(ballot)
            try:
                outcome = await self._settled(session, ballot, give_up)
                if outcome is Outcome.WON and (lease := await self._won(session, task, ballot)):
                    return lease
            except BaseException:
                session.undo(ballot)
                raise
            finally:
                session.attempts.discard(ballot)
            session.undo(ballot)
            pace = pace or _Pace(ballot.sent, wait, session.settings.patience)
            now = session.clock.now()
            if outcome is Outcome.UNREACHABLE and not pace.over(now):
                again = pace.after_outage(now)
                error = session.quorum.unavailable(ballot, self._name)
                if again is None or isinstance(error, ConfigError):
                    raise error
            else:
                again = pace.after_refusal(now, _soonest(ballot))
                if again is None:
                    return None
            await session.sleep_until(again)
            if pace.over(again):
                return None

    def _attempt(self, session: Session) -> Op:
        settings = self._settings
        seed = int(session.clock.wall() * 1_000_000)
        return Op(
            Verb.ACQUIRE,
            self._kind,
            self._name,
            session.new_id(seed, settings.metadata),
            settings.lease,
            seed,
            settings.lease + session.settings.fence_memory,
            plain=not settings.fencing,
        )

    async def _settled(self, session: Session, ballot: Ballot, give_up: float | None) -> Outcome:
        """The ballot's outcome; where the caller's timeout comes before the nodes', that ends it."""
        if give_up is None or give_up >= ballot.deadline:
            outcome = await ballot.settled(session.loop)
        else:
            timer = session.clock.call_at(give_up, ballot.expire)
            try:
                outcome = await ballot.settled(session.loop)
            finally:
                timer.cancel()
        session.check_open()
        return outcome

    async def _won(self, session: Session, task: asyncio.Task[Any] | None, ballot: Ballot) -> Lease | None:
        """The lease of a ballot that was won: None where its validity or its fence did not make it."""
        fences = ballot.fences()
        fence = max(fences)
        if fences.count(fence) <= ballot.nodes // 2 and not await self._witnessed(session, ballot, fence):
            return None
        session.check_open()
        lease = Lease(session, self, task, self._settings, ballot, fence)
        if lease.held:
            return lease
        lease._close()
        return None

    async def _witnessed(self, session: Session, ballot: Ballot, fence: int) -> bool:
        """A second round, where the counters differed: raise F to the token on a majority that holds for us."""
        op = ballot.op
        raised = Op(Verb.EXTEND, op.kind, op.name, op.id, op.lease, fence, op.memory)
        confirm = session.quorum.ask(raised, ballot.deadline - ballot.sent)
        won = await confirm.settled(session.loop) is Outcome.WON
        return won and sum(f >= fence for f in confirm.fences()) > ballot.nodes // 2


def _is_gone(task: asyncio.Task[Any] | None) -> bool:
    return task is None or task.done()


class _Pace:
    """When to try again, and when to stop. Pure."""

    def __init__(self, now: float, wait: float | None, patience: float) -> None:
        self.give_up = math.inf if wait is None else now + wait if wait else None  # None: one try, as long as it takes
        self._patience = patience
        self._refused = False  # the last word of a majority was: somebody holds it
        self._no_longer: float | None = None  # when an outage has lasted too long
        self._pause = _PAUSE[0]
        self._outage_pause = _OUTAGE_PAUSE[0]

    def over(self, now: float) -> bool:
        """Whether the time is up, for a wait that has last heard that somebody holds it."""
        return self._refused and self.give_up is not None and now >= self.give_up

    def after_refusal(self, now: float, soonest: float) -> float | None:
        """When to try next, `soonest` seconds from now being when a holder's lease may end; None: not again."""
        self._refused = True
        self._no_longer = None
        if self.give_up is None or now >= self.give_up:
            return None
        pause = min(self._pause * random.uniform(0.5, 1.0), soonest)  # noqa: S311 - jitter
        self._pause = min(2 * self._pause, _PAUSE[1])
        return min(now + pause, self.give_up)

    def after_outage(self, now: float) -> float | None:
        """The same while a majority is out of reach."""
        self._refused = False
        if self.give_up is None:
            return None
        self._no_longer = self._no_longer or now + self._patience
        limit = self._no_longer if self.give_up == math.inf else self.give_up
        pause = self._outage_pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._outage_pause = min(2 * self._outage_pause, _OUTAGE_PAUSE[1])
        return min(now + pause, limit) if now < limit else None


def _connect_limit(wait: float | None, session: Session) -> float:
    """How long a first use may wait for connections: a `timeout=0` needs some, too."""
    return wait or session.settings.patience


def _soonest(ballot: Ballot) -> float:
    """Seconds until the first of the holds that refused us ends; a whole ms more, as Redis rounds."""
    ends = [pttl for pttl, _ in ballot.denials() if pttl >= 0]
    return (min(ends) + 1) / 1000 if ends else float("inf")
