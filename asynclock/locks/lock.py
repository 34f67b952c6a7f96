"""Lock, a recipe that tasks may share. How it waits is told in `acquisition.py`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self, cast, overload

from asynclock._errors import LockNotHeld, LockTimeout, QuorumUnavailable, SelfDeadlock, brief
from asynclock._loop import no_loop, running_loop
from asynclock._options import seconds
from asynclock.acquire.acquisition import Wait
from asynclock.acquire.handover import Adoption
from asynclock.locks.admin import wrong_kind
from asynclock.quorum.ballot import Outcome
from asynclock.quorum.denials import is_held
from asynclock.rules.model import Op, Part, Verb
from asynclock.stores.port import WrongKind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from asynclock._options import LockSettings, Seconds
    from asynclock.acquire.handle import Known
    from asynclock.acquire.session import Session
    from asynclock.locks.lease import Lease
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind, Rule

UNSET: Any = object()


class Lock:
    """A name and how to hold it. Making one does no I/O; any number of tasks may share it, each tenure being its own
    `Lease`. After Redlock (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/)."""

    __slots__ = (
        "__weakref__", "_kind", "_name", "_purge_at", "_session_of", "_settings", "_tenures",
    )  # fmt: skip

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

    def __copy__(self) -> Self:
        return self  # a copy would not know the leases that were acquired through this Lock

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Lock is of its client and cannot be pickled: pickle its name, and make it anew there")

    @property
    def _parts(self) -> tuple[Part, ...]:
        """The names that it is of."""
        return self._kind.parts or (Part(self._name, cast("Rule", self._kind)),)

    @property
    def name(self) -> str:
        """The name, without the client's prefix."""
        return self._name

    @overload
    async def acquire(self, *, timeout: None) -> Lease: ...
    @overload
    async def acquire(self, *, timeout: Seconds = ...) -> Lease | None: ...
    async def acquire(self, *, timeout: Seconds | None = UNSET) -> Lease | None:
        """Wait for the lock, at most `timeout` seconds (None: as long as it takes; 0: try once; unset: the lock's).

        Answers a Lease, or None: somebody else held it all that time. Raises QuorumUnavailable while a majority is
        out of reach, SelfDeadlock where this task would wait for itself, ConfigError where a server refuses to serve.
        """
        if timeout is UNSET:
            wait = self._settings.timeout
        else:
            wait = None if timeout is None else seconds("timeout", timeout, zero=True)
        try:
            task = asyncio.current_task()
        except RuntimeError:
            raise no_loop() from None
        session = self._session_of(task)
        if not session.ready:
            began = session.clock.now()
            await session.open(self._settings, session.connect_limit(wait))
            if wait:
                wait = max(wait - (session.clock.now() - began), 1e-6)
        try:
            lease = await self._take(session, task, wait)
        except WrongKind:
            raise (await wrong_kind(session, self._parts)) from None
        if lease is not None:
            self._remember(lease)
        return lease

    async def _adopt(self, known: Known) -> Lease:
        """A Lease for a hold that was detached elsewhere."""
        task = asyncio.current_task(running_loop())
        session = self._session_of(task)
        if not session.ready:
            await session.open(self._settings, session.connect_limit(None))
        lease = await Adoption(session, self, self._settings, task, known).run()
        self._remember(lease)
        return lease

    def _take(
        self, session: Session, task: asyncio.Task[Any] | None, timeout: float | None
    ) -> Coroutine[Any, Any, Lease | None]:
        if timeout == 0 or self._name not in session.held:
            return Wait(session, self, self._settings, task, timeout).run()
        return self._take_beside(session, task, timeout)

    async def _take_beside(
        self, session: Session, task: asyncio.Task[Any] | None, timeout: float | None
    ) -> Lease | None:
        """The same where tasks of this process may hold these names."""
        mine = {
            part: sum(lease._task is task and lease.held for lease in session.leases(part.name)) for part in self._parts
        }
        if any(mine.values()) and all(part.kind.shared for part, count in mine.items() if count):
            # It may be let in beside itself; what it must not do is wait.
            with contextlib.suppress(QuorumUnavailable):
                if lease := await Wait(session, self, self._settings, task, 0).run():
                    return lease
        for part, count in mine.items():
            if count >= part.kind.room:
                raise SelfDeadlock(
                    f"this task holds {brief(part.name)} already and would wait for itself: {self._kind.way_out}",
                    name=part.name,
                )
        return await Wait(session, self, self._settings, task, timeout).run()

    async def release(self) -> None:
        """Give back what this task took through this lock; or, of a task that is gone, its one open tenure.

        Raises LockNotHeld where there is nothing to give back, LockLost where it ended under us, ConfigError where the
        servers refuse it. Servers out of reach are logged: the lease ends by itself.
        """
        await self._taken().release()

    async def locked(self) -> bool:
        """Whether a majority of the nodes has a holder for it, the same or several. Raises QuorumUnavailable."""
        ballot = await self._seen()
        return is_held(ballot.denials(), ballot.nodes)

    async def _holder(self) -> str | None:
        """The id of who holds it on a majority of the nodes."""
        found = (await self._seen()).holder()
        return None if found is None else found.holder

    async def _seen(self) -> Ballot:
        """What the nodes say of its holders."""
        session = self._session_of(None)
        if not session.ready:
            await session.open(self._settings, session.connect_limit(None))
        op = Op(Verb.EXTEND, self._kind, self._name, "", 0.0)
        ballot = session.quorum.ask(op, session.within(self._settings), everyone=True)
        if await ballot.settled(session.loop) is Outcome.UNREACHABLE:
            raise session.quorum.unavailable(ballot, self._name)
        return ballot

    async def __aenter__(self) -> Lease:
        """Wait and guard the body. Raises LockTimeout where `acquire` answers None, and what acquire raises."""
        lease = await self.acquire()
        if lease is None:
            which = "one or another of " if self._kind.parts else ""
            raise LockTimeout(f"{which}{brief(self._name)} was held by somebody else all the time", name=self._name)
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
        if leases and lease in leases and lease._block is None:
            leases.remove(lease)
            if not leases:
                del self._tenures[lease._taker]

    def _remember(self, lease: Lease) -> None:
        mine = self._tenures.setdefault(lease._taker, [])
        if mine and _is_past(mine[-1]):
            mine.pop()  # the new one is what release() gives back, and what it tells the loss of
        mine.append(lease)
        if len(self._tenures) > self._purge_at:
            ended = [
                each for task, leases in self._tenures.items() if _is_gone(task) for each in leases if not each._open
            ]
            for each in ended:
                self._forget(each)
            self._purge_at = 64 + 2 * len(self._tenures)

    def _taken(self) -> Lease:
        """What this task took last; else the one open tenure whose task is gone (a fixture's)."""
        try:
            mine = self._tenures.get(asyncio.current_task())
        except RuntimeError:
            raise no_loop() from None
        if mine:
            return mine[-1]
        gone = [each for task, leases in self._tenures.items() if _is_gone(task) for each in leases if each._open]
        if len(gone) == 1:
            return gone[0]
        raise LockNotHeld(f"this task does not hold {brief(self._name)} through this Lock", name=self._name)

    def _entered(self) -> Lease:
        """Whose block ends here; another task than the one that entered may end it (a fixture, an async generator)."""
        for lease in reversed(self._tenures.get(asyncio.current_task(), ())):
            if lease._block is not None:
                return lease
        others = [lease for leases in self._tenures.values() for lease in leases if lease._block is not None]
        return others[0] if len(others) == 1 else self._taken()


def _is_past(lease: Lease) -> bool:
    """Whether it has ended, and guards no block that still has to end."""
    return not lease._open and lease._block is None


def _is_gone(task: asyncio.Task[Any] | None) -> bool:
    return task is None or task.done()
