"""Records what many tasks do with locks, as a history for `spec.linearizability`."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

from asynclock import Lease, Lock, LockLost, QuorumUnavailable, Redlock, Skipped
from asynclock.events import Event, ReleaseFailed
from spec.linearizability import Call

Work: TypeAlias = Callable[[Redlock, str], Awaitable[None]]
"""What a task does, through this client and under that name of its own."""

_WAITS = 20.0, 20.0, 0.2, 0.0  # the timeouts of acquires


class Recorder:
    """The calls of all tasks of one process, by its monotonic clock.

    An acquire that is cancelled, raises or returns None is left out: it holds the name for a moment at most, and no
    task sees that."""

    def __init__(self, chance: random.Random) -> None:
        self.calls: list[Call] = []
        self._chance = chance
        self._not_released = 0  # releases that had no answer
        self._releases: set[asyncio.Task[None]] = set()

    async def hold(self, who: str, what: str, lock: Lock, *, again: bool = False) -> None:
        """Acquire, stay for a moment, release. `again`: enter it twice."""
        began = time.monotonic()
        try:
            lease = await lock.acquire(timeout=self._chance.choice(_WAITS))
        except QuorumUnavailable:
            return
        if lease is None:
            return
        entered = time.monotonic()
        self.calls.append(Call(who, what, lease.fence, began, entered))
        try:
            if again:
                await self.hold(who, what, lock)
            await asyncio.sleep(self._chance.choice([0.0, 0.001]))
        finally:
            self._releases.add(release := asyncio.ensure_future(self._release(who, lease, entered)))
            await asyncio.shield(release)

    async def _release(self, who: str, lease: Lease, entered: float) -> None:
        began = time.monotonic()
        try:
            await lease.release()
        except LockLost:
            began = entered  # it ended at some time since
        self.calls.append(Call(who, "release", 0, began, time.monotonic()))

    def listen_to(self, client: Redlock) -> None:
        """Hear of the releases that have no answer: the call does not raise that."""

        def heard(event: Event) -> None:
            self._not_released += isinstance(event, ReleaseFailed)

        client.subscribe(heard)

    async def once(self, who: str, guard: Callable[..., Any], fails: float) -> None:
        """Call a function under a guard of `once`. Such a share of the runs fails. A release that has no answer is sent
        again, so it may take effect at any time since."""
        failing, times, before = self._chance.random() < fails, list[float](), self._not_released

        async def work() -> None:
            times.append(time.monotonic())
            await asyncio.sleep(self._chance.choice([0.0, 0.001]))
            times.append(time.monotonic())
            if failing:
                raise ZeroDivisionError

        began, result = time.monotonic(), None
        with suppress(ZeroDivisionError, QuorumUnavailable):
            result = await guard(work)()
        ended = time.monotonic()
        if times:
            effective = ended if self._not_released == before else math.inf
            self.calls += [
                Call(who, "run", 0, began, times[0]),
                Call(who, "release" if failing else "return", 0, times[1], effective),
            ]
        elif isinstance(result, Skipped):
            self.calls.append(Call(who, "skip", 0, began, ended))

    async def crowd(self, clients: list[Redlock], work: Work, *, tasks: int, rounds: int, cancelled: float) -> None:
        """So many tasks do this so many times each. Such a share of the rounds is cancelled, at any moment."""

        async def play(number: int) -> None:
            for turn in range(rounds):
                task = asyncio.ensure_future(work(clients[number % len(clients)], f"{number}.{turn}"))
                if self._chance.random() < cancelled:
                    await asyncio.sleep(self._chance.uniform(0.0, 0.01))
                    task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.result()

        await asyncio.gather(*map(play, range(tasks)))
        await asyncio.gather(*self._releases)
