"""Blocks over one shared Lock object that other tasks end (HAZARDS F20): each block ends its own lease."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import linecache
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import uvicorn
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from asynclock import Lease, Lock, LockLost, Redlock
from tests.support.still_clock import Still, turns
from tests.support.waiters import LIMIT

CHUNK = b"x" * 2**24
"""More than the buffers of two sockets."""


@pytest.fixture
async def client(name: str) -> AsyncIterator[Redlock]:
    async with Still(1, name).client(lease=30.0, timeout=0) as client:
        yield client


@pytest.fixture
def lock(client: Redlock, name: str) -> Lock:
    """As a program has it at module level, for all its tasks."""
    return client.semaphore(name, 3)


async def is_free(client: Redlock, lock: Lock) -> None:
    """All permits come back, within a test's limit."""
    async with asyncio.timeout(LIMIT):
        while (await client.inspect(lock.name)).holders:
            await asyncio.sleep(0)


# -- fixtures ----------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def first_permit(lock: Lock) -> AsyncIterator[Lease]:
    async with lock as lease:
        yield lease
        assert lease.held
    assert not lease.held


@pytest_asyncio.fixture
async def second_permit(lock: Lock) -> AsyncIterator[Lease]:
    async with lock as lease:
        yield lease
        assert lease.held
    assert not lease.held


async def test_f20_two_fixtures_over_one_semaphore(lock: Lock, first_permit: Lease, second_permit: Lease) -> None:
    """Set-up and tear-down of each run in tasks of their own, which end. The test relies on both, and has a block
    too."""
    async with lock as lease:
        assert first_permit.held
        assert second_permit.held
    assert not lease.held
    assert first_permit.held
    assert second_permit.held


# -- async generators --------------------------------------------------------------------------------------------------


async def leases_of(lock: Lock) -> AsyncIterator[Lease]:
    async with lock as lease:
        while True:
            yield lease


async def fixture_of(lock: Lock) -> AsyncIterator[Lease]:
    async with lock as lease:
        yield lease


async def first_of(lock: Lock) -> Lease:
    async for lease in leases_of(lock):
        return lease
    raise AssertionError


@pytest.mark.parametrize("ended", [False, True])
async def test_f20_dropped_generators(client: Redlock, lock: Lock, ended: bool) -> None:
    """`async for ...: return` drops the generator; asyncio closes it in a task of its own. All permits come back, while
    the tasks that entered live, and after their end."""
    leave = asyncio.Event()

    async def reader() -> None:
        await first_of(lock)
        if not ended:
            await leave.wait()

    readers = [asyncio.create_task(reader()) for _ in range(3)]
    await turns()
    gc.collect()
    await is_free(client, lock)
    leave.set()
    await asyncio.gather(*readers)


async def test_f20_a_dropped_generator_ends_its_own_block(lock: Lock) -> None:
    """The task that drops it is in a block of its own, and so is another task: their leases stay."""
    inside, leave = asyncio.Event(), asyncio.Event()

    async def other() -> bool:
        async with lock as lease:
            inside.set()
            await leave.wait()
            return lease.held

    beside = asyncio.create_task(other())
    await inside.wait()
    async with lock as mine:
        dropped = await first_of(lock)
        async with asyncio.timeout(LIMIT):
            await dropped.wait_lost()
        assert mine.held
    leave.set()
    assert await beside


async def test_f20_generators_closed_in_the_order_of_their_start(lock: Lock) -> None:
    """One task has three generators, and closes the oldest first: each closes its own block."""
    generators: list[Any] = [leases_of(lock) for _ in range(3)]
    leases = [await anext(each) for each in generators]
    for number, each in enumerate(generators):
        await each.aclose()
        assert [lease.held for lease in leases] == [index > number for index in range(3)]


# -- streams whose clients hang up -------------------------------------------------------------------------------------


async def chunks(lock: Lock) -> AsyncIterator[bytes]:
    """The client does not read the end of the first chunk, so the generator is dropped while the server writes it."""
    async with lock:
        while True:
            yield CHUNK
            await asyncio.sleep(0)


async def read_beginning(url: str, clients: int, then: Callable[[], object] | None = None) -> None:
    """So many clients read the beginning of a stream, together. Then they hang up, or `then` ends the stream."""
    together = asyncio.Barrier(clients)

    async def read() -> None:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            await response.content.readexactly(10)
            await together.wait()
            if then is None:
                assert response.connection is not None
                assert response.connection.transport is not None
                response.connection.transport.abort()
                return
            then()
            with contextlib.suppress(aiohttp.ClientError):
                await response.read()

    async with asyncio.timeout(LIMIT):
        await asyncio.gather(*[read() for _ in range(clients)])


