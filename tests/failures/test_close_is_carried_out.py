"""A client closes, and its releases and withdrawals are carried out: also while servers stand still for longer than a
command may take, and with many waiters of its own (HAZARDS A19)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynclock import Lease, Redlock
from asynclock.events import Event, ReleaseFailed
from asynclock.stores.redis import delivery as _delivery
from asynclock.stores.redis import handlers as _handlers
from tests.support.closing_probes import is_cut
from tests.support.default_keys import key_of
from tests.support.probes import connection_of, intercept_notices, nodes_of
from tests.support.servers import Server
from tests.support.shifted_clock import Shifted, shifted
from tests.support.waiters import LIMIT, back, in_queue, queue, until, urls_of

pytestmark = pytest.mark.both_loops("the loop closes the transports")

LEASES = 300
"""A server reads 16 kB at once. If its client has gone by then, it drops what follows. So many releases are more."""

LEASE = 600.0
"""A lease whose third no test could wait for: then a waiter asks by itself."""

LAST_WORDS = 0.5
"""Seconds after which a client that awaits no reply has disconnected: five times what a connection waits at its end."""

NODE_TIMEOUT = 0.05


@pytest.fixture(autouse=True)
def patient_closes(monkeypatch: pytest.MonkeyPatch, patient_farewells: None) -> None:
    """A close waits for as long as the test does. Also a busy machine then ends it in time."""
    del patient_farewells
    monkeypatch.setattr(_delivery, "AT_MOST", LIMIT)


def client_of(servers: Sequence[Server], node_timeout: float = NODE_TIMEOUT) -> Redlock:
    return Redlock(*urls_of(servers), lease=LEASE, max_lease=LEASE, node_timeout=node_timeout, patience=LIMIT)


async def many_leases(client: Redlock, name: str) -> list[Lease]:
    """Leases of `LEASES` names, which any server can have."""
    return [await client(f"{name}:{number}").acquire(timeout=None) for number in range(LEASES)]


@asynccontextmanager
async def still(servers: Sequence[Server]) -> AsyncIterator[Callable[[], None]]:
    """They stand still, until the function is called or the block ends."""

    def thaw() -> None:
        for server in servers:
            server.thaw()

    for server in servers:
        server.freeze()
    try:
        yield thaw
    finally:
        thaw()


async def closes_later(client: Redlock, thaw: Callable[[], None]) -> None:
    """The client still waits when the servers have long been overdue, and closes once they run again."""
    closing = asyncio.create_task(client.aclose())
    done, _ = await asyncio.wait({closing}, timeout=LAST_WORDS)
    assert not done
    thaw()
    async with asyncio.timeout(LIMIT):
        await closing


def are_free(servers: Sequence[Server], name: str) -> bool:
    """Whether at most a minority has each of the names: another client can acquire it."""
    holders = [0] * LEASES
    for server in servers:
        with server.cli() as cli:
            found: Any = cli.mget([key_of(f"{name}:{number}") for number in range(LEASES)])
        holders = [count + (each is not None) for count, each in zip(holders, found, strict=True)]
    return max(holders) <= len(servers) // 2


@pytest.mark.usefixtures("patient_connections")
async def test_a19_leases_end_where_most_servers_stand_still(five: Sequence[Server], name: str) -> None:
    """Three of five servers do not run as the client closes: all of its leases end."""
    client = client_of(five[:])
    leases = await many_leases(client, name)
    async with still(five[:3]) as thaw:
        await closes_later(client, thaw)
    assert leases
    await until(lambda: are_free(five, name))


@pytest.mark.usefixtures("patient_connections")
async def test_a19_a_release_that_had_no_majority_is_carried_out(five: Sequence[Server], name: str) -> None:
    """Three of five servers do not run. All leases are released, which no majority answers, and then the client closes:
    the leases end."""
    client = client_of(five[:])
    leases = await many_leases(client, name)
    async with still(five[:3]) as thaw:
        await client.release_all()
        await closes_later(client, thaw)
    assert leases
    await until(lambda: are_free(five, name))


@pytest.mark.usefixtures("patient_connections")
async def test_a19_leases_end_where_the_silent_connections_were_given_up(
    five: Sequence[Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five servers do not run for so long that the closing client takes them for dead. It connects again, and
    waits until all releases have been answered there."""
    client = client_of(five[:])
    leases = await many_leases(client, name)
    await back(client)
    silent = [connection_of(node) for node in nodes_of(client)[:3]]
    monkeypatch.setattr(_handlers, "_SILENCE", 0.0)  # from now on three node timeouts are enough
    async with still(five[:3]) as thaw:
        closing = asyncio.create_task(client.aclose())
        await until(lambda: all(is_cut(each) for each in silent))
        thaw()
        async with asyncio.timeout(LIMIT):
            await closing
    assert leases
    assert are_free(five, name)


