"""The only node is connected again: its holds are renewed at once, so that those it lost meanwhile are lost at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asynclock import Lease, LockLost, Redlock
from asynclock.events import Lost, Renewed
from tests.support.default_keys import key_of
from tests.support.probes import listens, nodes_of, valid_until
from tests.support.servers import Server
from tests.support.told import Told, told
from tests.support.waiters import LIMIT, reconnected, until

LEASE = 600.0
"""Its renewals are due much later than a test waits."""


@pytest.fixture
async def redlock(server: Server) -> AsyncIterator[Redlock]:
    async with Redlock(server.url, lease=LEASE, max_lease=LEASE) as client:
        yield client


def cut(server: Server) -> None:
    """All clients have to connect again."""
    for kind in ("normal", "pubsub"):
        server.cli().client_kill_filter(_type=kind, skipme=True)


async def held(client: Redlock, name: str, **options: Any) -> Lease:
    lease = await client(name, **options).acquire()
    assert lease is not None
    return lease


async def test_a_restart_loses_all(redlock: Redlock, server: Server, name: str) -> None:
    """The server came back without its data: the body is cancelled when the client has connected again."""
    async with asyncio.timeout(LIMIT):
        with pytest.raises(LockLost) as caught:
            async with redlock(name):
                server.restart()
                await asyncio.sleep(LIMIT)
    assert caught.value.reason == "broken"


async def test_another_got_the_name(redlock: Redlock, server: Server, name: str) -> None:
    """As after a failover that lost the hold, and a grant of the new master to another client."""
    lease = await held(redlock, name)
    server.cli().set(key_of(name), "other", px=60_000)
    cut(server)
    async with asyncio.timeout(LIMIT):
        assert await lease.wait_lost()
    with pytest.raises(LockLost, match="another owner"):
        lease.ensure_held()


async def test_holds_that_are_there_are_extended(redlock: Redlock, server: Server, name: str) -> None:
    """All of them, each once, with one renewal after that as always."""
    leases = [await held(redlock, f"{name}:{number}") for number in range(300)]
    before = [valid_until(each) for each in leases]
    with told(redlock) as events:
        cut(server)
        await until(lambda: renewed(events) >= len(leases))
        assert renewed(events) == len(leases)
    assert all(valid_until(each) > end for each, end in zip(leases, before, strict=True))
    assert not events.of(Lost)
    await redlock.release_all()


async def test_c17_holds_at_a_server_that_sends_no_notices(server: Server, name: str) -> None:
    """Its ACL forbids subscriptions. The idle connection is cut, and another owner has the name meanwhile."""
    with server.cli() as cli:
        cli.acl_setuser("app", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"], reset=True)
    url = server.url.replace("unix://", "unix://app:pw@")
    async with Redlock(url, lease=LEASE, max_lease=LEASE) as client:
        lease = await held(client, name)
        assert not listens(client)
        server.cli().set(key_of(name), "other", px=60_000)
        cut(server)
        async with asyncio.timeout(LIMIT):
            assert await lease.wait_lost()


def renewed(events: Told) -> int:
    return len(events.of(Renewed))


async def test_not_those_that_are_never_renewed(redlock: Redlock, server: Server, name: str) -> None:
    """Nor does a hold with renew=False get a longer end."""
    lease = await held(redlock, name, renew=False)
    end = valid_until(lease)
    other = await held(redlock, f"{name}:other")
    with told(redlock) as events:
        cut(server)
        await until(lambda: renewed(events) == 1)
    assert other.held
    assert valid_until(lease) == end
    await redlock.release_all()


async def test_a_close_meanwhile(server: Server, name: str) -> None:
    """Nothing is left of a client that closes as it connects again with holds."""
    client = Redlock(server.url, lease=LEASE, max_lease=LEASE)
    leases = [await held(client, f"{name}:{number}") for number in range(50)]
    back = asyncio.create_task(reconnected(nodes_of(client)[0]))
    await asyncio.sleep(0)
    cut(server)
    await back
    await client.aclose()
    assert not any(each.held for each in leases)
    assert not [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    assert not server.cli().keys(f"{key_of(name)}*")
