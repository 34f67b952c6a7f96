"""`assert_exclusive`: which functions exclude themselves, and what it says of those that do not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import anyio
import pytest
from redis.asyncio import Redis

from asynclock import ConfigError, Redlock, redlock
from asynclock.testing import FakeStore, assert_exclusive, use
from tests.support.servers import Server

both_loops = pytest.mark.both_loops("it makes the tasks of the loop")
faked = pytest.mark.usefixtures("store")
numbers = itertools.count()


@pytest.fixture
def store() -> Iterator[FakeStore]:
    with use(found := FakeStore()):
        yield found


async def work() -> None:
    await asyncio.sleep(0)


async def held() -> None:
    async with redlock("a"):
        await work()


@redlock.synchronized("a")
async def decorated() -> None:
    await anyio.sleep(0.001)


@redlock.once("nightly", within=60)
async def once() -> None:
    await work()


async def without_an_await() -> None:
    async with redlock("a"):
        pass


async def several() -> None:
    async with redlock.multi("a", "b"), redlock("c", reentrant=True), redlock("c", reentrant=True):
        await work()


async def one_try() -> None:
    if (lease := await redlock("a").acquire(timeout=0)) is not None:
        async with lease:
            await work()


@contextlib.asynccontextmanager
async def locked() -> AsyncIterator[None]:
    async with redlock.write("a"):
        yield


async def in_a_context_manager() -> None:
    async with locked():
        await work()


async def in_child_tasks() -> None:
    await asyncio.wait_for(held(), 60)
    await asyncio.gather(held())
    await asyncio.create_task(held())
    async with asyncio.TaskGroup() as group:
        group.create_task(held())


async def in_tasks_that_others_await() -> None:
    await asyncio.shield(asyncio.create_task(held()))
    await asyncio.shield(asyncio.gather(held()))
    await asyncio.wait_for(asyncio.shield(asyncio.create_task(held())), 60)
    await asyncio.wait({asyncio.create_task(held())})
    for each in asyncio.as_completed([held()]):
        await each
    async with anyio.create_task_group() as group:
        group.start_soon(held)


async def cancelled_child_tasks() -> None:
    async with redlock("a"), anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        await anyio.sleep(0.001)
        group.start_soon(anyio.sleep_forever)  # it has not begun when it is cancelled
        group.cancel_scope.cancel()


async def another_client() -> None:
    async with Redlock("redis://nowhere.invalid:1") as client, client("a"):
        await work()


@both_loops
@faked
@pytest.mark.parametrize(
    "call",
    [
        held, decorated, once, without_an_await, several, one_try, in_a_context_manager, in_child_tasks,
        in_tasks_that_others_await, cancelled_child_tasks, another_client,
    ],
)  # fmt: skip
async def test_a_function_that_excludes_itself(call: Callable[[], Awaitable[object]]) -> None:
    """However it takes the lock."""
    await assert_exclusive(call)


async def no_lock() -> None:
    await work()


async def no_lock_and_no_await() -> None:
    pass


async def released_too_early() -> None:
    await held()
    await work()


async def taken_too_late() -> None:
    await work()
    await held()


async def around_something_else() -> None:
    task = asyncio.create_task(held())
    await work()
    await task


async def a_name_for_each_call() -> None:
    async with redlock(f"order:{next(numbers)}"):
        await work()


async def a_name_for_each_call_and_no_await() -> None:
    async with redlock(f"order:{next(numbers)}"):
        pass


async def readers() -> None:
    async with redlock.read("a"):
        await work()


async def two_permits() -> None:
    async with redlock.semaphore("a", 2):
        await work()


async def one_lock_after_the_other() -> None:
    async with redlock("a"):
        await work()
    async with redlock("b"):
        await work()


async def a_queue_with_a_limit() -> None:
    await held()
    queue: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, queue.put_nowait, 1)  # in the second turn: the task of `get` waits since the first
    await asyncio.wait_for(queue.get(), 60)


async def a_task_of_the_library() -> None:
    await held()
    await asyncio.create_task(asyncio.sleep(0.001))


async def a_task_group_of_anyio() -> None:
    await held()
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, 0.001)


async def an_event_of_anyio() -> None:
    await held()
    event = anyio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await event.wait()


async def futures() -> None:
    await held()
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    await asyncio.wait({future})


async def a_shielded_future() -> None:
    await held()
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    await asyncio.shield(future)


@faked
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (no_lock, r"calls 1, 2 held no lock: .* awaited at test_exclusive.py:\d+ in work"),
        (no_lock_and_no_await, "held no lock"),
        (released_too_early, r"awaited at test_exclusive.py:\d+ in work without a lock, and held 'a' elsewhere"),
        (taken_too_late, r"awaited at test_exclusive.py:\d+ in work without a lock, and held 'a' elsewhere"),
        (around_something_else, "in work without a lock"),
        (a_name_for_each_call, "call 1 was at .* and call 2 at .*, at the same time"),
        (a_name_for_each_call_and_no_await, r"different locks: call 1 held 'order:\d+'; call 2 held 'order:\d+'"),
        (readers, "held no lock, but a read lock of 'a', which others can hold beside it"),
        (two_permits, "held no lock, but a semaphore of 'a'"),
        (a_queue_with_a_limit, r"in (get|a_queue_with_a_limit) without a lock"),  # up to 3.11 it is a task of its own
        (a_task_of_the_library, r"awaited at tasks.py:\d+ in sleep without a lock"),
        (a_task_group_of_anyio, "in sleep without a lock"),
        (an_event_of_anyio, "in an_event_of_anyio without a lock"),
        (futures, "in futures without a lock"),
        (a_shielded_future, "in a_shielded_future without a lock"),
        (one_lock_after_the_other, r"held no lock all the time: 'a' at .* in work; 'b' at"),
    ],
)
async def test_a_function_that_does_not(call: Callable[[], Awaitable[object]], says: str) -> None:
    """The error says what was seen, and where."""
    with pytest.raises(AssertionError, match=r"^the calls do not exclude each other:\n") as caught:
        await assert_exclusive(call, tasks=2)
    assert pytest.RaisesExc(AssertionError, match=f"(?s){says}").matches(caught.value), caught.value


@faked
async def test_awaits_of_a_task_that_is_not_its_own() -> None:
    """A call that waits for a task from before, which nobody looks at, awaits without a lock."""
    ends = asyncio.Event()
    background = asyncio.create_task(ends.wait())

    async def call() -> None:
        await held()
        asyncio.get_running_loop().call_soon(ends.set)
        await background

    with pytest.raises(AssertionError, match="in call without a lock"):
        await assert_exclusive(call)


@faked
async def test_awaits_of_a_stream(server: Server) -> None:
    """As those of an HTTP client that uses anyio: they are outside of the lock here."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await anyio.connect_unix(server.path)) for _ in range(2)]
        left = iter(streams)

        async def call() -> None:
            stream = next(left)
            async with redlock("a"):
                await stream.send(b"PING\r\n")
            assert await stream.receive()

        with pytest.raises(AssertionError, match="in call without a lock"):
            await assert_exclusive(call, tasks=2)


