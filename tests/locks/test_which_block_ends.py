"""Blocks over one Lock object, where neither the task nor the caller says which block ends (HAZARDS F20)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from asynclock import Lease, Lock, Redlock
from tests.support.still_clock import Still


@pytest.fixture
async def client(name: str) -> AsyncIterator[Redlock]:
    async with Still(1, name).client(lease=30.0, timeout=0) as client:
        yield client


@pytest.fixture
def lock(client: Redlock, name: str) -> Lock:
    return client.semaphore(name, 3)


async def nested(lock: Lock) -> AsyncIterator[list[Lease]]:
    """Two rounds of a block, with another block inside, over the same Lock."""
    for _ in range(2):
        async with lock as outer:
            yield [outer]
            async with lock as inner:
                yield [outer, inner]
            yield [outer, inner]


@pytest.mark.parametrize("tasks", ["each step a task", "two tasks in turns"])
async def test_f20_nested_blocks_of_a_generator(client: Redlock, lock: Lock, tasks: str) -> None:
    """Other tasks enter the outer block, enter the inner one, and end it: the inner block ends its own lease."""
    generator: Any = nested(lock)
    other: asyncio.Queue[asyncio.Future[list[Lease]]] = asyncio.Queue()

    async def step() -> list[Lease]:
        leases: list[Lease] = await anext(generator)
        return leases

    async def serve() -> None:
        while True:
            (await other.get()).set_result(await step())

    async def by_other() -> list[Lease]:
        if tasks == "each step a task":
            return await asyncio.create_task(step())
        reply = asyncio.get_running_loop().create_future()
        other.put_nowait(reply)
        return await reply

    server = asyncio.create_task(serve())
    for _ in range(2):
        (outer,) = await step()
        _, inner = await by_other()
        assert outer.held
        assert inner.held
        await step()  # the task that entered the outer block ends the inner one
        assert outer.held
        assert not inner.held
    await generator.aclose()
    server.cancel()
    assert not (await client.inspect(lock.name)).holders


async def test_f20_a_wrapper_around_the_exit_alone(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer wraps `Lock.__aexit__`, and not `__aenter__`. The block ends its own lease, not the one that its body
    acquired."""
    traced = type(lock).__aexit__

    async def wrapper(*args: Any) -> None:
        await traced(*args)

    monkeypatch.setattr(type(lock), "__aexit__", wrapper)
    async with lock as block:
        lease = await lock.acquire()
        assert lease
    assert not block.held
    assert lease.held
    await lease.release()


def test_f20_a_block_of_another_loop_stays(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A stack of an event loop that has ended holds a lease of the Lock. A stack of the next loop, entered and closed
    in other tasks, ends its own lease."""
    client = Still(1, name).client(lease=30.0, timeout=0)
    lock = client.semaphore(name, 3)
    stacks = [AsyncExitStack() for _ in range(2)]

    async def first() -> None:
        await stacks[0].enter_async_context(lock)

    async def second() -> None:
        lease = await asyncio.create_task(stacks[1].enter_async_context(lock))
        await asyncio.create_task(stacks[1].aclose())
        assert not lease.held
        await client.aclose()

    with pytest.warns(ResourceWarning, match="at the end of its event loop"):
        asyncio.run(first())
    caplog.clear()
    asyncio.run(second())
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]