@pytest.mark.usefixtures("patient_connections")
async def test_a19_no_release_is_reported_that_a_majority_has_carried_out(five: Sequence[Server], name: str) -> None:
    """The answers come too late for their time limit, and before the client has closed: no release has failed."""
    failed: list[Event] = []
    client = client_of(five[:])
    client.subscribe(lambda event: failed.append(event) if isinstance(event, ReleaseFailed) else None)
    lease = await client(name).acquire(timeout=None)
    async with still(five[:3]) as thaw:
        await closes_later(client, thaw)
    assert not lease.held
    assert not failed


@pytest.mark.usefixtures("patient_connections")
async def test_a_close_does_not_wait_for_a_minority_that_stands_still(five: Sequence[Server], name: str) -> None:
    """Two of five servers do not run. The others carry the releases out, and the client closes in less than the time
    that it has for a majority. It leaves no task and no socket."""
    tasks, client = asyncio.all_tasks(), client_of(five[:])
    leases = await many_leases(client, name)
    connections = [connection_of(node) for node in nodes_of(client)]
    async with still(five[3:]):
        async with asyncio.timeout(LIMIT / 2):
            await client.aclose()
        assert asyncio.all_tasks() == tasks
        assert all(is_cut(each) for each in connections)
    assert leases
    assert are_free(five, name)


