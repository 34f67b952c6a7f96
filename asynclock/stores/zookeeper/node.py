"""The node of ZooKeeper servers in one event loop: a session, and the contenders that it has at the servers.

The rules:

1. An acquire creates the contender's node, and then reads the children. If no earlier child is in its way, it holds the
   lock. If one is, the contender waits: it keeps its node and watches that child; or, without a ticket, it deletes its
   node. So a release or a death notifies one waiter. If the name has no node yet, one transaction creates both, and no
   child can be earlier.
2. A create whose reply was lost may have been carried out. Its node is looked for by the id in its name, after a sync.
   The servers carry out no request of an earlier connection once they have accepted a later one of the session. So what
   is not found then never comes.
3. A node that is to be deleted, and could not be, is deleted when the connection is back. The session lives on, and
   would keep it.
4. An expired session has no nodes any more. All its holds are lost, and the next session does not bring them back: a
   hold is known by the transaction that created its node. Where kazoo has given a session up that the servers still
   have, its nodes are nobody's: they end with it, although this client would go on.
5. A hold that is not extended in time is deleted by its own client, since the session lives on.
6. Several names are one transaction. A refused attempt deletes all its nodes, and leaves a ticket at the name that
   refused it, which is in nobody's way. Each waiter with a ticket watches the ticket before its own.
7. After some refusals that ticket closes the name: those that arrive later wait behind it, with such tickets. A waiter
   that got its closed name keeps its nodes at all names, for a time (`hold_and_wait.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from asynclock._clock import LATE, running_for
from asynclock._errors import ConfigError
from asynclock._loop import AGAIN, own_task
from asynclock.rules.model import ID_LENGTH, Notice, Verb, parts_of
from asynclock.stores.backlog import Asked, Backlog
from asynclock.stores.closing import AWAITED, CANCELLING, closing_time
from asynclock.stores.forks import Origin
from asynclock.stores.port import CHECK_LIMIT, Reconnecting, Refused
from asynclock.stores.reports import Reports
from asynclock.stores.zookeeper.connection import NOT_GIVEN, Connection, SessionState
from asynclock.stores.zookeeper.contender import Contender
from asynclock.stores.zookeeper.errors import LOST, error_of, explained
from asynclock.stores.zookeeper.expiry import Expiry
from asynclock.stores.zookeeper.pipeline import MOST, for_each
from asynclock.stores.zookeeper.places import Places
from asynclock.stores.zookeeper.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from asynclock._time import Timer
    from asynclock.rules.model import Op
    from asynclock.stores.port import Checked, Grant, NodeConfig, NodeView, ReplyHandler
    from asynclock.stores.zookeeper.settings import Settings

log = logging.getLogger("asynclock")

_DEFERRED = (Verb.ACQUIRE, Verb.PEEK)
"""The ops that wait while others are under way. Renewals and releases do not: they overtake a burst."""

_RECONNECTS = 6
"""A client that lost its connection is down after this part of a session timeout, or after connect_timeout."""


class _Asked(Asked):
    """An op, and what it asked for when it was sent. Its owner may change the op before it is carried out."""

    __slots__ = ("contender", "due", "is_answered", "is_begun", "lease", "number", "reading", "tasks", "waits_for_turn")

    def __init__(self, op: Op, contender: Contender | None, handler: ReplyHandler) -> None:
        super().__init__(op, handler)
        self.contender = contender
        self.is_begun = False  # its task has had its first step
        self.is_answered = False  # its handler has been called
        self.due: Timer | None = None  # when its time is over
        self.waits_for_turn = False  # an earlier op of its contender has not ended
        self.reading: asyncio.Task[Any] | None = None  # its task, while it writes nothing and may be cancelled
        self.number = op.queueing.number  # of the ticket; 0: none
        self.tasks = op.queueing.tasks
        self.lease = op.lease


class ZooKeeperNode:
    """See the module."""

    listens = True  # each waiter watches by itself
    keeps_tickets = True  # they are nodes of the session
    check_limit = CHECK_LIMIT

    def __init__(self, settings: Settings, config: NodeConfig) -> None:
        self.label = settings.label
        self.error: Exception | None = ConnectionError(f"{settings.label} is not connected yet")
        self._outage = ""  # what to say of the connection, beside why the last attempt to connect failed
        self._settings = settings
        self._index = config.position
        self._clock = config.clock
        self._listener = config.listener
        self._connect_timeout = config.connect_timeout
        self._reports = Reports(settings.label, config.tell, config.clock)
        self._places = Places(settings, lambda: self._servers, config.clock)
        self._turns = Turns(settings.layout, self._places, self)
        self._backlog = Backlog[_Asked](
            settings.label, config, self._has_room, self._begin_counted, self._dropped, alone=True
        )
        self._under_way = 0  # of the ops that wait for others
        self._contenders: dict[str, Contender] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ops: set[asyncio.Task[None]] = set()  # those of `_tasks` that answer an op
        self._last_deadline = -math.inf
        self._expiry = Expiry(config.clock, self._contenders.get, self._end)
        self._forgetting = 0  # expired sessions of which not all contenders are forgotten
        self._reconnects: Timer | None = None
        self._up: asyncio.Event | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._origin = Origin()

    # -- the connection ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if not self._origin.is_here:  # a forked child makes nodes of its own
            return
        if self._connection is None:
            self._up = asyncio.Event()
            connection = Connection(self._settings.address, self._connect_timeout, self._changed, self._session_expired)
            try:
                connection.start()
            except NOT_GIVEN as error:  # the next op tries again
                self.error, self._outage = ConnectionError(f"{self.label} is not connected: {error}"), ""
                self._reports.down(self.error)
                return
            self._connection = connection
        if self.error is None or self._up is None:
            return
        try:
            async with running_for(self._connect_timeout, self._clock):
                await self._up.wait()
        except TimeoutError:
            if not (self._up.is_set() or isinstance(self.error, ConfigError)):  # it may come in the last moment
                self._reports.down(self._fail("does not answer"))

    @property
    def _servers(self) -> Connection:
        """The connection. Raises the error of a node that has none."""
        if self._connection is None or self._closed:
            raise ConnectionError(f"{self.label} is not connected")
        return self._connection

    def _fail(self, outage: str, kind: type[ConnectionError] = ConnectionError) -> ConnectionError:
        """There is no connection, and ops fail with this."""
        trouble = self._connection.trouble if self._connection is not None else None
        error = kind(f"{self.label} {outage}" + (f" ({trouble})" if trouble is not None else ""))
        self.error, self._outage = error, outage
        return error

    def _reason(self) -> Exception | None:
        """Why ops fail now. The reason may change while an outage lasts."""
        if self._outage and isinstance(self.error, ConnectionError):
            self._fail(self._outage, type(self.error))
        return self.error

    def _changed(self, state: SessionState) -> None:
        """The session has another state."""
        if self._closed:
            return
        if self._reconnects is not None:
            self._reconnects.cancel()
        if state is SessionState.CONNECTED and self._forgetting:
            return
        if state is not SessionState.CONNECTED:
            if state is SessionState.SUSPENDED:  # another server may answer at once
                self._fail("is disconnected", Reconnecting)
                within = min(self._connect_timeout, self._settings.session_timeout / _RECONNECTS)
                self._reconnects = self._clock.call_at(self._clock.now() + within, self._is_disconnected)
            else:
                self._reports.down(self._fail("ended the session, and a new one begins"))
            self._backlog.fail(lambda: self.error)
            return
        self.error, self._outage = self._settings.refuses(self._servers.timeout), ""
        if self._up is not None:
            self._up.set()
        if self.error is not None:
            self._reports.down(self.error)
            for_each(self._give_up, list(self._contenders.values()))
            return
        self._reports.up()
        self._backlog.begin_more()
        self._listener.connected(self._index)
        for_each(self._look_after, list(self._contenders.values()))

    def _look_after(self, contender: Contender) -> None:
        """The connection is back. If it is lost again, the next one does this."""
        if self.error is not None or self._closed:
            return
        if contender.is_unwanted:
            self.spawn(partial(self._clean, contender))
        elif contender.granted:
            self.spawn(partial(self._turns.look_again, contender))

    def _give_up(self, contender: Contender) -> None:
        """A server gives the session a shorter timeout than the one before did. If the connection is lost now, the
        servers free the names before the leases end here. So nothing is held, or waits, any more."""
        contender.has_ended = True
        self.spawn(partial(self._clean, contender))
        if contender.granted:
            self.notify(contender, expired=True)

    def _is_disconnected(self) -> None:
        """No server has answered since the connection was lost."""
        if isinstance(self.error, Reconnecting):
            self._reports.down(self._fail("is disconnected"))

    def _session_expired(self) -> None:
        """Rule 4. There may be many contenders, so they are forgotten in slices. Until all are, the next session does
        not count as connected: no op finds what was in this one."""
        if not self._closed:
            self._forgetting += 1
            for_each(self._forget, list(self._contenders.values()), self._is_forgotten)

    def _forget(self, contender: Contender) -> None:
        """The session of its nodes has expired. A contender that has nodes of the present session by now keeps them."""
        if self._connection is not None and contender.session == self._connection.session != 0:
            return
        granted = contender.granted
        contender.forget()
        self._drop(contender)
        if granted and not self._closed:
            self.notify(contender, expired=True)

    def _is_forgotten(self) -> None:
        self._forgetting -= 1
        if self._connection is not None and self._connection.state is SessionState.CONNECTED:
            self._changed(SessionState.CONNECTED)

    def _drop(self, contender: Contender) -> None:
        """Forget a contender of which nothing is at the servers, once no op needs it."""
        if contender.is_over and not contender.waits and not contender.users:
            self._contenders.pop(contender.id, None)

    # -- ops -----------------------------------------------------------------------------------------------------

    def send(self, op: Op, handler: ReplyHandler) -> None:
        contender = self._contenders.get(op.id)
        if op.verb is Verb.RELEASE:
            if contender is not None:
                contender.given_up, contender.rest = True, op.rest
            if self._backlog.undo(op.id):
                asyncio.get_running_loop().call_soon(handler.answer, self._index, Refused(None))
                return
        if self.error is not None and not (op.verb is Verb.EXTEND and contender is None):
            error, maybe = self._reason() or self.error, contender is not None
            asyncio.get_running_loop().call_soon(partial(handler.fail, self._index, error, maybe=maybe))
            if self._connection is None and not self._closed:
                self.spawn(self.open)
            return
        op.take_one_fence()
        if contender is None and op.verb is Verb.ACQUIRE:
            contender = self._contenders[op.id] = Contender(op)
        if contender is not None:
            contender.users += 1
        asked = _Asked(op, contender, handler)
        if op.verb not in _DEFERRED:
            self._begin(asked)
        elif self._under_way < MOST and not self._backlog.can_begin:
            self._begin_counted(asked)
        elif self._backlog.put(asked):
            self._backlog.ready(asked)
            if contender is not None and contender.granted:  # by an op whose time was over: no notice tells that
                self._backlog.granted(op.id)

    def _begin(self, asked: _Asked) -> asyncio.Task[None]:
        if asked.op.verb in AWAITED:
            self._last_deadline = max(self._last_deadline, asked.handler.deadline)
        elif asked.op.verb is Verb.ACQUIRE:
            asked.op.sent = self._clock.now()
        task = self._begin_task(self._answer(asked))
        self._ops.add(task)
        task.add_done_callback(partial(self._ended, asked))
        return task

    def _ended(self, asked: _Asked, task: asyncio.Task[None]) -> None:
        self._ops.discard(task)
        if not asked.is_begun:  # it was cancelled before its first step
            self._was_cancelled(asked)
            self._leave(asked)

    def _begin_counted(self, asked: _Asked) -> None:
        self._under_way += 1
        self._begin(asked).add_done_callback(partial(self._begin_next, self._clock.now(), asked.op.verb))

    def _begin_next(self, began: float, verb: Verb, task: asyncio.Task[None]) -> None:
        """An op has ended that others waited for."""
        self._under_way -= 1
        if verb is Verb.ACQUIRE:
            self._backlog.took(self._clock.now() - began)
        self._backlog.begin_more()

    def _has_room(self) -> bool:
        return self._under_way < MOST and self.error is None

    def _dropped(self, asked: _Asked) -> None:
        """It was not sent."""
        self._leave(asked)

    async def _answer(self, asked: _Asked) -> None:
        """Carry an op out, and answer it or its failure by its deadline."""
        asked.is_begun, handler = True, asked.handler
        asked.due = self._clock.call_at(handler.deadline, partial(self._overdue, asked))
        try:
            vote = await self._carry_out(asked)
        except Exception as error:  # any failure of kazoo
            if not isinstance(why := error_of(self.label, error), ConfigError) and isinstance(self.error, Reconnecting):
                why = self.error
            self._failed(asked, why, maybe=not isinstance(error, ConfigError))
        except asyncio.CancelledError:
            self._was_cancelled(asked)
            raise
        else:
            if not asked.is_answered:
                asked.is_answered = True
                handler.answer(self._index, vote)
        finally:
            if asked.due is not None:
                asked.due.cancel()
            self._leave(asked)

    def _overdue(self, asked: _Asked, *, is_last: bool = False) -> None:
        """The time of an op is over. After the loop was blocked it first reads what has come."""
        handler, now, asked.due = asked.handler, self._clock.now(), None
        within, late = handler.deadline - handler.sent, now - handler.deadline
        if late > LATE and not is_last:
            asked.due = self._clock.call_at(now + min(late, within), partial(self._overdue, asked, is_last=True))
            return
        why = "did not answer"
        if asked.waits_for_turn:
            why = "has not answered an earlier request for the same lock, so this one was not sent"
        asked.is_answered = True
        if asked.reading is not None:  # what it has not sent would delay the next renewals
            asked.reading.cancel()
        handler.fail(self._index, TimeoutError(f"{self.label} {why} within {within:.3g} s"), maybe=True)

    def _leave(self, asked: _Asked) -> None:
        """It needs its contender no more."""
        if asked.contender is not None:
            asked.contender.users -= 1
            self._drop(asked.contender)

    def _was_cancelled(self, asked: _Asked) -> None:
        """By a close, or by the program, which cancels all tasks of its loop. Without an answer its caller would wait
        for ever."""
        self._failed(asked, ConnectionError(f"{self.label}: the task of this request was cancelled"), maybe=True)

    def _failed(self, asked: _Asked, error: Exception, *, maybe: bool) -> None:
        """Answer it, unless it was overdue. What a release left is deleted in the background."""
        if asked.op.verb is Verb.RELEASE and asked.contender is not None and self.error is None and not self._closed:
            self.spawn(partial(self._clean, asked.contender))
        if not asked.is_answered:
            asked.is_answered = True
            asked.handler.fail(self._index, error, maybe=maybe)

    async def _carry_out(self, asked: _Asked) -> Grant | Refused:
        op, contender = asked.op, asked.contender
        match op.verb:
            case Verb.PEEK:
                return await self._turns.peek(parts_of(op))
            case Verb.BREAK:
                return await self._break(op)
            case Verb.ADOPT:
                raise ConfigError(f"{self.label}: a session cannot take over the node of another one")
        if contender is None:
            return Refused(None)
        asked.waits_for_turn = True
        async with contender.turn:
            asked.waits_for_turn = False
            if op.verb is Verb.RELEASE:
                return await self._release(contender)
            if asked.is_answered:  # its time is over: a later op of its owner does the same
                return Refused(None)
            if op.verb is Verb.EXTEND:
                return await self._extend(contender, asked)
            return await self._acquire(contender, asked)

    # -- acquire -------------------------------------------------------------------------------------------------

    async def _acquire(self, contender: Contender, asked: _Asked) -> Grant | Refused:
        """Rule 1. A second acquire of an id renews its ticket, or finds its hold."""
        number, sent = asked.number, asked.handler.sent
        contender.number, contender.sent = max(contender.number, number), sent
        await self._places.find(contender)
        if contender.nodes and not await self._places.are_there(contender):
            await self._places.delete(contender)  # of several names, the others
        if contender.granted:
            self.ends_at(contender, sent + contender.lease)
            return contender.czxid, False
        if contender.tasks != asked.tasks:
            await self._places.tell_tasks(contender, asked.tasks)
        if not contender.nodes:
            if not number and (refused := await self._turns.refusal_before(contender)) is not None:
                return refused
            if await self._places.create(contender):
                return self._turns.grant(contender)
        return await self._turns.judge(contender, waits=number > 0)

    # -- extend and release --------------------------------------------------------------------------------------

    async def _extend(self, contender: Contender, asked: _Asked) -> Grant | Refused:
        if not contender.granted:
            return Refused(None)
        asked.reading = asyncio.current_task()
        are_there = await self._places.are_there(contender)
        asked.reading = None
        if not are_there or not contender.granted:
            await self._places.delete(contender)  # of several names, the others
            return Refused(None)
        if asked.lease and self.error is None:  # else `_give_up` may have ended it since the nodes were read
            self.ends_at(contender, asked.handler.sent + asked.lease)
        return contender.czxid, False

    async def _release(self, contender: Contender) -> Grant | Refused:
        """Delete what the contender has. It is given up: after a failure, `_clean` goes on (rule 3)."""
        granted = contender.granted
        await self._places.find(contender)
        found = await self._places.release(contender)
        return (contender.czxid, False) if granted and found else Refused(None)

    async def _clean(self, contender: Contender) -> None:
        """Rules 3 and 5. Goes on until it is done, the connection is lost, or a late renewal extends the hold."""
        while True:
            try:
                async with contender.turn:
                    if not contender.is_unwanted:
                        return
                    await self._places.find(contender)
                    await self._places.release(contender)
            except Exception as error:
                if self.error is not None or self._closed:
                    return
                if not isinstance(error, LOST):  # an outage is reported as one, and this one is over
                    self._reports.unreleased(contender.name, error_of(self.label, error))
                await asyncio.sleep(contender.lease / 12)
            else:
                self._drop(contender)
                return

    def ends_at(self, contender: Contender, ends: float) -> None:
        """The hold ends then, unless it is extended (rule 5)."""
        contender.has_ended = False
        self._expiry.ends_at(contender, ends)

    def _end(self, contender: Contender) -> None:
        self.spawn(partial(self._expire, contender))

    async def _expire(self, contender: Contender) -> None:
        """End a hold, unless it was extended a moment ago."""
        async with contender.turn:
            if not contender.granted or contender.ends > self._clock.now():
                return
            contender.has_ended = True
        await self._clean(contender)

    def notify(
        self, contender: Contender, number: int = 0, fence: int = 0, *, broken: bool = False, expired: bool = False
    ) -> None:
        for part in contender.parts if number == 0 else contender.parts[:1]:
            notice = Notice(contender.id[:ID_LENGTH], number, fence, name=part.name, broken=broken, expired=expired)
            self._listener.received(self._index, notice)
        if fence:
            self._backlog.granted(contender.id)

    # -- looks and operators -------------------------------------------------------------------------------------

    async def _break(self, op: Op) -> Grant | Refused:
        """Delete the nodes of the holders. They learn it by their own watch."""
        broken, left = await self._places.looks.break_lock(op)
        if broken:
            for_each(partial(self._look_whether_broken, broken), list(self._contenders.values()))
            return 0, False
        return Refused(None) if left is None else Refused(self._settings.session_timeout, left)

    def _look_whether_broken(self, paths: set[str], contender: Contender) -> None:
        """At once, before the notice of its watch."""
        if contender.granted and any(own.path in paths for own in contender.nodes):
            self.spawn(partial(self._turns.look_again, contender, contender.watch))

    async def check_vote(self) -> Checked:
        if (error := self._reason()) is not None:
            raise error
        with explained(self.label):
            return await self._places.looks.check_vote(self._clock)

    async def probe(self, name: str) -> NodeView:
        if (error := self._reason()) is not None:
            raise error
        with explained(self.label):
            return await self._places.looks.view(name, self._clock)

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        if (error := self._reason()) is not None:
            raise error
        with explained(self.label):
            return await self._places.looks.names(begin, cursor)

    # -- tasks, and the end --------------------------------------------------------------------------------------

    def spawn(self, build: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do it in the background. If the program cancels all tasks of its loop, and goes on, it is done again: a node
        that is to be deleted would stay with the session."""
        if not self._closed:
            self._begin_task(build()).add_done_callback(partial(self._spawn_again, build))

    def _spawn_again(self, build: Callable[[], Coroutine[Any, Any, None]], task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self._closed:
            task.get_loop().call_later(AGAIN, self.spawn, build)

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            work.close()  # it was not begun if its task was cancelled before the first step

        task = own_task(self._run(work), f"asynclock {self.label}", ended)
        self._tasks.add(task)
        return task

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """What fails here is done again when the connection is back, or when a ticket or a lease is renewed."""
        try:
            await work
        except Exception as error:
            log.debug("asynclock: %s: %s", self.label, error_of(self.label, error))

    async def aclose(self) -> None:
        await self._backlog.aclose(ConnectionError(f"{self.label} is closed"))
        ops = set(self._ops)
        if ops:
            await asyncio.wait(ops, timeout=closing_time(self._last_deadline - self._clock.now()))
        self._closed = True
        self._expiry.stop()
        if self._reconnects is not None:
            self._reconnects.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CANCELLING)
        self._contenders.clear()
        connection, self._connection = self._connection, None
        self.error, self._outage = ConnectionError(f"{self.label} is closed"), ""
        if connection is not None:
            await connection.close()
        self._reports.stop()
