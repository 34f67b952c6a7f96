"""One ZooKeeper session of one event loop: kazoo's client in its threads, and its answers as futures of the loop.

    CONNECTING   there is no session yet; or the last one has expired, and kazoo asks for another one
    CONNECTED    requests are answered
    SUSPENDED    the connection is lost. The session lives on at the servers until its timeout: what it holds is unknown

Each change is reported in the event loop. A request ends with its answer, or with the end of the connection. While
there is no connection, it fails at once. One that is sent when kazoo has lost the connection, but before the loop knows
that, waits in kazoo for the next connection, or for the end of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections import OrderedDict
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kazoo.exceptions import (
    ConnectionLoss,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
    UnimplementedError,
)
from kazoo.protocol.serialization import Auth, Delete, Exists, GetChildren, GetData, SetData, Sync, Transaction
from kazoo.protocol.states import EventType, KazooState, KeeperState
from kazoo.retry import KazooRetry

from asynclock._loop import retrieve
from asynclock.stores.forks import Origin
from asynclock.stores.zookeeper.client import Client, permission_of
from asynclock.stores.zookeeper.handler import Handler
from asynclock.stores.zookeeper.pipeline import Inbox, Requests, for_each
from asynclock.stores.zookeeper.syncs import Syncs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.stores.zookeeper.pipeline import Answer

log = logging.getLogger("asynclock.kazoo")
if log.level == logging.NOTSET:  # an event of the node reports once what kazoo warns of
    log.setLevel(logging.ERROR)


def _has_no_secret(record: logging.LogRecord) -> bool:
    """Whether it may be logged: at DEBUG kazoo shows the request with the password."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    return not any(isinstance(each, Auth) for each in arguments)


log.addFilter(_has_no_secret)

_ROLLED_BACK = (RolledBackError, RuntimeInconsistency)
"""The answers to the other requests of a transaction of which one failed."""

_ANY_VERSION = -1

_BEATS = 8
"""The event loop shows this often in a session timeout that it runs."""

_ATTEMPTS = 3
"""The session timeout is long enough for so many attempts to open the session again; with several hosts, for two at
each."""

_PAUSE = 0.5
"""Seconds until kazoo is started again whose thread has ended."""

_CLOSE = 0.5
"""Seconds for which a close waits for the server, and then for kazoo's threads. The session ends by its timeout."""


_LOOKED_AT = 2
"""With each new watch the client looks at so many old ones. So the watches that nobody needs are about as many as the
others, at most."""

NOT_GIVEN = (RuntimeError, OSError)
"""The system gives no thread, or no file for the pipe that wakes it."""


class Address(NamedTuple):
    """The servers, and how to reach them."""

    hosts: str  # as kazoo takes them, without a path
    session_timeout: float  # seconds
    user: str = ""  # "user:password" for digest authentication; "": none
    acl: Any = None  # kazoo's ACLs of the nodes that are created; None: everybody may do everything

    def __repr__(self) -> str:
        return f"<Address {self.hosts}>"


