"""What `lead` returns where the lease is gone by the time its main returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asynclock import ConfigError, Lease, LockLost, Redlock
from tests.support.memory_probes import forget_all
from tests.support.probes import check, intercept_notices
from tests.support.still_clock import Still
from tests.support.waiters import LIMIT, rise


async def test_broken_as_main_returned(make: Callable[..., Redlock], name: str) -> None:
    """The release finds out that the name was taken away: main has run to its end all the same, once, and its result is
    returned."""
    leader, operator = make(), make()
    await leader.health()
    intercept_notices(leader, lambda index, notice: None)  # that it was broken comes too late
    runs: list[int] = []

    async def main(lease: Lease) -> str:
        runs.append(lease.fence)
        if len(runs) == 1:
            assert await operator.break_lock(name)
        return f"result {len(runs)}"

    async with asyncio.timeout(LIMIT):
        assert await leader.lead(name, main) == "result 1"
    assert len(runs) == 1
    assert not await operator(name).locked()


async def test_none_is_a_result_too(make: Callable[..., Redlock], name: str) -> None:
    """Main returns None, and its lease is gone by then: it has run all the same."""
    leader, operator = make(), make()
    await leader.health()
    intercept_notices(leader, lambda index, notice: None)
    runs: list[int] = []

    async def main(lease: Lease) -> None:
        runs.append(lease.fence)
        if len(runs) == 1:
            assert await operator.break_lock(name)

    async with asyncio.timeout(LIMIT):
        await leader.lead(name, main)
    assert len(runs) == 1


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("how", ["expired", "forgotten"])
async def test_over_in_the_last_turn(name: str, nodes: int, how: str) -> None:
    """The loop was blocked beyond the lease just before main returned, or the servers have forgotten it."""
    still = Still(nodes, name)
    runs = 0

    async def main(lease: Lease) -> int:
        nonlocal runs
        runs += 1
        if runs > 1:
            return -1
        if how == "expired":
            still.clock.block(60.0)
            assert not lease.held
        else:
            for store in still.stores:
                forget_all(store)
        return 17 * runs

    async with still.client() as client, asyncio.timeout(LIMIT):
        assert await client.lead(name, main) == 17
    assert runs == 1


@pytest.mark.parametrize("nodes", [1, 5])
async def test_lost_while_main_runs(name: str, nodes: int) -> None:
    """Here main was cancelled, so it runs again, under a greater token, and that result counts."""
    still = Still(nodes, name)
    fences: list[int] = []

    async def main(lease: Lease) -> str:
        fences.append(lease.fence)
        if len(fences) == 1:
            for store in still.stores:
                forget_all(store)
            check(lease)  # which finds out
            await asyncio.Event().wait()
        return "led"

    async with still.client() as client, asyncio.timeout(LIMIT):
        assert await client.lead(name, main) == "led"
    assert len(fences) == 2
    assert rise(fences)


@pytest.mark.parametrize("nodes", [1, 5])
async def test_an_error_of_main_goes_before_a_loss(name: str, nodes: int) -> None:
    """Main raises, and its lease is gone by then: its error is raised, after one run."""
    still = Still(nodes, name)
    runs = 0

    async def main(lease: Lease) -> None:
        nonlocal runs
        runs += 1
        still.clock.block(60.0)
        raise ZeroDivisionError

    async with still.client() as client, asyncio.timeout(LIMIT):
        with pytest.raises(ZeroDivisionError):
            await client.lead(name, main)
    assert runs == 1


async def test_closed_while_main_runs(name: str) -> None:
    """Its own client closes: main is stopped, and does not run again."""
    still = Still(1, name)
    runs = 0

    async def main(lease: Lease) -> None:
        nonlocal runs
        runs += 1
        await asyncio.Event().wait()

    async with asyncio.timeout(LIMIT), still.client() as client:
        leading = asyncio.create_task(client.lead(name, main))
        while not runs:
            await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises((LockLost, ConfigError)):
            await leading
    assert runs == 1


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("look", ["ensure_held", "extend"])
async def test_main_notices_the_loss_itself(name: str, nodes: int, look: str) -> None:
    """Main uses its lost lease and lets that error out: it leads again, and that result counts."""
    still = Still(nodes, name)
    fences: list[int] = []

    async def main(lease: Lease) -> str:
        fences.append(lease.fence)
        if len(fences) == 1:
            still.clock.block(60.0)
            if look == "extend":
                await lease.extend()
            lease.ensure_held()
        return "led"

    async with still.client() as client, asyncio.timeout(LIMIT):
        assert await client.lead(name, main) == "led"
    assert len(fences) == 2
    assert rise(fences)


@pytest.mark.parametrize("nodes", [1, 5])
async def test_main_lost_another_lock(name: str, nodes: int) -> None:
    """A LockLost of another name, or raised while the lease is held, is main's own error, and ends it."""
    still = Still(nodes, name)

    async def main(lease: Lease, lost: LockLost) -> None:
        raise lost

    async with still.client() as client, asyncio.timeout(LIMIT):
        for lost in (LockLost(f"{name}:other", "expired"), LockLost(name, "expired")):
            with pytest.raises(LockLost) as caught:
                await client.lead(name, lambda lease, lost=lost: main(lease, lost))  # type: ignore[misc]
            assert caught.value is lost
