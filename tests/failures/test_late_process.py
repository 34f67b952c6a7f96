"""A process that gets no CPU time does not take its servers for silent."""

from __future__ import annotations

import asyncio

import pytest

from asynclock import QuorumUnavailable
from tests.support.blocked_loop import block_until, call_timer_of
from tests.support.probes import connection_of, nodes_of, unanswered, unsent
from tests.support.servers import Server
from tests.support.shifted_clock import Shifted, shifted
from tests.support.waiters import until, urls_of

late = pytest.mark.parametrize("late", [0.0, 0.002, 0.02], ids=["on time", "a little late", "late"])


@late
async def test_replies_that_came_without_cpu_time_count(five: list[Server], name: str, late: float) -> None:
    """It got none from the write of its commands until the node timeout was over, to the millisecond or not. The
    replies have come in that time, and it reads them before it looks at the clock."""
    clock = Shifted()
    async with shifted(urls_of(five[:3]), clock, node_timeout=4.0) as redlock:
        nodes = nodes_of(redlock)
        acquiring = asyncio.create_task(redlock(name).acquire(timeout=0))
        while not all(unanswered(connection_of(node)) and not unsent(connection_of(node)) for node in nodes):
            await asyncio.sleep(0)
        block_until(lambda: all(connection_of(node).unread for node in nodes))
        for node in nodes:
            call_timer_of(node, clock, late)
        lease = await acquiring
        assert lease is not None
        await lease.release()


@late
async def test_a_silent_server_is_found_as_soon(server: Server, name: str, late: float) -> None:
    """Without a reply the command fails, although the process got no CPU time."""
    clock = Shifted()
    async with shifted([server.url], clock, node_timeout=4.0) as redlock:
        await redlock.health()
        (node,) = nodes_of(redlock)
        server.freeze()
        acquiring = asyncio.create_task(redlock(name).acquire(timeout=0))
        await until(lambda: unanswered(connection_of(node)) and not unsent(connection_of(node)))
        call_timer_of(node, clock, late)
        with pytest.raises(QuorumUnavailable, match="did not answer"):
            await acquiring
        server.thaw()
