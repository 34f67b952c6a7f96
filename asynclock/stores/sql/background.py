"""Work in the background that goes on as long as its owner does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asynclock._loop import AGAIN, own_task, running_task
from asynclock.stores.sql.limits import CLOSING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Background:
    """A task for `run`. It begins again if a program cancels all tasks of its loop, as after Ctrl-C, and goes on."""

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._run = run
        self._name = name
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        self._timer, self._task = None, own_task(self._run(), self._name, self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self._stopped:
            self._timer = task.get_loop().call_later(AGAIN, self._begin)

    def stop(self) -> None:
        """End it. If it calls this itself, it goes on to its end."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not running_task():
            self._task.cancel()

    async def aclose(self) -> None:
        """End it, and wait for that."""
        self.stop()
        await asyncio.wait({self._task}, timeout=CLOSING)
