"""Leases that no code uses: left to expire, dropped, or taken by a task that has ended."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from asynclock import LockLost, Redlock
from asynclock.protocol.hold import Tenure
from asynclock.rules.model import Verb
from tests.support.probes import tenures_of
from tests.support.still_clock import Still, turns
from tests.support.waiters import LIMIT, works

both = pytest.mark.parametrize("nodes", [1, 3])


@both
async def test_leases_left_to_expire_are_forgotten(name: str, nodes: int) -> None:
    """A task takes a lock again and again, and never releases it: its Lock keeps the last lease only."""
    still = Still(nodes, name)
    async with still.client(lease=3.0, renew=False) as client:
        lock: Any = client(name)
        for _ in range(50):
            assert await lock.acquire(timeout=0)
            await still.until(still.clock.now() + 4.0)
            assert tenures_of(lock) == 1
        with pytest.raises(LockLost) as caught:
            await lock.release()
        assert caught.value.reason == "expired"


@both
async def test_open_leases_between_ended_ones_are_kept(name: str, nodes: int) -> None:
    """One Lock of two permits: a lease that a task still holds through it is released, whatever ended since."""
    still = Still(nodes, name)
    async with still.client(lease=3.0, renew=False) as client:
        lock: Any = client.semaphore(name, 2)
        kept = await lock.acquire(timeout=0)
        for _ in range(20):
            assert await lock.acquire(timeout=0)
            await still.until(still.clock.now() + 1.0)
            await kept.extend()
            await still.until(still.clock.now() + 2.5)
            await kept.extend()
        assert tenures_of(lock) == 2
        assert kept.held
        await kept.release()


@both
async def test_a15_a_recorded_warning_renews_nothing(name: str, nodes: int) -> None:
    """A warnings recorder keeps the lease that was dropped: it is not renewed any more, and expires."""
    still = Still(nodes, name)
    async with still.client(lease=9.0) as client:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            gc.collect()
            recorded.clear()  # of earlier tests
            lock = client(name)
            await lock.acquire()
            del lock
            gc.collect()
            assert [each.category for each in recorded] == [ResourceWarning]
            assert isinstance(recorded[0].source, Tenure)
            still.asked()
            await still.until(still.clock.now() + 10.0)
            assert Verb.EXTEND not in [verb for verb, _ in still.asked()]
            assert not await client(name).locked()


@both
async def test_a_task_that_ended_with_its_lease_open(name: str, nodes: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its Lock lives on, so the lease is renewed until it is released: the log says so, once."""
    caplog.set_level("INFO", logger="asynclock")
    still = Still(nodes, name)
    async with still.client(lease=9.0) as client:
        lock = client(name)
        await asyncio.create_task(_awaited(lock.acquire()))
        caplog.clear()  # the line that says that the node is up
        await still.until(still.clock.now() + 20.0)
        assert await client(name).locked()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert name in caplog.records[0].getMessage()
        await lock.release()
        assert not await client(name).locked()


@both
@pytest.mark.parametrize("how", ["block", "alive"])
async def test_a11_an_open_block_is_no_reason_to_log(
    name: str, nodes: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A fixture's block, which another task ends; or a task that lives: nothing is logged."""
    caplog.set_level("INFO", logger="asynclock")
    still = Still(nodes, name)
    async with still.client(lease=9.0) as client:
        lock = client(name)
        if how == "block":
            await asyncio.create_task(_awaited(lock.__aenter__()))
        else:
            await lock.acquire()
        caplog.clear()  # the line that says that the node is up
        await still.until(still.clock.now() + 20.0)
        assert not caplog.records
        await (lock.__aexit__(None, None, None) if how == "block" else lock.release())


async def test_a6_max_hold_is_shorter_than_a_round_trip(make: Callable[..., Redlock], name: str) -> None:
    """The acquire returns at once a lease that is over already. Nothing is left."""
    client = make()
    async with asyncio.timeout(LIMIT):
        lease = await client(name, max_hold=1e-9).acquire(timeout=None)
        assert not lease.held
        with pytest.raises(LockLost) as caught:
            await lease.release()
        assert caught.value.reason == "max_hold"
        with pytest.raises(LockLost):
            async with client(name, max_hold=1e-9):
                pass
    await works(client, name)


@both
async def test_a6_max_hold_begins_with_the_grant(name: str, nodes: int) -> None:
    """A waiter that was served long after it had sent its ticket has its whole max_hold."""
    still = Still(nodes, name)
    async with still.held(lease=60.0, max_lease=60.0) as (_, lease), still.client() as other:
        waiting = asyncio.create_task(_awaited(other(name, lease=60.0, max_hold=5.0).acquire(timeout=None)))
        await turns()
        await still.until(still.clock.now() + 8.0)  # its ticket is renewed after 16 at the soonest
        await lease.release()
        async with asyncio.timeout(LIMIT):
            served = await waiting
        assert served.held
        assert served.remaining == pytest.approx(5.0, abs=0.1)
        await served.release()


async def _awaited(what: Any) -> Any:
    return await what