@faked
async def test_an_await_inside_a_package(server: Server) -> None:
    """The error names the line of the program that calls the package."""
    async with Redis(unix_socket_path=str(server.path)) as client:

        async def call() -> None:
            await held()
            await client.ping()

        with pytest.raises(AssertionError, match=r"awaited at test_exclusive.py:\d+ in call without a lock"):
            await assert_exclusive(call)


async def rested() -> None:
    async with redlock("a", min_hold=10):
        await work()


async def in_two_orders() -> None:
    first, second = ("a", "b") if next(numbers) % 2 else ("b", "a")
    async with redlock(first):
        await work()
        async with redlock(second):
            await work()


@faked
@pytest.mark.parametrize(
    ("call", "says"),
    [(rested, "no call holds one.*autojump=0"), (in_two_orders, r"call \d holds '[ab]'; call \d holds '[ab]'")],
)
async def test_calls_that_cannot_go_on(call: Callable[[], Awaitable[object]], says: str) -> None:
    """The time of the store stands still, so they would wait for ever. The error says for what."""
    with pytest.raises(AssertionError, match=f"no call can go on: .*{says}"):
        await assert_exclusive(call, tasks=2)


async def test_calls_that_wait_for_time() -> None:
    """They come to an end if time passes by itself."""
    with use(FakeStore(autojump=0)):
        await assert_exclusive(rested)


async def test_a_call_that_never_got_in(store: FakeStore) -> None:
    """It says nothing about the function."""
    store.busy("a")
    with pytest.raises(AssertionError, match="no call held a lock: all of them were refused"):
        await assert_exclusive(one_try)


@faked
async def test_an_error_of_a_call() -> None:
    """It is raised as it is, and the loop has its own tasks again."""

    async def fails() -> None:
        async with redlock("a"):
            raise KeyError("order")

    before = asyncio.get_running_loop().get_task_factory()
    with pytest.raises(KeyError, match="order"):
        await assert_exclusive(fails)
    assert asyncio.get_running_loop().get_task_factory() is before
    with pytest.raises(ConfigError):
        await assert_exclusive(held, tasks=1)


async def test_over_a_real_server(server: Server, name: str) -> None:
    """And it tells two clients of one server from two of different stores."""
    async with Redlock(server.url) as one, Redlock(server.url) as two, Redlock(FakeStore()) as elsewhere:
        turns = itertools.cycle([one, two])

        async def call() -> None:
            async with next(turns)(name):
                await work()

        await assert_exclusive(call)
        turns = itertools.cycle([one, elsewhere])
        with pytest.raises(AssertionError):
            await assert_exclusive(call)
