"""The sessions of one client, one for each event loop; and what becomes of them in a forked child."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, WeakSet, ref

from asynclock._errors import client_closed
from asynclock._loop import own_task, running_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Sequence

    from asynclock._time import Clock
    from asynclock.protocol.hold import Tenure
    from asynclock.runtime.session import Session
    from asynclock.stores.port import Store


_LOOK = 0.2
"""Seconds between two checks whether a client that was dropped is still in use."""

_closing: set[asyncio.Task[None]] = set()
"""Strong references: nobody else refers to a client that was dropped."""


def let_go(session: Session) -> None:
    """The program has dropped the client without a close: close it, once no lease and no task depends on it."""
    if session.closed:
        return
    if session.machine.holds or session.machine.under_way:
        session.loop.call_later(_LOOK, let_go, session)
        return
    close_soon(session)


def close_soon(session: Session) -> None:
    """Close it in the background. Leases that are still held are lost."""
    if not session.closed:
        _closing.add(own_task(session.aclose(), "asynclock close", _closing.discard))


class Sessions:
    """The sessions of one client, one for each event loop. Several threads, each with its own loop, may use it."""

    def __init__(self, *, ready_made: bool) -> None:
        self.ready_made = ready_made  # the client was made without nodes
        self._by_loop: dict[asyncio.AbstractEventLoop, Session] = {}
        self._unused: WeakSet[asyncio.AbstractEventLoop] = (
            WeakSet()
        )  # loops that closed the client before its first use
        self._guard = threading.Lock()
        self.has_inherited = False  # this is a forked child, and the client was in use in its parent
        _all_sessions.add(self)

    def __del__(self) -> None:
        """The program has dropped the client. A garbage collector may call this in any thread, so it only schedules."""
        if sys.is_finalizing():
            return
        left = [each for each in self.open() if not each.forked]
        # Collect these before the loops are notified, because the thread of a loop may close its session at once. A
        # session without a connected node leaves nothing open, so there is no warning for it.
        connected = [each for each in left if any(node.error is None for node in each.quorum.nodes)]
        for session in left:  # all of them before the first warning, which may be an error
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                session.loop.call_soon_threadsafe(let_go, session, context=Context())
        for session in connected:
            nodes = ", ".join(node.label for node in session.quorum.nodes)
            warnings.warn(
                f"<Redlock {nodes}> was dropped while it was connected: use `async with`, or `await client.aclose()` "
                "(in asynclock.blocking: `with`, or `client.close()`)",
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
                if _substitutes:
                    _substitutes[-1].made.append(Place(ref(self), self._by_loop[loop]))
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

    def take_out(self, which: Collection[Session] | None) -> list[Place]:
        """Take these sessions out; None: all. `put_back` undoes it."""
        with self._guard:
            out = [each for each in self._by_loop.values() if which is None or each in which]
            self._by_loop = {loop: its for loop, its in self._by_loop.items() if its not in out}
        return [Place(ref(self), each) for each in out]

    def put_back(self, session: Session) -> None:
        with self._guard:
            self._by_loop = {session.loop: session, **self._by_loop}

    def clear(self) -> None:
        self._by_loop = {}
        self._unused.clear()

    def forget_after_fork(self) -> None:
        """This is a forked child: the sessions are the parent's."""
        self.has_inherited = self.has_inherited or bool(self._by_loop)
        self._by_loop = {}
        self._guard = threading.Lock()


def all_tenures() -> list[Tenure]:
    """The tenures that are held now in this event loop, of all clients. For `asynclock.testing`."""
    sessions = _all_of(running_loop())
    holds = [hold for session in sessions for hold in session.machine.holds.in_slices() if hold is not None]
    return [tenure for hold in holds for tenure in hold.tenures if tenure.held]


def all_clocks() -> list[Clock]:
    """Those of the clients that are in use in this event loop. For `asynclock.testing`."""
    return [session.clock for session in _all_of(running_loop()) if not session.closed]


def _all_of(loop: asyncio.AbstractEventLoop) -> list[Session]:
    return [session for each in list(_all_sessions) if (session := each.of(loop)) is not None]


class Place(NamedTuple):
    """A session, and where it belongs."""

    sessions: ReferenceType[Sessions]
    session: Session


class Substitute:
    """For `asynclock.testing.use`: the sessions that begin between `begin` and `end` have these stores."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.made: list[Place] = []  # the sessions that have begun meanwhile
        self._out: list[Place] = []  # the sessions that are set aside until the end

    def begin(self) -> None:
        """Start. The sessions of the ready-made clients, and those with the stores of earlier substitutes, are set
        aside. New sessions take their place."""
        before = [place.session for each in _substitutes for place in each.made]
        for sessions in list(_all_sessions):
            self._out += sessions.take_out(None if sessions.ready_made else before)
        _substitutes.append(self)

    def end(self) -> None:
        """The sessions that have begun are closed in the background, and the sessions that were set aside are
        restored."""
        _substitutes.remove(self)
        for place in self.made:
            if (sessions := place.sessions()) is not None:
                sessions.take_out([place.session])
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                place.session.loop.call_soon_threadsafe(close_soon, place.session, context=Context())
        for place in self._out:
            if (sessions := place.sessions()) is not None:
                sessions.put_back(place.session)


def substitute() -> tuple[Store, ...]:
    """The stores of a session that begins now, in place of the client's own; (): its own."""
    return _substitutes[-1].stores if _substitutes else ()


_substitutes: list[Substitute] = []
"""The innermost one is the last."""

_all_sessions: WeakSet[Sessions] = WeakSet()


def _after_fork() -> None:
    for sessions in list(_all_sessions):
        sessions.forget_after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
