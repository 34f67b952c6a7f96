"""FakeStore: locks in memory by the rules of a server, with faults and a time that a test moves."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from asynclock._clock import wait_ended, wake
from asynclock._errors import ConfigError, LockNotHeld, brief
from asynclock._options import ANSWER_TIMEOUT, check_name
from asynclock._options import seconds as checked
from asynclock.rules.model import ID_LENGTH, QUIET, Entry, Op, Part, Serve, State, Verb, parts_of
from asynclock.rules.mutex import MUTEX
from asynclock.rules.registry import FAMILIES, family_of, rule_of
from asynclock.rules.rwlock import WRITE
from asynclock.stores.deciding import keys_of
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Reconnecting
from asynclock.stores.transactional import TransactionalNode
from asynclock.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asynclock._options import Seconds
    from asynclock.rules.model import Rule
    from asynclock.stores.jobs import Running
    from asynclock.stores.port import Grant, NodeConfig, Refused, Undone
    from asynclock.stores.transactional import Change, Step

_OWNER = "|1|another-host|busy() of a test"
"""Of the owner that `busy` stands for: its process, its host and its note."""

_LONG = 3e8
"""Seconds for which that owner holds a name, if it is never freed: ten years."""

_NOTIFIED = 0.1
"""Seconds that may pass by themselves when a waiter is notified: over several nodes it waits for a round trip."""

_CONNECTED = 0.6
"""The same when the store is up again: clients pause for up to half a second in an outage."""

_MEMORY = 300.0
"""Seconds for which the counter of fencing tokens outlives a hold: the default of fence_memory."""


class _Server(Enum):
    UP = "up"
    DOWN = "down"
    HANGING = "hanging"


class FakeStore(MemoryStore):
    """A store for tests. Its time stands still until `advance` moves it; leases, renewals, timeouts and waits of its
    clients follow. What needs no time goes on at once: a waiter enters when the name is free, and a client goes on when
    the store is up again.

    `autojump`: once no task has run for so many seconds of real time, time moves to the next moment at which something
    is due; 0: at once. None: time stands still but for `advance`. The stores of one client share one time, from its
    first use on.

    The rules are those of one server (`asynclock.stores.MemoryStore`). Any thread may call its methods, but for
    `advance`. Source: docs/testing.md.
    """

    concurrency = 256  # as with a server, a request that hangs holds up no other name
    _fakes = count(1)

    def __init__(self, *, autojump: Seconds | None = None) -> None:
        self.clock: FakeClock = FakeClock()
        super().__init__(self.clock)
        self.label = f"fake:{next(self._fakes)}"
        self.clock.autojump(None if autojump is None else checked("autojump", autojump, zero=True))
        self._server = _Server.UP
        self._nodes: WeakSet[FakeNode] = WeakSet()
        self._prefixes = {"lock:": None}  # of its clients; a dict keeps their order
        self._busy: dict[str, None] = {}  # names that another owner holds, in order
        self._freed: dict[str, None] = {}  # names that it gives back once the store is up
        self._cuts = 0  # so often its connections were cut
        self._alone = True
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}  # for a change of `_server`

    def __repr__(self) -> str:
        return f"<FakeStore {self.label}, {self._server.value}>"

    # -- for the test --------------------------------------------------------------------------------------------

    async def advance(self, seconds: Seconds) -> None:
        """Move time by so many seconds, or a timedelta, for all stores of its clients. It moves in steps: at each
        moment at which something is due, the tasks that it wakes run until all wait again. So a lease of 30 s is
        renewed 360 times in an hour. What the tasks do in real time, such as a request to a server, is not waited for.

        It returns when all of it is over, also if a loss cancels the task that called it: that task is cancelled at the
        end. Raises ConfigError.
        """
        await self.clock.advance(checked("seconds", seconds, zero=True))

    def busy(self, name: str) -> None:
        """Another owner holds `name` from now on, as long as it takes, whatever the kind of the lock. A holder in the
        program under test learns of it as in production, at its next renewal. Raises ConfigError."""
        check_name(name)
        with self._guard:
            self._busy[name] = None
            self._freed.pop(name, None)
            for prefix in self._prefixes:
                self._occupy(prefix, Part(name, MUTEX))

    def free(self, name: str) -> None:
        """The other owner gives `name` back, and the next waiter enters; if the store is down or hangs, once it is up.
        Raises LockNotHeld without `busy` before."""
        with self._guard:
            if name not in self._busy:
                raise LockNotHeld(f"{brief(name)} is not busy: call busy() before free()", name=name)
            del self._busy[name]
            self._freed[name] = None
            if self._server is _Server.UP:
                self._release_freed()

    def lose(self, name: str) -> None:
        """The hold of `name` is gone from the store, as after an eviction. Its holder learns of it as in production, at
        its next renewal, and LockLost then says "broken". Raises LockNotHeld if nobody holds it."""
        with self._guard:
            held = [key for key in self._keys(name) if self.state(key).holds]
            for key in held:
                self._states[key] = replace(self._states[key], holds=(), marked=False)
        if not held:
            raise LockNotHeld(f"{brief(name)} is not held in {self.label}", name=name)

    def down(self) -> None:
        """The store cannot be reached: each request fails at once. What it keeps stays."""
        self._become(_Server.DOWN)
        self._disconnect(ConnectionError(f"{self.label} is down"))

    def hang(self) -> None:
        """The store answers no more. `up` carries out the requests of the last 5 s; `down` and `restart` drop them."""
        self._become(_Server.HANGING)

    def up(self) -> None:
        """The store answers again, after `down` or `hang`. Its clients connect at once."""
        self._become(_Server.UP)
        with self._guard:
            self._release_freed()
        for node in list(self._nodes):
            node.call(node.connect_again)
        self.clock.let_pass(_CONNECTED)

    def restart(self) -> None:
        """The store forgets all: holds, waiters, fencing tokens and what is busy. It is up, and its clients connect
        again. It casts votes at once, while a real node of a quorum casts none for `max_lease` seconds."""
        self._become(_Server.DOWN)
        with self._guard:
            self._states.clear()
            self._busy.clear()
            self._freed.clear()
            self._server = _Server.UP
        self._disconnect(Reconnecting(f"{self.label} has restarted"))
        self.up()

    # -- for its clients -----------------------------------------------------------------------------------------

    def open(self, config: NodeConfig) -> FakeNode:
        if not isinstance(config.clock, FakeClock):
            raise ConfigError(f"{self.label} needs the clock of a FakeStore: give its client no store with another one")
        self.clock.join(config.clock)
        self._alone = config.quarantine is None
        with self._guard:
            self._prefixes[config.prefix] = None
            for name in self._busy:
                self._occupy(config.prefix, Part(name, MUTEX))
        node = FakeNode(self, config)
        self._nodes.add(node)
        return node

    def transact(self, keys: Sequence[str], step: Step) -> Any:
        if self._server is _Server.UP:
            super().transact(keys, partial(self._step, step))
            return None
        if self._server is _Server.HANGING:
            return self._transact_later(keys, step)
        raise ConnectionError(f"{self.label} is down")

    async def _transact_later(self, keys: Sequence[str], step: Step) -> None:
        await self._hung()
        self.transact(keys, step)

    async def _hung(self) -> None:
        """Return once it hangs no more. Raises OSError if the connection was cut meanwhile, or after the time in which
        a server has to answer."""
        until, cuts = self._time.now() + ANSWER_TIMEOUT, self._cuts
        while self._server is _Server.HANGING and self._cuts == cuts and (left := until - self._time.now()) > 0:
            await self._changed(_Server.HANGING, left)
        if self._cuts != cuts:
            raise ConnectionError(f"{self.label} has cut the connection")
        if self._server is _Server.HANGING:
            raise TimeoutError(f"{self.label} did not answer within {ANSWER_TIMEOUT:g} s")

    async def keys(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        if self._server is _Server.HANGING:
            await self._hung()
        if self._server is _Server.DOWN:
            raise ConnectionError(f"{self.label} is down")
        return await super().keys(begin, cursor)

    def _step(self, step: Step, states: Sequence[State], now: float) -> Change:
        change = step(states, now)
        if change.notices:
            self.clock.let_pass(_NOTIFIED)
        return change

    def listen(self, tag: str, receive: Callable[[Any], object]) -> None:
        if self._server is _Server.DOWN:
            raise ConnectionError(f"{self.label} is down")
        super().listen(tag, receive)

    def decide(
        self, prefix: str, op: Op, answer: Callable[[Grant | Refused | Undone], object]
    ) -> tuple[Running, list[Grant | Refused | Undone]] | None:
        with self._guard:
            for part in parts_of(op) if self._busy else ():
                if op.verb is Verb.BREAK:
                    self._busy.pop(part.name, None)
                self._occupy(prefix, part)
        return super().decide(prefix, op, answer)

    def is_down(self, error: Exception) -> bool:
        return isinstance(error, ConnectionError)

    @property
    def is_up(self) -> bool:
        return self._server is _Server.UP

    async def becomes_up(self) -> None:
        """Return once it is up."""
        while (seen := self._server) is not _Server.UP:
            await self._changed(seen)

    async def _changed(self, seen: _Server, limit: float | None = None) -> None:
        """Return once it is not as the caller has `seen` it; after `limit` seconds at most."""
        loop = asyncio.get_running_loop()
        change = loop.create_future()
        with self._guard:
            if self._server is not seen:  # another thread has changed it since then
                return
            self._waiting[change] = loop
        try:
            await wait_ended(change, limit, self.clock)
        finally:
            self._waiting.pop(change, None)

    def _become(self, server: _Server) -> None:
        with self._guard:
            self._server = server
            self._cuts += server is _Server.DOWN
            waiting = list(self._waiting.items())
        for change, loop in waiting:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(wake, change)

    def _disconnect(self, error: Exception) -> None:
        for node in list(self._nodes):
            node.call(partial(node.lost, error))

    # -- another owner -------------------------------------------------------------------------------------------

    def _keys(self, name: str) -> Iterator[str]:
        for prefix in self._prefixes:
            yield prefix + name

    def _occupy(self, prefix: str, part: Part) -> None:
        """The other owner holds a busy name as a lock of that kind, so that nobody can enter beside it."""
        if part.name not in self._busy:
            return
        state = self.state(prefix + part.name)
        mine = [each for each in state.holds if _is_busy(each) and family_of(each.id) == FAMILIES[part.kind.letter]]
        if len(mine) == len(state.holds) >= max(1, part.kind.slots):
            return
        kind = WRITE if part.kind.letter == "r" else part.kind
        kinds: list[Rule] = [kind.at(slot) for slot in range(kind.slots)] or [kind]
        wall = int(self._time.wall() * 1_000_000)
        tag = secrets.token_hex(ID_LENGTH // 2)
        holds = tuple(
            Entry(f"{tag[:-5]}{i:05x}|{each.mode}{wall}{_OWNER}", self.now() + _LONG) for i, each in enumerate(kinds)
        )
        fence, now = max(state.fence + 1, wall), self.now()
        self._states[prefix + part.name] = replace(state, holds=holds, fence=fence, fence_ends=now + _MEMORY)

    def _release_freed(self) -> None:
        for name in self._freed:
            for prefix in self._prefixes:
                for hold in self._states.get(prefix + name, State()).holds:
                    if _is_busy(hold):
                        self._release(prefix, name, hold)
        self._freed.clear()

    def _release(self, prefix: str, name: str, hold: Entry) -> None:
        serve = QUIET[Serve.GRANT if self._alone else Serve.WAKE]
        kind = rule_of(hold.id[ID_LENGTH + 1 :])
        op = Op(Verb.RELEASE, kind, name, hold.id, 0.0, memory=_MEMORY, queueing=serve)
        super().transact(keys_of(prefix, op), partial(self._step, self.step_of([op])[0]))


def _is_busy(hold: Entry) -> bool:
    return hold.id.endswith(_OWNER)


class FakeNode(TransactionalNode):
    """The store, as one event loop sees it."""

    _store: FakeStore

    def __init__(self, store: FakeStore, config: NodeConfig) -> None:
        super().__init__(store, config)
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[[], object]) -> None:
        """In its loop: now, if that runs here."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._loop:
            function()
            return
        with suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(function)

    def connect_again(self) -> None:
        """The store is up. It is too late for a node that closes."""
        if self.error is not None and not self._closed:
            self._open_unless_opening()

    async def _pause(self, seconds: float) -> None:
        del seconds
        await self._store.becomes_up()

    async def aclose(self) -> None:
        """Without a wait for a store that does not answer, whose time may stand still."""
        if not self._store.is_up:
            self._closed = True
            if self._opening is not None:
                self._opening.cancel()
            self._redelivery.stop()
            await self._jobs.aclose()
            self.listens = False
            self._store.unlisten(self._listener.tag)
            return
        await super().aclose()
