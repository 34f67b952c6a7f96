"""Lock, a recipe that tasks may share. `acquire/acquisition.py` says how it waits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self, cast, overload

from asynclock._errors import ConfigError, LockTimeout, QuorumUnavailable, SelfDeadlock, brief
from asynclock._loop import no_loop
from asynclock._options import seconds
from asynclock.acquire.acquisition import acquire
from asynclock.acquire.handover import adopt
from asynclock.acquire.tenure import Tenure, Terms
from asynclock.locks.admin import wrong_kind
from asynclock.locks.lease import Lease, guard, leave, release
from asynclock.locks.tenures import TenuresByTask
from asynclock.quorum.ballot import Outcome
from asynclock.quorum.denials import is_held
from asynclock.rules.model import Op, Part, Verb
from asynclock.stores.port import WrongKind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from asynclock._options import LockSettings, Seconds
    from asynclock.acquire.handover import Handle
    from asynclock.acquire.session import Session
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind, Rule
    from asynclock.stores.port import Refused

UNSET: Any = object()


class Lock:
    """A name and how to hold it. Making one does no I/O; any number of tasks may share it, each tenure being its own
    `Lease`. After Redlock (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/)."""

    __slots__ = ("__weakref__", "_kept", "_kind", "_name", "_session_of", "_settings")

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
        self._kept = TenuresByTask()

    def __repr__(self) -> str:
        return f"<Lock {self._kind.name} {brief(self._name)}>"

    def __copy__(self) -> Self:
        return self  # a copy would not know the leases that were acquired through this Lock

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Lock is of its client and cannot be pickled: pickle its name, and make it anew there")

    def __part__(self, session_of: object) -> Part | None:
        """For `multi`: this lock as one of several; None: it cannot be one. Raises ConfigError if it is not of the
        client with that `session_of`."""
        if self._session_of != session_of:
            raise ConfigError(f"{self!r} is another client's: make all locks of a multi through one client")
        return self._parts[0] if type(self) is Lock and not self._kind.parts else None

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
        tenure = await self._acquire(timeout)
        return Lease(tenure, self._kept) if isinstance(tenure, Tenure) else None

    async def _acquire(self, timeout: Seconds | None) -> Tenure | Refused:
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
            tenure = await self._take(session, Terms(self._name, self._kind, self._settings, task, wait))
        except WrongKind:
            raise (await wrong_kind(session, self._parts)) from None
        if isinstance(tenure, Tenure):
            self._kept.add(tenure)
        return tenure

    def _take(self, session: Session, terms: Terms) -> Coroutine[Any, Any, Tenure | Refused]:
        if terms.timeout == 0 or session.holds.get(self._name) is None:
            return acquire(session, terms)
        return self._take_beside(session, terms)

    async def _take_beside(self, session: Session, terms: Terms) -> Tenure | Refused:
        """The same where tasks of this process may hold these names."""
        mine = {part: sum(_is_of(each, terms) for each in session.holds.tenures(part.name)) for part in self._parts}
        if any(mine.values()) and all(part.kind.shared for part, count in mine.items() if count):
            # It may be let in beside itself; what it must not do is wait.
            with contextlib.suppress(QuorumUnavailable):
                one_try = Terms(terms.name, terms.kind, terms.settings, terms.task, 0, terms.owner)
                if isinstance(tenure := await acquire(session, one_try), Tenure):
                    return tenure
        for part, count in mine.items():
            if count >= part.kind.max_per_task:
                raise SelfDeadlock(
                    f"this task holds {brief(part.name)} already and would wait for itself: {self._kind.deadlock_hint}",
                    name=part.name,
                )
        return await acquire(session, terms)

    async def release(self) -> None:
        """Give back what this task took through this lock; or, of a task that is gone, its one open tenure.

        Raises LockNotHeld where there is nothing to give back, LockLost where it ended under us, ConfigError where the
        servers refuse it. Servers out of reach are logged: the lease ends by itself.
        """
        await release(self._kept.taken(self._name), self._kept)

    async def locked(self) -> bool:
        """Whether a majority of the nodes has a holder for it, the same or several. Raises QuorumUnavailable."""
        ballot = await self._seen()
        return is_held(ballot.denials(), ballot.nodes)

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
        tenure = await self._acquire(UNSET)
        if not isinstance(tenure, Tenure):
            which = "one or another of " if self._kind.parts else ""
            raise LockTimeout(f"{which}{brief(self._name)} was held by another owner all the time", name=self._name)
        guard(tenure, tenure.task)
        return Lease(tenure, self._kept)

    def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /
    ) -> Coroutine[Any, Any, None]:
        """Release, as the Lease does at the end of its block."""
        return leave(self._kept.entered(self._name), self._kept, e)


class AdoptedLock(Lock):
    """A Lock whose acquire takes over the hold of a handle."""

    __slots__ = ("_handle",)

    def __init__(
        self,
        handle: Handle,
        kind: Kind,
        settings: LockSettings,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
    ) -> None:
        super().__init__(handle.name, kind, settings, session_of)
        self._handle = handle

    def _take(self, session: Session, terms: Terms) -> Coroutine[Any, Any, Tenure | Refused]:
        return adopt(session, terms, self._handle)


def _is_of(tenure: Tenure, terms: Terms) -> bool:
    """Whether the task that asks holds that tenure now."""
    return tenure.task is terms.task and tenure.held
