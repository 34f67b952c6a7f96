"""Eager tasks (Python 3.12), on every Python."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def eagerly(coro: Coroutine[Any, Any, Any]) -> Any:
    """The first result of a coroutine that runs as an eager task does: as the current task, inside the step of
    another."""
    loop, outer = asyncio.get_running_loop(), asyncio.current_task()
    inner = loop.create_task(asyncio.sleep(0))
    asyncio.tasks._leave_task(loop, outer)  # type: ignore[attr-defined]
    asyncio.tasks._enter_task(loop, inner)  # type: ignore[attr-defined]
    try:
        coro.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        asyncio.tasks._leave_task(loop, inner)  # type: ignore[attr-defined]
        asyncio.tasks._enter_task(loop, outer)  # type: ignore[attr-defined]
    raise AssertionError("it waits")
