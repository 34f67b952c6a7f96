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
   nothing was ever sent. The next connection delivers the kept releases first, in slices. The node stays down until all
   slices but the last are answered, so that no attempt overtakes a release. If the acquire of an id was not answered on
   an earlier connection, its release leaves a tombstone, because the server may still read that acquire from its
   socket.
5. After the release of an id was queued, no command that could create a key or a ticket of it is sent again (NOSCRIPT).
6. Notices to waiters arrive as RESP3 pushes on the same connection. The server acknowledges the subscription before the
   connection is used. So a notice never overtakes a reply, and every working connection receives notices. If a server
   or its ACL forbids subscriptions, the node works without notices, and its waiters poll.
7. A client that closes waits for the answers to releases, adoptions and breaks until they are overdue (rule 2), for at
   most 1.8 s, and for others 0.1 s. If a server has pending releases, the client connects to it once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock._clock import LATE, running_for
from asynclock._errors import ConfigError
from asynclock._options import ANSWER_TIMEOUT
from asynclock.rules.model import EXTEND, RELEASE, Op, Serve
from asynclock.stores.closing import CANCELLING
from asynclock.stores.port import PROBE, UNDONE, Checked
from asynclock.stores.redis import replies
from asynclock.stores.redis.checks import Mode, check_vote
from asynclock.stores.redis.connection import CommandReply, Connection, IgnoredReply, patience
from asynclock.stores.redis.delivery import Delivery, last_words
from asynclock.stores.redis.encoding import encode, encode_native, encode_whole, pack
from asynclock.stores.redis.handshake import handshake
from asynclock.stores.redis.keys import mark
from asynclock.stores.redis.login import fetch_credentials, take_over
from asynclock.stores.redis.notices import Channel
from asynclock.stores.redis.pending import PendingReleases
from asynclock.stores.redis.reconnect import Backoff
from asynclock.stores.redis.restarts import Dialer, Restarts
from asynclock.stores.redis.stages import NodeState, Stage, follow
from asynclock.stores.redis.stopwatch import Stopwatch
from asynclock.stores.redis.views import names, view
from asynclock.stores.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import Facts, NodeConfig, NodeView, ReplyHandler

log = logging.getLogger("asynclock")

_GRANT = Serve.GRANT
_FAREWELL = 1.0  # seconds for which a client that closes tries to deliver pending releases


