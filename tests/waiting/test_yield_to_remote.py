"""Over N nodes who gives a lock back to others comes after them, and what that may cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynclock import LockLost, QuorumUnavailable, Redlock
from asynclock._options import QUORUM_TIMEOUT
from asynclock.rules.model import Verb
from tests.support.distant_stores import Beyond
from tests.support.probes import contended, forget_tickets, lose
from tests.support.still_clock import Still, idle, turns

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
            forget_tickets(other)  # what it hears means nothing to it
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


@asynccontextmanager
async def gone_quiet(beyond: Beyond, silent: int) -> AsyncIterator[Redlock]:
    """A client that has just given the name back to another that hangs; and so many nodes say nothing from then on."""
    async with beyond.opened() as ours, beyond.opened() as other:
        lease = await beyond.lease(ours)
        waits = asyncio.create_task(other(beyond.name).acquire(timeout=None))
        await beyond.pass_time(0.05)
        forget_tickets(other)
        await beyond.finish(asyncio.create_task(lease.release()))
        for store in beyond.far[:silent]:
            store.silent = True
        yield ours
        waits.cancel()


@pytest.mark.parametrize("timeout", [0.0003, 0.03, 0.3])
async def test_an_outage_is_none_the_less_one(name: str, timeout: float) -> None:
    """To have given the name back is not to have seen somebody hold it."""
    beyond = Beyond(5, name, way=0.0002)
    async with gone_quiet(beyond, silent=5) as ours:
        again = asyncio.create_task(ours(name).acquire(timeout=timeout))
        await beyond.finish(again)
        assert isinstance(again.exception(), QuorumUnavailable)


@pytest.mark.parametrize("timeout", [0.009, 0.04, 0.2, None])
async def test_a_silent_minority_holds_up_nobody_who_gives_way(name: str, timeout: float | None) -> None:
    """The name is free, and a majority says so in time; who has little time is not polite."""
    beyond = Beyond(5, name, way=0.0002)
    async with gone_quiet(beyond, silent=2) as ours:
        again = asyncio.create_task(ours(name).acquire(timeout=timeout))
        await beyond.pass_time(QUORUM_TIMEOUT - MOMENT, step=0.0002)
        assert again.done()
        await beyond.finish(asyncio.create_task((await again).release()))


async def test_who_lost_it_gave_nothing(name: str) -> None:
    """A hold that was lost calls nobody, and so there is nobody to give way to."""
    still = Still(5, name)
    async with still.client() as ours, still.client() as other:
        lease = await ours(name).acquire(timeout=None)
        waits = asyncio.create_task(other(name).acquire(timeout=None))
        while not idle(other):
            await asyncio.sleep(0)
        assert contended(lease)
        lose(lease)
        with pytest.raises(LockLost):
            await lease.release()
        still.asked()
        again = asyncio.create_task(ours(name).acquire(timeout=None))
        await turns()
        assert verbs(still)[-1] is not Verb.RELEASE  # it asked at once
        await (await waits).release()
        await (await again).release()
