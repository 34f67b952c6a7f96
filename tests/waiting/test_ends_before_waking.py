"""A hold may end between its grant and the turn in which its task wakes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from asynclock import LockLost, Redlock
from tests.support.probes import acquisitions_of, after_grant, hold_of, left_over, session_of
from tests.support.still_clock import Far, Still, idle, turns
from tests.support.waiters import LIMIT, LONG, until

both = pytest.mark.parametrize("nodes", [1, 5])


async def test_a_hold_that_is_lost_before_its_task_wakes_is_not_returned(name: str) -> None:
    """The acquire asks again, in the time that is left."""
    still = Still(1, name)
    async with still.held() as (_, lease), still.client() as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=20))
        await until(lambda: idle(other))
        (acquires,) = acquisitions_of(other)
        lost: list[Any] = []

        def lose() -> None:
            lost.extend(session_of(other).machine.holds.of(name))
            lost[0].lose("taken")

        after_grant(acquires, lose)
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        assert got is not None
        assert got.held
        assert hold_of(got) is not lost[0]
        await got.release()


async def test_a_last_question_behind_another_task_waits_for_its_answer(name: str) -> None:
    """The hold is lost before its task wakes, and the loop is blocked until the time of that task is over. The next
    task of its process asks a server that is far. Its answer serves both: the name is held, and that is no outage."""
    still = Still(1, name)
    far = Far(still.clock)
    still.stores = [far]
    async with still.held(lease=LONG) as (_, lease), still.client(lease=LONG) as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=3.0))
        await until(lambda: idle(other))
        (acquires,) = acquisitions_of(other)
        behind = asyncio.create_task(other(name).acquire(timeout=None))
        await turns()

        def lose() -> None:
            far.rtt = 0.2
            for hold in session_of(other).machine.holds.of(name):
                hold.lose("taken")
            still.clock.block(0.1)

        after_grant(acquires, lose)
        still.clock.advance(2.95)
        await until(lambda: idle(other))
        await lease.release()
        async with asyncio.timeout(LIMIT):
            while not (waiting.done() and behind.done()):
                still.clock.advance(0.05)
                await turns()
        assert await waiting is None
        far.rtt = 0.0
        await (await behind).release()


@both
async def test_a_hold_that_is_released_before_its_task_wakes_is_not_returned(name: str, nodes: int) -> None:
    """`release_all` ran in the turn of the grant. The acquire asks again."""
    still = Still(nodes, name)
    async with still.held() as (_, lease), still.client() as other:
        waiting = asyncio.create_task(other(name).acquire(timeout=None))
        await until(lambda: idle(other))
        (acquires,) = acquisitions_of(other)
        after_grant(acquires, lambda: releases_all(other))
        await lease.release()
        async with asyncio.timeout(LIMIT):
            got = await waiting
        assert got is not None
        assert got.held
        await got.release()
        assert left_over(other) == {}


def releases_all(client: Redlock) -> None:
    """All that `release_all` does in this turn."""
    with contextlib.suppress(StopIteration):
        client.release_all().send(None)


@both
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_hold_that_was_passed_on_before_its_task_wakes_is_not_released(
    name: str, nodes: int, cancelled: bool
) -> None:
    """`release_all` ran in the turn of the grant, and another task has the hold by then. The first task, which asks
    again or was cancelled, does not end it."""
    still = Still(nodes, name)
    async with still.client() as client:
        own = await client(name).acquire(timeout=None)
        waiting = asyncio.create_task(client(name).acquire(timeout=None))
        await turns()
        (acquires,) = acquisitions_of(client)
        second = asyncio.create_task(client(name).acquire(timeout=None))
        await turns()
        holds: list[Any] = []

        def release() -> None:
            holds.extend(session_of(client).machine.holds.of(name))
            releases_all(client)
            if cancelled:
                waiting.cancel()

        after_grant(acquires, release)
        await own.release()
        async with asyncio.timeout(LIMIT):
            got = await second
        await turns()
        assert hold_of(got) is holds[0]
        assert got.held
        await got.release()
        if cancelled:
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            async with asyncio.timeout(LIMIT):
                await (await waiting).release()
        assert left_over(client) == {}


async def test_a_body_does_not_begin_after_the_end_of_max_hold(name: str) -> None:
    """The watchdog has ended the lease before the task woke. So it would not cancel the body."""
    still, entered = Still(1, name), False

    def end() -> None:
        still.clock.advance(0.2)

    def watch() -> None:
        (acquires,) = acquisitions_of(client)
        after_grant(acquires, end)

    async with still.client() as client:
        asyncio.get_running_loop().call_soon(watch)
        with pytest.raises(LockLost, match="max_hold"):
            async with client(name, max_hold=0.1):
                entered = True
        assert not entered
        assert left_over(client) == {}
        async with still.client() as other, other(name, timeout=0):
            pass


async def test_a_lease_that_max_hold_ends_at_once_is_returned(name: str) -> None:
    """Its time counts from the grant, so a new try would not be longer."""
    still = Still(1, name)
    async with still.client() as client:
        lease = await client(name, max_hold=1e-9).acquire(timeout=5)
        assert lease is not None
        still.clock.advance(1e-6)
        with pytest.raises(LockLost, match="max_hold"):
            await lease.release()
