"""Real servers, and a client whose clock a test moves ahead: as after a blocked loop, or a sleep of the machine, while
the servers keep their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asynclock import Redlock
from asynclock._clock import SYSTEM
from asynclock._time import Timer
from asynclock.stores.redis.store import RedisStore


class Shifted:
    """The machine's clock and so many seconds more. A jump does not move its timers: they fire as if it had not
    happened, so that only a look at the clock can find it out."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        return SYSTEM.now() + self._ahead

    def wall(self) -> float:
        return SYSTEM.wall()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return SYSTEM.call_at(when - self._ahead, callback)

    def jump(self, seconds: float) -> None:
        self._ahead += seconds


def shifted(urls: Iterable[str], clock: Shifted, **options: Any) -> Redlock:
    """A client of these servers with that clock."""
    stores = [RedisStore(url) for url in urls]
    for store in stores:
        store.clock = clock  # type: ignore[assignment]
    return Redlock(*stores, **options)
