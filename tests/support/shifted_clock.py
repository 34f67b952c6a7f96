"""Real servers, and a client whose clock a test moves ahead: as after a loop that was blocked, or a machine that
slept, while the servers still have what they were told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asynclock import Redlock
from asynclock._clock import SYSTEM, Timer
from asynclock.stores.redis.store import RedisStore


class Shifted:
    """The machine's clock and so many seconds more. Its timers take no notice of a jump: they come when they would have
    come, so that nothing but a look at the clock can find out."""

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
    """A client of these servers that goes by that clock."""
    stores = [RedisStore(url) for url in urls]
    for store in stores:
        store.clock = clock  # type: ignore[assignment]
    return Redlock(*stores, **options)
