"""Redlock, the client for threads: that of asynclock, in the background loop of the process."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from asynclock import client as async_client
from asynclock._errors import ConfigError
from asynclock._loop import running_task
from asynclock.blocking import decorators
from asynclock.blocking.calls import Call
from asynclock.blocking.lease import give_back, watched
from asynclock.blocking.lock import Lock
from asynclock.blocking.loop_thread import call, call_and_undo, call_to_its_end, has_exited, register, thread_here
from asynclock.blocking.options import split
from asynclock.runtime.observers import guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from types import TracebackType

    from redis.asyncio import Redis, RedisCluster

    from asynclock._options import Seconds
    from asynclock.blocking.lease import Lease
    from asynclock.blocking.options import ClientOptions, LockOptions, OnLost, OnLostNow
    from asynclock.events import Event
    from asynclock.info import Health, Holder, LockInfo
    from asynclock.locks.decorators import Skipped
    from asynclock.runtime.counts import Counts
    from asynclock.stores.port import Store

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Redlock:
    """Locks over one node, or over a quorum of independent nodes, for code without asyncio.

        redlock = Redlock("redis://a", "redis://b", "redis://c", lease=30.0)

        with redlock("order:42") as lease:
            charge(fence=lease.fence)

    Nodes, options and environment variables are those of `asynclock.Redlock`, and `on_lost`; times are in seconds.
    Making a client does no I/O and starts no thread. One client serves all threads and forked children. Raises
    ConfigError.
    """

    def __init__(self, *nodes: str | Redis | RedisCluster | Store, **options: Unpack[ClientOptions]) -> None:
        self._on_lost, rest = split(options)
        self._client = async_client.Redlock(*nodes, **{**rest, "cancel_on_lost": False})
        register(self._client)

    def __repr__(self) -> str:
        return repr(self._client)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Redlock cannot be pickled: make one in the other process, from the same urls and options")

    def configure(self, *nodes: str | Redis | RedisCluster | Store, **options: Unpack[ClientOptions]) -> None:
        """Set the nodes and the options of a client that is not in use: before its first use, or after `close`. Raises
        ConfigError."""
        on_lost, rest = split(options)
        self._client.configure(*nodes, **{**rest, "cancel_on_lost": False})
        self._on_lost = on_lost or self._on_lost

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
        again; the owner is the thread, or the value of `owner`. Does no I/O. Raises ConfigError."""
        on_lost_now, rest = self._split(options)
        return Lock(self._client(name, fair=fair, reentrant=reentrant, owner=owner, **rest), on_lost_now)

    def read(self, name: str, /, **options: Unpack[LockOptions]) -> Lock:
        """The readers' side of a read-write lock: any number of readers hold it together, but not beside a writer. Does
        no I/O. Raises ConfigError, Unsupported (fencing=False)."""
        on_lost_now, rest = self._split(options)
        return Lock(self._client.read(name, **rest), on_lost_now)

    def write(self, name: str, /, **options: Unpack[LockOptions]) -> Lock:
        """The writers' side of a read-write lock: one writer holds it alone. Readers that arrive while a writer waits
        enter after it. Does no I/O. Raises ConfigError, Unsupported (fencing=False)."""
        on_lost_now, rest = self._split(options)
        return Lock(self._client.write(name, **rest), on_lost_now)

    def semaphore(self, name: str, permits: int, /, **options: Unpack[LockOptions]) -> Lock:
        """A lock that a caller enters while it has fewer than `permits` holders. Callers may give different numbers.
        Does no I/O. Raises ConfigError, Unsupported (fencing=False)."""
        on_lost_now, rest = self._split(options)
        return Lock(self._client.semaphore(name, permits, **rest), on_lost_now)

    def multi(self, *locks: str | Lock, **options: Unpack[LockOptions]) -> Lock:
        """Several locks as one: the caller gets all of them or none, in whatever order they are named. A str is a
        mutex. A Lock of this client counts with its name and kind, and its options do not count. Does no I/O. Raises
        ConfigError, Unsupported (fencing=False)."""
        on_lost_now, rest = self._split(options)
        parts = [each._async_lock() if isinstance(each, Lock) else each for each in locks]
        return Lock(self._client.multi(*parts, **rest), on_lost_now)

    def lead(self, name: str, main: Callable[[Lease], _R], /, **options: Unpack[LockOptions]) -> _R:
        """Run `main(lease)` while this caller is elected among all callers of `lead` with that name. A loss of the
        lease does not interrupt `main`, which asks `lease.ensure_held()`. The LockLost of that ends `main`, and the
        next election runs it again. The result, or another exception, of `main` ends `lead`.

        With a `timeout` (seconds), raises LockTimeout or QuorumUnavailable when an election takes longer. Without one,
        waits until an outage is over. Raises ConfigError, LockLost (the client was closed), TypeError (`main` is an
        async def, or a generator).
        """
        on_lost_now, rest = self._split(options)
        lock, through_outages = self._client._election(name, main, rest)
        return decorators.lead(Lock(lock, on_lost_now), main, through_outages)

    def synchronized(
        self, name: str | Callable[..., str], /, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
        """Decorate a function: each call runs under a lock. The name of the lock comes from the arguments of the call,
        by a template ("order:{order_id}") or by a function that takes the same arguments and returns the name. See
        `asynclock.Redlock.synchronized`.

        Raises ConfigError or TypeError when it decorates. A call raises what `with` of a lock raises, and TypeError for
        a value of another type.
        """
        on_lost_now, rest = self._split(options)
        return decorators.synchronized(name, self._client._lock_of_calls(name, rest), on_lost_now)

    def once(
        self, name: str | Callable[..., str], /, *, within: Seconds
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R | Skipped]]:
        """Decorate a function: for one name it completes at most once in `within` seconds, over all processes. Other
        calls return Skipped.RUNNING or Skipped.DONE. After a run that raised, or that ended with its process, the next
        call runs. Raises as `synchronized` does. A call waits for no run, and for `patience` seconds for the end of an
        outage or of split votes; LockTimeout tells of those."""
        return decorators.once(name, *self._client._runs(name, within), self._default_on_lost)

    def adopt(self, handle: str, /, **options: Unpack[LockOptions]) -> Lease:
        """Take over the hold that another process detached. `handle` is the string that `Lease.detach` returned.
        Returns a new Lease with a greater fencing token, under the options given here. Raises LockNotHeld (the handle
        was adopted already, or the hold has ended), QuorumUnavailable, ConfigError."""
        on_lost_now, rest = self._split(options)

        async def take() -> Any:
            return await self._client.adopt(handle, **rest)

        lease = call_and_undo(watched, give_back, take, on_lost_now())
        assert lease is not None  # noqa: S101 - adopt() returns one, or raises
        return lease

    def break_lock(self, name: str, /, *, foreign: bool = False) -> bool:
        """Take `name` away from its holders, and notify them. Until the notice arrives, a holder works on without
        protection. Returns whether the name was held. A key that asynclock did not make is deleted only with
        `foreign=True`, then whatever its type. Raises QuorumUnavailable, ConfigError (it is another program's)."""
        return call_to_its_end(self._client.break_lock, name, foreign=foreign)

    def subscribe(self, listener: Callable[[Event], object], /) -> Callable[[], None]:
        """Call `listener` with each event of this client from now on (`asynclock.events`). An event of a call, such as
        Acquired and Released, is told in the thread of the call, before it returns. Any other event is told in a thread
        of the library, and so is the Released of a generator that ends in its block. Its first exception is logged, and
        none reaches the caller of a lock. Returns a function that ends the subscription. Raises ConfigError."""
        told = guarded(listener)

        def tell(event: Event) -> None:
            task: object = running_task()
            if isinstance(task, Call):
                task.tell(told, event)
            else:
                thread_here().tell(told, event)

        return self._client.subscribe(tell)

    def _counts_of_sessions(self) -> list[Counts]:
        """For `asynclock.otel`: the counts of each open session. Any thread may call it."""
        return self._client._counts_of_sessions()

    def health(self) -> Health:
        """Whether an acquire would be decided now, and why not: each node takes a hold of a reserved name and gives it
        back. Connects at first use, for up to 1 s, and waits for the answers for up to 1 s; longer, if the nodes of a
        quorum are farther away. Never raises. Source: docs/health.md."""
        try:
            return call(self._client.health)
        except Exception as error:  # a thread that runs an event loop, or the end of the interpreter
            return self._client._unusable(error)

    def inspect(self, name: str, /) -> LockInfo:
        """The holders of `name` and its waiters, as a majority of the nodes sees them. Waits for each node for at
        most 1 s, or the node timeout if that is longer. Raises QuorumUnavailable, ConfigError."""
        return call(self._client.inspect, name)

    def holders(self, prefix: str = "", /) -> Iterator[Holder]:
        """All holds of the names that begin with `prefix`, found by SCAN. See `asynclock.Redlock.holders`. Raises
        QuorumUnavailable, ConfigError."""
        found = self._client.holders(prefix)

        async def following() -> Holder | None:
            return await anext(found, None)

        async def close() -> None:
            with suppress(RuntimeError):  # `following` still runs, and was cancelled: that ends the generator, too
                await found.aclose()  # type: ignore[attr-defined]  # an async generator

        try:
            while (holder := call(following)) is not None:
                yield holder
        finally:
            with suppress(ConfigError):  # the interpreter exits, or a garbage collector drops this in the loop's thread
                call_to_its_end(close)

    def release_all(self) -> None:
        """Release all holds of this client in this process. Errors are logged and not raised."""
        call_to_its_end(self._client.release_all)

    def close(self) -> None:
        """Release all holds of this client in this process, and close its connections. Leases that are still held are
        lost (reason "closed"), and threads that wait get ConfigError. A later use raises ConfigError, also if there was
        none before."""
        if not has_exited():
            call_to_its_end(self._client.aclose)

    def __enter__(self) -> Self:
        """Connect to the nodes, and wait until a majority would vote. Raises ConfigError at once if a majority refuses
        for a reason that only the user can solve, and QuorumUnavailable after `patience` seconds of an outage."""
        call(self._client.__aenter__)
        return self

    def __exit__(self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None, /) -> None:
        self.close()

    def _split(self, options: LockOptions) -> tuple[OnLostNow, Any]:
        on_lost, rest = split(options)
        return self._default_on_lost if on_lost is None else lambda: on_lost, rest

    def _default_on_lost(self) -> OnLost | None:
        return self._on_lost


redlock = Redlock()
"""The ready-made client: nodes from `redlock.configure(...)` or $ASYNCLOCK_URLS."""
