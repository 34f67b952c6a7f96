"""The events that a client tells, for the tests; and one lock of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from asynclock import Lock, Redlock
from asynclock.events import Event

_E = TypeVar("_E", bound=Event)

KINDS: dict[str, tuple[str, Callable[..., Lock]]] = {
    "mutex": ("mutex", lambda client, name, **options: client(name, **options)),
    "plain": ("mutex", lambda client, name, **options: client(name, fencing=False, **options)),
    "fair": ("mutex", lambda client, name, **options: client(name, fair=True, **options)),
    "reentrant": ("mutex", lambda client, name, **options: client(name, reentrant=True, **options)),
    "write": ("write", lambda client, name, **options: client.write(name, **options)),
    "semaphore": ("semaphore", lambda client, name, **options: client.semaphore(name, 1, **options)),
    "multi": ("multi", lambda client, name, **options: client.multi(name, f"{name}:b", **options)),
}
"""By its name in the tests: the kind that events call it, and how to make one that has one holder at a time."""


class Told:
    """The events of a client, in order."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def of(self, event: type[_E]) -> list[_E]:
        """Those of one class."""
        return [each for each in self.all if isinstance(each, event)]

    def named(self) -> list[str]:
        """The classes of all events of locks."""
        return [type(each).__name__ for each in self.all if hasattr(each, "kind")]


@contextmanager
def told(client: Redlock) -> Iterator[Told]:
    """What it tells in this block."""
    found = Told()
    unsubscribe = client.subscribe(found.all.append)
    try:
        yield found
    finally:
        unsubscribe()
