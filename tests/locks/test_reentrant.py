"""The reentrant mutex, on every deployment and both loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asynclock import ConfigError, LockLost, LockNotHeld, QuorumUnavailable, Redlock, SelfDeadlock, Unsupported
from asynclock.protocol.watchdog import TICK
from tests.support.kinds_of_node import each_kind_of_node
from tests.support.probes import acquisitions_of, in_outage
from tests.support.servers import Servers
from tests.support.still_clock import Still, turns
from tests.support.waiters import IN_VAIN, decided, until


async def test_e8_entering_again_keeps_the_fence(redlock: Redlock, name: str) -> None:
    """Through any Lock of the name, at any depth: the same hold, the same token, no round trip."""
    async with redlock(name, reentrant=True) as outer:
        async with redlock(name, reentrant=True) as inner:
            again = await redlock(name, reentrant=True).acquire(timeout=0)
            assert again is not None
            assert outer.fence == inner.fence == again.fence
            await again.release()
            assert inner.held
        assert outer.held
        assert not inner.held
    assert not await redlock(name).locked()


async def test_e8_an_inner_block_of_a_hold_without_a_token_has_none(redlock: Redlock, name: str) -> None:
    """It asks for one, but the outer block took the name without. A 0 would pass every check of tokens, or none."""
    async with redlock(name, reentrant=True, fencing=False), redlock(name, reentrant=True) as inner:
        with pytest.raises(Unsupported, match="each lock of this name with fencing=True"):
            inner.fence  # noqa: B018


@pytest.mark.every_store
async def test_e8_free_only_after_the_last_release(make: Callable[..., Redlock], name: str) -> None:
    """After as many releases as acquires another client gets it, with a greater token."""
    lock, other = make()(name, reentrant=True), make()(name)
    first = await lock.acquire(timeout=None)
    await lock.acquire()
    await lock.release()
    assert await other.acquire(timeout=0) is None
    assert first.held
    await lock.release()
    with pytest.raises(LockNotHeld):
        await lock.release()
    async with other as lease:
        assert lease.fence > first.fence


async def test_e7_a_child_task_is_not_the_owner(redlock: Redlock, name: str) -> None:
    """It waits like any other task, and is granted once the parent has left."""
    order: list[str] = []

    async def child() -> None:
        async with redlock(name, reentrant=True):
            order.append("child")

    async with redlock(name, reentrant=True):
        assert await asyncio.create_task(redlock(name, reentrant=True).acquire(timeout=0)) is None
        waiting = asyncio.create_task(child())
        async with redlock(name, reentrant=True):
            order.append("parent")
    await waiting
    assert order == ["parent", "child"]


async def test_e7_a_named_owner_may_be_many_tasks(redlock: Redlock, name: str) -> None:
    """Tasks that name one owner hold it together, with one token; another owner does not."""
    inside = asyncio.Barrier(3)

    async def worker() -> int:
        async with redlock(name, reentrant=True, owner="us") as lease:
            await inside.wait()
            assert await redlock(name, reentrant=True, owner="them").acquire(timeout=0) is None
            await inside.wait()
            return lease.fence

    assert len(set(await asyncio.gather(worker(), worker(), worker()))) == 1
    assert not await redlock(name).locked()


async def test_a_plain_lock_of_the_name_excludes_its_owner(redlock: Redlock, name: str) -> None:
    """An owner that waits through a lock that is not reentrant would wait for itself; and the other way round."""
    async with redlock(name, reentrant=True):
        with pytest.raises(SelfDeadlock):
            await redlock(name).acquire()
    async with redlock(name):
        with pytest.raises(SelfDeadlock):
            await redlock(name, reentrant=True).acquire()


async def test_a_loss_ends_every_block_of_the_owner(redlock: Redlock, name: str) -> None:
    """Two tasks of one owner are both cancelled, nested blocks once each; no cancel is left over."""
    inside = asyncio.Event()
    over = 0

    async def worker(enter: int) -> None:
        nonlocal over
        with pytest.raises(LockLost) as caught:
            async with redlock(name, reentrant=True, owner="us", max_hold=2.0):
                for _ in range(enter):
                    await redlock(name, reentrant=True, owner="us").acquire()
                inside.set()
                await asyncio.Event().wait()
        assert caught.value.reason == "max_hold"
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        over += 1

    async def nested() -> None:
        nonlocal over
        await inside.wait()
        with pytest.raises(LockLost):
            async with redlock(name, reentrant=True, owner="us"):
                async with redlock(name, reentrant=True, owner="us"):
                    await asyncio.Event().wait()
        over += 1

    await asyncio.gather(worker(0), nested())
    assert over == 2
    async with redlock(name, timeout=5):
        pass


async def test_the_max_hold_of_an_inner_block_ends_the_lease_in_time(name: str) -> None:
    """The outer block has a longer one, and the next renewal is due much later. The error names the inner one."""
    still = Still(1, name)
    async with still.client(lease=30.0) as client:
        outer = await client(name, reentrant=True, max_hold=100.0).acquire(timeout=None)
        inner = await client(name, reentrant=True, max_hold=1.0).acquire(timeout=None)
        still.clock.advance(0.9)
        assert outer.held
        assert inner.held
        still.clock.advance(0.1 + TICK)
        for lease in (outer, inner):
            assert not lease.held
            with pytest.raises(LockLost) as lost:
                await lease.release()
            assert lost.value.reason == "max_hold"
            assert "max_hold (1 s)" in str(lost.value)


@pytest.mark.parametrize("last", ["outer", "inner"])
async def test_the_min_hold_of_each_block_counts(make: Callable[..., Redlock], name: str, last: str) -> None:
    """The name stays taken until the last one is over, whichever lease is released last."""
    client, other = make(), make()
    outer = await client(name, reentrant=True).acquire(timeout=None)
    inner = await client(name, reentrant=True, min_hold=30.0).acquire(timeout=None)
    for lease in (inner, outer) if last == "outer" else (outer, inner):
        await lease.release()
        assert not lease.held
    assert await other(name).acquire(timeout=0) is None
    assert [each.metadata for each in (await other.inspect(name)).holders] == ["(resting)"]


async def test_cancelled_while_an_owner_enters(redlock: Redlock, name: str) -> None:
    """Any of an owner's tasks is cancelled: the others are granted."""
    async with redlock(name):
        tasks = [asyncio.create_task(redlock(name, reentrant=True, owner="us").acquire(timeout=None)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait({tasks[0]})
    leases = await asyncio.gather(*tasks[1:])
    assert leases[0].fence == leases[1].fence
    for lease in leases:
        await lease.release()
    assert not await redlock(name).locked()


async def test_a_cancelled_task_of_an_owner_leaves_no_timer(name: str) -> None:
    """It waited while another task of its owner asked, and its timeout is far away."""
    still = Still(1, name)
    async with still.held() as (_, lease), still.client() as client:
        lock = client(name, reentrant=True, owner="us")
        first = asyncio.create_task(lock.acquire(timeout=None))
        await turns()
        before = still.clock.armed
        second = asyncio.create_task(lock.acquire(timeout=1_000.0))
        await turns()
        assert still.clock.armed == before + 1
        second.cancel()
        await asyncio.wait({second})
        assert still.clock.armed == before
        await lease.release()
        await (await first).release()


@each_kind_of_node
async def test_an_entry_counts_against_its_timeout(redlock: Redlock, name: str) -> None:
    """Also while another task of the owner is asking."""
    async with redlock(name):
        lock = redlock(name, reentrant=True, owner="us")
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        assert await decided(lambda: asyncio.create_task(lock.acquire(timeout=IN_VAIN))) is None
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_c20_a_second_task_of_an_owner_learns_of_the_outage(servers: Servers, name: str) -> None:
    """It waits for the first one, which finds no server. At the end of its time it is told that, and not that another
    owner holds the name."""
    server = servers.start()
    async with Redlock(server.url, patience=600.0) as client:
        lock = client(name, reentrant=True, owner="us")
        assert not await client(name).locked()
        server.kill()
        first = asyncio.create_task(lock.acquire(timeout=None))
        await until(lambda: any(map(in_outage, acquisitions_of(client))))
        with pytest.raises(QuorumUnavailable):
            await lock.acquire(timeout=IN_VAIN)
        first.cancel()
        await asyncio.wait({first})


def test_bad_owners_are_refused() -> None:
    """With a hint."""
    client = Redlock("redis://nowhere")
    with pytest.raises(ConfigError, match="reentrant=True"):
        client("a", owner="us")
    with pytest.raises(ConfigError, match="hashable"):
        client("a", reentrant=True, owner=[])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reentrant is True or False"):
        client("a", reentrant="yes")  # type: ignore[arg-type]
