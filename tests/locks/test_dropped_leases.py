"""A lease without references (HAZARDS A15): when it warns, what it sends, and which waiter is served after it."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from asynclock import Lease, Redlock
from tests.support.cancelled_waits import SOON, Make
from tests.support.probes import acquisitions_of, enter_again, hold_of, waits_for_notice, watched_by
from tests.support.still_clock import Still, TenureRecord, idle, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, until

nodes = pytest.mark.parametrize("nodes", [1, 5])


async def drop(client: Redlock, name: str, **options: float) -> None:
    await client(name, **options).acquire(timeout=None)


@nodes
async def test_a15_nothing_is_sent_when_a_lease_is_dropped(name: str, nodes: int) -> None:
    """A collector may run anywhere: the drop warns once, sends nothing to any server, then or later, and the hold
    expires, even while a recorder of warnings refers to the lease."""
    still = Still(nodes, name)
    async with still.client() as client:
        with pytest.warns(ResourceWarning, match=name) as warned:
            gc.collect()
            warned.clear()  # of earlier tests
            await drop(client, name, lease=30.0)
            await turns()
            still.asked()
            gc.collect()
        assert len(warned) == 1
        await still.until(still.clock.now() + 29.0)
        assert still.asked() == []
        assert all(state_of(store, name).holds for store in still.stores)
        still.clock.advance(1.5)
        assert not any(state_of(store, name).holds for store in still.stores)


@nodes
@pytest.mark.parametrize("how", ["lease", "max_hold"])
async def test_a15_a_lease_that_is_over_is_dropped_in_silence(name: str, nodes: int, how: str) -> None:
    """Its time is up by the clock, though no timer has run: there is nothing to warn of."""
    still = Still(nodes, name)
    async with still.client(lease=40.0) as client:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lease = await client(name, **{how: 20.0}).acquire(timeout=None)
            await turns()
            still.clock.block(20.0)
            assert not lease.held
            del lease
            gc.collect()


@nodes
async def test_a15_one_of_two_tenures_is_dropped(name: str, nodes: int) -> None:
    """Its owner entered again, so the hold goes on: no warning, and the other tenure is renewed."""
    still = Still(nodes, name)
    async with still.client(lease=30.0) as client:
        lock = client(name, reentrant=True)
        async with lock as outer:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                inner = enter_again(outer, lock)
                del inner
                gc.collect()
            await still.until(still.clock.now() + 100.0)
            assert outer.held


@nodes
async def test_a15_a_passed_lease_is_dropped_at_once(name: str, nodes: int) -> None:
    """A hold was passed to a task that dropped its lease: it warns without the help of the garbage collector, and the
    hold is renewed no more."""
    record = TenureRecord(nodes, name)
    gc.collect()
    gc.disable()
    try:
        async with record.client(lease=30.0) as client:
            first = await client(name).acquire(timeout=None)
            head = asyncio.create_task(client(name).acquire(timeout=None))
            dropper = asyncio.create_task(drop(client, name))
            await turns(20)
            await first.release()
            lease = await head
            hold = hold_of(lease)
            with pytest.warns(ResourceWarning, match=name):
                await lease.release()
                await dropper
                del dropper
                await turns()
            assert hold.over
    finally:
        gc.enable()


@nodes
@pytest.mark.parametrize("tasks", [1, 20])
async def test_an_acquire_leaves_nothing_to_the_garbage_collector(name: str, nodes: int, tasks: int) -> None:
    """No object of it is in a reference cycle, so all are freed at once; also those of tasks that wait for each other.
    A thread that an earlier test has left may end meanwhile and leave some, so one of three times counts."""
    still, left = Still(nodes, name), list[int]()

    async def once(client: Redlock) -> None:
        async with client(name):
            await turns(3)

    async with still.client() as client:
        await asyncio.gather(*[once(client) for _ in range(tasks)])
        gc.collect()
        gc.disable()
        try:
            while 0 not in left and len(left) < 3:
                await asyncio.gather(*[once(client) for _ in range(tasks)])
                await turns()
                left.append(gc.collect())
        finally:
            gc.enable()
    assert 0 in left, left


@pytest.mark.every_store
async def test_an_acquire_over_a_store_leaves_nothing_to_the_garbage_collector(
    make: Callable[..., Redlock], name: str
) -> None:
    """Thousands of ops in a second would keep the collector busy: it looks at all objects of the program. Of tasks that
    have their names at the same time, and of one that is cancelled while it waits."""
    client, left = make(), list[list[object]]()

    async def once(key: str) -> None:
        async with client(key, timeout=LIMIT):
            pass

    async def all_of_it() -> None:
        await asyncio.gather(*[once(f"{name}:{number % 10}") for number in range(20)])
        async with client(name):
            waiting = asyncio.create_task(once(name))
            await until(lambda: any(map(waits_for_notice, acquisitions_of(client))))
            waiting.cancel()
            await asyncio.wait({waiting})
        await once(name)  # the withdrawal of that one is answered, too

    await all_of_it()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        while [] not in left and len(left) < 3:  # a thread that an earlier test has left may end meanwhile
            await all_of_it()
            gc.collect()
            left.append([each for each in gc.garbage if type(each).__module__.startswith("asynclock")])
            gc.garbage.clear()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert [] in left, left[-1][:20]


async def test_a15_a_local_waiter_asks_after_a_drop(make: Make, name: str) -> None:
    """It waited behind a lease that was dropped: it leaves a ticket with the servers, and is notified when another
    client releases the name."""
    client, operator = make(lease=LONG), make()
    await operator.health()
    leases = [await client(name).acquire(timeout=None)]
    behind = asyncio.create_task(client(name).acquire(timeout=None))
    async with asyncio.timeout(SOON):
        while not idle(client):
            await asyncio.sleep(0)
    assert not (await operator.inspect(name)).waiters
    with pytest.warns(ResourceWarning, match=name):
        leases.clear()
        gc.collect()
    async with asyncio.timeout(SOON):
        while not (await operator.inspect(name)).waiters:
            await asyncio.sleep(0.005)
        await operator.break_lock(name)
        got = await behind
    await got.release()


class DropAt:
    """Calls `drop` before the line of the package with that number, counted from the first call into `protocol/`."""

    def __init__(self, drop: Callable[[], object], line: int) -> None:
        self.drop = drop
        self.left = line

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        del arg
        if "/asynclock/protocol/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.drop()
        return self


async def wait_and_drop(
    client: Redlock, name: str, drop: Callable[[], object], line: int
) -> asyncio.Task[Lease] | None:
    """A task that begins to wait for the name, with a drop at that line; None: it waits, and all lines were tried."""
    before, dropping = sys.gettrace(), DropAt(drop, line)
    waiter = asyncio.create_task(client(name).acquire(timeout=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        sys.settrace(dropping)
        try:
            await turns(3)
        finally:
            sys.settrace(before)
    if dropping.left <= 0:
        return waiter
    waiter.cancel()
    return None


async def test_f4_a_lease_is_dropped_at_any_line_of_an_acquire(name: str) -> None:
    """The collector drops the lease of a task while another task begins to wait for the name: the waiter gets the lock
    when the dropped hold has expired, wherever the drop fell."""
    line = 0
    while True:
        line += 1
        still = Still(1, name)
        async with still.client(lease=30.0) as client:
            leases = [await client(name).acquire(timeout=None)]
            waiter = await wait_and_drop(client, name, leases.clear, line)
            if waiter is None:
                break
            await still.until(still.clock.now() + 31.0)
            assert waiter.done(), f"line {line}"
            await (await waiter).release()
    assert line > 50


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The garbage collector runs only where the test calls it, and quickly: it looks at nothing from before the test.
    Python reports the coroutines that it destroys."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def abandon(client: Redlock, name: str) -> None:
    """Start a task that is in a block, and waits for a future to which nothing else refers."""
    loop, inside = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda *_: None)  # asyncio logs the task

    async def body() -> None:
        async with client(name):
            inside.set()
            await loop.create_future()

    task = asyncio.create_task(body())
    await inside.wait()
    await turns(3)
    assert not task.done()


@pytest.mark.usefixtures("collector")
async def test_f4_a_coroutine_in_a_block_is_destroyed_at_any_line_of_an_acquire(name: str) -> None:
    """The collector destroys a suspended coroutine, and runs the end of its block, while another task begins to wait
    for the name. The end of the block touches nothing there: the waiter gets the lock when the hold has expired."""
    line = 0
    while True:
        line += 1
        still = Still(1, name)
        async with still.client(lease=30.0) as client:
            await abandon(client, name)
            waiter = await wait_and_drop(client, name, gc.collect, line)
            gc.collect()  # a line may have referred to the tenure
            if waiter is None:
                break
            await still.until(still.clock.now() + 31.0)
            assert waiter.done(), f"line {line}"
            await (await waiter).release()
    assert line > 50


@pytest.mark.usefixtures("collector")
@pytest.mark.filterwarnings("ignore:the lease of:ResourceWarning")
async def test_f4_a_coroutine_in_a_block_is_destroyed_in_another_thread(name: str) -> None:
    """The end of its block changes nothing in that thread. The loop ends the hold in a turn of its own."""
    still = Still(1, name)
    async with still.client(lease=30.0) as client:
        await abandon(client, name)
        (hold,) = watched_by(client)
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join(LIMIT)
        assert not hold.over
        assert watched_by(client) == [hold]
        await turns()
        assert hold.over
        await still.until(still.clock.now() + 31.0)
        async with client(name, timeout=0):
            pass


async def test_f4_a_lease_is_dropped_in_another_thread(name: str) -> None:
    """The finalizer of the thread changes nothing that the loop's thread may read at that moment. The loop ends the
    hold in a turn of its own."""
    still = Still(1, name)
    async with still.client(lease=30.0) as client:
        leases = [await client(name).acquire(timeout=None)]
        hold = hold_of(leases[0])
        with pytest.warns(ResourceWarning, match=name):
            thread = threading.Thread(target=leases.clear)
            thread.start()
            thread.join(LIMIT)
        assert not hold.over
        assert watched_by(client) == [hold]
        await turns()
        assert hold.over
        assert not watched_by(client)


@nodes
async def test_f4_the_outer_tenure_ends_before_the_loop_ends_the_inner(name: str, nodes: int) -> None:
    """An inner tenure of a reentrant lock is dropped, and the outer one is released in the same turn of the loop: the
    name is free."""
    still = Still(nodes, name)
    async with still.client(lease=30.0) as client:
        lock = client(name, reentrant=True)
        outer = await lock.acquire(timeout=None)
        enter_again(outer, lock)
        await outer.release()
        assert not await client(name).locked()
