"""One connection to a Redis server, and the handlers that wait for replies on it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import hiredis

from asynclock.rules.model import RELEASE
from asynclock.stores.closing import AWAITED
from asynclock.stores.distance import late
from asynclock.stores.port import Reconnecting, is_carried_out
from asynclock.stores.redis.encoding import pack
from asynclock.stores.redis.handlers import (
    CommandReply,
    IgnoredCommand,
    IgnoredReply,
    UnfailedCommands,
    call_each,
    overdue_at,
)
from asynclock.stores.redis.replies import PLAIN_YES, ServerError, refusal_of

if TYPE_CHECKING:
    from asynclock._time import Clock
    from asynclock.stores.distance import Distance
    from asynclock.stores.port import ReplyHandler

CHUNK = 16
"""The number of commands in one write. If all commands of a loop turn left in one write, client and server would work
in turns instead of side by side (docs/decisions.md)."""

REPLIES = 64
"""The greatest number of replies of one server that one turn of the loop handles, in about 0.5 ms."""

_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.DefaultSelector)
"""It needs no file descriptor: a process may have none left when it finds out that a server is silent."""

_LOOKS = 250  # commands that a closing client looks at in one turn of the loop; it may do so for five nodes at once

_ACKNOWLEDGED = (b"subscribe", b"ssubscribe")  # pushes that come in place of a reply
_PING = pack("PING")
_QUIT = pack("QUIT")  # the server carries out what came before it, and closes the connection
_HANGING_UP = 0.2  # seconds of silence after which a hang-up cuts the connection
_ROUNDS = 5  # a hang-up waits at most so many times _HANGING_UP for a server that is not silent


class Owner(Protocol):
    """The node of a connection."""

    label: str
    index: int
    clock: Clock
    distance: Distance

    def pushed(self, push: Any) -> object:
        """A message came that is no reply."""

    def not_native(self, connection: Connection, handler: ReplyHandler | CommandReply) -> None:
        """A release by the server's own command deleted nothing."""

    def odd_reply(self, connection: Connection, handler: ReplyHandler | CommandReply, reply: Any) -> None:
        """A reply came that is neither a grant nor a refusal."""

    def lost(self, connection: Connection, error: Exception) -> None:
        """The connection is of no use any more."""


