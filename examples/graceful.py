"""Ends a program on SIGTERM: its task is cancelled, so each `async with` releases its lock at once."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, but SIGTERM cancels the program as Ctrl-C does. The exit code is then 143."""
    terminated = False

    async def until_terminated() -> T:
        task = asyncio.ensure_future(main)

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await task

    with asyncio.Runner() as runner:
        try:
            return runner.run(until_terminated())
        except asyncio.CancelledError:
            if terminated:
                sys.exit(128 + signal.SIGTERM)
            raise
