"""Tasks that wait behind another one of their process, for an answer near the end of their time (HAZARDS B11, F19)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import LockTimeout, QuorumUnavailable, Redlock
from asynclock.events import NodeDown
from asynclock.protocol import local_queue
from asynclock.protocol.acquisition import Acquisition
from tests.support.cut_servers import Clocked, proxies_to
from tests.support.fake_clock import FakeClock
from tests.support.probes import acquisitions_of, nodes_of
from tests.support.proxy import KeepingProxy
from tests.support.servers import Server
from tests.support.still_clock import Far, Still, idle, turns
from tests.support.told import told
from tests.support.waiters import LIMIT, LONG, back, until, urls_of
from tests.support.waiting_probes import late_waiters_of

both = pytest.mark.parametrize("nodes", [1, 5])
RTT = 0.08
"""Seconds between a question and its answer, to servers on another continent."""


@both
@pytest.mark.parametrize(("rtt", "limit"), [(0.08, 1.0), (0.045, 0.05)])
@pytest.mark.parametrize("timeout", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("at_once", [False, True])
async def test_f19_far_servers_are_no_outage(
    name: str, nodes: int, timeout: float, rtt: float, limit: float, at_once: bool
) -> None:
    """The answer of far servers takes most of a short timeout, or of the node timeout (`limit`). The task in front is
    made to ask so early that the answer comes in time: None. So it is if that task has just begun (`at_once`), and had
    no answer before."""
    still = Still(nodes, name)
    far = [Far(still.clock) for _ in range(nodes)]
    still.stores = list(far)
    async with still.held(lease=LONG), still.client(lease=LONG, node_timeout=limit) as client:
        for store in far:
            store.rtt = rtt
        first = asyncio.create_task(client(name).acquire(timeout=None))
        await turns()
        for _ in range(1 if at_once else 100):
            still.clock.advance(0.005)
            await turns()
        for _ in range(3):
            began = still.clock.now()
            task = asyncio.create_task(client(name).acquire(timeout=timeout))
            await turns()
            while not task.done():
                still.clock.advance(0.005)
                await turns()
            assert await task is None
            assert still.clock.now() - began < 2 * timeout + 0.01
        for store in far:
            store.rtt = 0.0
        first.cancel()
        await asyncio.wait([first])


@both
async def test_f19_a_timeout_ends_while_connections_are_made_again(
    five: Sequence[Server], name: str, nodes: int
) -> None:
    """The servers close idle connections, accept new ones, and are silent. Tasks behind the first one learn at the end
    of their time that no majority is in reach, and not after connect_timeout. No node is reported as down before."""
    clock = FakeClock()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(Redlock(*urls_of(five[:nodes])))
        held = await other(name).acquire(timeout=None)
        proxies = await proxies_to(stack, five[:nodes])
        stores = [Clocked(each.url, clock) for each in proxies]
        client = await stack.enter_async_context(Redlock(*stores, lease=LONG, connect_timeout=LIMIT))
        with told(client) as seen:
            first = asyncio.create_task(client(name).acquire(timeout=None))
            await until(lambda: idle(client))
            for each in proxies:
                each.hold_replies()
                each.cut()
            await until(lambda: all(node.error is not None for node in nodes_of(client)))
            tasks = [asyncio.create_task(client(name).acquire(timeout=3.0)) for _ in range(3)]
            await until(lambda: len(acquisitions_of(client)) == 4)
            await turns()
            ends = clock.now() + 3.1
            while clock.now() < ends:
                clock.advance(0.05)
                await turns(20)
            assert late_waiters_of(client, name) == 0
            for task in tasks:
                with pytest.raises(QuorumUnavailable):
                    await asyncio.wait_for(task, LIMIT)
            assert seen.of(NodeDown) == []
        for each in proxies:
            each.let_go()
        first.cancel()
        await asyncio.wait([first])
        await held.release()


async def test_f19_a_task_that_cannot_ask_keeps_nobody_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task in front never gets to its question, as in a loop that is blocked again and again. The task behind it
    waits once more, for as long as a last question may take, and then says so."""
    monkeypatch.setattr(Acquisition, "renew_ticket_at", lambda self, at: None)
    still = Still(1, name)
    async with still.held(lease=LONG), still.client(lease=LONG) as client:
        first = asyncio.create_task(client(name).acquire(timeout=None))
        await until(lambda: idle(client))
        task = asyncio.create_task(client(name).acquire(timeout=3.0))
        await turns()
        await still.until(still.clock.now() + 4.0)
        assert task.done()
        with pytest.raises(QuorumUnavailable, match="not asked in time"):
            await task
        first.cancel()
        await asyncio.wait([first])


