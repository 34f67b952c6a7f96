"""Locks of one process, for unit tests: `decide` over a dict, with a clock that a test can move."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from asynclock._clock import SYSTEM, Clock
from asynclock._errors import brief
from asynclock.rules.decide import decide
from asynclock.rules.model import State, Verb, parts_of
from asynclock.rules.registry import FAMILIES, family_of
from asynclock.rules.several import decide_all
from asynclock.stores.port import NodeView, WrongKind
from asynclock.stores.transactional import vote_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.rules.model import Kind, Op
    from asynclock.stores.port import Grant, NodeConfig, Notice, NoticeListener, Refused, ReplyHandler, Undone


class MemoryStore:
    """A store whose clients, loops and threads share one dict. Give one to each client that shall share its locks."""

    _numbers = count(1)

    def __init__(self, clock: Clock | None = None) -> None:
        self.label = f"memory:{next(self._numbers)}"
        self.clock = clock
        self._time = clock or SYSTEM
        self._epoch = self._time.wall() - self._time.now()  # wall clocks jump; what counts leases must not
        self._states: dict[str, State] = {}
        self._listeners: dict[str, tuple[asyncio.AbstractEventLoop, NoticeListener, int]] = {}  # by tag
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self._states)} names>"

    def open(self, config: NodeConfig) -> MemoryNode:
        return MemoryNode(self, config)

    def now(self) -> float:
        """The server's time, as its clients' fences and leases meet it."""
        return self._epoch + self._time.now()

    def state(self, key: str) -> State:
        """What is known of a key (prefix + name) now."""
        return self._states.get(key, State()).at(self.now())

    def held(self, prefix: str, begin: str) -> list[str]:
        """The names that are held and begin so."""
        with self._guard:
            keys = [key for key in self._states if key.startswith(prefix + begin)]
            return [key[len(prefix) :] for key in keys if self.state(key).holds]

    def decide(self, prefix: str, op: Op, answer: Callable[[Grant | Refused | Undone], object]) -> None:
        """`answer` is called inside: so no notice overtakes it. Raises WrongKind."""
        with self._guard:
            now = self.now()
            names = [
                part for part in parts_of(op) if op.verb is Verb.BREAK or self._is_of(prefix + part.name, part.kind)
            ]
            if not names or (len(names) < len(op.kind.parts) and op.verb is not Verb.RELEASE):
                raise WrongKind(f"{self.label}: {brief(op.name)} is in use as another kind")
            keys = [prefix + part.name for part in names]
            states = [self._states.get(key, State()) for key in keys]
            notices: Sequence[Notice]
            if op.kind.parts:
                reply, part, states, notices = decide_all(names, states, op, now, self._hears)
            else:
                reply, part = decide(names[0].kind, states[0], op, now, self._hears), 0
                states, notices = [reply.state], reply.notices
            for key, state in zip(keys, states, strict=True):
                self._states[key] = state
                if state == State():
                    del self._states[key]
            answer(vote_of(reply, now, part))
            for notice in notices:
                loop, listener, index = self._listeners[notice.tag]
                loop.call_soon_threadsafe(listener.received, index, notice)

    def _is_of(self, key: str, kind: Kind) -> bool:
        """Whether it is held as that kind, or not at all."""
        holds = self.state(key).holds
        return not holds or family_of(holds[0].id) == FAMILIES[kind.letter]

    def listen(self, listener: NoticeListener, index: int) -> None:
        with self._guard:
            self._listeners = {tag: its for tag, its in self._listeners.items() if not its[0].is_closed()}
            self._listeners[listener.tag] = asyncio.get_running_loop(), listener, index

    def hush(self, listener: NoticeListener) -> None:
        with self._guard:
            self._listeners.pop(listener.tag, None)

    def _hears(self, tag: str) -> bool:
        return tag in self._listeners and not self._listeners[tag][0].is_closed()


class MemoryNode:
    """The store, as one event loop sees it. It answers in the next turn, as a server would at the soonest."""

    error: Exception | None = None

    def __init__(self, store: MemoryStore, config: NodeConfig) -> None:
        self.label = store.label
        self._store = store
        self._index = config.position
        self._prefix = config.prefix
        self._listener = config.listener
        self.listens = False

    async def open(self) -> None:
        self._store.listen(self._listener, self._index)
        self.listens = True

    def send(self, op: Op, handler: ReplyHandler) -> None:
        later = asyncio.get_running_loop().call_soon
        try:
            self._store.decide(self._prefix, op, lambda reply: later(handler.answer, self._index, reply))
        except WrongKind as error:
            later(partial(handler.fail, self._index, error, maybe=False))

    async def ping(self) -> float:
        return 0.0

    async def probe(self, name: str) -> NodeView:
        state, now = self._store.state(self._prefix + name), self._store.now()
        return NodeView(
            "string" if state.holds else "none",
            tuple((each.id, None if each.ends is None else each.ends - now) for each in state.holds),
            state.fence,
            tuple((each.order, each.id) for each in state.queue),
        )

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        del cursor
        return "0", self._store.held(self._prefix, begin)

    async def aclose(self) -> None:
        self.listens = False
        self._store.hush(self._listener)
