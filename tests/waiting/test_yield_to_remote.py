"""Over N nodes a client that releases a lock to others comes after them; and the cost of that."""

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
"""Seconds in which a notified waiter asks."""


@asynccontextmanager
async def after_release(still: Still, hangs: bool = False) -> AsyncIterator[tuple[Redlock, Redlock, asyncio.Task[Any]]]:
    """A client that has just released the name, another client that the release notified, and the task of that one."""
    async with still.client() as ours, still.client() as other:
        lease = await ours(still.name).acquire(timeout=None)
        waits: asyncio.Task[Any] = asyncio.create_task(other(still.name).acquire(timeout=None))
        while not idle(other):
            await asyncio.sleep(0)
        still.asked()
        if hangs:
            forget_tickets(other)  # notices mean nothing to it
        await lease.release()
        yield ours, other, waits


def verbs(still: Still) -> list[Verb]:
    return [verb for verb, _ in still.asked()]


async def test_the_releaser_comes_after_the_notified_waiter(name: str) -> None:
    """The releaser makes no attempt of its own, and asks nothing at first. A moment later it leaves a ticket."""
    still = Still(5, name)
    async with after_release(still) as (ours, _, waits):
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


async def test_an_adopter_comes_after_the_notified_waiter(name: str) -> None:
    """No server tells the adopter that another client waits, so it assumes that one does."""
    still = Still(5, name)
    async with still.held() as (_, lease), still.client() as ours, still.client() as other:
        waits: asyncio.Task[Any] = asyncio.create_task(other(name).acquire(timeout=None))
        while not idle(other):
            await asyncio.sleep(0)
        adopted = await ours.adopt(await lease.detach())
        still.asked()
        await adopted.release()
        again = asyncio.create_task(ours(name).acquire(timeout=None))
        await turns()
        still.clock.advance(MOMENT)
        await turns()
        assert waits.done()
        assert verbs(still) == [Verb.RELEASE, Verb.ACQUIRE, Verb.WAIT]
        await (await waits).release()
        await (await again).release()


async def test_a_notified_waiter_that_hangs_is_not_waited_for(name: str) -> None:
    """A process that hangs costs the others some milliseconds, and not a whole pause between two probes."""
    still = Still(5, name)
    async with after_release(still, hangs=True) as (ours, _, waits):
        again = asyncio.create_task(ours(name).acquire(timeout=None))
        for _ in range(30):
            still.clock.advance(MOMENT)
            await turns()
        assert again.done()
        assert not waits.done()
        await (await again).release()
        waits.cancel()


async def test_timeout_zero_does_not_yield(name: str) -> None:
    """With timeout=0 there is no time to yield to others."""
    still = Still(5, name)
    async with after_release(still) as (ours, _, waits):
        await (await waits).release()
        still.asked()
        lease = await ours(name).acquire(timeout=0)
        assert lease
        assert verbs(still) == [Verb.ACQUIRE]
        await lease.release()


async def test_it_yields_only_for_a_moment(name: str) -> None:
    """A waiter that was notified longer ago than a node may take to answer gets no precedence any more."""
    still = Still(5, name)
    async with after_release(still) as (ours, _, waits):
        await (await waits).release()
        still.clock.advance(QUORUM_TIMEOUT + MOMENT)
        still.asked()
        async with ours(name):
            assert verbs(still) == [Verb.ACQUIRE]


async def test_it_does_not_yield_without_remote_waiters(name: str) -> None:
    """A client that had to wait once, and is alone by now, asks for the lock as if it had never waited."""
    still = Still(5, name)
    async with after_release(still) as (_, other, waits):
        await (await waits).release()
        still.asked()
        for _ in range(2):
            async with other(name):
                pass
        assert verbs(still) == [Verb.ACQUIRE, Verb.RELEASE] * 2


@asynccontextmanager
async def gone_quiet(beyond: Beyond, silent: int) -> AsyncIterator[Redlock]:
    """A client that has just released the name to another one that hangs; so many nodes are silent from then on."""
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
async def test_an_outage_after_a_release_is_an_outage(name: str, timeout: float) -> None:
    """A client that released the name has not thereby seen a holder."""
    beyond = Beyond(5, name, way=0.0002)
    async with gone_quiet(beyond, silent=5) as ours:
        again = asyncio.create_task(ours(name).acquire(timeout=timeout))
        await beyond.finish(again)
        assert isinstance(again.exception(), QuorumUnavailable)


@pytest.mark.parametrize("timeout", [0.009, 0.04, 0.2, None])
async def test_a_silent_minority_does_not_delay_a_client_that_yields(name: str, timeout: float | None) -> None:
    """The name is free, and a majority says so in time. A client with little time does not yield."""
    beyond = Beyond(5, name, way=0.0002)
    async with gone_quiet(beyond, silent=2) as ours:
        again = asyncio.create_task(ours(name).acquire(timeout=timeout))
        await beyond.pass_time(QUORUM_TIMEOUT - MOMENT, step=0.0002)
        assert again.done()
        await beyond.finish(asyncio.create_task((await again).release()))


async def test_a_lost_hold_does_not_make_a_client_yield(name: str) -> None:
    """A hold that was lost notifies nobody, so there is nobody to yield to."""
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
