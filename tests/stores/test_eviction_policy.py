"""A server that deletes keys when its memory is full: the log warns, because locks are keys with an expiry."""

from __future__ import annotations

import pytest

from asynclock import Redlock
from tests.support.probes import nodes_of
from tests.support.servers import Server, Servers
from tests.support.waiters import reconnected, works


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "maxmemory-policy" in record.getMessage()]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_d6_eviction_is_warned_of(
    servers: Servers, name: str, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """Once for each server, also after it was connected again; locks work."""
    server = servers.start("--maxmemory", "100mb", "--maxmemory-policy", policy)
    async with Redlock(server.url) as redlock:
        await works(redlock, name)
        server.restart()
        await reconnected(nodes_of(redlock)[0])
        await works(redlock, name)
    assert len(warnings_of(caplog)) == 1
    assert policy in warnings_of(caplog)[0]


@pytest.mark.parametrize("options", [(), ("--maxmemory-policy", "allkeys-lru"), ("--maxmemory", "100mb")])
async def test_d6_without_eviction_there_is_no_warning(
    servers: Servers, caplog: pytest.LogCaptureFixture, options: tuple[str, ...]
) -> None:
    """Neither without a limit, nor with noeviction."""
    async with Redlock(servers.start(*options).url):
        assert warnings_of(caplog) == []


async def test_d6_a_server_that_forbids_info(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The check is left out, silently."""
    with server.cli() as cli:
        cli.config_set("maxmemory", "100mb")
        cli.config_set("maxmemory-policy", "allkeys-lru")
        cli.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~*", "&*", "+@all", "-info")
    async with Redlock(f"unix://worker:secret@{server.path}") as redlock, redlock("x"):
        assert warnings_of(caplog) == []
