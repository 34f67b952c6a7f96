"""Servers that say nothing, and a client that was too busy to listen (HAZARDS C10)."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from asynclock import QuorumUnavailable, Redlock
from tests.servers import Server
from tests.waiters import back


async def test_c10_a_frozen_minority_costs_nothing(five: list[Server], name: str) -> None:
    """Two of five nodes hang: with a node timeout of ten seconds nobody waits for it even once."""
    async with Redlock(*(each.url for each in five), node_timeout=10.0) as redlock:
        for each in five[:2]:
            each.freeze()
        async with asyncio.timeout(5):
            for _ in range(20):
                async with redlock(name) as lease:
                    await lease.extend()
        for each in five[:2]:
            each.thaw()


@pytest.mark.parametrize("pinged", [False, True])
async def test_c10_a_frozen_node_is_found_down_and_comes_back(five: list[Server], name: str, pinged: bool) -> None:
    """Silent for three node timeouts it is down, so that calls fail at once; it votes again once it wakes. A ping that
    it owes, which has more time, puts that off by nothing."""
    async with Redlock(*(each.url for each in five)) as redlock:
        await redlock.health()
        five[0].freeze()
        node = redlock._session().quorum.nodes[0]
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            if pinged:
                group.create_task(redlock.health())
                while not node._link.waiting:
                    await asyncio.sleep(0)
            while node.error is None:
                async with redlock(name):
                    await asyncio.sleep(0)
        assert "silent" in str(node.error)
        five[0].thaw()
        await back(redlock)
        async with redlock(name):
            pass


async def test_a_short_lease_hangs_up_on_nobody(server: Server, name: str) -> None:
    """How long a server may be silent is what its oldest command gives it, whatever is asked after that."""
    async with Redlock(server.url) as redlock:
        await redlock.health()
        server.freeze()
        node = redlock._session().quorum.nodes[0]
        link = node._link
        long = asyncio.create_task(redlock(name).acquire(timeout=None))
        while not link.waiting or node.clock.now() - link.moved_at < 0.6:  # longer than a short lease is patient
            await asyncio.sleep(0.01)
        with pytest.raises(QuorumUnavailable):
            await redlock(f"{name}:short", lease=0.1).acquire(timeout=0)
        server.thaw()
        async with asyncio.timeout(5), await long as lease:
            assert lease.held
        assert node._link is link


async def test_c10_nodes_that_accept_and_say_nothing(five: list[Server], name: str) -> None:
    """Half-open peers are no reason to wait at the first use either."""
    folder = five[0].path.parent
    mute = []
    for i in range(2):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / f"mute{i}"))
        listener.listen()
        mute.append(listener)
    urls = [each.url for each in five[:3]] + [
        f"unix://{listener.getsockname()}?socket_connect_timeout=0.5" for listener in mute
    ]
    async with asyncio.timeout(4), Redlock(*urls) as redlock, redlock(name) as lease:
        assert lease.held
        health = await redlock.health()
        assert health.ok
        assert [node.ok for node in health.nodes] == [True, True, True, False, False]
    for listener in mute:
        listener.close()


async def test_c10_majority_frozen_then_thawed(five: list[Server], name: str) -> None:
    """A waiter rides out an outage that ends within its timeout."""
    async with Redlock(*(each.url for each in five)) as redlock:
        for each in five[:3]:
            each.freeze()
        with pytest.raises(QuorumUnavailable) as caught:
            await redlock(name).acquire(timeout=0)
        assert caught.value.errors
        waiter = asyncio.create_task(redlock(name).acquire(timeout=20))
        with pytest.raises(QuorumUnavailable):
            await redlock(name).acquire(timeout=0.3)
        assert not waiter.done()
        for each in five[:3]:
            each.thaw()
        lease = await waiter
        assert lease is not None
        await lease.release()


async def test_a_blocked_loop_is_no_outage(five: list[Server], name: str) -> None:
    """A task that blocks the loop for several node timeouts costs no connection and no vote."""
    async with Redlock(*(each.url for each in five[:3]), lease=5.0) as redlock:
        links = [node._link for node in redlock._session().quorum.nodes]  # type: ignore[attr-defined]
        for _ in range(5):
            async with redlock(name):
                time.sleep(0.3)
                await asyncio.sleep(0)
            lease = await redlock(name).acquire(timeout=0)
            assert lease is not None
            time.sleep(0.2)
            await lease.release()
        assert links == [node._link for node in redlock._session().quorum.nodes]  # type: ignore[attr-defined]
