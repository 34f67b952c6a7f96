"""The limits of the local queue: remote waiters, timeouts, and locks that cannot be taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.protocol.local_queue import SPAN
from asynclock.rules.model import Notice, Op, Queueing, Serve, Verb
from asynclock.rules.mutex import MUTEX
from tests.support.cancelled_waits import connected
from tests.support.default_keys import PREFIX
from tests.support.distant_stores import Beyond
from tests.support.memory_probes import forget_all
from tests.support.probes import (
    contended,
    deliver_notice,
    extend,
    hold_of,
    id_of,
    intercept_notices,
    last_fence,
    local_queues_of,
    tickets_of,
)
from tests.support.still_clock import Still, TenureRecord, forgotten, idle, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, until

both = pytest.mark.parametrize("nodes", [1, 5])


# -- remote waiters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("tasks", [2, 3, 20])
async def test_a_busy_local_queue_lets_remote_waiters_in(name: str, nodes: int, tasks: int) -> None:
    """Tasks of one process acquire the name again and again, and are faster than any notice from a server to another
    process. The task of that process is served all the same, each time after a few of their round trips."""
    beyond = Beyond(nodes, name, way=0.001)
    log: list[str] = []
    waited: list[int] = []

    async def busy(lock: Any) -> None:
        while len(waited) < 5:
            async with lock:
                log.append("ours")
                await asyncio.sleep(0)

    async with beyond.opened() as ours, beyond.opened() as theirs:
        tasks_of_ours = [asyncio.create_task(busy(ours(name))) for _ in range(tasks)]
        await beyond.pass_time(0.05, 0.0005)
        for _ in range(5):
            before = len(log)
            guest = asyncio.create_task(theirs(name).acquire(timeout=None))
            while not guest.done() and len(log) - before < 100 * SPAN:
                await beyond.pass_time(0.0005, 0.0005)
            waited.append(len(log) - before)
            await beyond.finish(guest)
            await beyond.finish(asyncio.create_task(guest.result().release()))
        await beyond.finish(*tasks_of_ours)
    assert max(waited) <= 8 * SPAN


async def test_a_newcomer_that_is_granted_knows_of_waiters(shared_urls: list[str], name: str) -> None:
    """It asked as the name had just become free, and was granted ahead of a waiter. The servers say so in the grant,
    and its release notifies that waiter."""
    async with (
        Redlock(*shared_urls, lease=LONG, node_timeout=5.0) as client,
        Redlock(*shared_urls, lease=LONG, node_timeout=5.0) as other,
    ):
        await until(lambda: connected(client) and connected(other))
        first = await client(name).acquire(timeout=None)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        async with asyncio.timeout(LIMIT):
            while len((await client.inspect(name)).waiters) < 1 or not idle(other):
                await asyncio.sleep(0.005)
            calls = asyncio.Queue[int]()
            receive = intercept_notices(other, lambda index, notice: calls.put_nowait(index))
            await first.release()
            for _ in shared_urls:
                await calls.get()
            ahead = await client(name).acquire(timeout=0)
            assert ahead is not None
            while not contended(ahead):  # a majority is enough for the lease; each of the others says it, too
                await asyncio.sleep(0.005)
            intercept_notices(other, receive)
            await ahead.release()
            await (await waiting).release()


# -- whose time is up ------------------------------------------------------------------------------------------------


@both
async def test_its_time_ends_as_another_begins_to_ask(name: str, nodes: int) -> None:
    """It waited behind a task of its own process that held the name. That task releases, the next waiter asks, and
    meanwhile the time of the one behind it is up. The name was held all the time, so this is no outage."""
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
    """The same where it is the next waiter itself, less than a round trip before its time is up."""
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
        assert not any(state_of(store, name).holds for store in beyond.stores)
        assert forgotten(client)


@both
async def test_no_server_ever_answers(name: str, nodes: int) -> None:
    """The servers are out of reach from the beginning. The task that asks and the one behind it both get
    QuorumUnavailable when their time is up: neither saw a holder."""
    beyond = Beyond(nodes, name, way=0.015)
    async with beyond.opened() as client:
        beyond.set_answering(False)
        asking = asyncio.create_task(client(name).acquire(timeout=0.2))
        behind = asyncio.create_task(client(name).acquire(timeout=0.1))
        await beyond.finish(asking, behind)
        for task in asking, behind:
            assert isinstance(task.exception(), QuorumUnavailable)


@both
async def test_each_asks_for_itself_while_no_server_answers(name: str, nodes: int) -> None:
    """The connections of the task that asks break. The waiter behind it asks too, and gets no answer either. When its
    time is up, before any connection breaks again, it has seen an outage and no holder."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as client:
        beyond.set_answering(False)
        asking = asyncio.create_task(client(name).acquire(timeout=5.0))
        behind = asyncio.create_task(client(name).acquire(timeout=0.5))
        await beyond.pass_time(0.1)
        beyond.disconnect()
        await beyond.finish(behind)
        assert isinstance(behind.exception(), QuorumUnavailable)
        assert not asking.done()
        await beyond.finish(asking, within=6.0)
        assert isinstance(asking.exception(), QuorumUnavailable)


