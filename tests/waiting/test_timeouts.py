"""An acquire's timeouts are kept, and a waiter is served whenever the release comes (HAZARDS E1)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest

from asynclock import QuorumUnavailable, Redlock
from asynclock._clock import now
from asynclock.rules.model import ID_LENGTH, Verb
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Notice
from tests.support.distant_stores import Beyond
from tests.support.fake_clock import FakeClock
from tests.support.gates import behind_gates
from tests.support.kinds_of_node import each_kind_of_node
from tests.support.probes import acquisitions_of, deliver_notice, tickets_of
from tests.support.servers import Server
from tests.support.still_clock import Far, Still, forgotten, idle, turns
from tests.support.user_store import state_of
from tests.support.waiters import IN_VAIN, LIMIT, LONG, decided, until

Make = Callable[..., Redlock]

both = pytest.mark.parametrize("nodes", [1, 5])
fair_or_not = pytest.mark.parametrize("fair", [False, True], ids=["first-come", "fair"])


# -- timeouts ----------------------------------------------------------------------------------------------------------

PLACES = ["head", "local", "fair", "behind-our-own"]


@both
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("timeout", [1e-6, 0.05, 0.2, 9.99, 10.0, 10.01, 100.0, timedelta(days=1) / 100])
async def test_a_timeout_is_exact(name: str, nodes: int, place: str, timeout: float | timedelta) -> None:
    """The acquire returns None at its moment, not a microsecond before nor after, wherever it waits; and nothing is
    left of it."""
    still = Still(nodes, name)
    seconds = timeout / timedelta(seconds=1) if isinstance(timeout, timedelta) else timeout
    async with still.held() as (ours, lease), still.client() as other:
        client = ours if place == "behind-our-own" else other
        ahead = asyncio.create_task(other(name).acquire(timeout=None)) if place == "local" else None
        await turns()
        began = still.clock.now()
        waiting = asyncio.create_task(client(name, fair=place == "fair").acquire(timeout=timeout))
        await turns()
        await still.until(began + seconds - 5e-7)
        assert not waiting.done()
        still.clock.advance(1e-6)
        async with asyncio.timeout(LIMIT):
            assert await waiting is None
        await turns()
        assert [len(state_of(store, name).queue) for store in still.stores] == [ahead is not None] * nodes
        assert lease.held
        if ahead is not None:
            await lease.release()
            await (await ahead).release()
        assert forgotten(client)


async def test_a_majority_has_answered_the_task_that_asks(name: str) -> None:
    """One node is silent, so the round of the task that asks is open still. The task behind it times out: the name is
    held, and not out of reach."""
    beyond = Beyond(3, name, way=0.001)
    async with beyond.opened() as holder, beyond.opened(node_timeout=2.0) as client:
        lease = await beyond.lease(holder)
        ahead = asyncio.create_task(client(name).acquire(timeout=None))
        await beyond.pass_time(1.0, 0.01)
        beyond.far[2].silent = True
        behind = asyncio.create_task(client(name).acquire(timeout=0.2))
        await beyond.pass_time(0.3, 0.01)
        assert behind.done()
        assert behind.result() is None
        ahead.cancel()
        beyond.set_answering(True)
        beyond.disconnect()
        await beyond.finish(ahead, asyncio.create_task(lease.release()))


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "free"])
@pytest.mark.parametrize("nodes", [1, 3])
async def test_an_answer_between_the_end_of_the_time_and_the_task(name: str, nodes: int, taken: bool) -> None:
    """The time is up, and the answers come before the task wakes. A refusal is one; else the error says it."""
    beyond = Beyond(nodes, name, way=0.02)
    async with beyond.opened() as holder, beyond.opened(node_timeout=1.0) as client:
        lease = await beyond.lease(holder) if taken else None
        waiting = asyncio.create_task(client(name).acquire(timeout=0.0399))
        await turns()
        await beyond.pass_time(0.0398)
        assert not waiting.done()
        beyond.clock.advance(0.001)
        await turns()
        assert waiting.done()
        if lease is not None:
            assert waiting.result() is None
            await beyond.finish(asyncio.create_task(lease.release()))
        else:
            with pytest.raises(QuorumUnavailable, match=f"{nodes} of {nodes} nodes .*: .* answered too late"):
                waiting.result()
            await beyond.pass_time(0.1)
            free = await beyond.lease(client)
            await beyond.finish(asyncio.create_task(free.release()))


@both
async def test_a_timer_that_comes_early(name: str, nodes: int) -> None:
    """A loop may call back a clock tick too soon: the answer is None all the same, and not another try for ever."""
    clock = FakeClock(early=1e-3)
    stores = [MemoryStore(clock) for _ in range(nodes)]
    async with Redlock(*stores) as first, Redlock(*stores) as second:
        lease = await first(name).acquire(timeout=None)
        waiting = asyncio.create_task(second(name).acquire(timeout=1.0))
        await turns()
        for _ in range(2):
            clock.advance(1.0)
            await turns()
        assert waiting.done()
        assert waiting.result() is None
        await lease.release()


@pytest.mark.parametrize("nodes", [1, 3])
async def test_a_timer_that_comes_early_during_a_question(name: str, nodes: int) -> None:
    """The servers have said lately that the name is held, and the time ends a clock tick too soon while a last question
    is under way: the answer is None, and no outage."""
    beyond = Beyond(nodes, name, way=0.02, early=1e-3)
    async with beyond.opened() as holder, beyond.opened(node_timeout=1.0) as client:
        lease = await beyond.lease(holder)
        began = beyond.clock.now()
        waiting = asyncio.create_task(client(name).acquire(timeout=0.9))
        await turns()
        await beyond.pass_time(0.89)
        (whose,) = tickets_of(client)
        for index in range(nodes):
            deliver_notice(client, index, Notice(whose[:ID_LENGTH], 1, 0, name=name))
        await turns()
        assert not idle(client)
        await beyond.pass_time(began + 0.8991 - beyond.clock.now())
        assert waiting.done()
        assert waiting.result() is None
        await beyond.finish(asyncio.create_task(lease.release()))


@each_kind_of_node
@fair_or_not
async def test_a_timeout_by_the_machines_clock(make: Make, name: str, fair: bool) -> None:
    """Never sooner, and not as late as the next renewal of a ticket; at the end no ticket is left."""
    first, second = make(lease=LONG), make(lease=LONG)
    async with second(f"{name}:before"):  # a database takes its time for the first statements of a connection
        pass
    async with first(name):

        async def in_vain() -> float:
            began = now()
            async with asyncio.timeout(LONG / 6):
                assert await second(name, fair=fair).acquire(timeout=IN_VAIN) is None
            return now() - began

        assert await decided(in_vain) >= IN_VAIN - 0.001  # uvloop counts in whole ms
        assert forgotten(second)


@both
@fair_or_not
async def test_zero_asks_once(name: str, nodes: int, fair: bool) -> None:
    """It leaves no ticket, does not wait in the local queue, and asks once, although other tasks of its process wait
    there."""
    still = Still(nodes, name)
    async with still.held() as (ours, lease), still.client() as other:
        tasks = [asyncio.create_task(client(name).acquire(timeout=None)) for client in (ours, other, other)]
        await turns()
        waiting = len(state_of(still.stores[0], name).queue)
        for client in (ours, other):
            still.asked()
            assert await client(name, fair=fair).acquire(timeout=0) is None
            assert [verb for verb, _ in still.asked()] == [Verb.ACQUIRE]
            assert len(state_of(still.stores[0], name).queue) == waiting
        await lease.release()
        for _ in tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks = [each for each in tasks if each not in done]
            for each in done:
                await (await each).release()


@each_kind_of_node
@pytest.mark.parametrize("taken", [False, True], ids=["free", "taken"])
async def test_a_tiny_timeout(make: Make, name: str, taken: bool) -> None:
    """A microsecond is too short for any server: a lease, None, or no answer from a majority; and nothing is left."""
    first, second = make(lease=LONG), make(lease=LONG)
    await second.health()
    lease = await first(name).acquire(timeout=None) if taken else None
    for _ in range(20):
        try:
            got = await second(name).acquire(timeout=1e-6)
        except QuorumUnavailable:
            got = None
        assert got is None or not taken
        if got is not None:
            await got.release()
        assert forgotten(second)
    if lease is not None:
        await lease.release()
    async with asyncio.timeout(LIMIT):
        await (await first(name).acquire(timeout=None)).release()


@each_kind_of_node
@pytest.mark.parametrize("timeout", [1e300, timedelta.max], ids=str)
@fair_or_not
async def test_a_huge_timeout(make: Make, name: str, timeout: float | timedelta, fair: bool) -> None:
    """As good as none: it waits, at the head and in the local queue, and is served."""
    first, second = make(lease=LONG), make(lease=LONG)
    await second.health()
    lease = await first(name, fair=fair).acquire(timeout=timeout)
    assert lease is not None
    waiting = [asyncio.create_task(second(name, fair=fair).acquire(timeout=timeout)) for _ in range(2)]
    await until(lambda: idle(second))
    assert not any(each.done() for each in waiting)
    await lease.release()
    async with asyncio.timeout(LIMIT):
        for _ in range(2):
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting = [each for each in waiting if each not in done]
            for each in done:
                got = each.result()
                assert got is not None
                await got.release()


class Limit:
    """A limit of the caller's own around an acquire, which the test lets run out."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._scope: Any = None

    async def around(self, acquire: Callable[[], Any]) -> str:
        """What became of it."""
        try:
            match self.kind:
                case "asyncio.timeout":
                    async with asyncio.timeout(None) as self._scope:
                        await acquire()
                case "fail_after":
                    with anyio.fail_after(math.inf) as self._scope:
                        await acquire()
                case _:
                    with anyio.move_on_after(math.inf) as self._scope:
                        await acquire()
                    if self._scope.cancelled_caught:
                        return "cut"
        except TimeoutError:
            return "cut"
        return "served"

    def run_out(self) -> None:
        if self.kind == "asyncio.timeout":
            self._scope.reschedule(asyncio.get_running_loop().time())
        else:
            self._scope.deadline = -math.inf


