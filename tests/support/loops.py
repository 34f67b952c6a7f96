"""The event loop that a test runs on: asyncio's own, or uvloop. The name of a test draws one of them, so that half of
the tests run on each. A test of what the loop itself does runs on both: `both_loops(why)` marks it."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable

import pytest
import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
"""By the name that the id of a test shows."""

_IN_ID = re.compile(rf"\b({'|'.join(LOOPS)})-?")


def is_on_other_loop(item: pytest.Item) -> bool:
    """Whether it is the copy of a test for the loop that its name does not draw."""
    shown = _IN_ID.search(item.name.partition("[")[2])
    if shown is None or item.get_closest_marker("both_loops"):
        return False
    drawn = zlib.crc32(_IN_ID.sub("", item.nodeid).encode()) % len(LOOPS)
    return shown[1] != list(LOOPS)[drawn]
