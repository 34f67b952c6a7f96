"""Searches for embedded servers, as an event loop waits for them: in threads of their own (`shared_calls.py`), one per
folder at a time. A search may have to start the server; and a server, or a process that starts it, may be stopped."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asynclock.stores.embedded.finding import Search
from asynclock.stores.shared_calls import SharedCalls, result_of, wait_for_call

if TYPE_CHECKING:
    from pathlib import Path

    from asynclock.stores.embedded.home import Home

_LOOKS = 1.0
"""Seconds between two looks whether the server still starts."""

_searches = SharedCalls[Search]()


async def socket_of(home: Home, limit: float) -> Path:
    """The socket of the user's server. The search goes on if it takes longer than `limit` seconds, and the next caller
    takes part in it. While a server starts, its own limits count. Raises ConfigError or ConnectionError."""
    search = _searches.start(str(home.path), partial(Search, home))
    await wait_for_call(search, limit)
    while not search.done():
        obstacle = search.obstacle
        if not obstacle.progresses:
            raise ConnectionError(obstacle.text or f"{search.purpose} has no result after {limit:g} s")
        await wait_for_call(search, _LOOKS)
    return result_of(search)
