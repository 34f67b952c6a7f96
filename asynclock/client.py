"""Redlock, the client: it knows the nodes and makes the locks."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack
from weakref import WeakSet

from asynclock._errors import ConfigError, Unsupported
from asynclock._loop import running_loop
from asynclock._options import (
    ClientOptions,
    ClientSettings,
    LockOptions,
    LockSettings,
    check_flag,
    check_name,
    check_owner,
    client_settings,
    lock_settings,
    node_timeout,
    seconds,
)
from asynclock.acquire.handover import parse_handle
from asynclock.acquire.session import Session
from asynclock.info import Health, Holder, LockInfo, NodeHealth
from asynclock.locks import admin, decorators
from asynclock.locks.decorators import OnceLock
from asynclock.locks.lock import AdoptedLock, Lock
from asynclock.locks.multi import Multi, MultiLock, parts_of
from asynclock.locks.reentrant import ReentrantLock
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.registry import rule_of
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import MOST, Semaphore
from asynclock.stores import store_for, urls_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
    from types import TracebackType

    from redis.asyncio import Redis

    from asynclock._options import Seconds
    from asynclock.locks.decorators import Skipped
    from asynclock.locks.lease import Lease
    from asynclock.rules.model import Kind
    from asynclock.stores.port import Store

_P = ParamSpec("_P")
_R = TypeVar("_R")

URLS = "ASYNCLOCK_URLS"
"""Where a client without nodes looks: urls, comma-separated (`stores.urls_of`)."""


class Redlock:
    """Locks over one node, or over a quorum of independent nodes.

        redlock = Redlock("redis://a", "redis://b", "redis://c", lease=30.0)

        async with redlock("order:42") as lease:
            await charge(fence=lease.fence)

    Nodes are urls (redis, rediss, unix, valkey, valkeys, embedded, memory), `redis.asyncio.Redis` clients or Stores;
    without any, those of `configure` or of $ASYNCLOCK_URLS at the first await. Making a client does no I/O and needs
    no loop. One client serves every event loop, thread and forked child, each with connections of its own.
    Raises ConfigError.
    """

    def __init__(self, *nodes: str | Redis | Store, **options: Unpack[ClientOptions]) -> None:
        self._settings = ClientSettings()
        self._stores: tuple[Store, ...] = ()
        self._sessions = Sessions()
        self._set(nodes, options)

    def __repr__(self) -> str:
        return f"<Redlock {', '.join(store.label for store in self._stores) or 'not configured'}>"

    def __copy__(self) -> Self:
        return self  # a copy would share the sockets, and the fork hook would not reset it

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Redlock cannot be pickled: make one there, from the same urls and options")

    def configure(self, *nodes: str | Redis | Store, **options: Unpack[ClientOptions]) -> None:
        """Name the nodes and options of a client that is not in use: before its first use, or after `aclose` or the end
        of each loop that used it. Raises ConfigError."""
        if self._sessions.in_use():
            raise ConfigError("configure() comes before the first use of a client: this one is in use, close it first")
        self._set(nodes, options)
        self._sessions.clear()

    def __call__(
        self,
        name: str,
        /,
        *,
        fair: bool = False,
        reentrant: bool = False,
        owner: Hashable | None = None,
        **options: Unpack[LockOptions],
    ) -> Lock:
        """A mutex of that name. `fair`: in order of arrival. `reentrant`: its owner, the task or `owner`, may
        enter again. No I/O. Raises ConfigError."""
        if fair is not False or reentrant is not False:
            check_flag("fair", fair)
            check_flag("reentrant", reentrant)
        kind, settings = FAIR if fair else MUTEX, self._lock_settings(name, options)
        if reentrant:
            return ReentrantLock(name, kind, settings, self._session, check_owner(owner))
        if owner is not None:
            raise ConfigError("an owner is of a reentrant lock: say reentrant=True")
        return Lock(name, kind, settings, self._session)

    def read(self, name: str, /, **options: Unpack[LockOptions]) -> Lock:
        """The readers' side of a read-write lock: any number at once, while nobody writes. Raises ConfigError."""
        return self._shared(name, READ, options)

    def write(self, name: str, /, **options: Unpack[LockOptions]) -> Lock:
        """The writers' side of it: alone. Readers that come while it waits come after it. Raises ConfigError."""
        return self._shared(name, WRITE, options)

    def semaphore(self, name: str, permits: int, /, **options: Unpack[LockOptions]) -> Lock:
        """Enters while fewer than `permits` hold it; callers may differ in that number. Raises ConfigError."""
        if isinstance(permits, bool) or not isinstance(permits, int) or not 0 < permits <= MOST:
            raise ConfigError(f"permits is a whole number from 1 to {MOST}: {permits!r} is none", name=str(name))
        return self._shared(name, Semaphore(permits), options)

    def multi(self, *locks: str | Lock, **options: Unpack[LockOptions]) -> Lock:
        """Several locks as one: all of them or none, whatever the order. A str is a mutex; of a Lock of this client the
        name and the kind count, not its options. Its Lease has one fencing token, above all that any of the names gave
        before. Raises ConfigError."""
        kind = Multi(parts_of(locks, MUTEX, self._session, check_name))
        settings = self._lock_settings(kind.parts[0].name, options)
        if not settings.fencing:
            raise Unsupported("fencing=False is for the mutex alone, not for a multi lock", name=kind.parts[0].name)
        return MultiLock(kind, settings, self._session)

    def _shared(self, name: str, kind: Kind, options: LockOptions) -> Lock:
        settings = self._lock_settings(name, options)
        if not settings.fencing:
            raise Unsupported(f"fencing=False is for the mutex alone, not for a {kind.name} lock", name=name)
        return Lock(name, kind, settings, self._session)

    def _lock_settings(self, name: str, options: LockOptions) -> LockSettings:
        settings = lock_settings(check_name(name), options, self._settings)
        if self._stores and options:
            node_timeout(self._settings, settings, len(self._stores))
        return settings

    async def lead(self, name: str, main: Callable[[Lease], Awaitable[_R]], /, **options: Unpack[LockOptions]) -> _R:
        """Run `main(lease)` while elected among all who call this with that name: cancelled on a loss of that lease,
        and run again once elected again. Its result or exception ends it. Raises LockTimeout, ConfigError; an outage
        is ridden out, unless there is a timeout."""
        if not callable(main):
            raise ConfigError(f"main is a coroutine function that takes the lease, not {type(main).__name__}")
        through_outages = self._lock_settings(name, options).timeout is None
        return await decorators.lead(self(name, **options), main, through_outages)

    def synchronized(
        self, name: str | Callable[..., str], /, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R]]]:
        """Decorate a coroutine function: each call runs under a lock named after its arguments ("order:{order_id}", or
        what a function of the same arguments answers). A value is a str, int, UUID, date or enum; colons, slashes,
        percent signs and what stands between two fields are escaped inside it. Raises ConfigError, TypeError where it
        decorates; a call raises what `async with` does, and TypeError for a value that names nothing."""
        self._lock_settings("synchronized", options)  # a bad option is told here
        return decorators.synchronized(name, lambda named: self(named, **options))

    def once(
        self, name: str | Callable[..., str], /, *, within: Seconds
    ) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R | Skipped]]]:
        """Decorate a coroutine function: over the whole fleet it completes at most once in `within` seconds for the
        same name. Other calls answer Skipped.RUNNING or Skipped.DONE; a run that raised or died may be run again."""
        length, patience = seconds("within", within), self._settings.patience

        def lock(named: str) -> OnceLock:
            # A min_hold of the client's own would keep the name of a run that raised, which may be run again at once.
            return OnceLock(named, MUTEX, self._lock_settings(named, {"min_hold": 0}), self._session)

        return decorators.once(name, lock, length, patience)

    async def adopt(self, handle: str, /, **options: Unpack[LockOptions]) -> Lease:
        """Take over what another process detached: a new Lease, with a greater token, under the options given here;
        none come with the handle. Raises LockNotHeld (adopted already, or its time is over), QuorumUnavailable,
        ConfigError."""
        known = parse_handle(handle)
        settings = self._lock_settings(known.name, options)
        return await AdoptedLock(known, rule_of(known.mode), settings, self._session).acquire(timeout=None)

    async def break_lock(self, name: str, /) -> bool:
        """Free `name`, whoever holds it, and tell the holder at once: until he hears of it he works on unguarded.
        Answers whether anybody held it. Raises QuorumUnavailable."""
        session = await self._opened()
        return await admin.break_lock(session, check_name(name))

    async def health(self) -> Health:
        """How each node does. Never raises."""
        try:
            session = await self._opened()
        except ConfigError as error:
            labels = [store.label for store in self._stores]
            return Health(False, tuple(NodeHealth(label, False, None, str(error)) for label in labels))
        nodes = session.quorum.nodes
        pings = await asyncio.gather(*(_ping(node.ping()) for node in nodes), return_exceptions=True)
        health = tuple(
            NodeHealth(node.label, False, None, str(ping) or repr(ping))
            if isinstance(ping, BaseException)
            else NodeHealth(node.label, True, ping, "")
            for node, ping in zip(nodes, pings, strict=True)
        )
        return Health(sum(node.ok for node in health) > len(nodes) // 2, health)

    async def inspect(self, name: str, /) -> LockInfo:
        """Who holds `name` and who waits for it, as a majority of the nodes sees it. Raises QuorumUnavailable."""
        session = await self._opened()
        return await admin.inspect(session, check_name(name))

    async def holders(self, prefix: str = "", /) -> AsyncIterator[Holder]:
        """All that is held of the names that begin with `prefix`, found by SCAN: on a database that others share, give
        one, or their keys are shown as well. Raises QuorumUnavailable."""
        session = await self._opened()
        async for holder in admin.holders(session, prefix):
            yield holder

    async def _opened(self) -> Session:
        session = self._session()
        if not session.ready:
            await session.open(self._settings.lock, session.connect_limit(None))
        return session

    async def release_all(self) -> None:
        """Give back all that this client holds in this loop."""
        session = self._sessions.of(running_loop())
        if session is not None:
            await session.release_all()

    async def aclose(self) -> None:
        """Give back all that is held in this loop, and hang up. Leases still held are lost (reason "closed")."""
        session = self._sessions.of(running_loop())
        if session is not None:
            await session.aclose()

    async def __aenter__(self) -> Self:
        """Connect. Raises ConfigError, QuorumUnavailable."""
        self._sessions.forget_closed(running_loop())
        session = self._session()
        await session.open(self._settings.lock, session.connect_limit(None))
        if (outage := session.quorum.outage()) is not None:
            raise outage
        return self

    async def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------------------------------------------------

    def _set(self, nodes: tuple[str | Redis | Store, ...], options: ClientOptions) -> None:
        settings = client_settings(options, self._settings)
        stores = _stores(nodes) if nodes else self._stores
        if stores:
            node_timeout(settings, settings.lock, len(stores))
        self._settings = settings
        self._stores = stores

    def _session(self, task: asyncio.Task[Any] | None = None) -> Session:
        """This loop's session (`task` runs in it: asking it is cheaper than asking the system); made at first use."""
        loop = running_loop() if task is None else task.get_loop()
        return self._sessions.of(loop) or self._sessions.make(loop, self._new_session)

    def _new_session(self) -> Session:
        self._stores = self._stores or _stores_of_environment()
        return Session(self._settings, self._stores)


class Sessions:
    """The sessions of one client, one for each event loop. Threads with loops of their own share it."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, Session] = {}
        self._guard = threading.Lock()
        _all_sessions.add(self)

    def of(self, loop: asyncio.AbstractEventLoop) -> Session | None:
        return self._by_loop.get(loop)

    def make(self, loop: asyncio.AbstractEventLoop, new: Callable[[], Session]) -> Session:
        """The session of that loop; made if there is none."""
        with self._guard:
            if loop not in self._by_loop:
                alive = {each: its for each, its in self._by_loop.items() if not each.is_closed()}
                self._by_loop = {**alive, loop: new()}
            return self._by_loop[loop]

    def in_use(self) -> bool:
        return any(not (session.closed or loop.is_closed()) for loop, session in list(self._by_loop.items()))

    def forget_closed(self, loop: asyncio.AbstractEventLoop) -> None:
        """The next session of that loop is a new one, if the last was closed."""
        with self._guard:
            if (session := self._by_loop.get(loop)) is not None and session.closed:
                del self._by_loop[loop]

    def clear(self) -> None:
        self._by_loop = {}

    def forget_after_fork(self) -> None:
        """In a forked child the sockets and the loop are the parent's. They are kept, because closing them would reach
        the parent's selector; and they are never used."""
        for session in self._by_loop.values():
            session.forget_after_fork()
            _inherited.append(session)
        self._by_loop = {}
        self._guard = threading.Lock()


def _stores(nodes: tuple[str | Redis | Store, ...]) -> tuple[Store, ...]:
    stores = tuple(store_for(node) for node in nodes)
    labels = [store.label for store in stores]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{label} is named twice: a quorum needs independent servers, each named once")
    if len(stores) > 1 and len(stores) % 2 == 0:
        warnings.warn(
            f"{len(stores)} nodes survive the loss of no more than {len(stores) - 1} do: name an odd number",
            stacklevel=4,
        )
    return stores


def _stores_of_environment() -> tuple[Store, ...]:
    urls = urls_of(os.environ.get(URLS, ""))
    if not urls:
        raise ConfigError(
            f"no servers are named: set {URLS}=redis://host:6379 (or {URLS}=embedded: on one machine), "
            "or call redlock.configure('redis://host:6379') first"
        )
    return _stores(urls)


async def _ping(ping: Any) -> float:
    async with asyncio.timeout(1.0):
        latency: float = await ping
        return latency


_all_sessions: WeakSet[Sessions] = WeakSet()
_inherited: list[Session] = []


def _after_fork() -> None:
    for sessions in list(_all_sessions):
        sessions.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)

redlock = Redlock()
"""The ready-made client: nodes from `redlock.configure(...)` or $ASYNCLOCK_URLS."""