@pytest.mark.usefixtures("patient_connections")
async def test_a_close_ends_beside_a_majority_that_stays_silent(
    five: Sequence[Server], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five servers do not run. When its time is over, the client closes without an error, and leaves no task
    and no socket."""
    monkeypatch.setattr(_delivery, "AT_MOST", LAST_WORDS)
    tasks, client = asyncio.all_tasks(), client_of(five[:])
    lease = await client(name).acquire(timeout=None)
    connections = [connection_of(node) for node in nodes_of(client)]
    async with still(five[:3]):
        async with asyncio.timeout(LIMIT / 2):
            await client.aclose()
        assert asyncio.all_tasks() == tasks
        assert all(is_cut(each) for each in connections)
    assert not lease.held


# -- tickets -----------------------------------------------------------------------------------------------------------


def notices(server: Server) -> int:
    """The notices that the server has sent since it was asked to forget them."""
    with server.cli() as cli:
        found: Any = cli.info("commandstats")
    return int(found.get("cmdstat_publish", {"calls": 0})["calls"])


def forget_notices(servers: Sequence[Server]) -> None:
    for server in servers:
        with server.cli() as cli:
            cli.config_resetstat()


@asynccontextmanager
async def own_waiters(
    servers: Sequence[Server], name: str, limit: int, waiters: int, node_timeout: float = LIMIT
) -> AsyncIterator[tuple[Redlock, Redlock]]:
    """A client that holds all places of a semaphore while tasks of its own wait for one, and another client."""
    async with client_of(servers, node_timeout) as client, client_of(servers, node_timeout) as other:
        held = [await client.semaphore(name, limit).acquire(timeout=None) for _ in range(limit)]
        waiting = [asyncio.create_task(client.semaphore(name, limit).acquire(timeout=None)) for _ in range(waiters)]
        await until(in_queue(servers, name, waiters))
        assert len(held) == limit
        yield client, other
        await asyncio.gather(*waiting, return_exceptions=True)  # the client was closed


@pytest.mark.usefixtures("no_looks")
async def test_a19_a_close_notifies_no_waiter_of_its_own(five: Sequence[Server], name: str) -> None:
    """A client with all places of a semaphore and 40 waiters closes: the servers send no notice. Each of its releases
    and withdrawals would notify up to 16 of the waiters, and the close would last for all of these notices."""
    servers = five[:3]
    async with own_waiters(servers, name, limit=16, waiters=40) as (client, _):
        forget_notices(servers)
        await client.aclose()
        assert [notices(server) for server in servers] == [0, 0, 0]
        assert in_queue(servers, name, 0)()


async def test_a19_a_waiter_of_another_client_is_notified_by_a_close(five: Sequence[Server], name: str) -> None:
    """The same, and a waiter of another client is in the queue, behind those of the client that closes. It gets the
    semaphore, long before it asks by itself."""
    servers = five[:3]
    async with own_waiters(servers, name, limit=4, waiters=12) as (client, other):
        waiting = asyncio.create_task(other.semaphore(name, 4).acquire(timeout=None))
        await until(in_queue(servers, name, 13))
        await client.aclose()
        async with asyncio.timeout(LIMIT):
            assert (await waiting).held


async def test_a19_a_waiter_before_those_of_the_closing_client_is_notified(five: Sequence[Server], name: str) -> None:
    """A waiter of another client is the first in the queue of a semaphore, before those of the client that closes."""
    servers = five[:3]
    async with client_of(servers, LIMIT) as client, client_of(servers, LIMIT) as other:
        held = await client.semaphore(name, 1).acquire(timeout=None)
        waiting = asyncio.create_task(other.semaphore(name, 1).acquire(timeout=None))
        await until(in_queue(servers, name, 1))
        own = [asyncio.create_task(client.semaphore(name, 1).acquire(timeout=None)) for _ in range(12)]
        await until(in_queue(servers, name, 13))
        await client.aclose()
        async with asyncio.timeout(LIMIT):
            assert (await waiting).held
        assert not held.held
        await asyncio.gather(*own, return_exceptions=True)


@pytest.mark.parametrize("late", [False, True])
async def test_a19_a_waiter_behind_marks_that_the_client_has_not_read(
    five: Sequence[Server], name: str, late: bool
) -> None:
    """The servers have marked the hold of a client for waiters of its own, and it closes before it reads that. The own
    command of a server does not release a marked hold, so the release would be repeated, after the last withdrawal has
    served the queue: nobody would notify the waiter of another client. `late`: its loop was blocked beyond the lease,
    so the hold ends by the clock and not by the close."""
    servers, clock = five[:3], Shifted()
    late_client = shifted(urls_of(servers), clock, lease=LEASE, max_lease=LEASE, node_timeout=LIMIT, patience=LIMIT)
    async with late_client if late else client_of(servers, LIMIT) as client, client_of(servers, LIMIT) as other:
        held = await client(name, fair=True).acquire(timeout=None)
        intercept_notices(client, lambda index, notice: None)
        own = [asyncio.create_task(client(name, fair=True).acquire(timeout=None)) for _ in range(3)]
        await until(in_queue(servers, name, 3))
        waiting = asyncio.create_task(other(name, fair=True).acquire(timeout=None))
        await until(in_queue(servers, name, 4))
        clock.jump(LEASE)
        await client.aclose()
        async with asyncio.timeout(LIMIT):
            lease = await waiting
        assert lease.held
        assert lease.fence > held.fence
        await asyncio.gather(*own, return_exceptions=True)


@pytest.mark.usefixtures("patient_connections")
async def test_a19_tickets_are_withdrawn_where_most_servers_stand_still(five: Sequence[Server], name: str) -> None:
    """Three of five servers do not run as the client closes: none of its tickets stays at a majority."""
    async with own_waiters(five[:], name, limit=1, waiters=100, node_timeout=NODE_TIMEOUT) as (client, _):
        async with still(five[:3]) as thaw:
            await closes_later(client, thaw)
        await until(lambda: sum(bool(queue(server, name)) for server in five) <= 2)