@both
async def test_a_task_that_comes_in_an_outage_asks_for_itself(name: str, nodes: int) -> None:
    """One task asks, alone; its connections break, and it backs off. A task that comes now asks for itself: when its
    time is up, before the first one asks again, it has seen an outage and no holder."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as client:
        beyond.set_answering(False)
        asking = asyncio.create_task(client(name).acquire(timeout=5.0))
        await beyond.pass_time(0.01)
        beyond.disconnect()
        await turns()
        later = asyncio.create_task(client(name).acquire(timeout=0.001))
        await beyond.finish(later)
        assert isinstance(later.exception(), QuorumUnavailable)
        await beyond.finish(asking, within=6.0)


@both
async def test_out_of_reach_for_longer_than_a_round_trip(name: str, nodes: int) -> None:
    """It waited behind a holder of its own process. After that release the servers are silent for longer than a round
    trip may take: this is an outage, not a name held by another."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened(lease=0.6, renew=False) as client:
        held = await beyond.lease(client)
        waiting = asyncio.create_task(client(name).acquire(timeout=5.0))
        await turns()
        beyond.set_answering(False)
        await beyond.pass_time(0.7)
        assert not held.held
        beyond.disconnect()
        await beyond.finish(waiting, within=10.0)
        assert isinstance(waiting.exception(), QuorumUnavailable)


