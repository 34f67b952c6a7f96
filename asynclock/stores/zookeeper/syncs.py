"""One `sync` for all reads that are asked while it has not left.

A `sync` goes through the leader, and the server answers what the same connection asks behind it only after that. So its
answer is the word of the leader for each of these reads, however many there are: one `sync` of its own for each renewal
would be half of all requests, and each one costs a follower a message to its leader and back.

A `sync` counts for a read only if it leaves after its caller has asked. The caller counts a lease from that moment, and
an earlier `sync` may have passed a leader that this client has lost since. So a `sync` leaves in the turn of the loop
after its first caller has asked, or later if other requests are before it. Until then others join it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Sync

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class SharedSync:
    """One `sync`. Its callers wait for events, because a future would be cancelled with the first caller that is."""

    def __init__(self) -> None:
        self._queued = asyncio.Event()
        self._answered = asyncio.Event()
        self._error: BaseException | None = None

    async def queued(self) -> None:
        """Return once the requests that are asked from now on are behind it."""
        await self._queued.wait()

    async def answered(self) -> None:
        """Raises its error, as a copy for each caller: each raise adds to the traceback of an exception."""
        await self._answered.wait()
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def is_queued(self) -> None:
        """It is in the queue of the connection, or has left."""
        self._queued.set()

    def is_answered(self, future: asyncio.Future[Any]) -> None:
        """Its answer, or its failure, has come."""
        error = future.exception()
        if not isinstance(error, NoNodeError):
            self._error = error
        self._answered.set()


class Syncs:
    """Of one connection. `ask` sends a request in the order of the calls, and calls back when it leaves."""

    def __init__(self, ask: Callable[[Any, Callable[[], object]], asyncio.Future[Any]]) -> None:
        self._ask = ask
        self._next: SharedSync | None = None  # it has not left

    async def queued(self, path: str) -> SharedSync:
        """A `sync` that leaves after this call, and is in the queue of the connection when this returns."""
        if (sync := self._next) is None:
            sync = self._next = SharedSync()
            asyncio.get_running_loop().call_soon(self._send, path, sync)
        await sync.queued()
        return sync

    def _send(self, path: str, sync: SharedSync) -> None:
        def leaves() -> None:
            if self._next is sync:
                self._next = None

        def ended(future: asyncio.Future[Any]) -> None:
            leaves()  # it has not if the connection was lost before
            sync.is_answered(future)

        self._ask(Sync(path), leaves).add_done_callback(ended)
        sync.is_queued()
