"""The tenures of one Lock, by the task that acquired them. Here `Lock.release()` and the end of an `async with lock`
block find their tenure."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asynclock._errors import LockNotHeld, brief
from asynclock._loop import no_loop
from asynclock.acquire.tenure import GIVEN

if TYPE_CHECKING:
    from asynclock.acquire.tenure import Tenure

_PURGE_AT = 64
"""With more tasks than this, tasks that have ended and hold nothing are forgotten."""


class TenuresByTask:
    """The tenures of one Lock. Several tasks may share the Lock."""

    __slots__ = ("__weakref__", "_by_task", "_only", "_purge_at")

    def __init__(self) -> None:
        self._only: Tenure | None = None  # the first one; it moves to the dict when a second one comes
        self._by_task: dict[asyncio.Task[Any] | None, list[Tenure]] | None = None
        self._purge_at = _PURGE_AT

    def add(self, tenure: Tenure) -> None:
        if self._only is None and not self._by_task:  # most locks have one tenure at a time
            self._only = tenure
            return
        by_task, task = self._all(), tenure.terms.task
        mine = self._of(task)
        if not mine:
            mine = by_task[task] = []
        elif _is_past(mine[-1]):
            mine.pop()  # from now on release() means the new tenure, and reports only its loss
        mine.append(tenure)
        if len(by_task) > self._purge_at:
            gone = [task for task in by_task if _is_gone(task)]
            for each in [each for task in gone for each in by_task[task] if not each.open]:
                self.forget(each)
            self._purge_at = _PURGE_AT + 2 * len(by_task)

    def _all(self) -> dict[asyncio.Task[Any] | None, list[Tenure]]:
        """All tenures, each under the task that took it."""
        if self._by_task is None:
            self._by_task = {}
        only, self._only = self._only, None
        if only is not None:
            self._by_task[only.terms.task] = [only]
        return self._by_task

    def _of(self, task: asyncio.Task[Any] | None) -> list[Tenure]:
        """The tenures that the task took, without those at the end that release_all() gave back."""
        by_task = self._all()
        mine = by_task.get(task)
        if mine is None:
            return []
        while mine and mine[-1].state in GIVEN and mine[-1].on_lost is None:
            mine.pop()
        if not mine:
            del by_task[task]
        return mine

    def forget(self, tenure: Tenure) -> None:
        """It was released. A tenure that guards a block is kept, since the block has to find it at its end."""
        if tenure.on_lost is not None:
            return
        if self._only is tenure:
            self._only = None
            return
        mine = self._by_task.get(tenure.terms.task) if self._by_task else None
        if mine and tenure in mine and self._by_task is not None:
            mine.remove(tenure)
            if not mine:
                del self._by_task[tenure.terms.task]

    def taken(self, name: str) -> Tenure:
        """The tenure that this task acquired last; else the only open tenure of a task that has ended (a test
        fixture's). Raises LockNotHeld."""
        try:
            mine = self._of(asyncio.current_task())
        except RuntimeError:
            raise no_loop() from None
        if mine:
            return mine[-1]
        gone = [each for task, tenures in self._all().items() if _is_gone(task) for each in tenures if each.open]
        if len(gone) == 1:
            return gone[0]
        raise LockNotHeld(f"this task holds no {brief(name)} through this Lock: release its Lease", name=name)

    def entered(self, name: str) -> Tenure:
        """The tenure of the block that ends here. A block may end in another task than the one that entered it (a
        fixture, an async generator)."""
        if self._only is not None and self._only.on_lost is not None:
            return self._only
        by_task = self._all()
        for tenure in reversed(by_task.get(asyncio.current_task(), ())):
            if tenure.on_lost is not None:
                return tenure
        others = [each for tenures in by_task.values() for each in tenures if each.on_lost is not None]
        return others[0] if len(others) == 1 else self.taken(name)


def _is_past(tenure: Tenure) -> bool:
    """Whether it has ended, and guards no block that still has to end."""
    return not tenure.open and tenure.on_lost is None


def _is_gone(task: asyncio.Task[Any] | None) -> bool:
    return task is None or task.done()