async def _blocked(still: Still, client: Redlock, many: int) -> tuple[asyncio.Task[Any], list[asyncio.Task[Any]]]:
    """A task, and many behind it that had no time to ask before their time was up, as the loop was blocked."""
    first = asyncio.create_task(client(still.name).acquire(timeout=None))
    await until(lambda: idle(client))
    tasks = [asyncio.create_task(client(still.name).acquire(timeout=3.0)) for _ in range(many)]
    await turns()
    still.clock.block(10.0)
    return first, tasks


async def test_b11_late_waiters_get_their_reply_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer is for all of them; other tasks of the loop run in between."""
    monkeypatch.setattr(local_queue, "SLICE", -1.0)  # one waiter takes longer
    still = Still(1, name)
    async with still.held(lease=LONG), still.client(lease=LONG) as client:
        first, tasks = await _blocked(still, client, 20)
        still.asked()
        still.clock.advance(0.0)
        done, most = 0, 0
        async with asyncio.timeout(LIMIT):
            while done < len(tasks):
                await asyncio.sleep(0)
                before, done = done, sum(task.done() for task in tasks)
                most = max(most, done - before)
        assert most == 1
        assert await asyncio.gather(*tasks) == [None] * len(tasks)
        assert len(still.asked()) == 1
        first.cancel()
        await asyncio.wait([first])


@pytest.mark.parametrize("begun", [True, False], ids=["the asker has begun", "all are late"])
async def test_a_late_reply_counts_the_whole_wait(name: str, begun: bool) -> None:
    """The loop was blocked beyond the time of a task in the queue, or of the task in front, too. It asks late, and its
    error has the seconds from the call to the reply."""
    still = Still(1, name)
    far = Far(still.clock)
    still.stores = [far]
    async with still.held(lease=LONG), still.client(lease=LONG) as client:
        locks = [client(name, timeout=None if begun else 3.0), client(name, timeout=3.0)]
        tasks = []
        for lock in locks:
            tasks.append(asyncio.create_task(lock.__aenter__()))
            await turns()
        still.clock.block(10.0)
        far.rtt = RTT
        for task in tasks[begun:]:
            while not task.done():
                still.clock.advance(RTT / 4)
                await turns()
            with pytest.raises(LockTimeout) as caught:
                await task
            assert caught.value.waited == pytest.approx(10.0, abs=4 * RTT)
        far.rtt = 0.0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_b11_late_waiters_that_are_cancelled_are_forgotten(name: str) -> None:
    """The answer is on its way. Each that is cancelled leaves nothing in the queue."""
    still = Still(1, name)
    far = Far(still.clock)
    still.stores = [far]
    async with still.held(lease=LONG), still.client(lease=LONG) as client:
        first, tasks = await _blocked(still, client, 10)
        far.rtt = RTT
        still.clock.advance(0.0)
        await until(lambda: late_waiters_of(client, name) == 10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert late_waiters_of(client, name) == 0
        far.rtt = 0.0
        first.cancel()
        await asyncio.wait([first])


@both
@pytest.mark.parametrize("dies", [False, True])
async def test_f19_a_refusal_of_servers_that_then_fall_silent(
    five: list[Server], name: str, nodes: int, dies: bool
) -> None:
    """A try without fencing is refused by SET, and asks who the holder is. The servers read nothing any more, or their
    connections break: None, as a majority has refused, and TimedOut."""
    async with AsyncExitStack() as stack:
        fronts = [KeepingProxy(each.path.with_suffix(".keep"), each.path) for each in five[:nodes]]
        for front in fronts:
            await stack.enter_async_context(front)
        holder = await stack.enter_async_context(Redlock(*urls_of(five[:nodes])))
        client = await stack.enter_async_context(Redlock(*(front.url for front in fronts), node_timeout=1.0))
        await back(client)
        async with holder(name, lease=LONG):
            for front in fronts:
                front.keep(b"peek")
            with told(client) as seen:
                trying = asyncio.create_task(client(name, fencing=False).acquire(timeout=0))
                async with asyncio.timeout(LIMIT):
                    for front in fronts:
                        await front.has_kept.wait()
                        if dies:
                            front.cut()
                    assert await trying is None
            assert seen.named() == ["TimedOut"]
