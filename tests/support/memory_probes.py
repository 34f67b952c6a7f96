"""Probes of a memory store: tests set its states and its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.default_keys import key_of

if TYPE_CHECKING:
    from asynclock.rules.model import State
    from asynclock.stores.memory import MemoryStore


def set_state(store: MemoryStore, name: str, state: State) -> None:
    store._states[key_of(name)] = state


def forget_all(store: MemoryStore) -> None:
    """The store knows no name any more, like a server that restarted."""
    store._states.clear()


def set_clock(store: MemoryStore, clock: Any) -> None:
    store._time = store.clock = clock


def shift_clock(store: MemoryStore, seconds: float) -> None:
    """The store's wall clock is ahead by so many seconds."""
    store._epoch += seconds