@each_kind_of_node
@pytest.mark.parametrize("kind", ["asyncio.timeout", "fail_after", "move_on_after"])
@pytest.mark.parametrize("place", ["head", "local", "fair", "block"])
async def test_a_limit_around_an_acquire(make: Make, name: str, kind: str, place: str) -> None:
    """asyncio's and anyio's: the acquire is cut, its task lives on and may ask again, and nothing is left."""
    first, second = make(lease=LONG), make(lease=LONG)
    await second.health()
    lock = second(name, fair=place == "fair")
    lease = await first(name).acquire(timeout=None)
    ahead = asyncio.create_task(second(name).acquire(timeout=None)) if place == "local" else None

    async def block() -> None:
        async with lock:
            pass

    async def plain() -> None:
        await (await lock.acquire(timeout=None)).release()

    async def twice() -> list[str]:
        body = block if place == "block" else plain
        return [await limit.around(body), await limit.around(body)]

    limit = Limit(kind)
    asking = asyncio.create_task(twice())
    many = 1 + (ahead is not None)
    await until(lambda: idle(second) and len(acquisitions_of(second)) == many)
    cut = acquisitions_of(second)
    limit.run_out()
    await until(lambda: idle(second) and len(acquisitions_of(second) - cut) == 1)
    assert len(acquisitions_of(second)) == many
    await lease.release()
    if ahead is not None:
        await (await ahead).release()
    async with asyncio.timeout(LIMIT):
        assert await asking == ["cut", "served"]
    assert forgotten(second)
    assert not await first(name).locked()


