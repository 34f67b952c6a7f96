"""Time that a test moves: `FakeStore.advance` and `autojump`."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import pytest

from asynclock import ConfigError, Lease, LockLost, LockTimeout, Redlock, redlock
from asynclock.events import LoopLagged
from asynclock.testing import FakeStore, use

both_loops = pytest.mark.both_loops("advance reads from the tasks of the loop how far they have run")


@both_loops
async def test_an_hour_is_seen_step_by_step() -> None:
    """A lease is renewed all the time, and the event loop counts as never blocked."""
    store = FakeStore()
    async with Redlock(store, lease=30) as client:
        seen: list[object] = []
        client.subscribe(seen.append)
        async with client("order:42") as lease:
            began = store.clock.now()
            await store.advance(timedelta(hours=1))
            assert store.clock.now() - began == 3600
            assert lease.held
            assert lease.remaining > 15
        assert not any(isinstance(each, LoopLagged) for each in seen)


@both_loops
async def test_what_is_due_happens_in_order() -> None:
    """And the tasks that it wakes run before the next of it, as long as they take."""
    store = FakeStore()
    async with Redlock(store) as client:
        store.busy("order:42")
        seen: list[str] = []

        async def wait(timeout: float) -> None:
            try:
                await client("order:42", timeout=timeout).__aenter__()
            except LockTimeout as error:
                for _ in range(50):
                    await asyncio.sleep(0)
                seen.append(f"{timeout} at {store.clock.now() - began:g}, after {error.waited:g}")

        async with asyncio.TaskGroup() as group:
            began = store.clock.now()
            for timeout in (7, 3, 5):
                group.create_task(wait(timeout))
            await store.advance(10)
            assert seen == ["3 at 3, after 3", "5 at 5, after 5", "7 at 7, after 7"]


@both_loops
async def test_the_task_that_advances_loses_its_lease() -> None:
    """Time moves on to the end, and the task is cancelled there."""
    store = FakeStore()
    async with Redlock(store) as client:
        began = store.clock.now()
        with pytest.raises(LockLost) as caught:
            async with client("order:42"):
                store.lose("order:42")
                await store.advance(60)
                pytest.fail("its task was not cancelled")
        assert caught.value.reason == "broken"
        assert store.clock.now() - began == 60


async def test_a_cancel_of_a_task_that_advances() -> None:
    """It is raised once the time has passed."""
    store = FakeStore()
    began = store.clock.now()
    async with Redlock(store) as client, client("order:42"):
        task = asyncio.create_task(store.advance(100))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.clock.now() - began == 100


async def test_a_movement_that_is_cancelled_before_its_first_step() -> None:
    """As by a test that cancels all tasks. The next movement does not wait for it."""
    store = FakeStore()
    began = store.clock.now()
    task = asyncio.create_task(store.advance(5))
    await asyncio.sleep(0)
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.advance(7)
    assert store.clock.now() - began == 7


async def test_movements_at_the_same_time_follow_each_other() -> None:
    """Two tasks that advance by 5 s and 7 s move time by 12 s."""
    store = FakeStore()
    began = store.clock.now()
    await asyncio.gather(store.advance(5), store.advance(7))
    assert store.clock.now() - began == 12


@pytest.mark.parametrize("first", [0, 4])
async def test_a_movement_of_a_store_whose_client_is_first_used_meanwhile(first: float) -> None:
    """That client has another store before it. The movement goes on with what is left, for all its stores."""
    stores = [FakeStore() for _ in range(3)]
    clocks = [each.clock for each in stores]
    ended = asyncio.Event()
    if first:
        clocks[1].call_at(clocks[1].now() + first, ended.set)
    else:
        ended.set()

    async def pay() -> float:
        await ended.wait()
        with pytest.raises(LockTimeout) as caught:
            async with redlock("order:42", timeout=5):
                pass
        return caught.value.waited

    for each in stores:
        each.busy("order:42")
    with use(*stores):
        began = [each.now() for each in clocks]
        paying = asyncio.create_task(pay())
        another = asyncio.create_task(stores[1].advance(1))
        await stores[1].advance(first + 6)
        await another
        assert [each.now() - then for each, then in zip(clocks, began, strict=True)] == [7, first + 7, 7]
        assert paying.done()
        assert await paying == 5


async def test_time_moves_without_a_client() -> None:
    """While nothing is connected; and a wrong number is refused."""
    store = FakeStore()
    began, wall = store.clock.now(), store.clock.wall()
    await store.advance(0.5)
    assert (store.clock.now() - began, store.clock.wall() - wall) == (0.5, 0.5)
    with pytest.raises(ConfigError):
        await store.advance(-1)
    with pytest.raises(ConfigError):
        FakeStore(autojump=-1)


async def test_advance_inside_a_synchronized_function() -> None:
    """It stands for work that takes long: others wait for it, or give up."""
    store = FakeStore()
    with use(store):

        @redlock.synchronized("report", timeout=20)
        async def work() -> float:
            began = store.clock.now()
            await store.advance(30)
            return store.clock.now() - began

        async with asyncio.TaskGroup() as group:
            first = group.create_task(work())
            await asyncio.sleep(0)
            with pytest.raises(LockTimeout):
                await work()
        assert first.result() == 30


async def test_max_hold_and_min_hold() -> None:
    """Both follow the clock."""
    store = FakeStore()
    async with Redlock(store) as client:
        with pytest.raises(LockLost) as caught:
            async with client("a", max_hold=10):
                await store.advance(11)
        assert caught.value.reason == "max_hold"
        async with client("b", min_hold=10):
            pass
        assert await client("b").acquire(timeout=0) is None
        await store.advance(10)
        async with client("b", timeout=0):
            pass


async def test_once_and_lead() -> None:
    """`within` follows the clock, and an election is held again after a loss."""
    store = FakeStore()
    with use(store):
        runs: list[str] = []

        @redlock.once("nightly", within=3600)
        async def nightly() -> None:
            runs.append("nightly")

        await nightly()
        await nightly()
        await store.advance(3601)
        await nightly()
        assert runs == ["nightly", "nightly"]

        async def main(lease: Lease) -> int:
            runs.append("elected")
            if runs.count("elected") == 2:
                return 7
            return await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(redlock.lead("job", main))
        await store.advance(1)
        store.down()
        await store.advance(60)
        store.up()
        assert await task == 7


async def test_without_a_renewal_thread() -> None:
    """renew="thread" is renewed by the event loop: only the test moves this time."""
    store = FakeStore()
    async with Redlock(store, renew="thread") as client, client("order:42") as lease:
        await store.advance(300)
        assert lease.held
        assert not [each for each in threading.enumerate() if each.name == "asynclock renewals"]


async def test_a_hundred_holders() -> None:
    """A long time costs its renewals, and no step for each millisecond."""
    store = FakeStore()
    async with Redlock(store, lease=60) as client:
        leases = [await client(f"order:{number}").acquire(timeout=None) for number in range(100)]
        began = time.process_time()
        await store.advance(600)
        assert all(lease.held for lease in leases)
        assert time.process_time() - began < 60  # a step for each millisecond would take minutes


@both_loops
async def test_autojump() -> None:
    """Time moves on when nothing else can run: a wait ends by itself."""
    store = FakeStore(autojump=0)
    async with Redlock(store) as client:
        store.busy("order:42")
        began = store.clock.now()
        assert await client("order:42").acquire(timeout=500) is None
        assert store.clock.now() - began == pytest.approx(500, abs=1)
        with pytest.raises(LockLost) as caught:
            async with client("a", max_hold=100):
                await asyncio.get_running_loop().create_future()
        assert caught.value.reason == "max_hold"


async def test_autojump_waits_for_tasks_that_run() -> None:
    """Time stands still while a task runs on and on, and passes once it waits."""
    store = FakeStore(autojump=0)
    async with Redlock(store) as client:
        store.busy("order:42")
        waiting = asyncio.create_task(client("order:42").acquire(timeout=500))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert await waiting is None


async def test_autojump_with_a_pause() -> None:
    """Time stands still while a task runs again and again, with short waits in real time."""
    store = FakeStore(autojump=0.2)
    async with Redlock(store) as client:
        store.busy("order:42")
        began = store.clock.now()
        waiting = asyncio.create_task(client("order:42").acquire(timeout=2))
        for _ in range(50):
            await asyncio.sleep(0.01)  # it is due before the pause ends, however busy the machine is
        assert store.clock.now() == began
        assert await waiting is None


async def test_autojump_beside_advance() -> None:
    """A movement that a test asks for is as long as it says."""
    store = FakeStore(autojump=0)
    async with Redlock(store) as client, client("order:42"):
        for _ in range(100):
            await asyncio.sleep(0)
        began = store.clock.now()
        await store.advance(100)
        assert store.clock.now() - began == 100


def test_another_loop_ends_during_a_movement() -> None:
    """A task there waits for the end of the movement, before it moves time by itself. Its cancel does not end that."""
    store = FakeStore()
    held, moving = threading.Event(), threading.Event()

    async def other() -> None:
        async with Redlock(store) as client, client("a"):
            held.set()
            await asyncio.to_thread(moving.wait)
            for _ in range(1000):  # until that task waits
                await asyncio.sleep(0)

    thread = threading.Thread(target=asyncio.run, args=(other(),))

    def end_the_other() -> None:
        store.clock.autojump(0)
        moving.set()
        thread.join()

    async def main() -> None:
        began = store.clock.now()
        store.clock.call_at(began + 100, end_the_other)
        await store.advance(200)
        assert store.clock.now() == began + 200

    thread.start()
    try:
        assert held.wait(30)
        asyncio.run(main())
    finally:
        end_the_other()


def test_two_event_loops() -> None:
    """Two clients in two threads: the timers of each are called in its own loop."""
    store = FakeStore()
    held, end = threading.Event(), threading.Event()
    found: list[bool] = []
    threads: set[int] = set()

    async def other() -> None:
        async with Redlock(store) as client, client("a") as lease:
            client.subscribe(lambda event: threads.add(threading.get_ident()))
            held.set()
            await asyncio.to_thread(end.wait)
            found.append(lease.held)

    async def main() -> None:
        async with Redlock(store) as client, client("b") as lease:
            await store.advance(300)
            assert lease.held
            assert await client("a").acquire(timeout=0) is None

    thread = threading.Thread(target=asyncio.run, args=(other(),))
    thread.start()
    ident = thread.ident
    try:
        assert held.wait(30)
        asyncio.run(main())
    finally:
        end.set()
        thread.join()
    assert found == [True]
    assert threads == {ident}  # it told of each renewal


def test_a_step_waits_for_a_task_of_another_loop() -> None:
    """A timer ends a hold here, and nothing is due there. The task that waits for the lock runs before time goes on."""
    store = FakeStore()
    entered, end = threading.Event(), threading.Event()
    found: list[float] = []

    async def other() -> None:
        async with Redlock(store) as client, client("a", timeout=None):
            for _ in range(100):  # work that takes a while
                await asyncio.sleep(0)
            found.append(store.clock.now())
            entered.set()
            await asyncio.to_thread(end.wait)

    async def hold(client: Redlock, held: asyncio.Event) -> None:
        with pytest.raises(LockLost):
            async with client("a", max_hold=10):
                held.set()
                await asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with Redlock(store) as client, asyncio.TaskGroup() as group:
            began, held = store.clock.now(), asyncio.Event()
            group.create_task(hold(client, held))
            await held.wait()
            thread.start()
            while not (await client.inspect("a")).waiters:
                await asyncio.sleep(0.01)
            await store.advance(11)
            assert found == [pytest.approx(began + 10, abs=0.2)]

    thread = threading.Thread(target=asyncio.run, args=(other(),))
    try:
        asyncio.run(main())
    finally:
        end.set()
        thread.join()
