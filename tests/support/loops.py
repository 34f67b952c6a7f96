"""The event loop that a test runs on: asyncio's own, or uvloop. The name of a test draws one of them, so that half of
the tests run on each. A test of what the loop itself does runs on both: `both_loops(why)` marks it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import pytest
import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
"""By the name that the id of a test shows."""


def loops_of(test: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops on which a test runs."""
    if test.get_closest_marker("both_loops"):
        return LOOPS
    drawn = sorted(LOOPS)[zlib.crc32(test.nodeid.encode()) % len(LOOPS)]
    return {drawn: LOOPS[drawn]}
