"""Locks of one process, for unit tests: the states are in a dict, and a test can set the clock."""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakSet

from asynclock._clock import SYSTEM
from asynclock._errors import ConfigError
from asynclock.rules.model import State
from asynclock.stores.transactional import TransactionalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock._time import Clock
    from asynclock.rules.model import Notice
    from asynclock.stores.transactional import Step


class MemoryStore(TransactionalStore):
    """A store in a dict, which all its clients, event loops and threads share. Clients share locks if they are given
    the same MemoryStore."""

    _numbers = count(1)
    thread_safe = True

    def __init__(self, clock: Clock | None = None) -> None:
        self.label = f"memory:{next(self._numbers)}"
        self.clock = clock
        self._time = clock or SYSTEM
        self._epoch = self._time.wall() - self._time.now()  # a wall clock can jump, and leases must not
        self._states: dict[str, State] = {}
        self._listeners: dict[str, tuple[asyncio.AbstractEventLoop, Callable[[Notice], object]]] = {}  # by tag
        self._guard = threading.RLock()  # a subclass may run a transaction under it
        _all_stores.add(self)

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self._states)} names>"

    def now(self) -> float:
        """The time of this store as Unix seconds, by which leases end and fences are clamped."""
        return self._epoch + self._time.now()

    def state(self, key: str) -> State:
        """The state of a key (prefix + name) at this moment."""
        return self._states.get(key, State()).at(self.now())

    def transact(self, keys: Sequence[str], step: Step) -> None:
        with self._guard:
            states, notices = step([self._states.get(key, State()) for key in keys], self.now())
            for key, state in zip(keys, states, strict=True):
                self._states[key] = state
                if state == State():
                    del self._states[key]
            for notice in notices:
                loop, receive = self._listeners[notice.tag]
                loop.call_soon_threadsafe(receive, notice)

    def listen(self, tag: str, receive: Callable[[Notice], object]) -> None:
        with self._guard:
            self._listeners = {tag: its for tag, its in self._listeners.items() if not its[0].is_closed()}
            self._listeners[tag] = asyncio.get_running_loop(), receive

    def unlisten(self, tag: str) -> None:
        with self._guard:
            self._listeners.pop(tag, None)

    def has_listener(self, tag: str) -> bool:
        return tag in self._listeners and not self._listeners[tag][0].is_closed()

    async def keys(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        del cursor
        with self._guard:
            return "0", [key for key in self._states if key.startswith(begin) and self.state(key).holds]


_all_stores: WeakSet[MemoryStore] = WeakSet()


def _after_fork() -> None:
    """A thread of the parent may have been in a transaction, and does not exist in the child."""
    for store in list(_all_stores):
        store._guard = threading.RLock()  # noqa: SLF001 - of this module


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def store_of_url(url: str) -> MemoryStore:
    """A store of its own for each url `memory:`. Raises ConfigError."""
    if url.partition(":")[2].strip("/"):
        raise ConfigError(
            "a memory url has no name, and each client with one has a store of its own: write 'memory:'. To share "
            "locks, make one MemoryStore() of asynclock.stores, and give it to each client"
        )
    return MemoryStore()
