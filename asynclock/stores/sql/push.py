"""Push messages for the clients of one event loop: whether they come, and the connection that listens.

That connection is a further one: where there is none for it, or where others need it, clients look for their notices
(`inbox.py`), and it is tried again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock.stores.port import Reconnecting
from asynclock.stores.sql.background import Background
from asynclock.stores.sql.errors import is_crowded
from asynclock.stores.sql.limits import in_background
from asynclock.stores.sql.listening import Listening

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from asynclock.rules.model import Notice
    from asynclock.stores.sql.engines import EngineSource
    from asynclock.stores.sql.pool import Pool

log = logging.getLogger("asynclock")

_PUSH = 0.25
"""Seconds within which a push message must arrive when it is tried out first, at most."""

_PAUSES = (5.0, 300.0)
"""Seconds until it is tried out again, at first and at most; doubled each time."""

_LATER = 1.0
"""Seconds within which a message must arrive then, at most. So it is where a lost connection is replaced: until it has
come the node counts as down."""

_ROOM = 2.0
"""Seconds between two questions whether a pooler has room for other clients, while this one listens behind it. A client
that has no connection yet waits for `patience`, and cannot say so."""

FEW = "there is no further connection for this client: waiters look for their notices"


class Push:
    """See the module. `receive` gets the notices. `lost` is called with the reason when some may have been lost, and
    `changed` when messages begin or cease to come."""

    def __init__(
        self,
        label: str,
        connect_timeout: float,
        receive: Callable[[Notice], object],
        lost: Callable[[Exception], object],
        changed: Callable[[], object],
    ) -> None:
        self._label = label
        self._timeout = connect_timeout
        self._receive = receive
        self._lost = lost
        self._changed = changed
        self.opening = asyncio.Lock()  # one at a time connects, or begins to listen
        self.comes = False
        self.has_come = False  # once: a session is the client's own, also behind a pooler
        self.has_few = False  # there is no connection to listen with
        self._tags: set[str] = set()  # of the clients
        self._listening: Listening | None = None
        self._is_direct = False  # no pooler is between
        self._pause = _PAUSES[0]
        self._background: Background | None = None  # it tries again, or looks whether there is room

    async def begin(self, source: EngineSource, pool: Pool) -> bool:
        """Try it out. Whether messages come. Raises the error of the database."""
        async with pool.line():  # ops need it more than this does
            pass
        self._listening = await self._new_listening(source, pool, _PUSH, first=True)
        self.comes = self.has_come = self._listening is not None
        return self.comes

    def go_on(self, source: EngineSource, pool: Pool) -> None:
        """It was tried out: try again, if there may be another result. `pool`: for that."""
        if self.comes:
            self._watch_room(source, pool)
        elif self.has_few:
            self._tell_few()
            self.try_soon(source, pool)
        elif self._is_direct:
            log.warning(
                "asynclock: a push message of %s did not arrive within %g s: waiters look for their notices, and push "
                "is tried again",
                self._label,
                _PUSH,
            )
            self.try_soon(source, pool)

    def _tell_few(self) -> None:
        fields = {"asynclock_node": self._label}
        log.warning("asynclock: %s: %s, and push is tried again", self._label, FEW, extra=fields)

    async def add(self, tag: str) -> None:
        """A client wants its notices. Raises the error of the connection."""
        self._tags.add(tag)
        if self._listening is not None:
            await self._listening.add(tag)
        if self.comes and self._listening is None:  # it has ended meanwhile: a client that is not open yet is not told
            raise OSError("the connection that listens was closed")

    def forget(self, tag: str) -> None:
        """A client has closed."""
        self._tags.discard(tag)

    async def remove(self, tag: str) -> None:
        """The same, for the connection."""
        if self._listening is not None:
            await self._listening.remove(tag)

    async def ensure(self, source: EngineSource, pool: Pool) -> None:
        """Listen again, if messages came, and the connection is gone. Raises the error of the database."""
        if self._listening is not None and not await self._listening.answers():
            self._listening = None
        if not self.comes or self._listening is not None:
            return
        listening = await self._new_listening(source, pool, _LATER)
        if listening is not None:
            with _closed_after_error(listening):
                await self._add_tags(listening)
            self._listening = listening
        elif self.has_few:
            self._ceases(source, pool)
        else:
            raise OSError("its push messages do not arrive any more")

    async def _add_tags(self, listening: Listening) -> None:
        for tag in tuple(self._tags):  # a client may close meanwhile
            await listening.add(tag)

    async def _new_listening(
        self, source: EngineSource, pool: Pool, within: float, *, first: bool = False
    ) -> Listening | None:
        """A connection that listens; None: no messages arrive, or there is no such connection. `first`: the first use
        of the client waits for it, and the connection for ops works. So it has half of the time, and is tried again
        later if that was too short."""
        connecting = Listening.connect(source.engine, self._receive, self._silent)
        try:
            listening = await source.limited(connecting, lambda late: in_background(late.aclose()), further=first)
        except Exception as error:
            if not (is_crowded(error) or (first and isinstance(error, TimeoutError))):
                raise
            self.has_few = True
            return None
        self.has_few, within = False, min(within, self._timeout / 2)
        with _closed_after_error(listening):
            works = await pool.used(lambda line: listening.works(line, within))
            self._is_direct = await listening.is_direct()
        if works:
            return listening
        in_background(listening.aclose())
        return None

    # -- in the background ---------------------------------------------------------------------------------------

    def try_soon(self, source: EngineSource, pool: Pool, pause: float | None = None) -> None:
        """Try again: the server, or this program, may have been slow at the start, or there is a further connection.
        From then on new tickets get push messages; for those that were sent before, the inbox still looks."""
        first = self._pause if pause is None else pause
        self._run(partial(self._try, source, pool, first), "asynclock tries push")

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """In place of the work of before, which may be the caller, at its end."""
        if self._background is not None:
            self._background.stop()
        self._background = Background(work, name)

    async def _try(self, source: EngineSource, pool: Pool, pause: float) -> None:
        least, most = _PAUSES
        while not self.comes:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause = self._pause = min(max(least, 2 * pause), most)
            with contextlib.suppress(Exception):  # the next op finds it out, and reports it
                if (listening := await self._new_listening(source, pool, _LATER)) is not None:
                    await self._use(listening)
        self._watch_room(source, pool)

    async def _use(self, listening: Listening) -> None:
        with _closed_after_error(listening):  # or if the last client closes while it waits here
            async with self.opening:
                await self._add_tags(listening)
                self._listening = listening
                self.comes = self.has_come = True
                self._changed()
        log.info("asynclock: push messages of %s arrive now", self._label)

    def _watch_room(self, source: EngineSource, pool: Pool) -> None:
        """Behind a pooler: it has a connection of the server for each session."""
        if source.own and not self._is_direct:
            self._run(partial(self._yield_to_others, source, pool), "asynclock looks for room")

    async def _yield_to_others(self, source: EngineSource, pool: Pool) -> None:
        room = True
        while room:
            await asyncio.sleep(_ROOM * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            with contextlib.suppress(Exception):  # the same
                room = await pool.has_room()
        async with self.opening:
            self.has_few = True
            self._ceases(source, pool)
        self._lost(Reconnecting(f"{self._label}: {FEW}"))  # they send their tickets again

    def _ceases(self, source: EngineSource, pool: Pool) -> None:
        """Listen no more, and look for notices."""
        listening, self._listening, self.comes = self._listening, None, False
        if listening is not None:
            in_background(listening.aclose())
        self._changed()
        self._tell_few()
        self.try_soon(source, pool)

    def _silent(self) -> None:
        """The connection that listens is gone."""
        self._listening = None
        self._lost(Reconnecting(f"{self._label} closed the connection"))

    async def aclose(self) -> None:
        if self._background is not None:
            await self._background.aclose()
        if self._listening is not None:
            await self._listening.aclose()

    def desert(self) -> None:
        """The event loop is closed: end the connection without it."""
        if self._listening is not None:
            self._listening.desert()


@contextmanager
def _closed_after_error(listening: Listening) -> Iterator[None]:
    """Close the connection if the block raises: nobody else knows it yet."""
    try:
        yield
    except BaseException:
        in_background(listening.aclose())
        raise