@both
async def test_an_outage_ends_when_the_first_task_has_the_name(name: str, nodes: int) -> None:
    """The servers are silent for a moment, and then the first of two tasks has the name. The time of the second is up
    behind it: the name was held, and nothing is out of reach any more."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened(lease=LONG) as client:
        beyond.set_answering(False)
        first = asyncio.create_task(client(name).acquire(timeout=None))
        second = asyncio.create_task(client(name).acquire(timeout=3.0))
        await beyond.pass_time(0.1)
        beyond.disconnect()
        await turns()
        beyond.set_answering(True)
        await beyond.finish(first)
        await beyond.finish(second)
        assert second.result() is None
        await beyond.finish(asyncio.create_task(first.result().release()))


@both
async def test_a_close_lets_nobody_ask(name: str, nodes: int) -> None:
    """The client closes while tasks wait behind a holder of its own process: the name is released, and the next task
    does not ask for it."""
    still = Still(nodes, name)
    async with still.client(lease=LONG) as client:
        lease = await client(name).acquire(timeout=None)
        waiting = [asyncio.create_task(client(name).acquire(timeout=None)) for _ in range(3)]
        await turns()
        still.asked()
        await client.aclose()
        assert not lease.held
        assert [verb for verb, _ in still.asked()] == [Verb.RELEASE]
        assert all(isinstance(each, ConfigError) for each in await asyncio.gather(*waiting, return_exceptions=True))


@both
async def test_a_cancelled_question_is_no_outage(name: str, nodes: int) -> None:
    """In an outage two tasks ask for themselves. The servers answer the first one that another client holds the name;
    the second is cancelled while it asks. A task that comes later and waits behind the first is told that the name was
    held: nothing is out of reach."""
    beyond = Beyond(nodes, name, way=0.001)
    async with beyond.opened() as other, beyond.opened() as client:
        held = await beyond.lease(other)
        beyond.set_answering(False)
        asking = asyncio.create_task(client(name).acquire(timeout=None))
        standing = asyncio.create_task(client(name).acquire(timeout=None))
        await beyond.pass_time(0.1)
        beyond.disconnect()
        await turns()  # the second asks
        beyond.set_answering(True)
        await beyond.pass_time(0.1)
        (ticket,) = tickets_of(client)  # the first was refused, and waits
        beyond.disconnect()
        await turns()  # the second pauses
        for index in range(nodes):
            deliver_notice(client, index, Notice(ticket, 1, name=name))
        await beyond.pass_time(0.008, step=0.001)  # the first was refused again
        beyond.set_answering(False)
        await beyond.pass_time(0.03)  # the second asks again
        standing.cancel()
        await asyncio.wait({standing})
        beyond.set_answering(True)
        late = asyncio.create_task(client(name).acquire(timeout=0.1))
        await beyond.finish(late)
        assert late.result() is None
        await beyond.finish(asyncio.create_task(held.release()), asking)


# -- what is lost as it is passed on ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("how", ["forgotten", "expired"])
async def test_lost_in_the_turn_in_which_it_was_passed_on(name: str, nodes: int, how: str) -> None:
    """The hold is passed to the next waiter, and lost before that one runs: the servers forgot it, or the loop was
    blocked beyond the lease. The waiter does not enter. It goes on asking, and gets a hold of its own."""
    record = TenureRecord(nodes)
    async with record.client() as client:
        lease, next_waiter = await about_to_pass_on(record, client, name)
        if how == "forgotten":
            for store in record.stores:
                forget_all(store)
            extend(lease, 5.0)  # the answer is there before the next waiter runs
            await lease.release()
        else:
            await lease.release()
            record.clock.block(60.0)
        async with asyncio.timeout(LIMIT):
            while not next_waiter.done():
                await turns()
                record.clock.advance(0.01)
        assert next_waiter.result() is not hold_of(lease)
        assert not local_queues_of(client)


async def test_lost_to_another_client_as_it_was_passed_on(name: str) -> None:
    """The same where another client has the name by then: the next waiter waits for that client, and comes after it."""
    record = TenureRecord(1)
    async with record.client() as client, record.client() as other:
        lease, next_waiter = await about_to_pass_on(record, client, name)
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await turns()
        store = record.stores[0]
        breaks = Op(Verb.BREAK, MUTEX, name, "", 1.0, 0, 3600.0, queueing=Queueing(Serve.GRANT))
        store.decide(PREFIX, breaks, lambda reply: None)
        extend(lease, 5.0)
        await lease.release()
        got = await waiting
        await turns()
        assert not next_waiter.done()
        await got.release()
        assert await next_waiter is not hold_of(lease)


async def about_to_pass_on(record: TenureRecord, client: Redlock, name: str) -> tuple[Any, asyncio.Task[Any]]:
    """A lease that may be passed on, and the task of the next local waiter, which returns the hold under which its body
    ran."""

    async def body() -> object:
        async with client(name) as mine:
            assert mine.held
            ids = [state_of(store, name).holds[0].id for store in record.stores if state_of(store, name).holds]
            assert ids.count(id_of(mine)) > len(record.stores) // 2
            return hold_of(mine)

    first = await client(name).acquire(timeout=None)
    head = asyncio.create_task(client(name).acquire(timeout=None))
    next_waiter = asyncio.create_task(body())
    await turns(20)
    await first.release()
    lease = await head
    assert lease.fence < last_fence(lease)
    return lease, next_waiter


# -- what cannot be asked --------------------------------------------------------------------------------------------


async def test_a_lease_that_is_too_short_for_the_nodes(name: str) -> None:
    """The lock was made before the nodes were known, so its lease could not be checked; and its task waits in the local
    queue. Its own acquire raises ConfigError, neither the release before it nor a later acquire."""
    still = Still(3, name)
    client = Redlock()
    short = client(name, lease=0.12)
    client.configure(*still.stores)
    async with asyncio.timeout(LIMIT), client:
        held = await client(name).acquire(timeout=None)
        too_short = asyncio.create_task(short.acquire(timeout=None))
        behind = asyncio.create_task(client(name).acquire(timeout=None))
        await turns()
        await held.release()
        got = await behind
        with pytest.raises(ConfigError, match="node_timeout"):
            await too_short
        assert not idle(client)
        await got.release()
        assert forgotten(client)