class RedisNode:
    """One server. The rules are in the docstring of this module."""

    connection_class = Connection

    def __init__(self, store: Dialer, config: NodeConfig) -> None:
        self.label, self.index = store.label, config.position
        self.mark, self.probe_name = mark(config.prefix), PROBE
        self.state = NodeState.NEW
        self.listens = self._listened = self._second_look = False
        self.error: Exception | None = None
        self._reached(Stage.CONNECT)
        self._store, self._config, self.clock = store, config, config.clock
        self._connection: Connection | None = None
        self.rtt = Stopwatch(config.clock.now)
        self.pushed = Channel(config, self.label).pushed
        self._restarts = Restarts(store, config)
        self._quarantined, self._mode = False, Mode.UNKNOWN
        self._native: tuple[str, ...] = ()  # the server's own compare-and-delete; (): it has none, or forbids it
        self._timer: Any = None
        self._connecting: asyncio.Task[None] | None = None
        self._met = asyncio.Event()  # the first attempt has succeeded, failed, or waits for credentials for too long
        self._pending, self._backoff = PendingReleases(), Backoff()
        self._delivery = Delivery(self._pending, config.prefix, self.clock.now, self._ask)
        self._timer_at, self._lost_at = 0.0, -math.inf  # when the timer is due, and when the last connection was lost
        self._reports = Reports(self.label, config.tell, self.clock)

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
        if op.verb is RELEASE:
            if self._pending.unanswered and op.id in self._pending.unanswered:
                wire = encode_whole(op, self._config.prefix, tombstone=True)
            elif self._native and (native := encode_native(op, self._config.prefix, self._native)):
                wire = native
            elif wire.__class__ is tuple:  # packed as the own command of another server
                wire = None
        send = connection.send_after_ping if op.queueing.contended and op.queueing.serve is _GRANT else connection.send
        send(wire or encode(op, self._config.prefix), handler)
        if self._timer is None or handler.deadline < self._timer_at:
            self._arm(handler.deadline)
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
        """Handle a reply that is neither a grant nor a refusal: UNDONE, the answer to a plain SET, an error, or an
        answer to the handshake."""
        if isinstance(handler, CommandReply):
            handler.answer(self.index, reply)
        elif type(reply) is list and reply[0] == -1:
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
                refusal = replies.refusal(self.label, error, handler.op, self._reports)
                handler.fail(self.index, refusal, maybe=replies.is_half_done(error))
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
        reply = CommandReply(now, now + within)
        connection.send(pack(*command), reply)
        if self._timer is None:
            self._arm(reply.deadline)
        return reply

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self.clock.call_at(when, self._watch)

    def _watch(self) -> None:
        """Rules 2 and 3: fail the overdue commands; drop the connection to a silent server."""
        self._timer = None
        if (connection := self._connection) is None or not (waiting := connection.waiting):
            return
        now, limit = self.clock.now(), connection.time_limit
        late = now - self._timer_at
        blocked = late > LATE and not self._second_look
        if blocked or (connection.is_behind and connection.is_overdue(now)):
            self._second_look |= blocked  # first send what the blocked loop has not sent, and read what has come
            self._arm(now + (min(late, limit) if blocked else 0.001))
            return
        self._second_look = False
        if now - connection.moved_at >= patience(limit):
            self.lost(connection, TimeoutError(f"{self.label} has been silent for {now - connection.moved_at:.3g} s"))
            return
        later = min((handler.deadline for handler in waiting if handler.deadline > now), default=math.inf)
        overdue = connection.fail_overdue(now)
        again = max(min(later, connection.moved_at + (patience(limit) if overdue else limit)), now + 0.001)
        if self._connection is connection and (self._timer is None or again < self._timer_at):  # a handler may arm it
            self._arm(again)

    # -- the connection ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._reconnect()
        await self._met.wait()

    def lost(self, connection: Connection, error: Exception) -> None:
        """Give this connection up. A second call has no effect. An idle one that was closed is no outage yet."""
        connection.abort()
        self._pending.cut_off(connection.waiting, self.clock.now())
        if self._connection is not connection:
            connection.fail_all(error)  # it was lost during its handshake
            return
        self._connection = None
        self._lost_at = self.clock.now()
        self.listens = False
        self.error = error
        if self.state is not NodeState.CLOSED:
            self.state = NodeState.DOWN
            self._reports.down(error)
        connection.fail_all(error)
        self._reconnect()

    def _reconnect(self) -> None:
        if self._connection is None and self.state is not NodeState.CLOSED and self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(), name=f"asynclock {self.label}")
            self._connecting.add_done_callback(self._connect_ended)

    def _connect_ended(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        self._met.set()
        if not task.cancelled() and (error := task.exception()):
            log.error("asynclock: connecting to %s failed", self.label, exc_info=error)

    async def _connect(self) -> None:
        await asyncio.sleep(self._backoff.begin(self.clock.now()))
        while self.state is not NodeState.CLOSED:
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
        redis, limit = await self._dial(), self._config.connect_timeout
        await fetch_credentials(redis, self._reached, limit, self._met.set)
        connection: Connection | None = None
        follow(redis, self._reached)
        try:
            async with running_for(min(redis.socket_connect_timeout or limit, limit)):
                await redis.connect()  # type: ignore[no-untyped-call]
                self._reached(Stage.HELLO)
                connection = take_over(self, redis)
                native, listens, self._mode = await self._greet(partial(self._ask, connection), redis.client_name)
            await self._delivery.send_all_but_a_slice(connection)
        except BaseException:
            if connection is not None:
                connection.abort()
            await redis.disconnect(nowait=True)
            raise
        self._connection, self._native, self.listens = connection, native, listens
        self._quarantined = self._restarts.left > 0
        self._delivery.send_slice(connection)
        if connection.waiting and self._timer is None:
            self._arm(self.clock.now() + ANSWER_TIMEOUT)
        if self.state is not NodeState.CLOSED:
            self.state, self.error = NodeState.UP, None
            self._reports.up()
        if not self._quarantined:
            self.end_quarantine()  # set the mark of first use, so that a later restart is detected
        missed, self._listened = self.listens or self._listened, self.listens
        self._config.listener.connected(self.index, missed=missed)

    async def _greet(self, ask: Callable[..., CommandReply], name: str | None) -> tuple[tuple[str, ...], bool, Mode]:
        return await handshake(ask, self._config, self._restarts, self, name)

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
                if self._connection is not None:
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

    async def _run(self, *command: str) -> Any:
        if self._connection is None:
            self._reconnect()
            raise self.error or ConnectionError(f"{self.label} is not connected")
        return await replies.clear(self.label, self._ask(self._connection, *command).answer_of(), command)

    async def check_vote(self) -> Checked:
        began, connection = self.clock.now(), self._connection
        if connection is None:
            self._reconnect()
            raise self.error or ConnectionError(f"{self.label} is not connected")
        if self._quarantined and self._restarts.left:
            raise self._restarts.no_vote()
        ask = partial(self._ask, connection)
        try:
            refusal = await check_vote(ask, self._config, self._mode, self.label, self.probe_name)
        except replies.ServerError as error:
            if replies.fault_of(error) is replies.Fault.RECONNECT:
                self._no_master(connection, error)
            raise
        note = f"{self.label} sends no notices, so waiters poll it" if refusal or not self.listens else ""
        return Checked(self.clock.now() - began, f"{note}: {refusal}" if refusal else note)

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
            self.error = ConnectionError(f"{self.label} was closed")
            self._met.set()
            if self._connection is not None:
                await last_words(self._connection, partial(self._ask, self._connection), self.clock.now)
            if self._pending:
                await self._drain_at_close()
            if (connection := self._connection) is not None:
                connection.fail_all(self.error)  # a handler that fails here may send an undo; `hang_up` sends it
                self._connection = None
                await connection.hang_up()
        finally:  # also where it is cancelled
            self.abort()

    def abort(self) -> None:
        """Cut the connection, if there is one."""
        self.state = NodeState.CLOSED
        self._reports.stop()
        if self._connection is not None:
            self.lost(self._connection, ConnectionError(f"{self.label} was closed"))
        for each in filter(None, (self._connecting, self._timer)):
            each.cancel()