class SessionState(Enum):
    """The state of a session."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    SUSPENDED = "suspended"


class Stat(NamedTuple):
    """What the server says about a node."""

    czxid: int  # the number of the transaction that created it
    pzxid: int  # the number of the last transaction that created or deleted a child
    owner: int  # the session of an ephemeral node; 0: it belongs to none, and does not end with its client
    children: int
    written: float  # when its data were written, as Unix time of the server


class Watch:
    """On one node, or on its children, for all callbacks. Their owners keep them, so a waiter that has given up leaves
    none here. A watch without callbacks is removed after others were made: its node may not change for weeks."""

    def __init__(self, fire: Callable[[Watch], object]) -> None:
        self.callbacks: weakref.WeakSet[Callable[[], object]] = weakref.WeakSet()
        self._fire = fire

    def __call__(self, event: Any) -> None:
        """From the thread of kazoo."""
        if event.type != EventType.NONE:  # NONE: the connection is lost, which `changed` tells
            self._fire(self)


class Connection:
    """See the module. `changed` is called in the loop with each new state; `lost` when a session has expired."""

    def __init__(
        self, address: Address, limit: float, changed: Callable[[SessionState], object], lost: Callable[[], object]
    ) -> None:
        self.state = SessionState.CONNECTING
        self.timeout = 0.0  # of the session, as the server gave it; seconds
        self.session = 0  # 0: the last one has ended, and there is no other one yet
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._lost = lost
        self._timer: asyncio.TimerHandle | None = None
        self._period = address.session_timeout / _BEATS
        again = address.session_timeout / max(_ATTEMPTS, 2 * (address.hosts.count(",") + 1))
        self._closing = False
        self._origin = Origin()
        self._starting: threading.Thread | None = None  # it starts kazoo again
        self._watches: OrderedDict[tuple[str, bool], Watch] = OrderedDict()  # by path; True: of its children
        self._handler = Handler(max(limit, again), again, address.session_timeout, self._greeted, self._is_abandoned)
        retry = KazooRetry(
            max_tries=-1, delay=0.02, backoff=2, max_delay=min(1.0, address.session_timeout / 10), sleep_func=time.sleep
        )
        self._client = Client(
            hosts=address.hosts,
            timeout=address.session_timeout,
            handler=self._handler,
            default_acl=address.acl,
            auth_data=[("digest", address.user)] if address.user else None,
            connection_retry=retry,
            logger=log,
        )
        self._client.add_listener(self._told)
        self._inbox = Inbox(self._loop, self._is_abandoned)
        self._requests = Requests(self._loop, self._inbox, self._send)
        self._syncs = Syncs(self._requests.ask)

    @property
    def trouble(self) -> Exception | None:
        """Why the last attempt to connect failed; None: it did not, or there was none."""
        return self._handler.trouble

    def start(self) -> None:
        """Connect, in the background and for ever. Raises `NOT_GIVEN` if the system gives no thread or no file; then
        nothing is left of it."""
        self._beat()
        try:
            self._client.start_async()
        except NOT_GIVEN:
            if self._timer is not None:
                self._timer.cancel()
            self._client.close()
            raise

    async def close(self) -> None:
        """End the session. The servers delete what it holds. In a forked child nothing happens: the session and the
        pipe to kazoo's threads are those of the parent."""
        if not self._origin.is_here:
            return
        self._closing = True
        self._client.remove_listener(self._told)
        self._handler.end()
        if self._timer is not None:
            self._timer.cancel()
        closed: asyncio.Future[None] = self._loop.create_future()
        closing = threading.Thread(target=self._close, args=(closed,), name="asynclock zookeeper close", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the system gives no thread. Without an end kazoo's own would keep the session alive
            self._client.stop_soon()
            return
        try:
            await asyncio.wait({closed}, timeout=_CLOSE)
        finally:
            if not closed.done():  # the server does not answer, or this is cancelled
                self._handler.hang_up()
        await asyncio.wait({closed}, timeout=_CLOSE)

    def _close(self, closed: asyncio.Future[None]) -> None:
        """In a thread, because kazoo blocks."""
        try:
            self._client.stop()
            self._client.close()
        except Exception as error:  # kazoo raises Exception itself
            log.debug("asynclock: closing the session: %s", error)
        self._inbox.put(_settle, closed, None)

    # -- from the threads of kazoo -------------------------------------------------------------------------------

    def _is_abandoned(self) -> bool:
        """Whether the loop is closed, and nobody has closed this. Then its threads end, and with them its locks."""
        if not self._loop.is_closed() or self._closing:
            return False
        self._closing = True
        self._handler.end()
        self._client.remove_listener(self._told)
        threading.Thread(target=self._stop, daemon=True).start()
        return True

    def _stop(self) -> None:
        """In a thread, because kazoo blocks, and cannot stop from its own."""
        with contextlib.suppress(Exception):  # nobody is there to learn of it
            self._client.stop()
            self._client.close()

    def _start_again(self) -> None:
        """In such a thread, after kazoo's own has ended by an error."""
        time.sleep(_PAUSE)
        if not self._closing:
            try:
                self._client.start_async()
                if self._closing:  # meanwhile: nobody else would stop it
                    self._client.stop()
            except Exception as error:  # kazoo raises Exception itself
                log.debug("asynclock: starting kazoo again: %s", error)

    def _greeted(self, timeout: float, session: int) -> None:
        if timeout > 0:
            self._inbox.put(self._opened, timeout, session)

    def _told(self, state: str) -> None:
        self._inbox.put(self._change, state)

    # -- in the event loop ---------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._handler.beat()
        self._timer = self._loop.call_later(self._period, self._next_beat)

    def _next_beat(self) -> None:
        self._beat()
        if not self._client.runs:  # it ended once more before it was connected: kazoo tells no second loss
            self._restart()

    def _restart(self) -> None:
        if self._closing or (self._starting is not None and self._starting.is_alive()):
            return
        if not self._origin.is_here:  # a forked child has none of the threads, and must not take the session over
            return
        self._starting = threading.Thread(target=self._start_again, daemon=True)
        with contextlib.suppress(RuntimeError):  # the system gives no thread: the next beat tries again
            self._starting.start()

    def _opened(self, timeout: float, session: int) -> None:
        self.timeout, self.session = timeout, session

    def _change(self, state: str) -> None:
        known = {KazooState.CONNECTED: SessionState.CONNECTED, KazooState.SUSPENDED: SessionState.SUSPENDED}
        self.state = known.get(state, SessionState.CONNECTING)
        if self.state is not SessionState.CONNECTED:
            self._watches.clear()  # kazoo has none any more
            self._requests.fail()
        if state == KazooState.LOST:
            self.session = 0
            self._lost()
            if self._client.client_state in (KeeperState.CLOSED, KeeperState.AUTH_FAILED):
                self._restart()
        self._changed(self.state)

    def _watcher(self, path: str, callback: Callable[[], object] | None, *, children: bool) -> Watch | None:
        """The watcher for a request."""
        if callback is None:
            return None
        key = path, children
        watch = self._watches.get(key)
        if watch is None:
            self._remove_unused()
            watch = self._watches[key] = Watch(lambda fired: self._inbox.put(self._fired, key, fired))
        watch.callbacks.add(callback)
        return watch

    def _remove_unused(self) -> None:
        """Look at the watches that were not looked at for longest, and remove those that nobody needs. A later watch of
        the same node is another one, and its request comes after this one."""
        for key in list(islice(self._watches, _LOOKED_AT)):
            if (watch := self._watches[key]).callbacks:
                self._watches.move_to_end(key)
                continue
            del self._watches[key]
            if self.state is SessionState.CONNECTED:  # else neither kazoo nor a server has it
                path, children = key
                removing = self._requests.ask(self._client.unwatch(path, watch, children=children))
                removing.add_done_callback(retrieve)  # it may have fired, or the connection is lost

    def _fired(self, key: tuple[str, bool], watch: Watch) -> None:
        if self._watches.get(key) is watch:
            del self._watches[key]
        for_each(lambda callback: callback(), list(watch.callbacks))

    def _send(self, request: Any, answer: Answer) -> None:
        """Give a request to kazoo. Not in a forked child: it would wake the threads of the parent."""
        if not self._origin.is_here:
            raise ConnectionLoss
        self._client.send(request, answer)

    async def _ask(self, request: Any) -> Any:
        if self.state is not SessionState.CONNECTED:
            raise ConnectionLoss
        try:
            return await self._requests.ask(request)
        except NoAuthError:
            raise NoAuthError(permission_of(request)) from None
        except UnimplementedError:
            raise UnimplementedError(type(request).__name__) from None

    # -- requests. They raise kazoo's exceptions -----------------------------------------------------------------

    async def create(self, path: str, data: bytes) -> tuple[str, Stat]:
        """Create an ephemeral, sequential node: its path, with its number."""
        made, stat = await self._ask(self._client.ephemeral(path, data, with_stat=True))
        return made, _stat(stat)

    async def create_first(self, path: str, data: bytes) -> str:
        """The same, and its parent in the same transaction. Raises NodeExistsError if the parent exists."""
        parent = path.rpartition("/")[0]
        _, made = await self._commit([self._client.persistent(parent), self._client.ephemeral(path, data)])
        return str(made)

    async def create_all(self, nodes: Sequence[tuple[str, bytes]]) -> list[str]:
        """Create several such nodes in one transaction: all or none. Their paths."""
        return await self._commit([self._client.ephemeral(path, data) for path, data in nodes])

    async def delete_all(self, paths: Sequence[str]) -> None:
        """Delete several nodes in one transaction."""
        await self._commit([Delete(path, _ANY_VERSION) for path in paths])

    async def _commit(self, operations: Sequence[Any]) -> list[Any]:
        results: list[Any] = await self._ask(Transaction(operations))
        errors = [each for each in results if isinstance(each, Exception)]
        if errors:  # the one that failed is among those that were rolled back for it
            refused = next((at for at, each in enumerate(results) if isinstance(each, NoAuthError)), None)
            if refused is not None:
                raise NoAuthError(permission_of(operations[refused]))
            raise next((each for each in errors if not isinstance(each, _ROLLED_BACK)), errors[0])
        return results

    async def create_for(self, path: str, data: bytes, seconds: float) -> None:
        """Create a node that the servers delete after that time, or up to a minute later."""
        with contextlib.suppress(NodeExistsError):
            await self._ask(self._client.persistent_for(path, data, seconds))

    async def ensure(self, path: str) -> None:
        """Create a node that stays, and its parents, where they do not exist."""
        with contextlib.suppress(NodeExistsError):
            try:
                await self._ask(self._client.persistent(path))
            except NoNodeError:
                await self.ensure(path.rpartition("/")[0])
                await self._ask(self._client.persistent(path))

    async def delete(self, path: str) -> bool:
        """Delete a node. Returns whether it existed."""
        try:
            await self._ask(Delete(path, _ANY_VERSION))
        except NoNodeError:
            return False
        return True

    def owns(self, stat: Stat) -> bool:
        """Whether a node belongs to the session that there is now. One of an earlier session ends with that one: the
        servers may have it still, if kazoo has given that session up."""
        return stat.owner != 0 and stat.owner == self.session

    async def exists(self, path: str) -> Stat | None:
        """What the server says about a node; None: it does not exist."""
        stat = await self._ask(Exists(path, None))
        return None if stat is None else _stat(stat)

    async def confirmed(self, paths: Sequence[str]) -> list[Stat | None]:
        """The same of several nodes, as they are once the leader has answered a `sync` that left after this call."""
        if self.state is not SessionState.CONNECTED:
            raise ConnectionLoss
        sync = await self._syncs.queued(paths[0])
        stats = await asyncio.gather(*(self.exists(path) for path in paths))
        await sync.answered()
        return stats

    async def watch(self, path: str, callback: Callable[[], object]) -> bool:
        """Call it when a node changes, if its owner still has it. False: there is no such node. Then nothing watches
        it: `exists` would leave a watch for ever, since no node comes again under its number."""
        watcher = self._watcher(path, callback, children=False)
        try:
            await self._ask(GetData(path, watcher))
        except NoNodeError:
            self._watches.pop((path, False), None)
            return False
        except NoAuthError:  # another program made it, and does not let this user read it
            return await self._ask(Exists(path, watcher)) is not None
        return True

    async def children(self, path: str, watch: Callable[[], object] | None = None) -> list[str]:
        """The names of the children; none of a node that does not exist. `watch` is called when they change, if its
        owner still has it."""
        watcher = self._watcher(path, watch, children=True)
        try:
            found: list[str] = await self._ask(GetChildren(path, watcher))
        except NoNodeError:
            if watcher is not None:
                self._watches.pop((path, True), None)
            return []
        return found

    async def data(self, path: str) -> tuple[bytes | None, Stat | None]:
        """The data of a node, and what the server says about it; None: it does not exist."""
        try:
            data, stat = await self._ask(GetData(path, None))
        except NoNodeError:
            return None, None
        return data, _stat(stat)

    async def touch(self, path: str, data: bytes) -> None:
        """Write its data, so that those who watch it look again."""
        with contextlib.suppress(NoNodeError):
            await self._ask(SetData(path, data, _ANY_VERSION))

    async def sync(self, path: str) -> None:
        """Wait until the server has all that was written before."""
        with contextlib.suppress(NoNodeError):
            await self._ask(Sync(path))


def _stat(stat: Any) -> Stat:
    return Stat(stat.czxid, stat.pzxid, stat.ephemeralOwner, stat.numChildren, stat.mtime / 1000)


def _settle(future: asyncio.Future[None], value: None) -> None:
    if not future.done():
        future.set_result(value)
