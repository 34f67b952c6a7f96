"""The sessions of one client, one for each event loop; and what becomes of them in a forked child."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from contextvars import Context
from typing import TYPE_CHECKING
from weakref import WeakSet

from asynclock._errors import client_closed
from asynclock.acquire.shutdown import let_go

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from asynclock.acquire.session import Session


class Sessions:
    """The sessions of one client, one for each event loop. Several threads, each with its own loop, may use it."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, Session] = {}
        self._unused: WeakSet[asyncio.AbstractEventLoop] = (
            WeakSet()
        )  # loops that closed the client before its first use
        self._guard = threading.Lock()
        _all_sessions.add(self)

    def __del__(self) -> None:
        """The program has dropped the client. A garbage collector may call this in any thread, so it only schedules."""
        if sys.is_finalizing():
            return
        left = [each for each in self.open() if not each.forked]
        for session in left:  # all of them before the first warning, which may be an error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                session.loop.call_soon_threadsafe(let_go, session, context=Context())
        for session in left:
            nodes = ", ".join(node.label for node in session.quorum.nodes)
            warnings.warn(
                f"<Redlock {nodes}> was dropped while it was connected: use `async with`, or `await client.aclose()`",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def of(self, loop: asyncio.AbstractEventLoop) -> Session | None:
        return self._by_loop.get(loop)

    def make(self, loop: asyncio.AbstractEventLoop, new: Callable[[], Session]) -> Session:
        """The session of that loop; made if there is none. Raises ConfigError if the client was closed."""
        if loop in self._unused:
            raise client_closed()
        with self._guard:
            if loop not in self._by_loop:
                alive = {each: its for each, its in self._by_loop.items() if not each.is_closed()}
                self._by_loop = {**alive, loop: new()}
            return self._by_loop[loop]

    def in_use(self) -> bool:
        return bool(self.open())

    def open(self) -> list[Session]:
        """The sessions in use. Any thread may call it."""
        return [each for loop, each in list(self._by_loop.items()) if not (each.closed or loop.is_closed())]

    def forget_closed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget the session of that loop if it is closed. The next use then makes a new one."""
        self._unused.discard(loop)
        with self._guard:
            if (session := self._by_loop.get(loop)) is not None and session.closed:
                del self._by_loop[loop]

    async def aclose(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the client in that loop, also before its first use there."""
        if (session := self._by_loop.get(loop)) is None:
            self._unused.add(loop)
        else:
            await session.aclose()

    def clear(self) -> None:
        self._by_loop = {}
        self._unused.clear()

    def forget_after_fork(self) -> None:
        """In a forked child the sockets and the loop belong to the parent. They are kept but not used: closing them
        would change the parent's selector."""
        for session in self._by_loop.values():
            session.forget_after_fork()
            _inherited.append(session)
        self._by_loop = {}
        self._guard = threading.Lock()


_all_sessions: WeakSet[Sessions] = WeakSet()
_inherited: list[Session] = []


def _after_fork() -> None:
    for sessions in list(_all_sessions):
        sessions.forget_after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
