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

    __slots__ = ("__weakref__", "_by_task", "_purge_at")

    def __init__(self) -> None:
        self._by_task: dict[asyncio.Task[Any] | None, list[Tenure]] = {}
        self._purge_at = _PURGE_AT

    def add(self, tenure: Tenure) -> None:
        task = tenure.terms.task
        mine = self._of(task)
        if not mine:
            mine = self._by_task[task] = []
        elif _is_past(mine[-1]):
            mine.pop()  # from now on release() means the new tenure, and reports only its loss
        mine.append(tenure)
        if len(self._by_task) > self._purge_at:
            gone = [task for task in self._by_task if _is_gone(task)]
            for each in [each for task in gone for each in self._by_task[task] if not each.open]:
                self.forget(each)
            self._purge_at = _PURGE_AT + 2 * len(self._by_task)

    def _of(self, task: asyncio.Task[Any] | None) -> list[Tenure]:
        """The tenures that the task took, without those at the end that release_all() gave back."""
        mine = self._by_task.get(task)
        if mine is None:
            return []
        while mine and mine[-1].state in GIVEN and mine[-1].on_lost is None:
            mine.pop()
        if not mine:
            del self._by_task[task]
        return mine

    def forget(self, tenure: Tenure) -> None:
        """It was released. A tenure that guards a block is kept, since the block has to find it at its end."""
        mine = self._by_task.get(tenure.terms.task)
        if mine and tenure in mine and tenure.on_lost is None:
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
        gone = [each for task, tenures in self._by_task.items() if _is_gone(task) for each in tenures if each.open]
        if len(gone) == 1:
            return gone[0]
        raise LockNotHeld(f"this task holds no {brief(name)} through this Lock: release its Lease", name=name)

    def entered(self, name: str) -> Tenure:
        """The tenure of the block that ends here. A block may end in another task than the one that entered it (a
        fixture, an async generator)."""
        for tenure in reversed(self._by_task.get(asyncio.current_task(), ())):
            if tenure.on_lost is not None:
                return tenure
        others = [each for tenures in self._by_task.values() for each in tenures if each.on_lost is not None]
        return others[0] if len(others) == 1 else self.taken(name)


def _is_past(tenure: Tenure) -> bool:
    """Whether it has ended, and guards no block that still has to end."""
    return not tenure.open and tenure.on_lost is None


def _is_gone(task: asyncio.Task[Any] | None) -> bool:
    return task is None or task.done()
