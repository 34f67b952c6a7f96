"""The counts that metrics read from a client: what it holds, which acquires wait, and the state of its nodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from asynclock import Redlock
from asynclock.runtime.counts import Counts
from tests.support.probes import acquisitions_of, clock_of, waits_for_notice
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.waiters import until

Make = Callable[..., Redlock]


def counts_of(client: Redlock) -> Counts:
    """Of its only session."""
    (counts,) = client._counts_of_sessions()
    return counts


async def test_a_client_that_was_not_used_has_no_counts(make: Make) -> None:
    """It has no session, and making one for a metric would connect it."""
    assert make()._counts_of_sessions() == []


async def test_each_hold_counts_once(redlock: Redlock, name: str) -> None:
    """Of each kind; one of several names, and one that its owner entered twice, too."""
    twice = redlock(f"{name}:r", reentrant=True)
    async with redlock(name), redlock.multi(f"{name}:a", f"{name}:b"), twice, twice:
        assert counts_of(redlock).held == 3
        async with redlock.read(f"{name}:s"), redlock.semaphore(f"{name}:p", 3):
            assert counts_of(redlock).held == 5
    assert counts_of(redlock).held == 0


async def test_holders_of_one_name_count_each(redlock: Redlock, name: str) -> None:
    """Of a kind that several may hold."""
    async with redlock.read(name), asyncio.TaskGroup() as group:
        leave = asyncio.Event()

        async def read() -> None:
            async with redlock.read(name):
                await leave.wait()

        group.create_task(read())
        await until(lambda: counts_of(redlock).held == 2)
        leave.set()


async def test_waiters_count_while_they_wait(make: Make, name: str) -> None:
    """In the local queue, and at the servers; the one try of timeout=0 is no wait."""
    client, other = make(), make()
    async with other(name):
        assert await client(name).acquire(timeout=0) is None
        assert counts_of(client).waiting == 0
        waiters = [asyncio.create_task(client(name).acquire()) for _ in range(3)]
        await until(lambda: sum(map(waits_for_notice, acquisitions_of(client))) == 3)
        assert counts_of(client).waiting == 3
    for waiter in asyncio.as_completed(waiters):
        lease = await waiter
        await lease.release()
    assert counts_of(client).waiting == 0


async def test_the_first_request_is_no_wait(server: Server, name: str) -> None:
    """The servers may grant it at once."""
    async with Proxy(server.path.with_suffix(".proxy"), server.path) as proxy, Redlock(proxy.url) as redlock:
        proxy.hold_replies()
        acquiring = asyncio.create_task(redlock(name).acquire())
        await until(lambda: proxy.held)
        assert counts_of(redlock).waiting == 0
        proxy.let_go()
        await (await acquiring).release()


async def test_another_thread_reads_them(redlock: Redlock, name: str) -> None:
    """The SDK collects in a thread of its own, while the loop works."""
    read: list[int] = []
    failed: list[Exception] = []
    enough = threading.Event()

    def reader() -> None:
        try:
            while len(read) < 200:
                read.append(counts_of(redlock).held)
        except Exception as error:
            failed.append(error)
        enough.set()

    async def work(number: int) -> None:
        while not enough.is_set():
            async with redlock(f"{name}:{number}"), redlock.read(name):
                await asyncio.sleep(0)

    async with redlock(f"{name}:held"):
        thread = threading.Thread(target=reader)
        thread.start()
        await asyncio.gather(*map(work, range(20)))
        thread.join()
    assert not failed
    assert 1 <= min(read) <= max(read) <= 41


async def test_nodes_are_up_or_down(five: Sequence[Server], name: str) -> None:
    """Each by its address."""
    async with Redlock(*(server.url for server in five)) as redlock:
        up = [(server.url, True) for server in five]
        await until(lambda: [(node.node, node.up) for node in counts_of(redlock).nodes] == up)  # it entered with three
        five[1].kill()
        await until(lambda: [node.up for node in counts_of(redlock).nodes] == [True, False, True, True, True])


async def test_a_round_trip_is_measured_without_a_command(server: Server, name: str) -> None:
    """It is as long as the answer of an op took."""
    async with Proxy(server.path.with_suffix(".proxy"), server.path) as proxy, Redlock(proxy.url) as redlock:
        (before,) = counts_of(redlock).nodes
        assert before.rtt is None
        now = clock_of(redlock).now
        proxy.hold_replies()
        began = now()
        acquiring = asyncio.create_task(redlock(name).acquire())
        await until(lambda: proxy.held)
        at_least = now()
        await until(lambda: now() - at_least > 0.02)
        proxy.let_go()
        lease = await acquiring
        (after,) = counts_of(redlock).nodes
        assert after.rtt is not None
        assert 0.02 < after.rtt < now() - began
        assert lease is not None
        await lease.release()


@pytest.mark.parametrize("make", ["memory"], indirect=True)
async def test_a_store_need_not_measure(make: Make, name: str) -> None:
    """Then there is no round trip."""
    redlock = make()
    async with redlock(name):
        assert [node.rtt for node in counts_of(redlock).nodes] == [None]
