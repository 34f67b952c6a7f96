"""The local line has its limits: towards who waits elsewhere, towards time, and towards what cannot be asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.acquire.local_queue import SPAN
from asynclock.rules.model import Notice, Op, Queueing, Serve, Verb
from asynclock.rules.mutex import MUTEX
from tests.support.distant_stores import Beyond
from tests.support.probes import (
    contended,
    deliver_notice,
    extend,
    forget_all,
    hold_of,
    id_of,
    intercept_notices,
    last_fence,
    local_queues_of,
    tickets_of,
)
from tests.support.still_clock import Stand, Still, forgotten, idle, turns
from tests.support.waiters import LIMIT, LONG

both = pytest.mark.parametrize("nodes", [1, 5])


# -- who waits elsewhere ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("tasks", [2, 3, 20])
async def test_a_busy_line_lets_others_in(name: str, nodes: int, tasks: int) -> None:
    """Tasks of one process want the name again and again, and are quicker than any call from a server to another
    process. Its task is served all the same, every time, after a few round trips of theirs."""
    beyond = Beyond(nodes, name, way=0.001)
    log: list[str] = []
    waited: list[int] = []

    async def busy(lock: Any) -> None:
        while len(waited) < 5:
            async with lock:
                log.append("ours")
                await asyncio.sleep(0)

    async with beyond.opened() as ours, beyond.opened() as theirs:
        lines = [asyncio.create_task(busy(ours(name))) for _ in range(tasks)]
        await beyond.pass_time(0.05, 0.0005)
        for _ in range(5):
            before = len(log)
            guest = asyncio.create_task(theirs(name).acquire(timeout=None))
            while not guest.done() and len(log) - before < 100 * SPAN:
                await beyond.pass_time(0.0005, 0.0005)
            waited.append(len(log) - before)
            await beyond.finish(guest)
            await beyond.finish(asyncio.create_task(guest.result().release()))
        await beyond.finish(*lines)
    assert max(waited) <= 8 * SPAN


async def test_who_gets_in_first_is_told_of_those_who_wait(shared_urls: list[str], name: str) -> None:
    """It asked as the name had just become free, and was let in ahead of somebody who waits: the servers say so with
    their yes, and with its release that one is called."""
    async with Redlock(*shared_urls, lease=LONG) as client, Redlock(*shared_urls, lease=LONG) as other:
        first = await client(name).acquire(timeout=None)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        async with asyncio.timeout(LIMIT):
            while len((await client.inspect(name)).waiters) < 1 or not idle(other):
                await asyncio.sleep(0.005)
            calls = asyncio.Queue[int]()
            hears = intercept_notices(other, lambda index, notice: calls.put_nowait(index))
            await first.release()
            for _ in shared_urls:
                await calls.get()
            ahead = await client(name).acquire(timeout=0)
            assert ahead is not None
            while not contended(ahead):  # a majority is enough for the lease; each of the others says it, too
                await asyncio.sleep(0.005)
            intercept_notices(other, hears)
            await ahead.release()
            await (await waiting).release()


# -- whose time is up ------------------------------------------------------------------------------------------------


@both
async def test_its_time_ends_as_another_begins_to_ask(name: str, nodes: int) -> None:
    """It stood behind a task of its own process that held the name. That gives it back, the next in line asks, and
    while the question is under way the time of the one behind is up: it was held all the time, nothing is out of
    reach."""
    beyond = Beyond(nodes, name, way=0.015)
    async with beyond.opened() as client:
        held = await beyond.lease(client)
        first = asyncio.create_task(client(name).acquire(timeout=None))
        await turns()
        second = asyncio.create_task(client(name).acquire(timeout=0.1))
        await beyond.pass_time(0.08)
        giving = asyncio.create_task(held.release())
        await beyond.finish(second)
        assert not first.done()
        assert second.result() is None
        await beyond.finish(first, giving)


@both
async def test_its_time_ends_as_it_begins_to_ask_itself(name: str, nodes: int) -> None:
    """The same where it is itself the next in line, less than a round trip before its time is up."""
    beyond = Beyond(nodes, name, way=0.015)
    async with beyond.opened() as client:
        held = await beyond.lease(client)
        waiting = asyncio.create_task(client(name).acquire(timeout=0.1))
        await beyond.pass_time(0.08)
        giving = asyncio.create_task(held.release())
        await beyond.finish(waiting)
        assert waiting.result() is None
        await beyond.finish(giving)
        await beyond.pass_time(0.1)
        assert not any(store.state(name).holds for store in beyond.stores)
        assert forgotten(client)


@both
async def test_nobody_was_ever_answered(name: str, nodes: int) -> None:
    """The servers are out of reach from the beginning: who asks, and who stands behind him, hears just that when its
    time is up. Neither saw anybody hold the name."""
    beyond = Beyond(nodes, name, way=0.015)
    async with beyond.opened() as client:
        beyond.hear(False)
        asking = asyncio.create_task(client(name).acquire(timeout=0.2))
        standing = asyncio.create_task(client(name).acquire(timeout=0.1))
        await beyond.finish(asking, standing)
        for task in asking, standing:
            assert isinstance(task.exception(), QuorumUnavailable)


@both
async def test_each_asks_for_itself_while_nobody_answers(name: str, nodes: int) -> None:
    """The connections of who asks break: who stands behind him asks too, and nobody answers it either. When its time
    is up, before any connection breaks again, it has seen an outage and no holder."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as client:
        beyond.hear(False)
        asking = asyncio.create_task(client(name).acquire(timeout=5.0))
        standing = asyncio.create_task(client(name).acquire(timeout=0.5))
        await beyond.pass_time(0.1)
        beyond.hang_up()
        await beyond.finish(standing)
        assert isinstance(standing.exception(), QuorumUnavailable)
        assert not asking.done()
        await beyond.finish(asking, within=6.0)
        assert isinstance(asking.exception(), QuorumUnavailable)


