"""The order of the transactions of one node: those of one key in turn, those of different keys at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from asynclock.stores.closing import CANCELLING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

_ALL = ("",)


class Jobs:
    """The transactions of one node. Those with a key in common run one after the other, in the order in which they were
    added; others run at the same time, at most `most` of them. If that is 1, all run in order."""

    def __init__(self, most: int, finished: Callable[[Sequence[str]], object], name: str) -> None:
        self._most = most
        self._finished = finished
        self._name = name
        self._last: dict[str, _Job] = {}  # by key: the last one that was added and has not ended
        self._ready: deque[_Job] = deque()
        self._running: dict[str, int] = {}  # by key
        self._waiting: set[_Job] = set()  # those that do not run yet
        self._runners: set[asyncio.Task[None]] = set()
        self._active = 0  # runners that look at `_ready` again

    def add(
        self,
        keys: Sequence[str],
        running: Coroutine[Any, Any, None],
        done: Callable[[Exception | None], object],
        first: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Await `running` in its turn, and `first` before it; then call `done` with its error."""
        job = _Job(keys, running, done, first)
        self._waiting.add(job)
        for key in job.order_by(self._most):
            if (before := self._last.get(key)) is not None:
                before.followers.append(job)
                job.blocked += 1
            self._last[key] = job
        if not job.blocked:
            self._start(job)

    def runs(self, key: str) -> bool:
        """Whether a transaction of that key runs now."""
        return key in self._running

    def _start(self, job: _Job) -> None:
        self._ready.append(job)
        if self._active < self._most:
            self._active += 1
            runner = asyncio.get_running_loop().create_task(self._run(), name=self._name)
            self._runners.add(runner)
            runner.add_done_callback(self._runners.discard)

    async def _run(self) -> None:
        try:
            while self._ready:
                await self._run_one(self._ready.popleft())
        finally:
            self._active -= 1

    async def _run_one(self, job: _Job) -> None:
        self._waiting.discard(job)
        for key in job.keys:
            self._running[key] = self._running.get(key, 0) + 1
        try:
            if job.first is not None:
                await job.first()
            await job.running
        except Exception as error:  # any failure of the store; its next transaction may work
            job.done(error)
        else:
            job.done(None)
        finally:
            job.running.close()  # if `first` was cancelled, it has not begun
        self._end(job)

    def _end(self, job: _Job) -> None:
        for key in job.keys:
            if self._running[key] == 1:
                del self._running[key]
            else:
                self._running[key] -= 1
        self._finished(job.keys)
        for key in job.order_by(self._most):
            if self._last.get(key) is job:
                del self._last[key]
        for follower in job.followers:
            follower.blocked -= 1
            if not follower.blocked:
                self._start(follower)

    async def aclose(self, within: float) -> None:
        """Wait at most that many seconds for the transactions to end; then cancel them."""
        if running := set(self._runners):
            await asyncio.wait(running, timeout=within)
        if left := set(self._runners):
            for runner in left:
                runner.cancel()
            await asyncio.wait(left, timeout=CANCELLING)
        for job in self._waiting:  # the handler of each has timed out
            job.running.close()
        self._waiting.clear()
        self._ready.clear()
        self._last.clear()


class _Job:
    """One transaction."""

    __slots__ = ("blocked", "done", "first", "followers", "keys", "running")

    def __init__(
        self,
        keys: Sequence[str],
        running: Coroutine[Any, Any, None],
        done: Callable[[Exception | None], object],
        first: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self.keys = keys
        self.running = running
        self.done = done
        self.first = first
        self.blocked = 0  # by so many keys of earlier ones
        self.followers: list[_Job] = []

    def order_by(self, most: int) -> Sequence[str]:
        """The keys that order it; one for all, if only one may run at a time."""
        return self.keys if most > 1 else _ALL
