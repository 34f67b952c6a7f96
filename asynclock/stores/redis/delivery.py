"""Delivers the pending releases of a server (`pending.py`) in slices. Each slice is sent after the previous one is
answered, so that neither side is flooded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from functools import partial
from typing import TYPE_CHECKING

from asynclock._clock import running_for
from asynclock._loop import AGAIN, own_task
from asynclock._options import ANSWER_TIMEOUT
from asynclock.stores.closing import AT_MOST, CANCELLING
from asynclock.stores.redis.encoding import encode
from asynclock.stores.redis.handlers import IgnoredReply
from asynclock.stores.redis.replies import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.stores.redis.connection import Connection
    from asynclock.stores.redis.handlers import Ask, CommandReply
    from asynclock.stores.redis.pending import PendingReleases

log = logging.getLogger("asynclock")

SLICE = 256
"""The number of pending releases in one slice. Sending a slice takes the loop 1 ms."""

_LAST_WORDS = 0.1  # seconds for which a client that closes waits for the answers that no task awaits

_LOOK = 0.02
"""Seconds after which a client that closes looks again whether a majority has carried its releases out."""

BUSY_PAUSE = 0.1
"""Seconds after which a release that a busy server refused is sent again."""


class Delivery:
    """Delivers the pending releases of one node. `ask` sends a command on a connection."""

    def __init__(
        self,
        pending: PendingReleases,
        prefix: str,
        now: Callable[[], float],
        ask: Ask,
    ) -> None:
        self._pending = pending
        self._prefix = prefix
        self._now = now
        self._ask = ask
        self._refused = False  # the server refused a release of the last slice
        self._closing = False
        self._again: asyncio.Task[None] | None = None  # sends refused releases again
        self._later: asyncio.TimerHandle | None = None  # begins another such task

    def send_slice(self, connection: Connection) -> None:
        """Send the next slice. If the connection is lost, its releases become pending again."""
        now = self._now()
        for op in self._pending.drain(now, SLICE):
            connection.send(encode(op, self._prefix), IgnoredReply(op, now, now + ANSWER_TIMEOUT))

    async def send_all_but_a_slice(self, connection: Connection) -> None:
        """Send the slices but the last on a new connection, before any other op. Raises ConnectionError,
        TimeoutError."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._later is not None:
            self._later.cancel()
        await self._send(connection, keep=SLICE)
        if connection.transport.is_closing():
            raise ConnectionError("it hung up")

    async def _send(self, connection: Connection, keep: int = 0) -> None:
        """Send slices until at most `keep` releases are left, or one is refused."""
        self._refused = False
        while self._pending.to_send > keep and not self._refused and not connection.transport.is_closing():
            self.send_slice(connection)
            await self._all_answered(connection)

    async def _all_answered(self, connection: Connection) -> None:
        """Wait until the server has answered all that was sent."""
        async with running_for(ANSWER_TIMEOUT):
            with contextlib.suppress(ServerError):  # an error reply is an answer, too
                await self._ask(connection, "PING").answer_of()

    def refused(self, connection: Connection) -> None:
        """The server refused a release for now, for example with BUSY. It is sent again after a pause."""
        self._refused = True
        if self._again is None and not self._closing:
            self._again = own_task(self._repeat(connection), "asynclock pending", partial(self._repeated, connection))

    async def _repeat(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the next connection delivers them
            while self._pending.to_send and not connection.transport.is_closing():
                await asyncio.sleep(BUSY_PAUSE)
                await self._send(connection)

    def _repeated(self, connection: Connection, task: asyncio.Task[None]) -> None:
        if self._again is not task:
            return  # the next connection delivers them
        self._again = None
        if task.cancelled():  # by a close, or by the program (AGAIN)
            if not self._closing:
                self._later = task.get_loop().call_later(AGAIN, self.refused, connection)
        elif error := task.exception():
            log.error("asynclock: pending releases are not sent again", exc_info=error)
        elif self._pending.to_send and not connection.transport.is_closing():
            self.refused(connection)  # a slow answer, or a refusal since the last step of the task

    async def finish(self, connection: Connection | None) -> None:
        """The client closes: deliver the pending releases while the connection works. A server that answers on a
        connection which is closed already drops what it has not read: so the last slice, too, is awaited."""
        while connection is not None and not connection.transport.is_closing():
            if self._pending.to_send:
                await self._send(connection)
            elif connection.waiting:
                await self._all_answered(connection)
            else:
                return
            if self._refused:
                await asyncio.sleep(BUSY_PAUSE)

    async def stop(self) -> None:
        """The client closes: refused releases are not sent again, but by `finish`."""
        self._closing = True
        if self._later is not None:
            self._later.cancel()
        if (again := self._again) is not None:
            again.cancel()
            await asyncio.wait([again], timeout=CANCELLING)


async def last_words(connection: Connection, ask: Ask, now: Callable[[], float]) -> None:
    """Rule 7 of `node.py`. Each round awaits the commands in flight. Then a release may need one more round
    (`RedisNode.not_native`). A lost connection has no commands in flight. While a release lacks a majority, its limit
    is that of the close, and each round looks again whether the other nodes have carried it out."""
    began = now()
    until = began + _LAST_WORDS
    reply: CommandReply | None = None
    while connection.waiting:
        awaited = await connection.awaited_until()
        lacking = awaited == math.inf
        if not lacking:
            until = max(until, min(awaited, began + AT_MOST))
        left = (began + AT_MOST if lacking else until) - now()
        if left <= 0:
            return
        if reply is None or reply.ended:
            reply = ask("PING", within=left)
        await reply.wait(min(left, _LOOK) if lacking else left)
