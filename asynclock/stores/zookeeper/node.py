"""The node of ZooKeeper servers in one event loop: a session, and the contenders that it has at the servers.

The rules:

1. An acquire creates the contender's node, and then reads the children. If no earlier child is in its way, it holds the
   lock. If one is, the contender waits: it keeps its node and watches that child; or, without a ticket, it deletes its
   node. So a release or a death notifies one waiter.
2. A create whose reply was lost may have been carried out. Its node is looked for by the id in its name, after a sync.
   The servers carry out no request of an earlier connection once they have accepted a later one of the session. So what
   is not found then never comes.
3. A node that is to be deleted, and could not be, is deleted when the connection is back. The session lives on, and
   would keep it.
4. An expired session has no nodes any more. All its holds are lost, and the next session does not bring them back: a
   hold is known by the transaction that created its node.
5. A hold that is not extended in time is deleted by its own client, since the session lives on.
6. Several names are one transaction. A refused attempt deletes all its nodes, and watches the child that refused it.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING

from kazoo.exceptions import ConnectionLoss, NoNodeError, SessionExpiredError

from asynclock._errors import ConfigError, brief
from asynclock.rules.model import ID_LENGTH, Notice, Verb, parts_of
from asynclock.stores.port import Refused, WrongKind
from asynclock.stores.reports import Reports
from asynclock.stores.zookeeper.connection import Connection, SessionState
from asynclock.stores.zookeeper.contender import Contender, Own
from asynclock.stores.zookeeper.errors import error_of
from asynclock.stores.zookeeper.layout import (
    Child,
    Obstacle,
    escaped,
    holders,
    is_of,
    obstacle,
    prefix_of,
    queue_of,
)
from asynclock.stores.zookeeper.looks import Looks

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from asynclock._clock import Timer
    from asynclock.rules.model import Op, Part
    from asynclock.stores.port import Checked, Grant, NodeConfig, NodeView, ReplyHandler
    from asynclock.stores.zookeeper.store import ZooKeeperStore

_TRIES = 5
"""So often a create is tried again whose parent was deleted between two requests."""

_SETTLED = 0.05
"""Seconds after a grant until the holder watches its own node. A shorter hold saves that."""


class ZooKeeperNode:
    """See the module."""

    listens = True  # each waiter watches by itself

    def __init__(self, store: ZooKeeperStore, config: NodeConfig) -> None:
        self.label = store.label
        self.error: Exception | None = ConnectionError(f"{store.label} is not connected yet")
        self._store = store
        self._layout = store.layout
        self._index = config.position
        self._clock = config.clock
        self._listener = config.listener
        self._connect_timeout = config.connect_timeout
        self._reports = Reports(store.label, config.tell, config.clock)
        self._contenders: dict[str, Contender] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ops: set[asyncio.Task[None]] = set()  # those of `_tasks` that answer an op
        self._last_deadline = -math.inf
        self._sweeper: Timer | None = None
        self._up: asyncio.Event | None = None
        self._connection: Connection | None = None
        self._closed = False

    # -- the connection ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._connection is None:
            self._up = asyncio.Event()
            self._connection = Connection(
                self._store.address, self._connect_timeout, self._changed, self._session_expired
            )
            self._connection.start()
        if self.error is None or self._up is None:
            return
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._up.wait()
        except TimeoutError:
            if not isinstance(self.error, ConfigError):
                self.error = self._trouble("does not answer")
                self._reports.down(self.error)

    @property
    def _servers(self) -> Connection:
        """The connection. Raises the error of a node that has none."""
        if self._connection is None or self._closed:
            raise ConnectionError(f"{self.label} is not connected")
        return self._connection

    def _trouble(self, what: str) -> Exception:
        trouble = self._connection.trouble if self._connection is not None else None
        return ConnectionError(f"{self.label} {what}" + (f" ({trouble})" if trouble is not None else ""))

    def _changed(self, state: SessionState) -> None:
        """The session has another state."""
        if self._closed:
            return
        if state is not SessionState.CONNECTED:
            suspended = state is SessionState.SUSPENDED
            self.error = self._trouble("is disconnected" if suspended else "ended the session, and a new one begins")
            self._reports.down(self.error)
            return
        self.error = self._store.refuses(self._servers.timeout)
        if self._up is not None:
            self._up.set()
        if self.error is not None:
            self._reports.down(self.error)
            return
        self._reports.up()
        for contender in list(self._contenders.values()):
            if contender.given_up:
                self._spawn(self._clean(contender))
            elif contender.waits or contender.granted:
                self._spawn(self._look_again(contender))
        self._listener.connected(self._index)

    def _session_expired(self) -> None:
        """Rule 4."""
        if self._closed:
            return
        for contender in list(self._contenders.values()):
            granted = contender.granted
            contender.forget()
            if granted:
                self._tell(contender, expired=True)
            self._drop(contender)

    def _drop(self, contender: Contender) -> None:
        """Forget a contender of which nothing is at the servers, once no op needs it."""
        if contender.is_over and not contender.waits and not contender.users:
            self._contenders.pop(contender.id, None)

    # -- ops -----------------------------------------------------------------------------------------------------

    def send(self, op: Op, handler: ReplyHandler) -> None:
        contender = self._contenders.get(op.id)
        if op.verb is Verb.RELEASE and contender is not None:
            contender.given_up = True
        if self.error is not None and not (op.verb is Verb.EXTEND and contender is None):
            error, maybe = self.error, contender is not None
            asyncio.get_running_loop().call_soon(partial(handler.fail, self._index, error, maybe=maybe))
            if self._connection is None and not self._closed:
                self._spawn(self.open())
            return
        op.take_one_fence()
        if contender is None and op.verb is Verb.ACQUIRE:
            contender = self._contenders[op.id] = Contender(op)
        if contender is not None:
            contender.users += 1
        self._last_deadline = max(self._last_deadline, handler.deadline)
        task = self._spawn(self._answer(op, contender, handler, op.queueing.number, op.lease))
        self._ops.add(task)
        task.add_done_callback(self._ops.discard)

    async def _answer(
        self, op: Op, contender: Contender | None, handler: ReplyHandler, number: int, lease: float
    ) -> None:
        """Carry an op out, and answer it or its failure by its deadline."""
        overdue = False

        def fail() -> None:
            nonlocal overdue
            overdue = True
            within = handler.deadline - handler.sent
            handler.fail(self._index, TimeoutError(f"{self.label} did not answer within {within:.3g} s"), maybe=True)

        timer = self._clock.call_at(handler.deadline, fail)
        try:
            vote = await self._carry_out(op, contender, handler.sent, number, lease)
        except Exception as error:  # any failure of kazoo
            if not overdue:
                handler.fail(self._index, error_of(self.label, error), maybe=not isinstance(error, ConfigError))
            if op.verb is Verb.RELEASE and contender is not None and self.error is None:
                self._spawn(self._clean(contender))
        else:
            if not overdue:
                handler.answer(self._index, vote)
        finally:
            timer.cancel()
            if contender is not None:
                contender.users -= 1
                self._drop(contender)

    async def _carry_out(
        self, op: Op, contender: Contender | None, sent: float, number: int, lease: float
    ) -> Grant | Refused:
        match op.verb:
            case Verb.PEEK:
                return await self._peek(parts_of(op))
            case Verb.BREAK:
                return await self._break(op)
            case Verb.ADOPT:
                raise ConfigError(f"{self.label}: a session cannot take over the node of another one")
        if contender is None:
            return Refused(None)
        async with contender.turn:
            if op.verb is Verb.EXTEND:
                return await self._extend(contender, sent, lease)
            if op.verb is Verb.RELEASE:
                return await self._release(contender)
            return await self._acquire(contender, sent, number)

    # -- acquire -------------------------------------------------------------------------------------------------

    async def _acquire(self, contender: Contender, sent: float, number: int) -> Grant | Refused:
        """Rule 1. A second acquire of an id renews its ticket, or finds its hold."""
        contender.number, contender.sent = max(contender.number, number), sent
        await self._find(contender)
        if contender.nodes and not await self._is_there(contender):
            contender.forget()
        if contender.granted:
            self._ends_at(contender, sent + contender.lease)
            return contender.czxid, False
        if not contender.nodes:
            if not number and (refused := await self._refusal_before(contender)) is not None:
                return refused
            await self._create(contender)
        return await self._judge(contender, waits=number > 0)

    async def _refusal_before(self, contender: Contender) -> Refused | None:
        """A try that leaves no ticket looks before it writes."""
        for part in contender.parts:
            queue = await self._queue(part.name)
            _check_kind(queue, part)
            if (blocked := obstacle(queue, part.kind)) is not None:
                return await self._refused(part, queue, len(queue), blocked)
        return None

    async def _judge(self, contender: Contender, *, waits: bool) -> Grant | Refused:
        """Whether a contender that has its nodes holds the lock now."""
        while True:
            blocked = await self._blocked(contender)
            if blocked is None:
                return await self._grant(contender)
            part, queue, rank, found = blocked
            several = len(contender.parts) > 1
            contender.waits = waits
            if not waits or several:
                refused, _ = await asyncio.gather(
                    self._refused(part, queue, rank, found), self._delete(contender), return_exceptions=False
                )
            else:
                refused = await self._refused(part, queue, rank, found)
            contender.waits = waits
            if not waits or await self._watch(contender, part, found):
                return refused
            if not contender.nodes:
                await self._create(contender)

    async def _blocked(self, contender: Contender) -> tuple[Part, list[Child], int, Obstacle] | None:
        """The name that refuses a contender, the children there, its rank, and what is in its way. None: no name does.
        Raises WrongKind, and then deletes its nodes."""
        queues = await asyncio.gather(*(self._queue(part.name) for part in contender.parts))
        for part, own, queue in zip(contender.parts, contender.nodes, queues, strict=True):
            rank = next((rank for rank, child in enumerate(queue) if child.name == own.name), None)
            if rank is None:
                contender.forget()
                raise SessionExpiredError("the node of this attempt is gone")
            try:
                _check_kind(queue[:rank], part)
            except WrongKind:
                await self._delete(contender)
                raise
            if (found := obstacle(queue[:rank], part.kind)) is not None:
                return part, queue, rank, found
        return None

    async def _grant(self, contender: Contender) -> Grant:
        contender.granted, waited = True, contender.waits
        contender.waits = False
        contender.watch += 1
        self._ends_at(contender, contender.sent + contender.lease)
        asyncio.get_running_loop().call_later(_SETTLED, self._watch_own, contender)
        if waited and contender.parts[0].kind.letter == "s" and len(contender.parts) == 1:
            # Those behind it watch its node, and wait for the first holder that leaves once this one waits no more.
            self._spawn(self._servers.touch(contender.nodes[0].path, contender.id.encode()))
        return contender.czxid, False

    async def _refused(self, part: Part, queue: Sequence[Child], rank: int, found: Obstacle) -> Refused:
        """A refusal, with the id of a holder."""
        first = next(iter(holders(queue[:rank])), found.child)
        holder = await self._looks.id_of(part.name, first)
        return Refused(self._store.session_timeout, holder, rank, found.child.number + 1)

    # -- the nodes of a contender --------------------------------------------------------------------------------

    async def _queue(self, name: str) -> list[Child]:
        return queue_of(self._layout, await self._servers.children(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._store.root}/{escaped(name)}"

    def _named(self, contender: Contender, part: Part) -> str:
        """Its id at one name."""
        return part.named(contender.id) if len(contender.parts) > 1 else contender.id

    async def _create(self, contender: Contender) -> None:
        """Create its nodes, in the order of the queue."""
        nodes = [
            (
                f"{self._path(part.name)}/{prefix_of(self._layout, contender.id, part.kind)}",
                self._named(contender, part).encode(),
            )
            for part in contender.parts
        ]
        for again in range(_TRIES, -1, -1):
            contender.doubtful = True
            try:
                if len(nodes) == 1:
                    path, stat = await self._servers.create(*nodes[0])
                    paths = [path]
                else:
                    paths = await self._servers.create_all(nodes)
                    stat = await self._stat(paths[0])
            except NoNodeError:
                contender.doubtful = False
                if not again:
                    raise
                await asyncio.gather(*(self._servers.ensure(self._path(part.name)) for part in contender.parts))
                continue
            except (ConfigError, SessionExpiredError):
                contender.doubtful = False
                raise
            except Exception as error:
                contender.doubtful = isinstance(error, (ConnectionLoss, ConnectionError))
                raise
            contender.doubtful = False
            self._keep(contender, paths, stat.czxid, stat.owner)
            return

    def _keep(self, contender: Contender, paths: Sequence[str], czxid: int, session: int) -> None:
        contender.czxid = czxid
        contender.nodes = tuple(Own(path, path.rpartition("/")[2], czxid, session) for path in paths)

    async def _stat(self, path: str) -> Any:
        stat = await self._servers.exists(path)
        if stat is None:
            raise SessionExpiredError("the node of this attempt is gone")
        return stat

    async def _find(self, contender: Contender) -> None:
        """Rule 2: find the nodes of a create without a reply."""
        if not contender.doubtful or contender.nodes:
            return
        paths: list[str] = []
        for part in contender.parts:
            path, prefix = self._path(part.name), prefix_of(self._layout, contender.id, part.kind)
            await self._servers.sync(path)
            names = await self._servers.children(path)
            paths += [f"{path}/{name}" for name in names if name.startswith(prefix)]
        if len(paths) == len(contender.parts):  # one transaction created all or none
            stat = await self._stat(paths[0])
            self._keep(contender, paths, stat.czxid, stat.owner)
        contender.doubtful = False

    async def _is_there(self, contender: Contender) -> bool:
        """Whether its nodes are there: a round trip on the session."""
        stats = await asyncio.gather(*(self._servers.exists(own.path) for own in contender.nodes))
        return all(
            stat is not None and stat.czxid == own.czxid for stat, own in zip(stats, contender.nodes, strict=True)
        )

    async def _delete(self, contender: Contender) -> bool:
        """Delete its nodes. Returns whether they were there."""
        contender.watch += 1
        if len(contender.nodes) == 1:
            found = await self._servers.delete(contender.nodes[0].path)
        elif contender.nodes:
            try:
                await self._servers.delete_all([own.path for own in contender.nodes])
            except NoNodeError:  # an operator deleted one
                await asyncio.gather(*(self._servers.delete(own.path) for own in contender.nodes))
                found = False
            else:
                found = True
        else:
            found = False
        contender.forget()
        return found

    # -- extend and release --------------------------------------------------------------------------------------

    async def _extend(self, contender: Contender, sent: float, lease: float) -> Grant | Refused:
        if not contender.granted:
            return Refused(None)
        if not await self._is_there(contender):
            await self._delete(contender)  # of several names, the others
            return Refused(None)
        if lease:
            self._ends_at(contender, sent + lease)
        return contender.czxid, False

    async def _release(self, contender: Contender) -> Grant | Refused:
        """Delete what the contender has. It is given up: after a failure, `_clean` goes on (rule 3)."""
        granted = contender.granted
        await self._find(contender)
        found = await self._delete(contender)
        return (contender.czxid, False) if granted and found else Refused(None)

    async def _clean(self, contender: Contender) -> None:
        """Rules 3 and 5. Goes on until it is done, or the connection is lost."""
        contender.given_up = True
        while True:
            try:
                async with contender.turn:
                    await self._find(contender)
                    await self._delete(contender)
            except Exception as error:
                if self.error is not None or self._closed:
                    return
                self._reports.unreleased(contender.name, error_of(self.label, error))
                await asyncio.sleep(contender.lease / 12)
            else:
                self._drop(contender)
                return

    def _ends_at(self, contender: Contender, ends: float) -> None:
        """The hold ends then, unless it is extended (rule 5)."""
        contender.ends = ends if contender.ends == math.inf else max(ends, contender.ends)
        if self._sweeper is None:
            self._sweeper = self._clock.call_at(contender.ends, self._sweep)

    def _sweep(self) -> None:
        """End the holds that were not extended."""
        self._sweeper, now, soonest = None, self._clock.now(), math.inf
        for contender in list(self._contenders.values()):
            if not contender.granted or contender.given_up:
                continue
            if contender.ends <= now:
                self._spawn(self._clean(contender))
            else:
                soonest = min(soonest, contender.ends)
        if soonest < math.inf:
            self._sweeper = self._clock.call_at(soonest, self._sweep)

    # -- watches -------------------------------------------------------------------------------------------------

    async def _watch(self, contender: Contender, part: Part, found: Obstacle) -> bool:
        """Watch what is in the way of a waiter. False: it is gone already, so look again."""
        contender.watch += 1
        fired = partial(self._fired, contender, contender.watch)
        path = self._path(part.name)
        if found.any_child:
            before = await self._servers.children(path, fired)
            return found.child.name in before and self._is_blocked_by(contender, part, before)
        return await self._servers.exists(f"{path}/{found.child.name}", fired) is not None

    def _is_blocked_by(self, contender: Contender, part: Part, names: Sequence[str]) -> bool:
        own = next((each.name for each, its in zip(contender.nodes, contender.parts, strict=False) if its is part), "")
        queue = queue_of(self._layout, names)
        before = [child for child in queue if child.name != own]
        rank = next((rank for rank, child in enumerate(queue) if child.name == own), len(before))
        return obstacle(queue[:rank], part.kind) is not None

    def _fired(self, contender: Contender, watch: int) -> None:
        """What a waiter watched has changed."""
        if contender.watch == watch and not self._closed:
            self._spawn(self._look_again(contender, watch))

    async def _look_again(self, contender: Contender, watch: int = -1) -> None:
        """A waiter enters if it can, and its owner is notified. A holder is notified if its node is gone."""
        async with contender.turn:
            if contender.given_up or (watch >= 0 and contender.watch != watch):
                return
            if contender.granted:
                if not await self._is_there(contender):
                    await self._delete(contender)
                    self._tell(contender, broken=True)
                elif watch < 0:
                    self._watch_own(contender)
                return
            if not contender.waits:
                return
            if len(contender.parts) > 1:
                contender.waits = False
                self._tell(contender, number=contender.number)
                return
            if contender.nodes and not contender.doubtful:
                vote = await self._judge(contender, waits=True)
                if not isinstance(vote, Refused):
                    self._tell(contender, number=contender.number, fence=vote[0])

    def _watch_own(self, contender: Contender) -> None:
        if contender.granted and not contender.given_up and not self._closed and self.error is None:
            contender.watch += 1
            self._spawn(self._watch_nodes(contender, contender.watch))

    async def _watch_nodes(self, contender: Contender, watch: int) -> None:
        fired = partial(self._fired, contender, watch)
        found = await asyncio.gather(*(self._servers.exists(own.path, fired) for own in contender.nodes))
        if None in found:
            self._fired(contender, watch)

    def _tell(
        self, contender: Contender, number: int = 0, fence: int = 0, *, broken: bool = False, expired: bool = False
    ) -> None:
        for part in contender.parts if number == 0 else contender.parts[:1]:
            notice = Notice(contender.id[:ID_LENGTH], number, fence, name=part.name, broken=broken, expired=expired)
            self._listener.received(self._index, notice)

    # -- looks and operators -------------------------------------------------------------------------------------

    @property
    def _looks(self) -> Looks:
        return Looks(self._servers, self._store)

    async def _peek(self, parts: Sequence[Part]) -> Refused:
        for part in parts:
            queue = await self._queue(part.name)
            _check_kind(queue, part)
            if (found := obstacle(queue, part.kind)) is not None:
                refused = await self._refused(part, queue, len(queue), found)
                return refused._replace(rank=0)
        return Refused(None)

    async def _break(self, op: Op) -> Grant | Refused:
        """Delete the nodes of the holders. They learn it by their own watch."""
        broken, left = await self._looks.break_lock(op)
        for contender in list(self._contenders.values()):
            if contender.granted and any(own.path in broken for own in contender.nodes):
                self._spawn(self._look_again(contender, contender.watch))
        if broken:
            return 0, False
        return Refused(None) if left is None else Refused(self._store.session_timeout, left)

    async def check_vote(self) -> Checked:
        if self.error is not None:
            raise self.error
        try:
            return await self._looks.check_vote(self._clock)
        except ConfigError:
            raise
        except Exception as error:
            raise error_of(self.label, error) from None

    async def probe(self, name: str) -> NodeView:
        if self.error is not None:
            raise self.error
        return await self._looks.view(name)

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        if self.error is not None:
            raise self.error
        return await self._looks.names(begin, cursor)

    # -- tasks, and the end --------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run(work), name=f"asynclock {self.label}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """What fails here is done again when the connection is back."""
        try:
            await work
        except Exception as error:
            if self.error is None and not self._closed:
                self._reports.unreleased("", error_of(self.label, error))

    async def aclose(self) -> None:
        ops = set(self._ops)
        if ops:
            await asyncio.wait(ops, timeout=max(0.0, self._last_deadline - self._clock.now()))
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        self._contenders.clear()
        connection, self._connection = self._connection, None
        self.error = ConnectionError(f"{self.label} is closed")
        if connection is not None:
            await connection.close()
        self._reports.stop()


def _check_kind(before: Sequence[Child], part: Part) -> None:
    """Raise WrongKind where the name is held as another kind."""
    for child in holders(before)[:1]:
        if not is_of(child, part.kind):
            raise WrongKind(f"{brief(part.name)} is in use as another kind")
