"""The first answer of several nodes of a cluster: the other questions end with it, and nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from asynclock.stores.redis.cluster.masters import first_answer
from asynclock.stores.redis.cluster.topology import Address, Range

ANSWER = (Range(0, 16383, Address("a", 1), ()),)


async def answers() -> tuple[Range, ...]:
    await asyncio.sleep(0)
    return ANSWER


async def fails(why: str = "refused") -> tuple[Range, ...]:
    await asyncio.sleep(0)
    raise ConnectionError(why)


async def fails_as_it_is_cancelled() -> tuple[Range, ...]:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(0)  # it closes its connection
        await asyncio.sleep(0)
        raise ConnectionError("reset") from None
    return ()


async def test_nothing_is_left_of_the_others() -> None:
    """No task, and no error that asyncio logs because nobody has read it."""
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    for _ in range(20):  # the order of a set changes
        assert await first_answer([fails(), answers(), fails_as_it_is_cancelled()]) == ANSWER
        assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    assert not logged


async def test_no_answer() -> None:
    """The error of one of them."""
    with pytest.raises(ConnectionError, match="refused"):
        await first_answer([fails(), fails()])


async def test_a_cancel_ends_all_questions() -> None:
    """It waits for their end, so that a client that closes leaves no connection behind."""
    task = asyncio.create_task(first_answer([fails_as_it_is_cancelled(), fails_as_it_is_cancelled()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}
