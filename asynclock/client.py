"""Redlock, the client: it knows the nodes and makes the locks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from asynclock._errors import ConfigError, brief
from asynclock._loop import running_loop
from asynclock._options import (
    THREAD,
    BoundOptions,
    ClientOptions,
    ClientSettings,
    LockOptions,
    check_flag,
    check_name,
    check_owner,
    check_text,
    client_settings,
    environment_settings,
    node_timeout,
    plain_text,
    seconds,
)
from asynclock.locks import admin, decorators, health
from asynclock.locks.decorators import OnceLock
from asynclock.locks.lock import AdoptedLock, Lock, check_fencing
from asynclock.locks.multi import Multi, MultiLock, parts_of
from asynclock.locks.reentrant import ReentrantLock
from asynclock.protocol.handover import parse_handle
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.registry import rule_of
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import MOST_PERMITS, Semaphore
from asynclock.runtime.calls import enter
from asynclock.runtime.counts import counts
from asynclock.runtime.observers import Observers
from asynclock.runtime.session import Session
from asynclock.runtime.sessions import Sessions, substitute
from asynclock.stores import check_supported, check_thread_safe, limited_of, stores_for, stores_of
from asynclock.stores.port import Use, Wish, is_standalone

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
    from types import TracebackType

    from redis.asyncio import Redis, RedisCluster

    from asynclock._options import Seconds
    from asynclock.events import Event
    from asynclock.info import Health, Holder, LockInfo
    from asynclock.locks.decorators import Skipped
    from asynclock.locks.lease import Lease
    from asynclock.rules.model import Kind
    from asynclock.runtime.counts import Counts
    from asynclock.stores import LimitedStore
    from asynclock.stores.port import Store

_P = ParamSpec("_P")
_R = TypeVar("_R")

_VALID = 64
"""So many combinations of options a client remembers as valid. A program has few of them, and makes many locks."""


class Redlock:
    """Locks over one node, or over a quorum of independent nodes.

        redlock = Redlock("redis://a", "redis://b", "redis://c", lease=30.0)

        async with redlock("order:42") as lease:
            await charge(fence=lease.fence)

    Nodes are urls (redis, rediss, unix, valkey, valkeys; redis+sentinel, rediss+sentinel; redis+cluster,
    rediss+cluster, valkey+cluster, valkeys+cluster; embedded, memory), `redis.asyncio.Redis` or `RedisCluster` clients,
    or Stores. A url of postgresql, mariadb, mysql, sqlite or zookeeper is the only node. Without nodes, the client
    takes those of `configure`, or of $ASYNCLOCK_URLS at its first await; and then also the options that were not given,
    from $ASYNCLOCK_PREFIX, _LEASE, _MAX_LEASE, _TIMEOUT, _NODE_TIMEOUT, _CONNECT_TIMEOUT and _TRUST_RESTARTS. `options`
    are those of ClientOptions; times are in seconds. Making a client does no I/O and needs no event loop. One client
    serves all event loops, threads and forked children; each of them has connections of its own. Raises ConfigError.

    Source: https://redis.io/docs/latest/develop/use/patterns/distributed-locks/
    """

    def __init__(self, *nodes: str | Redis | RedisCluster | Store, **options: Unpack[ClientOptions]) -> None:
        self._settings = ClientSettings()
        self._default = BoundOptions("", {}, self._settings)  # of a lock without options
        self._valid: dict[tuple[object, ...], BoundOptions] = {}  # by options that were checked with these settings
        self._given: Mapping[str, Any] = {}  # the options that were given, to __init__ or to configure()
        self._ready_made = self._unread = not nodes  # it takes other options from the environment; not read yet
        self._stores: tuple[Store, ...] = ()
        self._limited: tuple[LimitedStore, ...] = ()  # those that cannot keep every lock
        self._sessions = Sessions(ready_made=not nodes)
        self._observers = Observers()
        self._set(nodes, options)

    def __repr__(self) -> str:
        return f"<Redlock {', '.join(store.label for store in self._stores) or 'not configured'}>"

    def __copy__(self) -> Self:
        return self  # a copy would share the sockets, and the fork hook would not reset it

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Redlock cannot be pickled: make one in the other process, from the same urls and options")

    def configure(self, *nodes: str | Redis | RedisCluster | Store, **options: Unpack[ClientOptions]) -> None:
        """Set the nodes and the options of a client that is not in use: before its first use, after `aclose`, or after
        the end of each event loop that used it. They hold for the locks that were made before, too. Raises
        ConfigError."""
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
        """A mutex of that name. `fair`: waiters enter in their order of arrival. `reentrant`: its owner may enter
        again; the owner is the task, or the value of `owner`. Does no I/O. Raises ConfigError."""
        if fair is not False or reentrant is not False:
            check_flag("fair", fair, str(name))
            check_flag("reentrant", reentrant, str(name))
        kind, bound = FAIR if fair else MUTEX, self._bound(name, options)
        name = plain_text(name)
        if reentrant:
            return self._checked(ReentrantLock(name, kind, bound, self._session, check_owner(owner, name)))
        if owner is not None:
            raise ConfigError("owner= is for a reentrant lock: add reentrant=True", name=name)
        lock = Lock(name, kind, bound, self._session)
        return self._checked(lock) if self._limited else lock

    def read(self, name: str, /, **options: Unpack[LockOptions]) -> Lock:
        """The readers' side of a read-write lock: any number of readers hold it together, but not beside a writer. Does
        no I/O. Raises ConfigError, Unsupported (fencing=False). Source: `rules/rwlock.py`."""
        return self._shared(name, READ, options)

    def write(self, name: str, /, **options: Unpack[LockOptions]) -> Lock:
        """The writers' side of a read-write lock: one writer holds it alone. Readers that arrive while a writer waits
        enter after it. Does no I/O. Raises ConfigError, Unsupported (fencing=False)."""
        return self._shared(name, WRITE, options)

    def semaphore(self, name: str, permits: int, /, **options: Unpack[LockOptions]) -> Lock:
        """A lock that a caller enters while it has fewer than `permits` holders. Callers may give different numbers.
        Does no I/O. Raises ConfigError, Unsupported (fencing=False)."""
        if isinstance(permits, bool) or not isinstance(permits, int) or not 0 < permits <= MOST_PERMITS:
            raise ConfigError(f"permits is a whole number from 1 to {MOST_PERMITS}, not {permits!r}", name=str(name))
        return self._shared(name, Semaphore(int(permits)), options)

    def multi(self, *locks: str | Lock, **options: Unpack[LockOptions]) -> Lock:
        """Several locks as one: the caller gets all of them or none, in whatever order they are named. A str is a
        mutex. A Lock of this client counts with its name and kind, and its options do not count. The Lease has one
        fencing token, which is greater than all earlier tokens of these names. Does no I/O. Raises ConfigError,
        Unsupported (fencing=False). Source: `locks/multi.py`."""
        kind = Multi(parts_of(locks, MUTEX, self._session, check_name))
        bound = self._bound(kind.parts[0].name, options)
        check_fencing(kind, bound.settings, kind.parts[0].name)
        return self._checked(MultiLock(kind, bound, self._session))

    def _shared(self, name: str, kind: Kind, options: LockOptions) -> Lock:
        bound = self._bound(name, options)
        name = plain_text(name)
        check_fencing(kind, bound.settings, name)
        return self._checked(Lock(name, kind, bound, self._session))

    def _checked(self, lock: Lock) -> Lock:
        """The lock. Raises Unsupported if the stores are known and cannot keep it."""
        if self._limited:
            check_supported(self._limited, lock._wish()._replace(prefix=self._settings.prefix))
        return lock

    def _bound(self, name: str, options: LockOptions, *, named: bool = True) -> BoundOptions:
        if self._unread:
            self._use_settings(self._settings_of(self._given))  # the first await reads it again
        if named:  # the names of a decorator come with its calls
            check_name(name)
        if not options:
            return self._default
        key = tuple([(option, value, type(value)) for option, value in options.items()])
        try:
            return self._valid[key]
        except (KeyError, TypeError):  # not known, or a wrong value that cannot be hashed
            bound = BoundOptions(name, options, self._settings)
        if self._stores:
            node_timeout(self._settings, bound.settings, len(self._stores), name)
            if bound.settings.renew == THREAD:
                check_thread_safe(self._stores, name)
        if len(self._valid) >= _VALID:  # each may have metadata of its own
            self._valid.clear()
        self._valid[key] = bound
        return bound

    async def lead(self, name: str, main: Callable[[Lease], Awaitable[_R]], /, **options: Unpack[LockOptions]) -> _R:
        """Run `main(lease)` while this caller is elected among all callers of `lead` with that name. A loss of the
        lease cancels `main`; the next election runs it again. The result or the exception of `main` ends `lead`.

        With a `timeout` (seconds), raises LockTimeout or QuorumUnavailable when an election takes longer. Without one,
        waits until an outage is over. Raises ConfigError, TypeError (`main` returned no awaitable), LockLost (the
        client was closed).
        """
        lock, through_outages = self._election(name, main, options)
        return await decorators.lead(lock, main, through_outages)

    def _election(self, name: str, main: object, options: LockOptions) -> tuple[Lock, bool]:
        """For `lead`: its lock, and whether it waits until an outage is over. Raises ConfigError."""
        if not callable(main):
            raise ConfigError(f"main is a function that takes the lease, not {type(main).__name__}")
        return self(name, **options), self._bound(name, options).settings.timeout is None

    def synchronized(
        self, name: str | Callable[..., str], /, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R]]]:
        """Decorate a coroutine function: each call runs under a lock. The name of the lock comes from the arguments of
        the call, by a template ("order:{order_id}") or by a function that takes the same arguments and returns the
        name. A value in a template is a str, int, UUID, date or enum; equal values have one name. In a value, colons,
        slashes, percent signs and the characters between two fields are escaped.

        Raises ConfigError or TypeError when it decorates. A call raises what `async with` of a lock raises, and
        TypeError for a value of another type.
        """
        return decorators.synchronized(name, self._lock_of_calls(name, options))

    def _lock_of_calls(self, name: str | Callable[..., str], options: LockOptions) -> Callable[[str], Lock]:
        """For `synchronized`: makes the lock of a call from its name. Raises ConfigError."""
        bound = self._options_of_calls(name, options, Use.LOCK)
        return lambda named: Lock(check_name(named), MUTEX, bound, self._session)

    def once(
        self, name: str | Callable[..., str], /, *, within: Seconds
    ) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], Callable[_P, Coroutine[Any, Any, _R | Skipped]]]:
        """Decorate a coroutine function: for one name it completes at most once in `within` seconds, over all
        processes. Other calls return Skipped.RUNNING or Skipped.DONE. After a run that raised, or that
        ended with its process, the next call runs.

        Raises ConfigError or TypeError when it decorates. A call raises as one of `synchronized` does. It waits for no
        run, and for `patience` seconds for the end of an outage or of split votes; LockTimeout tells of those.
        """
        return decorators.once(name, *self._runs(name, within))

    def _runs(self, name: str | Callable[..., str], within: Seconds) -> tuple[Callable[[str], OnceLock], float]:
        """For `once`: makes the lock of a run from its name; and `within`, in seconds. Raises ConfigError."""
        length = seconds("within", within)
        # With the client's min_hold the name would stay taken after a run that raised; the next call could not run.
        bound = self._options_of_calls(name, {"min_hold": 0}, Use.ONCE)

        def lock(named: str) -> OnceLock:
            return OnceLock(check_name(named), MUTEX, bound, self._session)

        return lock, length

    def _options_of_calls(self, name: str | Callable[..., str], options: LockOptions, use: Use) -> BoundOptions:
        """The options for the calls of a decorated function; their label is its template. Raises ConfigError for a
        wrong option."""
        labelled: LockOptions = {"label": name, **options} if isinstance(name, str) else options
        bound = self._bound("", labelled, named=False)
        known = bound.settings
        if self._limited:
            check_supported(self._limited, Wish(use, MUTEX, (), known.lease, known.min_hold, known.fencing))
        return bound

    async def adopt(self, handle: str, /, **options: Unpack[LockOptions]) -> Lease:
        """Take over the hold that another process detached. `handle` is the string that `Lease.detach` returned.
        Returns a new Lease with a greater fencing token, under the options given here; the handle contains no options.
        It waits for no owner, so `timeout` has no effect. Raises LockNotHeld (the handle was adopted already, or the
        hold has ended), QuorumUnavailable (after `patience` seconds), ConfigError."""
        known = parse_handle(handle)
        bound = self._bound(known.name, options)
        lock = self._checked(AdoptedLock(known, rule_of(known.mode), bound, self._session))
        return await lock.acquire(timeout=None)

    async def break_lock(self, name: str, /, *, foreign: bool = False) -> bool:
        """Take `name` away from its holders, and notify them: their LockLost names this process and the client's
        `metadata`. Until the notice arrives, a holder works on without
        protection. Returns whether the name was held. A key that asynclock did not make is deleted only with
        `foreign=True`, then whatever its type. Raises QuorumUnavailable, ConfigError (it is another program's)."""
        check_flag("foreign", foreign)
        session = await self._opened()
        return await admin.break_lock(session, check_name(name), foreign)

    def subscribe(self, listener: Callable[[Event], object], /) -> Callable[[], None]:
        """Call `listener` with each event of this client from now on (`asynclock.events`), in the event loop in which
        the event happens. A listener is not awaited and must not block. Its first exception is logged, and none reaches
        the caller of a lock. Returns a function that ends the subscription. Raises ConfigError."""
        return self._observers.add(listener)

    def _counts_of_sessions(self) -> list[Counts]:
        """For `asynclock.otel`: the counts of each open session. Any thread may call it."""
        return [counts(session) for session in self._sessions.open()]

    async def health(self) -> Health:
        """Whether an acquire would be decided now, and why not: each node takes a hold of a reserved name and gives it
        back. Connects at first use, for up to 1 s, and waits for the answers for up to 1 s, or 3 s of a database or
        ZooKeeper; longer, if the nodes of a quorum are farther away. Never raises. Source: docs/health.md."""
        try:
            return await health.health(self._session())
        except Exception as error:  # a closed client, no nodes, a store that fails: `reason` says it
            return self._unusable(error)

    async def _answers(self) -> Health:
        """For `asynclock top`: whether each node answers. As `health`, but it needs the right to read only."""
        try:
            return await health.answers(self._session())
        except Exception as error:
            return self._unusable(error)

    def _unusable(self, error: Exception) -> Health:
        """For `health`: why it asked no node."""
        return health.unusable([store.label for store in self._stores], error)

    async def inspect(self, name: str, /) -> LockInfo:
        """The holders of `name` and its waiters, as a majority of the nodes sees them. Waits for each node for at
        most 1 s, or the node timeout if that is longer. Raises QuorumUnavailable, ConfigError."""
        session = await self._opened()
        return await admin.inspect(session, check_name(name))

    async def holders(self, prefix: str = "", /) -> AsyncIterator[Holder]:
        """All holds of the names that begin with `prefix`, found by SCAN. Keys without the client's own prefix are not
        seen. For a client without one, a string of another program counts as a hold if it expires and looks like the
        token of a lock library. Raises QuorumUnavailable, ConfigError."""
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix is a str, not {type(prefix).__name__}")
        check_text("prefix", prefix)
        session = await self._opened()
        async for holder in admin.holders(session, prefix):
            yield holder

    async def _opened(self) -> Session:
        session = self._session()
        if not session.opened:
            await session.open(self._settings.lock, session.connect_limit(None), check=False)
        return session

    async def release_all(self) -> None:
        """Release all holds of this client in this event loop. Errors are logged and not raised."""
        session = self._sessions.of(running_loop())
        if session is not None:
            await session.release_all()

    async def aclose(self) -> None:
        """Release all holds of this client in this event loop, and close its connections. Leases that are still held
        are lost (reason "closed"). A later use raises ConfigError, also if there was none before."""
        try:
            loop = running_loop()
        except ConfigError:
            if self._sessions.has_inherited:  # a child that was forked in a coroutine leaves the blocks of its parent
                return
            raise
        await self._sessions.aclose(loop)

    async def __aenter__(self) -> Self:
        """Connect to the nodes, and wait until a majority would vote. Raises ConfigError at once if a majority refuses
        for a reason that only the user can solve, and QuorumUnavailable after `patience` seconds of an outage."""
        loop, sessions = running_loop(), self._sessions
        sessions.forget_closed(loop)
        used_before = sessions.of(loop) is not None
        try:
            await enter(self._session(), used_before)
        finally:
            sessions.forget_closed(loop)  # it is closed if entering failed
        return self

    async def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------------------------------------------------

    def _set(self, nodes: tuple[str | Redis | RedisCluster | Store, ...], options: ClientOptions) -> None:
        given = {**self._given, **options}
        settings = self._settings_of(given)
        stores = stores_for(nodes) if nodes else self._stores
        if stores:
            node_timeout(settings, settings.lock, len(stores))
            if settings.lock.renew == THREAD:
                check_thread_safe(stores)
            _check_prefix(stores, settings)
        self._given = given
        self._use_settings(settings)
        self._use_stores(stores)
        self._unread = self._ready_made

    def _use_settings(self, settings: ClientSettings) -> None:
        if settings is not self._settings:
            self._settings = settings
            self._default = BoundOptions("", {}, settings)
            self._valid.clear()

    def _use_stores(self, stores: tuple[Store, ...]) -> None:
        self._valid.clear()
        self._stores = stores
        self._limited = limited_of(stores)

    def _settings_of(self, given: Mapping[str, Any], *, strict: bool = False) -> ClientSettings:
        """The settings with these options, and others from the environment if the client is ready-made. Before the
        first await (`strict`) a wrong value in the environment is no error. Raises ConfigError."""
        if not self._ready_made:
            return client_settings(given)
        try:
            settings = environment_settings(os.environ, given)
        except ConfigError:
            if strict:
                raise
            settings = client_settings(given)
        return self._settings if settings == self._settings else settings

    def _session(self, task: asyncio.Task[Any] | None = None) -> Session:
        """The session of this loop, made at first use. `task` is the running task if the caller knows it: reading its
        loop is cheaper than asking for the running loop."""
        loop = running_loop() if task is None else task.get_loop()
        return self._sessions.of(loop) or self._sessions.make(loop, self._new_session)

    def _new_session(self) -> Session:
        if self._unread:
            self._use_settings(self._settings_of(self._given, strict=True))
            self._unread = False
        if not (stores := substitute() or self._stores):
            stores = stores_of(os.environ)
            _check_prefix(stores, self._settings)
            self._use_stores(stores)
        return Session(self._settings, stores, self._observers)


def _check_prefix(stores: Sequence[Store], settings: ClientSettings) -> None:
    """Refuse a prefix that would have no effect. Raises ConfigError."""
    for store in stores:
        if is_standalone(store) and settings.prefix not in ("", ClientSettings().prefix):
            raise ConfigError(
                f"prefix={brief(settings.prefix)} is for keys in Redis; {store.label} has a namespace of its own: "
                "leave prefix out, and name another table or path in the url"
            )


redlock = Redlock()
"""The ready-made client: nodes from `redlock.configure(...)` or $ASYNCLOCK_URLS."""
