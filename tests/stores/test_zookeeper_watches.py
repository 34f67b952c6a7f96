"""The watches that a client has at the servers of ZooKeeper: as many as it needs."""

from __future__ import annotations

import asyncio
import gc
from functools import partial

from kazoo.client import KazooClient

from asynclock import Redlock
from asynclock.stores.zookeeper.client import RemoveWatches
from tests.support.probes import acquisitions_of, waits_for_notice
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, until
from tests.support.zookeeper_clients import client_of
from tests.support.zookeeper_probes import ask, connection_of, most_sent, watchers_of, zookeeper_session


def watched_by(server: ZooKeeper, client: Redlock) -> int:
    """How many nodes a client watches, as the server counts them."""
    session, _ = zookeeper_session(client) or (0, b"")
    sessions = server.ask("wchc").split("0x")
    return sum(each.count("\n\t") for each in sessions if each.startswith(f"{session & (2**64 - 1):x}\n"))


async def wait_in_vain(client: Redlock, name: str) -> None:
    waiting = asyncio.create_task(client(name).acquire(timeout=None))
    await until(lambda: [waits_for_notice(each) for each in acquisitions_of(client)] == [True])
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_waiters_that_give_up_leave_few_watches(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Each waited for another name, and their holders stay for weeks. Neither kazoo nor the server keeps the watches of
    all."""
    async with client_of(shared_zookeeper) as holds, client_of(shared_zookeeper) as waits, asyncio.timeout(2 * LIMIT):
        held = [await holds(f"{name}:{number}").acquire(timeout=None) for number in range(12)]
        for number in range(12):
            await wait_in_vain(waits, f"{name}:{number}")
            gc.collect()
        await connection_of(waits).exists("/")
        assert watchers_of(waits) <= 2
        assert watched_by(shared_zookeeper, waits) <= 2
        for lease in held:
            await lease.release()


async def test_a_node_is_watched_again_after_its_watch_was_removed(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The next waiter for it is woken by the release, and not found by its renewal, ten seconds later."""
    async with client_of(shared_zookeeper) as holds, client_of(shared_zookeeper) as waits, asyncio.timeout(LIMIT):
        held = [await holds(f"{name}:{each}").acquire(timeout=None) for each in "abc"]
        for each in "abc":
            await wait_in_vain(waits, f"{name}:{each}")
        waiting = asyncio.create_task(waits(f"{name}:a").acquire(timeout=None))
        await until(lambda: [waits_for_notice(each) for each in acquisitions_of(waits)] == [True])
        await connection_of(waits).exists("/")
        await held[0].release()
        lease = await waiting
        assert most_sent(waits) == 1
        for each in (lease, *held[1:]):
            await each.release()


async def test_a_watch_that_has_fired_is_not_there_to_be_removed(shared_zookeeper: ZooKeeper, name: str) -> None:
    """The server says so with an error that not each version of kazoo knows. Its thread goes on."""
    async with client_of(shared_zookeeper) as client:
        async with client(name) as lease:
            removed: list[None] = []
            gone = ask(client, RemoveWatches("/locks", partial(removed.append, None), children=True))
            async with asyncio.timeout(LIMIT):
                await asyncio.wait({gone})
            assert type(gone.exception()).__name__ in ("NoWatcherError", "_NoWatcherError")
            await lease.extend()
        assert not removed


async def test_a_holder_watches_on_after_its_node_was_written_to(shared_zookeeper: ZooKeeper, name: str) -> None:
    """By another program. Else the holder learns of a later break at its next renewal only."""
    other = KazooClient(shared_zookeeper.address)
    await asyncio.to_thread(other.start)
    try:
        async with client_of(shared_zookeeper) as client, client(name):
            await until(lambda: watched_by(shared_zookeeper, client) == 1)
            (node,) = await asyncio.to_thread(other.get_children, f"/locks/{name}")
            await asyncio.to_thread(other.set, f"/locks/{name}/{node}", b"")
            await until(lambda: watched_by(shared_zookeeper, client) == 1)
    finally:
        await asyncio.to_thread(other.stop)
        other.close()
