"""Lock: a name and how to hold it. `protocol/acquisition.py` has the rules by which it waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from sys import _getframe as frame_at
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload
from weakref import ref

from asynclock._clock import sleep
from asynclock._errors import ConfigError, QuorumUnavailable, Unsupported, brief
from asynclock._loop import coroutine_function, no_loop
from asynclock._options import seconds
from asynclock.events import Acquired, TimedOut, Unavailable
from asynclock.info import Holder
from asynclock.locks.admin import wrong_kind
from asynclock.locks.lease import Lease, give_back, guard, leave, release
from asynclock.locks.tenures import TenuresByTask
from asynclock.protocol.causes import NoLease, lock_timeout_error, note_of
from asynclock.protocol.hold import Tenure
from asynclock.protocol.rounds import no_ticket
from asynclock.protocol.states import LOST
from asynclock.protocol.terms import Terms
from asynclock.quorum.ballot import Outcome
from asynclock.quorum.denials import would_refuse
from asynclock.rules.model import ID_LENGTH, PEEK, PEEK_ID, Op, Part, Serve, parts_for
from asynclock.rules.mutex import MUTEX
from asynclock.runtime.calls import acquire, adopt
from asynclock.stores.port import Use, Wish, WrongKind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from types import CoroutineType, TracebackType

    from asynclock._errors import LockTimeout
    from asynclock._options import BoundOptions, LockSettings, Seconds
    from asynclock.locks.cancellation import Caller
    from asynclock.protocol.handover import Handle
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind
    from asynclock.runtime.session import Session

UNSET: Any = object()


class Lock:
    """A name and how to hold it. Making one does no I/O. Any number of tasks may share it: each acquire returns a
    `Lease` of its own. Times are in seconds. Source:
    https://redis.io/docs/latest/develop/use/patterns/distributed-locks/"""

    __slots__ = ("__weakref__", "_kept", "_kind", "_name", "_options", "_session_of")

    _use: ClassVar[Use] = Use.LOCK
    _take = staticmethod(acquire)  # what each acquire awaits

    def __init__(
        self,
        name: str,
        kind: Kind,
        options: BoundOptions,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
    ) -> None:
        self._name = name
        self._kind = kind
        self._options = options
        self._session_of = session_of
        self._kept = TenuresByTask()

    def __repr__(self) -> str:
        return f"<Lock {self._kind.name} {brief(self._name)}>"

    def __copy__(self) -> Self:
        return self  # a copy could not release the leases that were acquired through this Lock

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Lock cannot be pickled: send its name, and make a new Lock in the other process")

    def _part(self, session_of: object) -> Part | None:
        """For `multi`: this lock as one of several; None: it cannot be one. Raises ConfigError if it belongs to another
        client than the one with that `session_of`."""
        if self._session_of != session_of:
            raise ConfigError(f"{self!r} is another client's: make all locks of a multi lock with one client")
        return self._parts[0] if type(self) is Lock and not self._kind.parts else None

    def _wish(self) -> Wish:
        """For the client: what it asks of the stores."""
        names, settings = tuple(part.name for part in self._parts), self._options.settings
        return Wish(self._use, self._kind, names, settings.lease, settings.min_hold, settings.fencing)

    @property
    def _parts(self) -> tuple[Part, ...]:
        """Its names, each with its kind."""
        return parts_for(self._name, self._kind)

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

        Returns a Lease, or None if another owner held the lock for the whole timeout: test for it before `async with`.
        Raises QuorumUnavailable (a majority was out of reach for `patience` seconds or until the timeout), SelfDeadlock
        (this task would wait for itself), ConfigError (a wrong timeout, a server that refuses a command, or a name in
        use as another kind).
        """
        taken = await self._acquire(timeout)
        return Lease(taken, self._kept) if isinstance(taken, Tenure) else None

    async def _acquire(self, timeout: Seconds | None) -> Tenure | NoLease:
        wait = None if timeout is UNSET or timeout is None else seconds("timeout", timeout, zero=True)
        try:
            task = asyncio.current_task()
        except RuntimeError:
            raise no_loop() from None
        session, opened_in, options = self._session_of(task), 0.0, self._options
        settings = options.settings if options.client is session.settings else self._settings_in(session)
        if timeout is UNSET:
            wait = settings.timeout
        if not settings.fencing and self._use is Use.LOCK:
            check_fencing(self._kind, settings, self._name)
        if not session.ready:
            began = session.clock.now()
            await session.open(settings, session.connect_limit(wait))
            opened_in = session.clock.now() - began
            if wait:
                wait = max(wait - opened_in, 1e-6)
        if session.limited:  # the stores may have been unknown when this lock was made
            session.check_supported(self._wish())
        terms = self._terms(settings, task, wait)
        take = self._take_plain if wait == 0 and not settings.fencing else self._take
        try:
            if session.observers.active:
                taken = await self._take_observed(take, session, terms, opened_in)
            else:
                taken = await take(session, terms)
            if isinstance(taken, Tenure):
                self._kept.add(taken)
                return taken
            return taken._replace(waited=opened_in + taken.waited)
        except WrongKind:
            raise (await wrong_kind(session, self._parts)) from None
        finally:
            del task, terms  # the error with which a task ends refers to this frame: a cycle would stay

    async def _take_plain(self, session: Session, terms: Terms) -> Tenure | NoLease:
        """As `_take`, for one try without fencing: a plain SET does not say who holds the key, or what it is, so a
        refusal asks for that. Without an answer the refusal stays as it is: a majority has refused."""
        taken = await self._take(session, terms)
        if not isinstance(taken, Tenure):
            with suppress(QuorumUnavailable):
                if (found := (await self._peek()).holder()) is not None:
                    return taken._replace(holder=found.holder, left=found.left)
        return taken

    async def _take_observed(
        self,
        take: Callable[[Session, Terms], Coroutine[Any, Any, Tenure | NoLease]],
        session: Session,
        terms: Terms,
        opened_in: float,
    ) -> Tenure | NoLease:
        """As `take`, and emits an event for the outcome. `opened_in`: seconds for which the caller has waited for
        connections."""
        began = session.clock.now() - opened_in
        event: type[Acquired | TimedOut | Unavailable] | None = None
        taken: Tenure | NoLease | None = None
        try:
            taken = await take(session, terms)
            event = Acquired if isinstance(taken, Tenure) else TimedOut
        except QuorumUnavailable:
            event = Unavailable
            raise
        finally:
            if event is not None:
                outcome = event(*terms.described, session.clock.now() - began, terms.had_to_wait)
                try:
                    session.observers.tell_caller(outcome)
                except BaseException:  # such as a KeyboardInterrupt in a listener: the caller gets no lease
                    if isinstance(taken, Tenure):
                        taken.hold.end(taken)
                    raise
        return taken

    def _terms(self, settings: LockSettings, task: asyncio.Task[Any] | None, wait: float | None) -> Terms:
        return Terms(self._name, self._kind, settings, task, wait)

    def _settings_in(self, session: Session) -> LockSettings:
        """Its settings in that session: those of the client may be others than when it was made. Raises ConfigError."""
        return self._options.under(session.settings, self._name)

    async def release(self) -> None:
        """Release the lease that this task acquired last through this Lock; without one, the only open lease of a task
        that has ended.

        Raises LockNotHeld (no lease to release), LockLost, ConfigError (the servers refuse the command). An outage is
        logged: the lease ends by itself.
        """
        await release(self._kept.last_of_task(self._name), self._kept)

    async def locked(self) -> bool:
        """Whether another owner's `acquire(timeout=0)` would be refused now: the holders leave no room, or a waiter
        goes first (of a fair lock, or a writer before readers). Raises QuorumUnavailable, ConfigError."""
        session = await self._opened()
        asked = self._peeks(session)
        await session.all_settled([ballot for _, ballot in asked])
        for _, ballot in asked:
            await self._check_answered(session, ballot)
        return any(would_refuse(ballot.denials(), ballot.nodes, kind) for kind, ballot in asked)

    async def _opened(self) -> Session:
        session = self._session_of(None)
        if not session.opened:
            await session.open(self._settings_in(session), session.connect_limit(None), check=False)
        if session.limited:
            session.check_supported(self._wish())
        return session

    def _peeks(self, session: Session) -> list[tuple[Kind, Ballot]]:
        """Ask all nodes, for each kind, whether an attempt would enter."""
        return [(self._kind, self._peek_at(session, self._kind, self._name))]

    def _peek_at(self, session: Session, kind: Kind, name: str) -> Ballot:
        op = Op(PEEK, kind, name, PEEK_ID + kind.mode, 0.0, queueing=no_ticket(Serve.NOBODY, kind.fair, 1))
        return session.quorum.ask(op, session.within(self._settings_in(session)), everyone=True)

    async def _peek(self) -> Ballot:
        """Ask all nodes whether an attempt would enter, and for the holders."""
        session = await self._opened()
        ballot = self._peek_at(session, self._kind, self._name)
        await session.settled(ballot)
        await self._check_answered(session, ballot)
        return ballot

    async def _check_answered(self, session: Session, ballot: Ballot) -> None:
        if ballot.outcome is Outcome.UNREACHABLE:
            error: Exception = session.quorum.unavailable(ballot, self._name)
            raise (await wrong_kind(session, self._parts)) if isinstance(error, WrongKind) else error

    @coroutine_function
    def __aenter__(self) -> CoroutineType[Any, Any, Lease]:
        """Wait for the lock and guard the body. Raises LockTimeout where `acquire` returns None, the errors of
        `acquire`, and LockLost if max_hold is over already."""
        frame = frame_at(1)  # this is no `async def`: a coroutine may run under another frame than its caller's
        return self._enter((id(frame), frame.f_code, frame.f_lasti))  # type: ignore[return-value] # mypy's Coroutine

    async def _enter(self, caller: Caller) -> Lease:
        taken = await self._acquire(UNSET)
        if not isinstance(taken, Tenure):
            raise self._timed_out(taken)
        if taken.state is LOST:  # max_hold was over before this task woke: no loss would cancel the body any more
            await give_back(taken, self._kept)
        guard(taken, ref(self._kept), taken.task, caller)
        return Lease(taken, self._kept)

    async def _leased(self) -> Lease:
        """For `lead`: as `acquire`, but raises LockTimeout where that returns None."""
        taken = await self._acquire(UNSET)
        if isinstance(taken, Tenure):
            return Lease(taken, self._kept)
        raise self._timed_out(taken)

    async def _sleep(self, seconds: float) -> None:
        """For `lead`: wait so long, by the clock of the client."""
        await sleep(seconds, self._session_of(None).clock)

    def _timed_out(self, refusal: NoLease) -> LockTimeout:
        """The error for a refusal, with what is known of the holder."""
        session = self._session_of(None)
        here = _holder_here(session, [part.name for part in self._parts], refusal.holder)
        wall, timeout, several = session.clock.wall(), self._settings_in(session).timeout, len(self._parts) > 1
        return lock_timeout_error(self._name, refusal, here, wall, timeout=timeout, several=several)

    @coroutine_function
    def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /
    ) -> CoroutineType[Any, Any, None]:
        """Release, as the Lease does at the end of its block."""
        only = self._kept.only_entered
        if only is not None:
            return leave(only, self._kept, e)  # type: ignore[return-value]
        frame = frame_at(1)
        find = partial(self._kept.of_block, self._name, (id(frame), frame.f_code, frame.f_lasti))
        return leave(find, self._kept, e)  # type: ignore[return-value]


class AdoptedLock(Lock):
    """A Lock whose acquire takes over the hold of a handle."""

    __slots__ = ("_handle",)

    _use = Use.ADOPT

    def __init__(
        self,
        handle: Handle,
        kind: Kind,
        options: BoundOptions,
        session_of: Callable[[asyncio.Task[Any] | None], Session],
    ) -> None:
        super().__init__(handle.name, kind, options, session_of)
        self._handle = handle

    def _take(self, session: Session, terms: Terms) -> Coroutine[Any, Any, Tenure | NoLease]:
        return adopt(session, terms, self._handle)


def check_fencing(kind: Kind, settings: LockSettings, name: str) -> None:
    """Raise Unsupported for a lock without fencing tokens that is no mutex."""
    if not settings.fencing and kind.letter != MUTEX.letter:
        which = "to multi()" if kind.parts else f"for a {kind.name} lock"
        raise Unsupported(f"fencing=False is for a mutex: pass fencing=True {which}", name=name)


def _holder_here(session: Session, names: Iterable[str], id: str) -> Holder | None:
    """The holder of one of these names in this process, if there is one; with an `id`, only the hold of that id."""
    now, wall = session.clock.now(), session.clock.wall()
    for name in names:
        holds = session.machine.holds.of(name)
        if id:
            known = session.machine.holds.with_id(name, id[:ID_LENGTH])
            holds = () if known is None or known.op.id != id else (known,)
        for hold in holds:
            for tenure in hold.tenures:
                if tenure.held:
                    note = note_of(hold.op.id)
                    since, metadata = wall - tenure.held_for, tenure.terms.settings.metadata
                    return Holder(name, note.host, note.pid, since, tenure.ends - now, metadata)
    return None
