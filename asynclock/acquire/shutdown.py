"""The limits of a close: it ends, whatever the nodes do and whatever happened before."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from asynclock._loop import own_task

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from asynclock.acquire.session import Session

log = logging.getLogger("asynclock")

CLOSING = 2.7
"""Seconds for which a close waits for its nodes. Each has limits of its own; this one is for stores that have none."""

CANCELLING = 0.2
"""Seconds for which it waits for a task that it has cancelled. A driver may lose the cancel."""

_STUCK = 0.5
_TURNS = 100
"""A set that lost no member for so many seconds, and for so many turns of the loop, is given up."""


_LOOK = 0.2
"""Seconds between two looks whether a client that was dropped is still in use."""

_closing: set[asyncio.Task[None]] = set()
"""Strong references: nobody else refers to a client that was dropped."""


def let_go(session: Session) -> None:
    """The program has dropped the client without a close: close it, once no lease and no task depends on it."""
    if session.closed:
        return
    if session.holds or session.under_way:
        session.loop.call_later(_LOOK, let_go, session)
        return
    close_soon(session)


def close_soon(session: Session) -> None:
    """Close it in the background. Leases that are still held are lost."""
    if not session.closed:
        _closing.add(own_task(session.aclose(), "asynclock close", _closing.discard))


async def all_ended(works: Collection[Coroutine[Any, Any, None]], seconds: float) -> None:
    """Run them all, for at most `seconds`. A work that lasts longer is cancelled, and nothing waits for its end. The
    error of a work that fails is logged."""
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
    """Wait a turn or two until nothing is left in it. A member that is stuck is given up: a KeyboardInterrupt may end
    the call that would have woken its task."""
    left, since, turns = len(members), time.monotonic(), 0
    while members and (turns < _TURNS or time.monotonic() - since < _STUCK):
        await asyncio.sleep(0)
        turns += 1
        if len(members) < left:
            left, since, turns = len(members), time.monotonic(), 0
