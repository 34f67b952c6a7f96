"""One Redis server, as one event loop sees it: one connection, shared by all tasks.

1. Commands of one loop turn leave in one write; replies come back in the order of the commands, to a deque of sinks.
   No task, timer, lock or closure per command.
2. A command that has no answer by its sink's deadline, from a server that has been silent as long, counts as no vote.
   (While replies come, it is we or the line who are slow: a thousand tasks at once are no outage. But there is an end
   to that, too.) Its place in the deque stays, so that a late reply falls on it and nowhere else. One timer watches
   the earliest deadline.
3. A server that has been silent for three times as long is down: its connection is dropped, commands fail at once, and
   one task connects again with back-off. The time is at least half a second, and at most 5 s or that of the oldest
   command, whichever is longer. A broken stream is never used again.
4. A release that could not be delivered is owed, unless its id was made while there was no connection: then nothing of
   that id was ever sent. What is owed goes first on the next connection, in slices, and the node is down until all but
   the last slice are answered: so no attempt overtakes a release. An id whose acquire was left unanswered on an earlier
   connection is released with a tombstone: that acquire may still sit in the server's socket.
5. Nothing that could create a key or a ticket is sent again (NOSCRIPT) once the release of its id was queued.
6. Notices to those who wait come as RESP3 pushes on the same connection, from a subscription that is acknowledged
   before the connection serves anybody. So a notice never overtakes a reply, and a connection that lives, listens.
   Where a server or its ACL forbids that, the node works without: its waiters poll.
7. A client that closes waits for the answers to releases, adoptions and breaks as long as rule 2 says, and at most a
   tenth of a second for those to other commands. It connects once more to a server that is owed a release.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError
from asynclock._options import CONNECT_TIMEOUT
from asynclock.rules.model import EXTEND, RELEASE, Op, Serve
from asynclock.stores.redis import replies
from asynclock.stores.redis.connection import Debt, Link, Once, is_overdue, patience, take_over
from asynclock.stores.redis.delivery import Delivery
from asynclock.stores.redis.encoding import (
    PLAIN_NO,
    PLAIN_YES,
    encode,
    encode_native,
    encode_whole,
    pack,
)
from asynclock.stores.redis.handshake import handshake
from asynclock.stores.redis.keys import mark
from asynclock.stores.redis.pending import Debts
from asynclock.stores.redis.reconnect import Backoff
from asynclock.stores.redis.restarts import Dialer, Probation
from asynclock.stores.redis.views import names, view

if TYPE_CHECKING:
    from asynclock.stores.port import Facts, NodeConfig, Sink, View

log = logging.getLogger("asynclock")

_LATE = 0.01  # a timer that comes so many seconds too late says that it was we who slept
_GRANT = Serve.GRANT
_LAST_WORDS = 0.1  # seconds that a client which closes waits for answers that nobody else waits for
_FAREWELL = 1.0  # seconds for which a client that closes tries to deliver what a server is owed


class NodeState(Enum):
    """Whether commands can be sent."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class RedisNode:
    """See the module's rules."""

    def __init__(self, store: Dialer, config: NodeConfig) -> None:
        self.label = store.label
        self.index = config.position
        self.state = NodeState.NEW
        self.listens = self._listened = False
        self.error: Exception | None = ConnectionError(f"{self.label} is not connected yet")
        self._store = store
        self._config = config
        self.clock = config.clock
        self._link: Link | None = None
        self._probation = Probation(store, config)
        self._on_probation = False
        self._native: tuple[str, ...] = ()  # the server's own release, if it has one and we may use it
        self._timer: Any = None
        self._timer_at = 0.0
        self._second_look = False
        self._connecting: asyncio.Task[None] | None = None
        self._met = asyncio.Event()  # the first attempt to connect has ended, well or not
        self._debts = Debts()
        self._delivery = Delivery(self._debts, config.prefix, self.clock.now, self._answered)
        self._lost_at = -math.inf  # when the last connection was lost
        self._backoff = Backoff()

    def __repr__(self) -> str:
        return f"<RedisNode {self.label} {self.state.value}>"

    # -- commands ------------------------------------------------------------------------------------------------

    def send(self, op: Op, sink: Sink) -> None:
        link = self._link
        if link is None:
            if op.verb is RELEASE and op.since <= self._lost_at:
                now = self.clock.now()
                self._debts.owe(op, now, now)
            self._reconnect()
            sink.fail(self.index, self.error or ConnectionError(f"{self.label} is not connected"), maybe=False)
            return
        if self._on_probation and op.verb is not RELEASE and self._muted(op, sink):
            return
        wire = None
        if op.verb is RELEASE:
            if self._debts.orphans and op.id in self._debts.orphans:
                wire = encode_whole(op, self._config.prefix, tombstone=True)
            elif self._native:
                wire = encode_native(op, self._config.prefix, self._native)
        send = link.send_last_word if op.queueing.contended and op.queueing.serve is _GRANT else link.send
        send(wire or op.wire or encode(op, self._config.prefix), sink)
        if self._timer is None or sink.deadline < self._timer_at:
            self._arm(sink.deadline)

    def flush(self) -> None:
        if self._link is not None:
            self._link.flush()

    def not_native(self, link: Link, sink: Sink | Once) -> None:
        """A release by the server's own command deleted nothing; the script knows more."""
        if isinstance(sink, Once):
            sink.answer(self.index, PLAIN_NO)
        else:
            link.send(encode(sink.op, self._config.prefix), sink)

    def odd_reply(self, link: Link, sink: Sink | Once, reply: Any) -> None:
        """All that is not the list of a script: a plain SET's answer, an error, the answers to a handshake."""
        if isinstance(sink, Once):
            sink.answer(self.index, reply)
        elif reply is None or reply == b"OK":
            sink.answer(self.index, PLAIN_NO if reply is None else PLAIN_YES)
        elif isinstance(reply, replies.ServerError):
            self._server_error(link, sink, reply)
        else:
            error = ConnectionError(f"{self.label} answered out of step")
            self.lost(link, error)
            sink.fail(self.index, error, maybe=True)  # no longer among those that `lost` tells

    def pushed(self, push: Any) -> None:
        """A notice came."""
        if push[0] == b"message":
            self._config.ear.heard(self.index, push[2])

    def _server_error(self, link: Link, sink: Sink, error: replies.ServerError) -> None:
        match replies.fault_of(error):
            case replies.Fault.RESEND if not sink.op.undone:
                link.send(encode_whole(sink.op, self._config.prefix), sink)
            case replies.Fault.CONFIG if replies.is_about_native_release(error):
                # an ACL that lets us run scripts, but not this
                self._native = ()
                link.send(encode(sink.op, self._config.prefix), sink)
            case replies.Fault.CONFIG:
                sink.fail(self.index, replies.refusal(self.label, error, sink.op), maybe=replies.is_half_done(error))
            case fault:
                if sink.op.verb is RELEASE:  # BUSY and the like: nothing was done, and soon it can be
                    self._debts.owe(sink.op, self.clock.now(), sink.sent)
                    self._delivery.refused(link)
                sink.fail(self.index, error, maybe=replies.is_half_done(error))
                if fault is replies.Fault.RECONNECT:
                    self._backoff.rebuffed(self.clock.now())
                    self.lost(link, ConnectionError(f"{self.label}: {error}"))

    def _ask(self, link: Link, *command: str, within: float = CONNECT_TIMEOUT) -> Once:
        """One command outside the votes."""
        now = self.clock.now()
        once = Once(now, now + within)
        link.send(pack(*command), once)
        if self._timer is None:
            self._arm(once.deadline)
        return once

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self.clock.call_at(when, self._watch)

    def _watch(self) -> None:
        """Rules 2 and 3: fail what is overdue; drop a server that has gone silent."""
        self._timer = None
        link = self._link
        if link is None or not link.waiting:
            return
        now = self.clock.now()
        if now - self._timer_at > _LATE and (not self._second_look or link.unread):
            self._second_look = True  # the loop was blocked, perhaps again: what came meanwhile is read first
            self._arm(now + 0.001)
            return
        self._second_look = False
        oldest = next((sink for sink in link.waiting if not isinstance(sink, Once)), link.waiting[0])
        limit = oldest.deadline - oldest.sent  # a vote's, for a ping has more time
        if now - link.moved_at >= patience(limit):
            self.lost(link, TimeoutError(f"{self.label} has been silent for {now - link.moved_at:.3g} s"))
            return
        overdue = [sink for sink in link.waiting if is_overdue(sink, link.moved_at, now)]
        later = min((sink.deadline for sink in link.waiting if sink.deadline > now), default=math.inf)
        for sink in overdue:
            error = TimeoutError(f"{self.label} did not answer within {now - sink.sent:.3g} s")
            sink.fail(self.index, error, maybe=True)
        again = max(min(later, link.moved_at + (patience(limit) if overdue else limit)), now + 0.001)
        if self._link is link and (self._timer is None or again < self._timer_at):  # who was told may have sent more
            self._arm(again)

    # -- the connection ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._reconnect()
        await self._met.wait()

    def lost(self, link: Link, error: Exception) -> None:
        """This connection is of no use any more. Callable twice; only the first time counts."""
        link.abort()
        self._debts.cut_off(link.waiting, self.clock.now())
        if self._link is not link:
            self._fail_all(link, error)  # of a handshake that was cut short
            return
        self._link = None
        self._lost_at = self.clock.now()
        self.listens = False
        self.error = error
        if self.state is not NodeState.CLOSED:
            self.state = NodeState.DOWN
        self._fail_all(link, error)
        self._reconnect()

    def _fail_all(self, link: Link, error: Exception) -> None:
        sinks = list(link.waiting)
        link.waiting.clear()
        for sink in sinks:
            sink.fail(self.index, error, maybe=True)

    def _reconnect(self) -> None:
        if self._link is None and self.state is not NodeState.CLOSED and self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(), name=f"asynclock {self.label}")
            self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        self._met.set()
        if not task.cancelled() and (error := task.exception()):
            log.error("asynclock: connecting to %s failed", self.label, exc_info=error)

    async def _connect(self) -> None:
        await asyncio.sleep(self._backoff.begin(self.clock.now()))
        while self.state is not NodeState.CLOSED:
            try:
                await self._open_link()
            except Exception as error:  # a server may fail in any way; each is kept, told and tried again
                self.error = error if isinstance(error, ConfigError) else replies.connect_error(self.label, error)
                self._debts.prune(self.clock.now())
                if self.state is NodeState.NEW:
                    self.state = NodeState.DOWN
            else:
                return
            finally:
                self._met.set()
            await asyncio.sleep(self._backoff.failed(hopeless=isinstance(self.error, ConfigError)))

    async def _open_link(self) -> None:
        redis = await self._store.dial()
        link: Link | None = None
        try:
            async with asyncio.timeout(min(redis.socket_connect_timeout or CONNECT_TIMEOUT, CONNECT_TIMEOUT)):
                await redis.connect()  # type: ignore[no-untyped-call]
                link = take_over(self, redis)
                ask = partial(self._ask, link)
                native, listens = await handshake(ask, self._config, self._probation, self.label)
            await self._delivery.send_all_but_a_slice(link)
        except BaseException:
            if link is not None:
                link.abort()
            await redis.disconnect(nowait=True)
            raise
        self._link = link
        self._native, self.listens = native, listens
        self._on_probation = bool(self._probation.left)
        self._delivery.send_slice(link)
        if link.waiting and self._timer is None:
            self._arm(self.clock.now() + CONNECT_TIMEOUT)
        if self.state is not NodeState.CLOSED:
            self.state, self.error = NodeState.UP, None
        if not self._on_probation:
            self.trust()  # a server of age bears the mark of its use, so that its restart will show
        if self.listens or self._listened:
            self._config.ear.connected(self.index)
        self._listened = self.listens

    async def _pay_last(self) -> None:
        """Rule 7. A server that is busy, or was cut off just now, gets what it is owed; one that is down does not."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_FAREWELL):
                if self._link is None:
                    await self._open_link()
                if self._link is not None:
                    await self._delivery.finish(self._link)

    # -- restarted servers ---------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts | None:
        return self._probation.facts

    def _muted(self, op: Op, sink: Sink) -> bool:
        if self._probation.over:
            self.trust()
            return False
        if op.verb is EXTEND and self._link is not None:  # it may have kept the key, and shall go on to
            self._link.send(op.wire or encode(op, self._config.prefix), Debt(op, sink.sent, sink.deadline))
        why = f"{self.label} restarted a short while ago and casts no vote for another {self._probation.left:.0f} s"
        sink.fail(self.index, ConnectionError(why), maybe=False)
        return True

    def trust(self) -> None:
        self._on_probation = False
        used = self._probation.trust()
        if used and self._link is not None:
            self._ask(self._link, "SET", mark(self._config.prefix), used)

    async def look(self) -> None:
        if self._link is not None and self._on_probation:
            self._probation.learn_mark(await self._ask(self._link, "GET", mark(self._config.prefix)).answer_of())
            self._on_probation = bool(self._probation.left)

    async def _run(self, *command: str) -> Any:
        if self._link is None:
            self._reconnect()
            raise self.error or ConnectionError(f"{self.label} is not connected")
        return await replies.clear(self.label, self._ask(self._link, *command).answer_of(), command)

    async def _answered(self, link: Link) -> Any:
        return await self._ask(link, "PING").answer_of()

    async def ping(self) -> float:
        began = self.clock.now()
        await self._run("PING")
        return self.clock.now() - began

    async def view(self, name: str) -> View:
        return await view(self._run, self._config.prefix, name)

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        return await names(self._run, self._config.prefix, begin, cursor)

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        self.state = NodeState.CLOSED
        await self._delivery.stop()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        self.error = ConnectionError(f"{self.label} was closed")
        self._met.set()
        await self._last_words()
        if self._debts:
            await self._pay_last()
        if (link := self._link) is not None:
            self._fail_all(link, self.error)  # a sink that fails here may send an undo, which leaves, too
            self._link = None
            link.hang_up()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _last_words(self) -> None:
        """Rule 7. Each round awaits what is in flight; a release may need its script after that (not_native)."""
        until = self.clock.now() + _LAST_WORDS
        while (link := self._link) is not None and link.waiting:
            now = self.clock.now()
            until = max(until, link.awaited_until())
            if now >= until:
                return
            try:
                async with asyncio.timeout(until - now):
                    await self._ask(link, "PING", within=until - now).answer_of()
            except TimeoutError:
                if link.awaited_until() <= until:
                    return
            except Exception:  # noqa: S112 - a replies.refusal is an answer, too; and a lost connection ends the loop
                continue
