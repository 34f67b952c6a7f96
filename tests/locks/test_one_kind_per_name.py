"""A name is of one kind at a time, on every deployment and both loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import permutations

import pytest

from asynclock import ConfigError, Lock, Redlock
from tests.support.default_keys import key_of
from tests.support.servers import Server

KINDS: dict[str, Callable[[Redlock, str], Lock]] = {
    "mutex": lambda client, name: client(name),
    "read-write lock": lambda client, name: client.write(name),
    "semaphore": lambda client, name: client.semaphore(name, 2),
}


@pytest.mark.every_store
async def test_c14_mixing_kinds_is_an_error_that_names_both(make: Callable[..., Redlock], name: str) -> None:
    """It is raised at once, and does not harm the holder. Once the name is free, it may be of another kind."""
    client, other = make(), make()
    for used, asked in permutations(KINDS, 2):
        async with KINDS[used](other, name) as lease:
            async with asyncio.timeout(10):
                with pytest.raises(ConfigError, match=f"as a {used}.*as a {asked}") as caught:
                    await KINDS[asked](client, name).acquire()
            assert caught.value.name == name
            assert type(caught.value) is ConfigError
            await lease.extend()
            assert (await client.inspect(name)).kind == used
        async with KINDS[asked](client, name):
            pass


async def test_c14_a_key_that_is_no_lock(server: Server, name: str) -> None:
    """It is another program's: the error says so, and the key is left alone."""
    with server.cli() as cli:
        cli.hset(key_of(name), "a", "b")
        async with Redlock(server.url) as client:
            for lock in KINDS.values():
                with pytest.raises(ConfigError, match="hash"):
                    await lock(client, name).acquire()
        assert cli.hgetall(key_of(name)) == {b"a": b"b"}
