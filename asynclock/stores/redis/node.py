"""One Redis server, as one event loop sees it: one connection, shared by all tasks.

1. The commands of one loop turn leave together. The replies arrive in the order of the commands, and a deque has their
   handlers in the same order. A command needs no task, timer, lock or closure of its own.
2. A command is overdue when its handler's deadline has passed and the server has sent nothing for the command's time
   limit. Then the node casts no vote on it. While replies arrive, the server works through a long queue (for example
   that of a thousand tasks), so a command may be up to 5 s late. An overdue handler stays in the deque, so that a late
   reply goes to it and to no other handler. One timer watches the earliest deadline.
3. A server is down when it has been silent for three times the time limit, but at least for half a second, and at most
   for 5 s or the time limit of the oldest command, whichever is longer. Then the node drops the connection, fails all
   commands at once, and one task connects again with back-off. A broken stream is never used again.
4. A release that could not be delivered is kept, unless its id was made while there was no connection: of such an id
   nothing was ever sent. The next connection delivers the kept releases first, in slices, and sends those of the last
   2 s again (`pending.py`). The node stays down until all slices but the last are answered, so that no attempt
   overtakes a release. If the acquire of an id was not answered on an earlier connection, its release leaves a
   tombstone, because the server may still read that acquire from its socket.
5. After the release of an id was queued, no command that could create a key or a ticket of it is sent again (NOSCRIPT).
6. Notices to waiters arrive as RESP3 pushes on the same connection. The server acknowledges the subscription before the
   connection is used. So a notice never overtakes a reply, and every working connection receives notices. If a server
   or its ACL forbids subscriptions, the node works without notices, and its waiters poll.
7. A client that closes waits for the answers to releases, adoptions and breaks until they are overdue (rule 2), for at
   most 1.8 s, and for others 0.1 s. For a release that no majority of its nodes has carried out it waits for those
   1.8 s, overdue or not: else the hold would stay for its whole lease. If a server has pending releases,
   the client connects to it once more. At the end the client closes its side of the connection, and reads on until the
   server has read all (`Connection.hang_up`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock._clock import running_for
from asynclock._errors import ConfigError
from asynclock._loop import AGAIN, own_task
from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.model import EXTEND, RELEASE, Op, Serve
from asynclock.stores.closing import CANCELLING
from asynclock.stores.forks import Origin
from asynclock.stores.port import PROBE, UNDONE, Checked, Reconnecting
from asynclock.stores.redis import replies
from asynclock.stores.redis.checks import Mode, check_vote
from asynclock.stores.redis.connecting import follow
from asynclock.stores.redis.connection import Connection
from asynclock.stores.redis.deadlines import Deadlines
from asynclock.stores.redis.delivery import Delivery, last_words
from asynclock.stores.redis.encoding import encode, encode_native, encode_whole, pack
from asynclock.stores.redis.handlers import CommandReply, IgnoredReply
from asynclock.stores.redis.handshake import handshake
from asynclock.stores.redis.hang_ups import explained
from asynclock.stores.redis.keys import mark
from asynclock.stores.redis.login import fetch_credentials, take_over
from asynclock.stores.redis.notices import Channel
from asynclock.stores.redis.pending import PendingReleases
from asynclock.stores.redis.reconnect import Backoff
from asynclock.stores.redis.restarts import Dialer, Restarts
from asynclock.stores.redis.rights import Rights
from asynclock.stores.redis.stages import NodeState, Stage
from asynclock.stores.redis.stopwatch import Stopwatch
from asynclock.stores.redis.views import names, view
from asynclock.stores.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import Facts, NodeConfig, NodeView, ReplyHandler
    from asynclock.stores.redis.handlers import Ask

log = logging.getLogger("asynclock")

_GRANT = Serve.GRANT
_FAREWELL = 1.0  # seconds for which a client that closes tries to deliver pending releases


class RedisNode:
    """See the module."""

    connection_class = Connection
    in_cluster = False  # it is one node of a cluster whose other nodes are known, too
    managed = False  # a Sentinel or a cluster names its server

    def __init__(self, store: Dialer, config: NodeConfig) -> None:
        self.label, self.index = store.label, config.position
        self.mark, self.probe_name = mark(config.prefix), PROBE
        self.state, self.mode = NodeState.NEW, Mode.UNKNOWN
        self.listens = self._listened = self._quarantined = False
        self.error: Exception | None = None
        self._reached(Stage.CONNECT)
        self._store, self._config, self.clock = store, config, config.clock
        self._origin = Origin()
        self._connection: Connection | None = None
        self.rtt = Stopwatch(config.clock, config.measured)
        self.pushed = Channel(config, self.label).pushed
        self.distance, self._reports = self.rtt.distance, Reports(self.label, config.tell, self.clock)
        self._restarts = Restarts(store, config, self._reports, managed=self.managed)
        self._native: tuple[str, ...] = ()  # the server's own compare-and-delete; (): it has none, or forbids it
        self._connecting: asyncio.Task[None] | None = None
        self._abandoned: asyncio.Task[None] | None = None  # the same, for which a close does not wait any more
        self._later: asyncio.TimerHandle | None = None  # begins another attempt
        self._met = asyncio.Event()  # the first attempt has succeeded, failed, or waits for credentials for too long
        self._pending, self._backoff = PendingReleases(), Backoff()
        self._delivery = Delivery(self._pending, config.prefix, self.clock.now, self._ask)
        self._lost_at = -math.inf  # when the last connection was lost
        self._sent = self._pending.sent
        self._rights = Rights(self, config, self._reports, self._check_rights, self._know_rights)
        self._deadlines = Deadlines(self, lambda: self._connection)

    def __repr__(self) -> str:
        return f"<RedisNode {self.label} {self.state.value}>"

    # -- commands ------------------------------------------------------------------------------------------------

    def send(self, op: Op, handler: ReplyHandler) -> None:
        connection = self._connection
        if connection is None:
            if op.verb is RELEASE and op.since <= self._lost_at:
                now = self.clock.now()
                self._pending.add(op, now, now)
            self._reconnect()
            handler.fail(self.index, self.error or ConnectionError(f"{self.label} is not connected"), maybe=False)
            return
        if self._quarantined and op.verb is not RELEASE and self._refuses_vote(op, handler):
            return
        wire: Any = op.packed
        send: Callable[[bytes, ReplyHandler], None] = connection.send
        if op.verb is RELEASE:
            if op.queueing.contended and op.queueing.serve is _GRANT:
                send = connection.send_after_ping
            op.sent = handler.sent
            self._sent.append(op)
            if self._pending.unanswered and self._pending.was_unanswered(op.id, handler.sent):
                wire = encode_whole(op, self._config.prefix, tombstone=True)
            elif self._native and wire.__class__ is tuple and wire[0] == self._native:  # packed for another node
                wire = wire[1]
            elif self._native and (native := encode_native(op, self._config.prefix, self._native)):
                wire = native
            elif wire.__class__ is tuple:  # packed as the own command of another server
                wire = None
        send(wire or encode(op, self._config.prefix), handler)
        if handler.deadline < self._deadlines.next:
            self._deadlines.arm(handler.deadline)
            self.rtt.time_last(connection.waiting, handler)

    def flush(self) -> None:
        if self._connection is not None:
            self._connection.flush()

    def not_native(self, connection: Connection, handler: ReplyHandler | CommandReply) -> None:
        """The server's own command deleted nothing, so send the release as a script: it serves the waiters, and answers
        which id holds the name."""
        if isinstance(handler, CommandReply):
            handler.answer(self.index, 0)
        else:
            connection.send(encode(handler.op, self._config.prefix), handler)

    def odd_reply(self, connection: Connection, handler: ReplyHandler | CommandReply, reply: Any) -> None:
        """Handle any other reply than a grant or a refusal: UNDONE, an error, that to a plain SET or to a handshake."""
        if isinstance(handler, CommandReply):
            handler.answer(self.index, reply)
        elif type(reply) is list and reply[:1] == [-1]:
            handler.answer(self.index, UNDONE)
        elif reply is None or reply == b"OK":
            handler.answer(self.index, replies.PLAIN_NO if reply is None else replies.PLAIN_YES)
        elif isinstance(reply, replies.ServerError):
            self._server_error(connection, handler, reply)
        else:
            error = ConnectionError(f"{self.label} answered out of step")
            self.lost(connection, error)
            handler.fail(self.index, error, maybe=True)  # it has left the deque, so `lost` did not fail it

    def _server_error(self, connection: Connection, handler: ReplyHandler, error: replies.ServerError) -> None:
        match replies.fault_of(error):
            case replies.Fault.RESEND if not handler.op.revoked:
                connection.send(encode_whole(handler.op, self._config.prefix), handler)
            case replies.Fault.CONFIG if replies.is_about_native_release(error):
                # The ACL allows scripts, but not this command.
                self._native = ()
                connection.send(encode(handler.op, self._config.prefix), handler)
            case replies.Fault.CONFIG:
                handler.fail(self.index, self._rights.refused(handler.op, error), maybe=replies.is_half_done(error))
            case fault:
                if handler.op.verb is RELEASE:  # BUSY, for example: the server did nothing, and may do it later
                    self._pending.add(handler.op, self.clock.now(), handler.sent)
                    self._delivery.refused(connection)
                handler.fail(self.index, error, maybe=replies.is_half_done(error))
                if fault is replies.Fault.RECONNECT:
                    self._no_master(connection, error)

    def _no_master(self, connection: Connection, error: replies.ServerError) -> None:
        self._backoff.rebuffed(self.clock.now())
        self._restarts.refused_write()
        self.lost(connection, ConnectionError(f"{self.label}: {error}"))

    def _ask(self, connection: Connection, *command: str, within: float = ANSWER_TIMEOUT) -> CommandReply:
        """Send a command that is not part of a ballot."""
        now = self.clock.now()
        reply = self.rtt.reply(connection.waiting, now, now + within)
        if connection.hung_up is not None:
            reply.fail(self.index, connection.hung_up, maybe=False)
            return reply
        connection.send(pack(*command), reply)
        if reply.deadline < self._deadlines.next:
            self._deadlines.arm(reply.deadline)
        return reply

    # -- the connection ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._reconnect()
        await self._met.wait()

    def lost(self, connection: Connection, error: Exception) -> None:
        """Give this connection up. A second call has no effect. An idle one that was closed is no outage yet."""
        connection.abort()
        self._pending.cut_off(connection.waiting, self.clock.now(), connection.moved_at)
        if self._connection is not connection:
            connection.fail_all(error)  # it was lost during its handshake
            return
        self._connection, self._lost_at = None, self.clock.now()
        self._restarts.answered(connection.alive_at)
        self.listens, self.error = False, error
        self._rights.stop()
        if self.state is not NodeState.CLOSED:
            self.state = NodeState.DOWN
            self._reports.down(error)
        try:
            connection.fail_all(error)
        finally:
            self._reconnect()

    def _reconnect(self) -> None:
        if self._connection is None and self._may_connect and self._connecting is None:
            self._connecting = own_task(self._connect(), f"asynclock {self.label}", self._connect_ended)

    @property
    def _may_connect(self) -> bool:
        """Whether the client is open. A forked child never connects its copy of a node: the holds are the parent's."""
        return self.state is not NodeState.CLOSED and self._origin.is_here

    def _connect_ended(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        self._met.set()
        if task.cancelled():  # by a close, or by the program (AGAIN)
            if self.state is not NodeState.CLOSED:
                self._later = task.get_loop().call_later(AGAIN, self._reconnect)
        elif error := task.exception():
            log.error("asynclock: connecting to %s failed", self.label, exc_info=error)
        else:
            self._reconnect()  # the connection may have been lost since the last step of the task

    async def _connect(self) -> None:
        pause = self._backoff.begin(self.clock.now())
        if self._backoff.in_storm and isinstance(self.error, Reconnecting):
            self.error = ConnectionError(f"{self.error}: it closes each connection soon after it was made")
            self._reports.down(self.error)
        await asyncio.sleep(pause)
        while self._may_connect:
            try:
                await self._open_connection()
                return
            except Exception as error:  # any failure: `error` keeps it for messages, and the next attempt follows
                self.error = replies.connect_error(self.label, error, self.stage)
                self._pending.prune(self.clock.now())
                self.state = NodeState.DOWN if self.state is NodeState.NEW else self.state
                self._reports.down(self.error)
            finally:
                self._met.set()
            await self._backoff.pause(hopeless=isinstance(self.error, ConfigError))

    async def _dial(self) -> AbstractConnection:
        return await self._store.dial()

    async def _open_connection(self) -> None:
        self._end_if_abandoned()
        redis, limit = await self._dial(), self._config.connect_timeout
        await fetch_credentials(redis, self._reached, limit, self._met.set)
        connection: Connection | None = None
        limit = follow(redis, self._reached, limit)
        try:
            async with running_for(limit):
                await redis.connect()  # type: ignore[no-untyped-call]
                self._end_if_abandoned()
                self._reached(Stage.HELLO)
                connection = take_over(self, redis, self.connection_class)
                native = await self._greet(partial(self._ask, connection), redis.client_name)
            self._end_if_abandoned()
            await self._delivery.send_all_but_a_slice(connection)
            self._end_if_abandoned()
        except BaseException as error:
            if connection is not None:
                connection.abort()
            await redis.disconnect(nowait=True)
            raise (await explained(redis, error, self.stage, limit)) from None
        try:
            self._use(connection, native)
        except BaseException as error:  # such as a warning that the program has made an error
            self.lost(connection, ConnectionError(f"{self.label}: {error!r}"))
            raise

    def _use(self, connection: Connection, native: tuple[str, ...]) -> None:
        """The handshake is done."""
        self._connection, self._native = connection, native
        self._backoff.connected(self.clock.now())
        self._quarantined = self._restarts.left > 0
        self._delivery.send_slice(connection)
        if connection.waiting and self._deadlines.next == math.inf:
            self._deadlines.arm(self.clock.now() + ANSWER_TIMEOUT)
        if self.state is not NodeState.CLOSED:
            self.state = NodeState.UP
            self._rights.start(connection, partial(self._ask, connection))
            self._know_rights()
        if not self._quarantined:
            self.end_quarantine()  # set the mark of first use, so that a later restart is detected

    def _end_if_abandoned(self) -> None:
        """Raises CancelledError in the task that the close has cancelled in vain: redis-py has lost that. Also in a
        child that was forked meanwhile."""
        if asyncio.current_task() is self._abandoned or not self._origin.is_here:
            raise asyncio.CancelledError

    async def _greet(self, ask: Ask, name: str | None) -> tuple[str, ...]:
        native, mode = await handshake(ask, self._config, self._restarts, self.label, self.mark, name)
        self.mode = Mode.SHARD if self.in_cluster else mode
        await self._rights.read(ask)
        return native

    async def _check_rights(self, ask: Ask) -> str:
        return await check_vote(ask, self._config, self.mode, self.label, self.probe_name)

    def _know_rights(self) -> None:
        """It is connected, or the server changed what it permits: tell that, and wake the waiters."""
        rights = self._rights
        self.error, self.listens = None, rights.silence is None
        self._reports.notices(rights.silence)
        if rights.refusal is not None:
            self._reports.down(rights.refusal)
        else:
            self._restarts.warn()
            self._backoff.when_lasting(self.clock, partial(self._tell_up, self._connection))
        missed, self._listened = self.listens or self._listened, self.listens
        self._config.listener.connected(self.index, missed=missed)

    def _tell_up(self, connection: Connection | None) -> None:
        if self._connection is connection and self._rights.refusal is None:
            self._reports.up()

    def _reached(self, stage: Stage) -> None:
        self.stage = stage
        if self.state is NodeState.NEW:
            self.error = replies.not_connected_yet(self.label, stage)

    async def _drain_at_close(self) -> None:
        """Rule 7: deliver the pending releases to a server that is busy or lost its connection just now. A server that
        is down gets none."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_FAREWELL):
                if self._connection is None:
                    await self._open_connection()
                await self._delivery.finish(self._connection)

    # -- restarted servers ---------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts | None:
        return self._restarts.facts

    def _refuses_vote(self, op: Op, handler: ReplyHandler) -> bool:
        if not self._restarts.left:
            self.end_quarantine()
            return False
        if op.verb is EXTEND and self._connection is not None:  # the server may have the key, and must keep it
            wire = op.packed or encode(op, self._config.prefix)
            self._connection.send(wire, IgnoredReply(op, handler.sent, handler.deadline))
            if handler.deadline < self._deadlines.next:  # else nobody notices that it is silent
                self._deadlines.arm(handler.deadline)
        handler.fail(self.index, self._restarts.no_vote(), maybe=False)
        return True

    def end_quarantine(self) -> None:
        self._quarantined = False
        if (used := self._restarts.end_quarantine()) and self._connection is not None:
            self._ask(self._connection, "SET", self.mark, used)

    async def read_mark(self) -> None:
        if self._connection is not None and self._quarantined:
            self._restarts.learn_mark(await self._ask(self._connection, "GET", self.mark).answer_of())
            self._quarantined = self._restarts.left > 0

    def _connected(self) -> Connection:
        if self._connection is None:
            self._reconnect()
            raise self.error or ConnectionError(f"{self.label} is not connected")
        return self._connection

    async def _run(self, *command: str) -> Any:
        return await replies.clear(self.label, self._ask(self._connected(), *command).answer_of(), command)

    async def check_vote(self) -> Checked:
        began, connection = self.clock.now(), self._connected()
        if self._quarantined and self._restarts.left:
            raise self._restarts.no_vote()
        try:
            note = await self._rights.check(partial(self._ask, connection))
        except replies.ServerError as error:
            if replies.fault_of(error) is replies.Fault.RECONNECT:
                self._no_master(connection, error)
            raise
        return Checked(self.clock.now() - began, note)

    async def probe(self, name: str) -> NodeView:
        return await view(self._run, self._config.prefix, name)

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        return await names(self._run, self._config.prefix, begin, cursor)

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        self.state = NodeState.CLOSED
        try:
            await self._delivery.stop()
            if self._connecting is not None:
                self._connecting.cancel()
                await asyncio.wait([self._connecting], timeout=CANCELLING)
                self._abandoned = self._connecting
            self.error = ConnectionError(f"{self.label} was closed")
            self._met.set()
            if self._connection is not None:
                await last_words(self._connection, partial(self._ask, self._connection), self.clock.now)
            if self._pending.to_send:
                await self._drain_at_close()
            if (connection := self._connection) is not None:
                self._keep_unanswered(connection)
                connection.fail_all(self.error)  # a handler that fails here may send an undo; `hang_up` sends it
                self._connection = None
                await connection.hang_up()
        finally:  # also where it is cancelled
            self.abort()

    def _keep_unanswered(self, connection: Connection) -> None:
        """It closes. A subclass may keep the releases that have no answer."""

    def abort(self) -> None:
        """Cut the connection, if there is one."""
        self.state = NodeState.CLOSED
        self._reports.stop()
        self._backoff.stop()
        if self._connection is not None:
            self.lost(self._connection, ConnectionError(f"{self.label} was closed"))
        self._rights.stop()
        self._deadlines.cancel()
        self.rtt.stop()
        if self._later is not None:
            self._later.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            self._abandoned = self._connecting
