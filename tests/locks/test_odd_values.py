"""Values that are valid for Python, and odd for a server: enums that are texts or numbers, and very long times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest

from asynclock import ConfigError, Redlock

Name: Any = Enum("Name", {"ORDER": "order"}, type=str)
Permits: Any = Enum("Permits", {"TWO": 2}, type=int)
"""The format of their members is the name, and not the value."""


async def test_a_name_that_is_an_enum(make: Callable[..., Redlock], name: str) -> None:
    """It is the lock of its value, for a mutex and a reader, with one counter of tokens and one queue. Keys are made of
    parts here, since the prefix has a hash tag."""
    redlock, other = make(prefix="{odd}:"), make(prefix="{odd}:")
    odd: Any = Enum("Odd", {"NAME": name}, type=str)
    async with redlock(odd.NAME) as lease:
        assert await other(name).acquire(timeout=0) is None
        assert type(lease.name) is str
    async with other(name) as later:
        assert later.fence > lease.fence
    async with redlock(odd.NAME) as last:
        assert last.fence > later.fence
    async with redlock.read(odd.NAME):
        assert await other.write(name).acquire(timeout=0) is None


async def test_permits_that_are_an_enum(make: Callable[..., Redlock], name: str) -> None:
    """Two holders enter, and no third."""
    redlock, other = make(), make()
    async with redlock.semaphore(name, Permits.TWO), other.semaphore(name, 2):
        assert await redlock.semaphore(name, Permits.TWO).acquire(timeout=0) is None


def test_options_that_are_enums() -> None:
    """They are texts by their value."""
    client = Redlock("memory:", metadata=Name.ORDER, prefix=Name.ORDER)
    assert type(client._settings.lock.metadata) is type(client._settings.prefix) is str  # noqa: SLF001 - nothing tells it


@pytest.mark.parametrize("option", ["lease", "max_lease", "min_hold", "fence_memory"])
def test_a_time_that_no_server_can_store(option: str) -> None:
    """Redis counts in ms, with 63 bits."""
    with pytest.raises(ConfigError, match=rf"^{option}=9.22337e.18 s is out of range: give at most 1e.14"):
        Redlock("memory:", **{option: sys.maxsize})


def test_once_for_ever() -> None:
    """`within` is such a time. The longest timedelta is none."""
    client = Redlock("memory:")
    client.once("x", within=timedelta.max)
    for within in (sys.maxsize, 1e308):
        with pytest.raises(ConfigError, match=r"^within=.* s is out of range: give at most 1e.14"):
            client.once("x", within=within)


@pytest.mark.parametrize("prefix", [b"x", 5, "\ud800"])
async def test_a_prefix_of_holders_that_is_no_text(redlock: Redlock, prefix: Any) -> None:
    """A ConfigError, and not an outage."""
    with pytest.raises(ConfigError, match=r"^prefix "):
        [each async for each in redlock.holders(prefix)]
