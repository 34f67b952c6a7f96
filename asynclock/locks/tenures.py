"""The tenures of one Lock, by the task that acquired them. Here `Lock.release()` and the end of an `async with lock`
block find their tenure.

A block may end in another task than the one that entered it: asyncio closes a dropped async generator in a task of its
own, and a fixture's set-up and tear-down are two tasks. The end of a task does not show that its tenures are no longer
needed: a test relies on the lock that its fixture's set-up took. So the tenure of a block is that of the frame that
entered it. An `async with` statement calls `__aenter__` and `__aexit__` from its own frame, in whatever task that runs.

The frame is known by its id, with no reference. A reference would keep the variables of a frame that has ended, and
among them a Lease that the program has dropped (HAZARDS A15). An id is used again after its frame has ended, but the
frame of an `async with` statement lives until its block has ended. Another frame may have called `__aenter__`, such as
that of an AsyncExitStack, or of a class with a Lock inside. It ends before the block, so its id proves nothing. The
bytecode tells the two apart: the instruction after the call is `GET_AWAITABLE`, with 1 after `__aenter__` in a
statement, 2 after `__aexit__` in a statement, and 0 elsewhere. A block that was entered by a call outside such a
statement is matched by its task. If several tenures still fit, a WARNING names the line.
"""

from __future__ import annotations

import asyncio
import logging
from inspect import CO_ASYNC_GENERATOR
from opcode import opmap
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from asynclock._errors import LockNotHeld, brief
from asynclock._loop import no_loop
from asynclock.locks.cancellation import Block
from asynclock.protocol.states import GIVEN_BACK
from asynclock.protocol.terms import owner_of
from asynclock.runtime.session import session_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asynclock.locks.cancellation import Caller
    from asynclock.protocol.hold import Tenure

log = logging.getLogger("asynclock")

_PURGE_AT = 64
"""With more tasks than this, tasks that have ended and hold nothing are forgotten."""

_ENTERS, _LEAVES = (bytes((opmap.get("GET_AWAITABLE", 0), what)) for what in (1, 2))
"""The instruction after the call of `__aenter__` or `__aexit__` by an `async with` statement."""

_OF_ONE_TASK = "the lease that this task entered last is released, which is wrong if its blocks end in another order"

