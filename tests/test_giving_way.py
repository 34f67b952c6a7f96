"""Over N nodes who gives a lock back to others comes after them, and what that may cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asynclock import Redlock
from asynclock._op import Verb
from asynclock._options import QUORUM_TIMEOUT
from tests.still import Still, idle, turns

MOMENT = 0.001
"""Seconds in which one that was called comes in."""


@asynccontextmanager
async def called(still: Still, hangs: bool = False) -> AsyncIterator[tuple[Redlock, Redlock, asyncio.Task[Any]]]:
    """A client that has just given the name back, another whom that called, and that one's task."""
    async with still.client() as ours, still.client() as other:
        lease = await ours(still.name).acquire(timeout=None)
        waits: asyncio.Task[Any] = asyncio.create_task(other(still.name).acquire(timeout=None))
        while not idle(other):
            await asyncio.sleep(0)
        still.asked()
        if hangs:
            other._session().waiting.clear()  # what it hears means nothing to it
        await lease.release()
        yield ours, other, waits


def verbs(still: Still) -> list[Verb]:
    return [verb for verb, _ in still.asked()]


async def test_who_gives_back_comes_after_who_was_called(name: str) -> None:
    """It makes no attempt of its own, and asks nothing at first: a moment later it leaves a ticket."""
    still = Still(5, name)
    async with called(still) as (ours, _, waits):
        again = asyncio.create_task(ours(name).acquire(timeout=None))
        await turns()
        still.clock.advance(MOMENT)
        await turns()
        assert waits.done()
        (given, released), (taken, entered), (left, later) = still.asked()
        assert (given, taken, left) == (Verb.RELEASE, Verb.ACQUIRE, Verb.WAIT)
        assert released == entered < later
        await (await waits).release()
        await (await again).release()


async def test_who_was_called_and_does_not_come_is_not_waited_for(name: str) -> None:
    """A process that hangs costs the others some ms, and not a whole look at a stranger."""
    still = Still(5, name)
    async with called(still, hangs=True) as (ours, _, waits):
        again = asyncio.create_task(ours(name).acquire(timeout=None))
        for _ in range(30):
            still.clock.advance(MOMENT)
            await turns()
        assert again.done()
        assert not waits.done()
        await (await again).release()
        waits.cancel()


async def test_to_try_once_is_to_try_at_once(name: str) -> None:
    """With timeout=0 there is no time to be polite."""
    still = Still(5, name)
    async with called(still) as (ours, _, waits):
        await (await waits).release()
        still.asked()
        lease = await ours(name).acquire(timeout=0)
        assert lease
        assert verbs(still) == [Verb.ACQUIRE]
        await lease.release()


async def test_only_just_now(name: str) -> None:
    """Who was called longer ago than a node may take to answer had his chance."""
    still = Still(5, name)
    async with called(still) as (ours, _, waits):
        await (await waits).release()
        still.clock.advance(QUORUM_TIMEOUT + MOMENT)
        still.asked()
        async with ours(name):
            assert verbs(still) == [Verb.ACQUIRE]


async def test_nobody_is_left_to_give_way_to(name: str) -> None:
    """Who had to wait once, and is alone by now, asks for the lock as if it never had."""
    still = Still(5, name)
    async with called(still) as (_, other, waits):
        await (await waits).release()
        still.asked()
        for _ in range(2):
            async with other(name):
                pass
        assert verbs(still) == [Verb.ACQUIRE, Verb.RELEASE] * 2
