"""The limits of a close: it ends, whatever the nodes do and whatever happened before."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from asynclock._loop import own_task

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

log = logging.getLogger("asynclock")

CLOSING = 2.7
"""Seconds for which a close waits for its nodes. Each has limits of its own; this one is for stores that have none."""

CANCELLING = 0.2
"""Seconds for which it waits for a task that it has cancelled. A driver may lose the cancel."""

MARKS = 0.2
"""Seconds for which it waits for the other nodes to get the marks of runs of `once`. A majority has them already."""

_STUCK = 0.5
_TURNS = 100
"""A set that lost no member for so many seconds, and for so many turns of the loop, is given up."""


async def all_ended(works: Collection[Coroutine[Any, Any, None]], seconds: float) -> None:
    """Run them all, for at most `seconds`. A coroutine that lasts longer is cancelled, and gets CANCELLING seconds to
    end. The error of a coroutine that fails is logged."""
    tasks = [own_task(each, ended=_log) for each in works]
    _, left = await asyncio.wait(tasks, timeout=seconds)
    await cancelled(left)


async def cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel them, and wait a moment."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCELLING)


def _log(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("asynclock: a node did not close", exc_info=error)


async def drained(members: Collection[object]) -> None:
    """Wait until it is empty, normally for a turn or two. A member that is stuck (`_STUCK`, `_TURNS`) is given up: a
    KeyboardInterrupt may end the call that would have woken its task."""
    left, since, turns = len(members), time.monotonic(), 0
    while members and (turns < _TURNS or time.monotonic() - since < _STUCK):
        await asyncio.sleep(0)
        turns += 1
        if len(members) < left:
            left, since, turns = len(members), time.monotonic(), 0
