"""Keys of other programs on the same servers."""

from __future__ import annotations

from typing import Any

from asynclock import Redlock
from tests.support.default_keys import PREFIX, keys_of
from tests.support.servers import Server


async def test_d11_the_default_prefix_keeps_a_lock_from_a_key_of_the_application(server: Server) -> None:
    """A lock `order:42` never meets the application's own key `order:42`, and all keys of asynclock have the prefix."""
    with server.cli() as cli:
        cli.set("order:42", "an order")
        async with Redlock(server.url) as redlock, redlock("order:42", timeout=0):
            known: Any = cli.keys("*")
        assert cli.get("order:42") == b"an order"
    ours = {key.decode() for key in known} - {"order:42"}
    assert all(key.startswith(PREFIX) for key in ours)
    assert {keys_of("order:42").hold, keys_of("order:42").fence} <= ours
