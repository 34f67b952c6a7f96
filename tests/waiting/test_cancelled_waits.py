"""Waiting is cut short at each await: nothing is left behind, and no waiter is forgotten (HAZARDS A16, E5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from asynclock import ConfigError, LockLost, Redlock
from asynclock.locks.lease import Lease
from asynclock.stores.memory import MemoryStore
from asynclock.stores.port import Notice
from tests.support.cancelled_waits import (
    SOON,
    Held,
    Make,
    Scene,
    kept,
    no_task_is_left,
    nothing_is_left,
    sent,
    tenure,
    three,
    waiter,
)
from tests.support.fake_clock import FakeClock
from tests.support.kinds_of_node import each_kind_of_node
from tests.support.probes import intercept_notices, nodes_of, waiting_for_loss
from tests.support.proxy import cancelled_at
from tests.support.still_clock import turns
from tests.support.waiters import LONG

cuts = pytest.mark.parametrize("late", [False, True], ids=["at-once", "as-it-wakes"])
fairness = pytest.mark.parametrize("fair", [False, True], ids=["", "fair"])


# -- at every await --------------------------------------------------------------------------------------------------


@each_kind_of_node
@cuts
@pytest.mark.parametrize(
    ("where", "fair"),
    [("alone", False), ("alone", True), ("passed-to", False), ("first", False), ("first", True), ("behind", False),
     ("behind", True)],
)  # fmt: skip
async def test_a16_a_waiting_acquire(make: Make, name: str, where: str, fair: bool, late: bool) -> None:
    """The acquire is cut at each await, while the holder releases at any of them or once all are idle. Nothing is left,
    the waiters before and behind it are served, and after that any client has the name at once. The acquire waits
    alone, or in the local queue behind a holder of its own process, as the first or as the second waiter."""
    await cut_at_each_await(make, name, where, fair=fair, late=late, releases=[1] if late else range(3))


async def test_a16_a_waiting_acquire_over_each_store(make: Make, name: str) -> None:
    """The same in short: each store undoes what the acquire has asked of it."""
    await cut_at_each_await(make, name, "behind", releases=[1])


async def cut_at_each_await(
    make: Make, name: str, where: str, *, fair: bool = False, late: bool = False, releases: Iterable[int] = range(3)
) -> None:
    clients = await three(make)
    with no_task_is_left():
        for ends in releases:
            for index in range(100):
                scene = Scene(clients, f"{name}:{ends}:{index}.", where, fair)
                hit = await scene.play(index, ends, late)
                await sent(clients, scene.name)
                lease = await scene.third(scene.name, fair=fair).acquire(timeout=0)
                assert lease is not None
                await lease.release()
                await nothing_is_left(clients, scene.name)
                if not hit:
                    break
            else:
                pytest.fail("it never came to an end")
            assert index > 1


@each_kind_of_node
@cuts
@pytest.mark.parametrize("what", ["extend", "release", "wait_lost"])
async def test_a16_a_lease_that_is_waited_for(make: Make, name: str, what: str, late: bool) -> None:
    """The holder is cut at each of its awaits, while another client waits and a task of its own waits in the local
    queue. Both are served as soon as the holder has released."""
    holds, waits, _ = clients = await three(make)
    with no_task_is_left():
        for index in range(100):
            here = f"{name}:{index}."
            lease = await holds(here).acquire(timeout=None)
            others = [await waiter(waits, here, False), await waiter(holds, here, False)]
            if what == "wait_lost" and index:  # it waits for ever, unless it ends
                others.append(asyncio.create_task(fence_of(lease)))
            hit = await cancelled_at(getattr(lease, what), index, late=late and index > 0)
            assert not waiting_for_loss(lease)
            if lease.held:
                await lease.release()
            async with asyncio.timeout(SOON):
                fences = await asyncio.gather(*others)
            assert min(fences[:2]) > lease.fence
            await nothing_is_left(clients, here)
            if not hit:
                break
        else:
            pytest.fail("it never came to an end")
    assert index > 0


async def fence_of(lease: Lease) -> int:
    """Give it back."""
    await asyncio.sleep(0)
    await lease.release()
    return lease.fence


@cuts
@fairness
async def test_a16_no_timer_is_left(name: str, fair: bool, late: bool) -> None:
    """The acquire is cut at each await: all timers of the wait are cancelled, too."""
    clock = FakeClock()
    store = MemoryStore(clock)
    async with Redlock(store) as first, Redlock(store) as second, Redlock(store) as third:
        clients = [first, second, third]
        for client in clients:
            await client.health()
        assert not await Scene(clients, f"{name}.", "alone", fair).play(100, 9, late)  # all their watchdogs run now
        before = clock.armed
        for index in range(100):
            hit = await Scene(clients, f"{name}:{index}.", "alone", fair).play(index, 9, late)
            await sent(clients)
            assert clock.armed == before
            if not hit:
                break
        assert index > 1


@each_kind_of_node
async def test_a16_cancelled_waiters_leave_no_local_queue(make: Make, name: str) -> None:
    """All waiters of the holder's process are cancelled: its local queue is removed, although the lease is still
    held."""
    (client, *_) = await three(make)
    async with client(name):
        waiting = [await waiter(client, name, False) for _ in range(3)]
        for number in (1, 0, 2):
            waiting[number].cancel()
            await asyncio.wait({waiting[number]})
        assert kept(client).keys() == {"holds", "leases"}


# -- the woken waiter is cancelled -----------------------------------------------------------------------------------


@each_kind_of_node
@fairness
@pytest.mark.parametrize("first", ["cancel", "notice"])
@pytest.mark.parametrize("successor", ["elsewhere", "behind"])
async def test_e5_cancelled_in_the_turn_of_the_notice(
    make: Make, name: str, fair: bool, first: str, successor: str
) -> None:
    """The first waiter is notified, and cancelled just before or after it receives the notice, from the first node or
    any other. A grant that reached it is passed on at once, to another client or to the next waiter of its local
    queue."""
    holds, waits, other = clients = await three(make)
    on_notice: list[Callable[[], object]] = []

    def intercept(index: int, notice: Notice) -> None:
        cancel: Callable[[], object] = on_notice.pop(0) if on_notice else bool
        order: list[Callable[[], object]] = [cancel, partial(receive, index, notice)]
        for act in order if first == "cancel" else order[::-1]:
            act()

    receive = intercept_notices(waits, intercept)
    with no_task_is_left():
        for number in range(len(nodes_of(waits))):
            here = f"{name}:{number}."
            lease = await holds(here, fair=fair).acquire(timeout=None)
            victim = await waiter(waits, here, fair)
            next_one = await waiter(waits if successor == "behind" else other, here, fair)
            on_notice[:] = [bool] * number + [victim.cancel]
            await lease.release()
            async with asyncio.timeout(SOON):
                await asyncio.wait({victim})
                assert await next_one > lease.fence
            assert victim.cancelled() or number
            on_notice.clear()
            await nothing_is_left(clients, here)


@each_kind_of_node
@fairness
async def test_e5_cancelled_as_the_holder_releases(make: Make, name: str, fair: bool) -> None:
    """The first waiter is cancelled some turns after the release began, wherever its notice is on the way: the next one
    is served."""
    holds, waits, other = clients = await three(make)
    with no_task_is_left():
        for number in (*range(20), *range(20, 60, 3)):
            here = f"{name}:{number}."
            held = Held(await holds(here, fair=fair).acquire(timeout=None))
            victim = await waiter(waits, here, fair)
            next_one = await waiter(other, here, fair)
            held.end()
            await turns(number)
            victim.cancel()
            async with asyncio.timeout(SOON):
                await held.ended()
                assert await next_one > held.fence
                await asyncio.wait({victim})
            await nothing_is_left(clients, here)


# -- the client closes -----------------------------------------------------------------------------------------------


@pytest.mark.every_store
@each_kind_of_node
@fairness
@pytest.mark.parametrize("holder", ["itself", "another"])
async def test_closed_while_tasks_wait(make: Make, name: str, holder: str, fair: bool) -> None:
    """The client closes in any turn, with or without a release by the holder in that turn. Each task that waits through
    it gets ConfigError, nothing is left, and a waiter of another client is served."""
    other, third = make(lease=LONG), make(lease=LONG)
    for client in (other, third):
        await client.health()
    for number in range(0, 20, 3):
        here = f"{name}:{number}."
        closes = make(lease=LONG)
        await closes.health()
        held = Held(await (closes if holder == "itself" else other)(here, fair=fair).acquire(timeout=None))
        tasks = [asyncio.create_task(tenure(closes, here, fair)) for _ in range(5)]
        await turns(number)
        elsewhere = asyncio.create_task(tenure(third, here, fair))
        await turns(number // 2)
        if number % 2 and holder == "another":
            held.end()
        await closes.aclose()
        async with asyncio.timeout(SOON):  # the next question of a waiter comes later
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for each in results:
            assert isinstance(each, ConfigError | LockLost)
        assert kept(closes) == {}
        if holder == "another":
            await held.ended()
        async with asyncio.timeout(SOON):
            assert await elsewhere > held.fence
        await nothing_is_left([other, third], here)