async def test_f20_cancelled_aiohttp_streams(client: Redlock, lock: Lock) -> None:
    """Three handlers stream at once, and their clients hang up: all permits come back."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for chunk in chunks(lock):
            await response.write(chunk)
        return response

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await read_beginning(f"http://127.0.0.1:{runner.addresses[0][1]}/", 3)
        await is_free(client, lock)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("how", ["the clients hang up", "the server stops"])
async def test_f20_cancelled_starlette_streams(client: Redlock, lock: Lock, how: str) -> None:
    """As above, with responses that stream from an async generator. A server that stops cancels them, too."""

    async def handler(request: Request) -> StreamingResponse:
        del request
        return StreamingResponse(chunks(lock))

    app = Starlette(routes=[Route("/", handler)])
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=0))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        stop = partial(setattr, server, "should_exit", True)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        try:
            await read_beginning(url, 3, stop if how == "the server stops" else None)
            await is_free(client, lock)
        finally:
            server.should_exit = True
            await serving


# -- exit stacks and wrappers ------------------------------------------------------------------------------------------


async def test_f20_exit_stacks_in_another_order(lock: Lock, caplog: pytest.LogCaptureFixture) -> None:
    """Two stacks of one task end in the order of their start. Which block ends cannot be known: a WARNING names the
    line, and in the end both leases are released."""
    first, second = AsyncExitStack(), AsyncExitStack()
    leases = [await first.enter_async_context(lock), await second.enter_async_context(lock)]
    async with lock as mine:
        await first.aclose()
        assert sum(lease.held for lease in leases) == 1
        (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert "wrong if its blocks end in another order" in line
        (number,) = re.findall(re.escape(__file__) + r":(\d+) ", line)
        assert linecache.getline(__file__, int(number)).strip() == "await first.aclose()"
        await second.aclose()  # only one is left that fits
        assert not any(lease.held for lease in leases)
        assert mine.held
    assert [each.levelno for each in caplog.records].count(logging.WARNING) == 1


async def test_f20_exit_stacks_of_leases(lock: Lock, caplog: pytest.LogCaptureFixture) -> None:
    """A stack that enters the lease of an acquire ends that lease, in any order."""
    first, second = AsyncExitStack(), AsyncExitStack()
    leases: list[Any] = [await each.enter_async_context(await lock.acquire()) for each in (first, second)]  # type: ignore[arg-type]
    await first.aclose()
    assert [lease.held for lease in leases] == [False, True]
    await second.aclose()
    assert not leases[1].held
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


async def test_f20_a_stack_beside_the_block_of_another_task(lock: Lock) -> None:
    """A task that is in a block ends the stack of another task: its own lease stays."""
    stack = AsyncExitStack()
    other = await asyncio.create_task(stack.enter_async_context(lock))
    async with lock as mine:
        await stack.aclose()
        assert mine.held
    assert not other.held


async def test_f20_contextlib_wrappers(lock: Lock, caplog: pytest.LogCaptureFixture) -> None:
    """`asynccontextmanager` runs the block in a generator, whose frame enters and leaves it, in any order and task."""

    @asynccontextmanager
    async def permit() -> AsyncIterator[Lease]:
        async with lock as lease:
            yield lease

    wrappers = [permit() for _ in range(3)]
    leases = [await each.__aenter__() for each in wrappers]
    for number, each in enumerate(wrappers):
        await asyncio.create_task(each.__aexit__(None, None, None))  # type: ignore[arg-type]
        assert [lease.held for lease in leases] == [index > number for index in range(3)]
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


class Wrapped:
    """A context manager of the program with the Lock inside."""

    def __init__(self, lock: Lock) -> None:
        self.lock = lock

    async def __aenter__(self) -> Lease:
        return await self.lock.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self.lock.__aexit__(*error)  # type: ignore[arg-type]


async def test_f20_wrappers_of_many_tasks(client: Redlock, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The frames of the wrapper end at once, and their ids are used again. Each task ends its own block."""
    lock = client.semaphore(name, 20)
    leave = asyncio.Event()
    held: list[bool] = []

    async def work() -> None:
        async with Wrapped(lock) as lease:
            await leave.wait()
            held.append(lease.held)
        held.append(not lease.held)

    tasks = [asyncio.create_task(work()) for _ in range(20)]
    await turns(20)
    leave.set()
    await asyncio.gather(*tasks)
    assert held == [True] * 40
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]


# -- lost blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entered", ["by a generator", "by a call"])
async def test_f20_a_lost_block_that_another_task_ends(name: str, entered: str) -> None:
    """Another task is in a block of the same Lock by then: the end of the lost one raises LockLost, and the other lease
    stays."""
    still = Still(1, name)
    async with still.client(lease=30.0, max_hold=5.0, timeout=0) as client:
        lock = client(name)
        generator: Any = fixture_of(lock)
        if entered == "by a generator":
            lost = await asyncio.create_task(anext(generator))
        else:
            lost = await asyncio.create_task(lock.__aenter__())  # type: ignore[arg-type]
        await still.until(still.clock.now() + 40.0)  # its key has expired, too
        assert not lost.held
        inside, leave = asyncio.Event(), asyncio.Event()

        async def other() -> bool:
            if entered == "by a generator":
                async with lock as lease:
                    inside.set()
                    await leave.wait()
                    return lease.held
            lease = await lock.__aenter__()
            inside.set()
            await leave.wait()
            held = lease.held
            await lock.__aexit__(None, None, None)
            return held

        beside = asyncio.create_task(other())
        await inside.wait()
        with pytest.raises(LockLost):
            await (anext(generator) if entered == "by a generator" else lock.__aexit__(None, None, None))
        leave.set()
        assert await beside