class Connection(asyncio.Protocol):
    """A deque of handlers, in the order in which their commands were written."""

    def __init__(self, node: Owner, writer: asyncio.StreamWriter) -> None:
        self.waiting: deque[ReplyHandler | CommandReply] = deque()
        self.transport: Any = writer.transport
        self.moved_at = node.clock.now()  # when it last received data, or last got a command while it had none
        self.alive_at = -math.inf  # the server has answered a command that was sent then
        self._node = node
        self._index = node.index
        self._now = node.clock.now
        self._writer = writer  # a reference, because a collected StreamWriter closes the transport
        self._out: list[bytes] = []
        self._unfailed = UnfailedCommands()
        self._paused = False  # more replies have arrived than one turn of the loop handles
        self._was_failed = False  # commands were failed here that the server may not have read yet
        self._hangs_up = False  # nothing more is sent, and data that arrives is dropped
        self._gone = asyncio.Event()
        self.hung_up: Reconnecting | None = None  # it is closed, and no handler will be called any more
        self._reader = hiredis.Reader(replyError=ServerError)
        self._call_soon = asyncio.get_running_loop().call_soon

    def send(self, wire: bytes, handler: ReplyHandler | CommandReply) -> None:
        out = self._out
        if not out:
            self._call_soon(self.flush)
        out.append(wire)
        if not self.waiting:
            self.moved_at = self._now()
        self.waiting.append(handler)
        if len(out) == CHUNK:
            self.flush()

    def send_after_ping(self, wire: bytes, handler: ReplyHandler) -> None:
        """Send a command that notifies another client. A server writes first to the client that joined its list of
        pending output last. The PING puts this client on the list before the notified one, so the notice is written
        first."""
        self.send(_PING, IgnoredCommand(handler.sent, handler.deadline))
        self.send(wire, handler)

    def flush(self) -> None:
        out = self._out
        if out:
            if len(out) == len(self.waiting):
                self.moved_at = self._now()
            if not self.transport.is_closing():  # else uvloop raises; the handlers learn that the connection is lost
                self.transport.write(b"".join(out))
            out.clear()

    def data_received(self, data: bytes) -> None:
        self.moved_at = self._now()
        if self._hangs_up:
            return
        self._reader.feed(data)
        waiting = self.waiting
        oldest = waiting[0] if waiting else None
        sent = -math.inf if oldest is None else oldest.sent
        self._handle_replies()
        # If the oldest command still waits, only notices have come. The server may have sent those long ago.
        if sent > self.alive_at and (not waiting or waiting[0] is not oldest):
            self.alive_at = sent

    def _handle_replies(self) -> None:
        """Handle the replies that have arrived. After REPLIES of them the loop runs its other callbacks before the
        rest."""
        gets, take, index = self._reader.gets, self.waiting.popleft, self._index
        handler: ReplyHandler | CommandReply | None = None
        try:
            for _ in range(REPLIES):
                if (reply := gets()) is False:
                    self._all_handled()
                    return
                kind = type(reply)
                if kind is list and reply:
                    handler = take()
                    if (code := reply[0]) == 1:  # only a script answers with a list that begins with an int
                        handler.answer(index, (reply[1], len(reply) > 2))
                    elif code == 0:
                        handler.answer(index, refusal_of(reply))
                    else:
                        self._node.odd_reply(self, handler, reply)
                elif kind is hiredis.PushNotification and reply[0] not in _ACKNOWLEDGED:
                    self._node.pushed(reply)
                else:
                    handler = take()
                    if kind is int and reply:  # a release by the server's own command
                        handler.answer(index, PLAIN_YES)
                    elif kind is int:
                        self._node.not_native(self, handler)
                    else:  # also the acknowledgement of a subscription, which comes in place of a reply
                        self._node.odd_reply(self, handler, reply)
        except (hiredis.ProtocolError, IndexError) as error:  # no script gives this reply, or no command waits for it
            self._give_up(handler, f"broke the protocol: {error}")
        except BaseException as error:  # as of a signal handler: the handlers may be out of step with the replies
            self._give_up(handler, f"was left, because a reply could not be handled: {error!r}")
            raise
        else:
            self._handle_rest_later()

    def _give_up(self, handler: ReplyHandler | CommandReply | None, why: str) -> None:
        broken = ConnectionError(f"{self._node.label} {why}")
        try:
            self._node.lost(self, broken)
        finally:
            if handler is not None:  # it has left the deque; without effect if it has its answer
                handler.fail(self._index, broken, maybe=True)

    def _all_handled(self) -> None:
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _handle_rest_later(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()  # so that the replies stay in order
        self._call_soon(self._handle_rest)

    def _handle_rest(self) -> None:
        if not (self._hangs_up or self.transport.is_closing()):
            self.moved_at = self._now()  # these replies have come: their commands are not overdue
            self._handle_replies()

    @property
    def is_behind(self) -> bool:
        """Whether the program has not sent any of the commands yet, or the server has sent data that is not handled
        yet. If some commands were sent, it is the server that is silent: a program may send others in each turn. The
        loop polls its sockets before it runs callbacks, so data that arrives while they run is still unread when a
        timer fires, even if that is on time."""
        if self.transport.is_closing():
            return False
        if self._paused or len(self._out) == len(self.waiting):
            return True
        with _Selector() as selector:
            selector.register(self.transport.get_extra_info("socket").fileno(), selectors.EVENT_READ)
            return bool(selector.select(0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        why = exc or "it closed the connection"
        self.hung_up = Reconnecting(f"{self._node.label} hung up: {why}")
        self._node.lost(self, self.hung_up)

    async def awaited_until(self) -> float:
        """When the last of the answers is overdue for which a closing client waits; -inf: there is none; inf: a release
        is not yet carried out by a majority of the nodes. These are the answers that show whether a lock is free: a
        release that deleted nothing must be sent again as a script. A client may wait for 100,000 of them, so it looks
        at some in each turn of the loop, and drops its references to them one by one: freeing all of them at once would
        take long. It begins with the newest release, which is the last one to be carried out."""
        handlers, until = list(self.waiting), -math.inf
        while handlers:
            handler = handlers.pop()
            if (
                not isinstance(handler, (CommandReply, IgnoredReply))
                and handler.op.verb in AWAITED
                and not handler.op.marks_free
            ):
                if handler.op.verb is RELEASE and not is_carried_out(handler):
                    return math.inf
                until = max(until, overdue_at(handler, self.moved_at))
            if len(handlers) % _LOOKS == 0:
                await asyncio.sleep(0)
        return until

    @property
    def time_limit(self) -> float:
        """The seconds that the server has for its oldest command. An op counts before other commands, which have more
        time."""
        ops = (each for each in self.waiting if not isinstance(each, CommandReply))
        oldest = next(ops, self.waiting[0])
        return oldest.deadline - oldest.sent

    def next_overdue(self) -> float:
        """When a command is overdue next (rule 2), of those that were not failed yet; math.inf: there is none."""
        self._unfailed.read(self.waiting, self.moved_at)
        return self._unfailed.next

    def fail_overdue(self, now: float) -> None:
        """Rule 2: fail the overdue commands."""
        self._unfailed.read(self.waiting, self.moved_at)
        call_each([partial(self._fail_late, handler, now) for handler in self._unfailed.take_overdue(now)])

    def _fail_late(self, handler: ReplyHandler | CommandReply, now: float) -> None:
        limit = handler.deadline - handler.sent
        error = late(self._node.label, now - handler.sent, limit, self._node.distance)
        handler.fail(self._index, error, maybe=True)

    def fail_all(self, error: Exception) -> None:
        """No reply will come any more."""
        handlers = list(self.waiting)
        self._was_failed |= bool(handlers)
        self.waiting.clear()
        call_each([partial(each.fail, self._index, error, maybe=True) for each in handlers])

    async def hang_up(self) -> None:
        """Write what is left, and close. A server that cannot write a reply drops the commands that it has not read
        yet. So if commands have no reply, only this side is closed, and data is read until the server has read all and
        closes its side. TLS has no such half-close: there QUIT makes the server do the same. A server that stands still
        neither closes its side nor answers the end of a TLS session: then the connection is cut, and also if this is
        cancelled."""
        self.flush()
        self._hangs_up, unread = True, self._was_failed or bool(self.waiting)
        if not unread or self.transport.is_closing():
            self.transport.close()
        else:
            self._all_handled()
            if self.transport.can_write_eof():
                with contextlib.suppress(OSError):  # the server has reset it, and the loop has not seen that yet
                    self.transport.write_eof()
            else:
                self.transport.write(_QUIT)
        try:
            for _ in range(_ROUNDS):
                before = self.moved_at
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_HANGING_UP):
                        await self._gone.wait()
                if self._gone.is_set() or self.moved_at == before:
                    return
        finally:
            if not self._gone.is_set():
                self.transport.abort()

    def abort(self) -> None:
        self._out.clear()
        if not self._gone.is_set():  # asyncio reports an abort in connection_lost after a slow close as an error
            self.transport.abort()