_CACHES = 10
"""Bytes of empty cache entries between a call and the next instruction, at most."""


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
            gone = [task for task in list(by_task) if _is_gone(task)]  # a copy: other loops add theirs meanwhile
            for each in [each for task in gone for each in by_task.get(task, ()) if not each.open]:
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
        """The tenures that the task took, without those at the end of the list that release_all() gave back."""
        by_task = self._all()
        mine = by_task.get(task)
        if mine is None:
            return []
        while mine and mine[-1].state in GIVEN_BACK and mine[-1].block is None:
            mine.pop()
        if not mine:
            del by_task[task]
        return mine

    def forget(self, tenure: Tenure) -> None:
        """It was released. A tenure that guards a block is kept, since the block has to find it at its end."""
        if tenure.block is not None:
            return
        if self._only is tenure:
            self._only = None
            return
        mine = self._by_task.get(tenure.terms.task) if self._by_task else None
        if mine and tenure in mine and self._by_task is not None:
            mine.remove(tenure)
            if not mine:
                del self._by_task[tenure.terms.task]

    def last_of_task(self, name: str) -> Tenure:
        """The tenure that this task acquired last; else the only open tenure of a task that has ended (a test
        fixture's). Raises LockNotHeld."""
        try:
            mine = self._of(task := asyncio.current_task())
        except RuntimeError:
            raise no_loop() from None
        if mine:
            return mine[-1]
        gone = [each for each in self._of_all_tasks() if _is_gone(each.terms.task) and each.open]
        if len(gone) == 1:
            return gone[0]
        owner = owner_of(task)
        raise LockNotHeld(f"this {owner} holds no {brief(name)} through this Lock: release its Lease", name=name)

    @property
    def only_entered(self) -> Tenure | None:
        """The tenure of the block that ends here, if this Lock has no other tenure."""
        return self._only if self._only is not None and self._only.block is not None else None

    def _of_all_tasks(self) -> list[Tenure]:
        """The tenures of this event loop. Other loops may share the Lock."""
        loop = asyncio.get_running_loop()
        groups = list(self._all().values())  # atomic, since threads of other loops use it, too
        return [each for tenures in groups for each in tenures if session_of(each).loop is loop]

    def of_block(self, name: str, caller: Caller) -> Tenure:
        """The tenure of the block that ends here; `caller` called `__aexit__`. Raises LockNotHeld."""
        mine = self._all().get(asyncio.current_task(), [])
        if not caller[1].co_flags & CO_ASYNC_GENERATOR:  # several tasks may run an async generator in turns
            for tenure in reversed(mine):
                if _is_block_of(tenure, caller):
                    return tenure
        if _is_followed_by(_LEAVES, caller):
            found = [each for each in self._of_all_tasks() if _is_block_of(each, caller)]
            if found:
                return max(found, key=_index)
        fits = _entered_by_call(mine)
        ordered = bool(fits)
        fits = fits or _entered_by_call(self._of_all_tasks())
        if not fits:  # perhaps a statement has entered the block, and a wrapper calls only `__aexit__`
            blocks = [each for each in mine if _caller(each) is not None]
            return blocks[-1] if blocks else self.last_of_task(name)
        # Prefer a lost tenure: ending it takes the lock from no body.
        tenure = next((each for each in fits if not each.open), fits[-1])
        if len(fits) > 1 and session_of(tenure).journal.admits_fault("blocks of which several may have ended"):
            log.warning(
                "asynclock: %s ends one of %d blocks over one Lock of %s, and an exit stack or a wrapper hides which: "
                "%s; enter `await lock.acquire()` there",
                _line(),
                len(fits),
                brief(name),
                _OF_ONE_TASK if ordered else "one lease is released, perhaps that of another block",
            )
        return tenure


def _is_past(tenure: Tenure) -> bool:
    """Whether it has ended, and guards no block that still has to end."""
    return not tenure.open and tenure.block is None


def _is_gone(task: asyncio.Task[Any] | None) -> bool:
    return task is None or task.done()


def _is_block_of(tenure: Tenure, caller: Caller) -> bool:
    """Whether the frame of that `async with` statement has entered it."""
    known = _caller(tenure)
    return known is not None and known[0] == caller[0] and _is_followed_by(_ENTERS, known)


def _caller(tenure: Tenure) -> Caller | None:
    """The call of `Lock.__aenter__` that entered it, while its block has not ended."""
    block = tenure.block
    return block.caller if isinstance(block, Block) else None


def _index(tenure: Tenure) -> int:
    """The index of the instruction that entered it, to order the blocks of one frame. The innermost block ends first,
    and has the greatest index: its statement is in the bodies of the others, and the compiler puts a body behind the
    call that enters it, even if it moves exception handlers to the end. In a loop no statement is entered twice,
    because the jump back leaves the block."""
    caller = _caller(tenure)
    return caller[2] if caller is not None else -1


def _entered_by_call(tenures: Iterable[Tenure]) -> list[Tenure]:
    """Those with a block that no `async with` statement has entered."""
    blocks = [(each, _caller(each)) for each in tenures]
    return [each for each, caller in blocks if caller is not None and not _is_followed_by(_ENTERS, caller)]


def _is_followed_by(instruction: bytes, caller: Caller) -> bool:
    """Whether that instruction follows the call."""
    _, code, index = caller
    return code.co_code[index + 2 : index + 2 + _CACHES].lstrip(b"\0").startswith(instruction)


def _line() -> str:
    """Where the program ends the block."""
    for frame, line in walk_stack(None):
        if frame.f_globals.get("__name__") not in ("contextlib", "asynclock.locks.lease", __name__):
            return f"{frame.f_code.co_filename}:{line}"
    return "a line that is unknown"