# -- no release is missed ----------------------------------------------------------------------------------------------


@both
@fair_or_not
@pytest.mark.parametrize("turn", range(12))
async def test_e1_released_in_any_turn(name: str, nodes: int, fair: bool, turn: int) -> None:
    """The release comes before the try, between try and ticket, or after it. The waiter is served, and not by a renewal
    of its ticket, for hardly any time passes."""
    still = Still(nodes, name)
    async with still.held() as (_, lease), still.client() as other:
        waiting = asyncio.create_task(other(name, fair=fair).acquire(timeout=None))
        await turns(turn)
        await lease.release()
        for _ in range(300):  # an attempt and the release may split the votes, then it tries again in a moment
            await turns(5)
            if waiting.done():
                break
            still.clock.advance(0.001)
        await waiting.result().release()


async def test_the_one_try_beside_an_own_permit_may_take_all_the_time(server: Server, name: str) -> None:
    """Its refusal comes after the time of the caller. All permits are held, and the server is up: that is no outage."""
    async with Redlock(server.url, lease=LONG) as other, behind_gates([server], 0, lease=LONG) as (client, gates):
        mine = await client.semaphore(name, 2).acquire(timeout=0)
        theirs = await other.semaphore(name, 2).acquire(timeout=0)
        assert mine is not None
        assert theirs is not None
        gates[0].open.clear()
        asyncio.get_running_loop().call_later(3.2, gates[0].open.set)  # its time is over, and that of the node is not
        assert await client.semaphore(name, 2).acquire(timeout=3.0) is None
        await theirs.release()
        await mine.release()


@both
async def test_the_one_try_beside_an_own_permit_keeps_a_short_timeout(name: str, nodes: int) -> None:
    """The servers do not answer, and may take 20 s. The caller gave 0.3 s: it waits for that time, and for the answer
    to a last question, but not until the nodes have been silent for as long as they may."""
    still = Still(nodes, name)
    far = [Far(still.clock) for _ in range(nodes)]
    still.stores = list(far)
    took: list[float] = []

    async def twice(client: Redlock) -> None:
        semaphore = client.semaphore(name, 2)
        async with semaphore:
            for store in far:
                store.rtt = 1000.0
            began = still.clock.now()
            with pytest.raises(QuorumUnavailable):
                await semaphore.acquire(timeout=0.3)
            took.append(still.clock.now() - began)
            for store in far:
                store.rtt = 0.0

    async with still.client(lease=LONG, node_timeout=20.0) as client:
        asking = asyncio.create_task(twice(client))
        while not asking.done():
            still.clock.advance(0.05)
            await turns()
        await asking
    assert took[0] < 1.0
