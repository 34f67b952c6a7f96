"""Looks at the table in the background: each minute, and soon after an error that may be due to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

from asynclock.stores.sql.background import Background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PAUSE = 60.0
"""Seconds between two looks, at most. Somebody may drop the key while clients are connected."""

_LEAST = 1.0
"""Seconds between two looks, at least: an error of one op, which has nothing to do with the table, may come often."""


class TableWatch:
    """The background task of one event loop. `look` may raise any error: ops report what is wrong with the database."""

    def __init__(self, look: Callable[[], Awaitable[object]]) -> None:
        self._look = look
        self._suspected = asyncio.Event()
        self._background = Background(self._run, "asynclock looks at the table")

    def suspect(self) -> None:
        """An op has failed, and the table may be the reason."""
        self._suspected.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE * random.uniform(0.8, 1.0)):  # noqa: S311 - jitter
                    await self._suspected.wait()
            self._suspected.clear()
            with contextlib.suppress(Exception):
                await self._look()
            await asyncio.sleep(_LEAST)

    async def aclose(self) -> None:
        await self._background.aclose()