@both
async def test_out_of_reach_for_longer_than_a_round_trip(name: str, nodes: int) -> None:
    """It stood behind a holder of its own process; but when that had gone, the servers fell silent for longer than
    they are given: an outage, and not somebody who holds the name."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened(lease=0.6, renew=False) as client:
        held = await beyond.lease(client)
        waiting = asyncio.create_task(client(name).acquire(timeout=5.0))
        await turns()
        beyond.hear(False)
        await beyond.pass_time(0.7)
        assert not held.held
        beyond.hang_up()
        await beyond.finish(waiting, within=10.0)
        assert isinstance(waiting.exception(), QuorumUnavailable)


@both
async def test_a_cancelled_question_is_no_outage(name: str, nodes: int) -> None:
    """In an outage two tasks ask for themselves. The servers answer the first one that another client holds the name;
    the second is cancelled while it asks. A task that comes later and waits behind the first is told that the name was
    held: nothing is out of reach."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as other, beyond.opened() as client:
        held = await beyond.lease(other)
        beyond.hear(False)
        asking = asyncio.create_task(client(name).acquire(timeout=None))
        standing = asyncio.create_task(client(name).acquire(timeout=None))
        await beyond.pass_time(0.1)
        beyond.hang_up()
        await turns()  # the second asks
        beyond.hear(True)
        await beyond.pass_time(0.1)
        (ticket,) = tickets_of(client)  # the first was refused, and waits
        beyond.hang_up()
        await turns()  # the second pauses
        for index in range(nodes):
            deliver_notice(client, index, Notice(ticket, 1, name=name))
        await beyond.pass_time(0.008, step=0.001)  # the first was refused again
        beyond.hear(False)
        await beyond.pass_time(0.03)  # the second asks again
        standing.cancel()
        await asyncio.wait({standing})
        beyond.hear(True)
        late = asyncio.create_task(client(name).acquire(timeout=0.1))
        await beyond.finish(late)
        assert late.result() is None
        await beyond.finish(asyncio.create_task(held.release()), asking)


# -- what is lost as it is passed on ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("how", ["forgotten", "expired"])
async def test_lost_in_the_turn_in_which_it_was_passed_on(name: str, nodes: int, how: str) -> None:
    """The hold goes to the next in line, and is lost before that one runs: the servers forgot it, or the loop was
    blocked for as long as it lasts. The heir does not enter: it goes on asking, and has a hold of its own."""
    stand = Stand(nodes)
    async with stand.client() as client:
        lease, heir = await about_to_inherit(stand, client, name)
        if how == "forgotten":
            for store in stand.stores:
                forget_all(store)
            extend(lease, 5.0)  # the answer is there before the heir runs
            await lease.release()
        else:
            await lease.release()
            stand.clock.block(60.0)
        async with asyncio.timeout(LIMIT):
            while not heir.done():
                await turns()
                stand.clock.advance(0.01)
        assert heir.result() is not hold_of(lease)
        assert not local_queues_of(client)


async def test_lost_to_somebody_else_as_it_was_passed_on(name: str) -> None:
    """The same where another client has it by then: the heir waits for that one, and comes after it."""
    stand = Stand(1)
    async with stand.client() as client, stand.client() as other:
        lease, heir = await about_to_inherit(stand, client, name)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns()
        store = stand.stores[0]
        breaks = Op(Verb.BREAK, MUTEX, name, "", 1.0, 0, 3600.0, queueing=Queueing(Serve.GRANT))
        store.decide("", breaks, lambda reply: None)
        extend(lease, 5.0)
        await lease.release()
        got = await waiting
        await turns()
        assert not heir.done()
        await got.release()
        assert await heir is not hold_of(lease)


async def about_to_inherit(stand: Stand, client: Redlock, name: str) -> tuple[Any, asyncio.Task[Any]]:
    """A lease that may be passed on; and the task that is next in line for it, which answers with the hold under which
    its body ran."""

    async def body() -> object:
        async with client(name) as mine:
            assert mine.held
            ids = [store.state(name).holds[0].id for store in stand.stores if store.state(name).holds]
            assert ids.count(id_of(mine)) > len(stand.stores) // 2
            return hold_of(mine)

    first = await client(name).acquire(timeout=None)
    head = asyncio.create_task(client(name).acquire(timeout=None))
    heir = asyncio.create_task(body())
    await turns(20)
    await first.release()
    lease = await head
    assert lease.fence < last_fence(lease)
    return lease, heir


# -- what cannot be asked --------------------------------------------------------------------------------------------


async def test_a_lease_that_is_too_short_for_the_nodes(name: str) -> None:
    """It was made before the nodes were known, so nobody could tell; and it stands in line. Its own acquire says so:
    not the release before it, nor who comes after it."""
    still = Still(3, name)
    client = Redlock()
    short = client(name, lease=0.12)
    client.configure(*still.stores)
    async with asyncio.timeout(LIMIT), client:
        held = await client(name).acquire(timeout=None)
        standing = asyncio.create_task(short.acquire(timeout=None))
        behind = asyncio.create_task(client(name).acquire(timeout=None))
        await turns()
        await held.release()
        got = await behind
        with pytest.raises(ConfigError, match="node_timeout"):
            await standing
        assert not idle(client)
        await got.release()
        assert forgotten(client)
