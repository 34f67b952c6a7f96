"""A store of a user's own, over a dict. docs/stores.md shows the class as it stands here."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from asynclock.stores.sql import SQLStore
from asynclock.stores.transactional import Notice, State, Step, TransactionalStore
from tests.support.default_keys import key_of
from tests.support.sql_states import sql_state


class DictStore(TransactionalStore):
    """Locks of one event loop, kept in a dict."""

    label = "dict"

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self.listeners: dict[str, Callable[[Notice], object]] = {}
        self.most = 100  # names that are kept before it looks for those that can be forgotten
        self.epoch = time.time() - time.monotonic()  # a wall clock can jump, and leases must not

    def now(self) -> float:
        return self.epoch + time.monotonic()

    async def transact(self, keys: Sequence[str], step: Step) -> None:
        await asyncio.sleep(0)  # stands for the time that a database takes; the next two lines are the transaction
        states, notices = step([self.states.get(key, State()) for key in keys], self.now())
        self.states.update(zip(keys, states, strict=True))
        if len(self.states) > self.most:  # forget the names whose holds, tokens and tickets have ended
            self.states = {key: state for key, state in self.states.items() if state.at(self.now()) != State()}
            self.most = 100 + 2 * len(self.states)
        for notice in notices:
            if receive := self.listeners.get(notice.tag):
                receive(notice)
        await asyncio.sleep(0)  # stands for the confirmation of the commit

    def listen(self, tag: str, receive: Callable[[Notice], object]) -> None:
        self.listeners[tag] = receive

    def unlisten(self, tag: str) -> None:
        self.listeners.pop(tag, None)

    async def keys(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        now = self.now()
        return "0", [key for key, state in self.states.items() if key.startswith(begin) and state.at(now).holds]


def state_of(store: Any, name: str) -> State:
    """What a store without a server keeps for a name of a client with the default prefix."""
    key = key_of(name)
    if isinstance(store, DictStore):
        return store.states.get(key, State()).at(store.now())
    if isinstance(store, SQLStore):
        return sql_state(store, name)  # its prefix is ""
    found: State = store.state(key)
    return found
