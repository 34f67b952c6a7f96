"""The mutex, on every deployment and both loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from asynclock import Lease, LockLost, LockNotHeld, LockTimeout, Redlock, SelfDeadlock, Unsupported
from asynclock.protocol import holds
from asynclock.stores.memory import MemoryStore
from tests.support.probes import acquisitions_of, tenures_of
from tests.support.still_clock import idle
from tests.support.user_store import state_of
from tests.support.waiters import IN_VAIN, LIMIT, LONG, back, decided, until

pytestmark = pytest.mark.both_loops("the basics are tested on both")


@pytest.mark.every_store
async def test_one_holder_at_a_time(redlock: Redlock, name: str) -> None:
    """Fifty tasks count through a lock and none sees another inside."""
    inside = 0
    done = 0

    async def worker() -> None:
        nonlocal inside, done
        async with redlock(name):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1
            done += 1

    await asyncio.gather(*(worker() for _ in range(50)))
    assert done == 50


@pytest.mark.every_store
async def test_two_clients_exclude_each_other(make: Callable[..., Redlock], name: str) -> None:
    """Clients share nothing but the servers."""
    async with make()(name):
        assert await make()(name).acquire(timeout=0) is None


async def test_acquire_returns_a_lease_that_guards_its_block(redlock: Redlock, name: str) -> None:
    """acquire, then `async with lease`, then released."""
    lease = await redlock(name, lease=LONG).acquire(timeout=LIMIT)
    assert isinstance(lease, Lease)
    async with lease as same:
        assert same is lease
        assert lease.held
        assert LONG / 2 < lease.remaining <= LONG
    assert not lease.held
    assert lease.remaining == 0.0
    assert not await redlock(name).locked()


async def test_classic_form(redlock: Redlock, name: str) -> None:
    """acquire and release on the lock itself."""
    lock = redlock(name)
    assert await lock.acquire(timeout=0)
    assert await lock.locked()
    await lock.release()
    assert not await lock.locked()


@pytest.mark.every_store
async def test_acquire_in_vain_returns_none(make: Callable[..., Redlock], name: str) -> None:
    """None: another client held it for the whole timeout."""
    other = make()
    await other.health()  # connected: the timeout is for the lock alone
    async with make()(name):
        assert await decided(lambda: other(name).acquire(timeout=IN_VAIN)) is None


async def test_block_in_vain_raises_lock_timeout(make: Callable[..., Redlock], name: str) -> None:
    """`async with` cannot return None."""
    other = make()
    await other.health()

    async def enter() -> None:
        async with other(name, timeout=timedelta(seconds=IN_VAIN)):
            pytest.fail("entered")

    async with make()(name):
        with pytest.raises(LockTimeout) as caught:
            await decided(enter)
    assert caught.value.name == name
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.every_store
async def test_waiter_gets_it_after_release(make: Callable[..., Redlock], name: str) -> None:
    """A waiter gets the lock once it is free."""
    async with make()(name):
        client = make()
        waiting = asyncio.create_task(client(name).acquire())
        await until(lambda: acquisitions_of(client) and idle(client))
        assert not waiting.done()
    async with asyncio.timeout(LIMIT):
        await (await waiting).release()


@pytest.mark.every_store
async def test_fences_rise(make: Callable[..., Redlock], name: str) -> None:
    """Each hold's token is greater than all before it, whichever client takes it."""
    fences = []
    for client in (make(), make(), make()) * 5:
        async with client(name) as lease:
            fences.append(lease.fence)
    assert fences == sorted(set(fences))


async def test_without_fencing_there_is_no_fence(make: Callable[..., Redlock], name: str) -> None:
    """fencing=False excludes all the same, and `fence` says that there is none."""
    async with make()(name, fencing=False) as lease:
        with pytest.raises(Unsupported):
            _ = lease.fence
        assert await make()(name).acquire(timeout=0) is None
        await lease.extend()
    async with make()(name):
        assert await make()(name, fencing=False).acquire(timeout=0) is None


async def test_release_twice(redlock: Redlock, name: str) -> None:
    """The second release has nothing to release."""
    lock = redlock(name)
    lease = await lock.acquire(timeout=None)
    await lease.release()
    with pytest.raises(LockNotHeld):
        await lease.release()
    with pytest.raises(LockNotHeld):
        await lock.release()


async def test_extend_after_release(redlock: Redlock, name: str) -> None:
    """A released lease cannot be extended."""
    lease = await redlock(name).acquire(timeout=None)
    await lease.release()
    with pytest.raises(LockNotHeld):
        await lease.extend()
    with pytest.raises(LockNotHeld):
        lease.ensure_held()


@pytest.mark.every_store
async def test_extend_replaces_and_never_shortens(redlock: Redlock, name: str) -> None:
    """extend counts from now: it neither adds to the rest of the lease nor shortens it."""
    async with redlock(name, lease=10) as lease:
        await lease.extend(lease=40)
        assert 30 < lease.remaining <= 40
        await lease.extend(lease=timedelta(seconds=5))
        assert 20 < lease.remaining <= 40


async def test_wait_lost_returns_false_after_a_release(redlock: Redlock, name: str) -> None:
    """False: it was released, not lost."""
    async with redlock(name) as lease:
        lost = asyncio.create_task(lease.wait_lost())
        await asyncio.sleep(0)
    assert await lost is False
    assert await lease.wait_lost() is False


@pytest.mark.every_store
async def test_min_hold_keeps_the_name_taken(make: Callable[..., Redlock], name: str) -> None:
    """Release does not wait for the end of min_hold; until then the name stays taken."""
    lease = await make()(name, lease=LONG, min_hold=LONG).acquire(timeout=None)
    async with asyncio.timeout(LIMIT):
        await lease.release()
    assert not lease.held
    assert await make()(name).acquire(timeout=0) is None


@pytest.mark.every_store
async def test_max_hold_ends_a_lease(redlock: Redlock, name: str) -> None:
    """A body that never ends is cancelled after max_hold."""
    with pytest.raises(LockLost) as caught:
        async with redlock(name, max_hold=0.1):
            await asyncio.Event().wait()
    assert caught.value.reason == "max_hold"
    assert not await redlock(name).locked()


async def test_release_ends_only_this_tasks_tenure(redlock: Redlock, name: str) -> None:
    """Another task's tenure through the same Lock goes on."""
    lock = redlock(name)

    async def other() -> None:
        with pytest.raises(LockNotHeld):
            await lock.release()

    async with lock as lease:
        await asyncio.create_task(other())
        assert lease.held


@pytest.mark.every_store
async def test_release_all(redlock: Redlock, name: str) -> None:
    """It releases all that this client holds, and nothing else."""
    leases = [await redlock(f"{name}:{i}").acquire(timeout=None) for i in range(5)]
    await redlock.release_all()
    assert not any(lease.held for lease in leases)
    assert not await redlock(f"{name}:0").locked()


async def test_release_all_leaves_nothing_with_a_lock(redlock: Redlock, name: str) -> None:
    """The Lock forgets the leases that release_all() gave back, however often a task takes two through it."""
    lock = redlock.semaphore(name, 2)
    for _ in range(5):
        assert await lock.acquire() is not await lock.acquire()
        await redlock.release_all()
        assert tenures_of(lock) <= 2
    with pytest.raises(LockNotHeld, match="holds no"):
        await lock.release()
    assert tenures_of(lock) == 0


async def test_a_cancelled_release_all_gives_all_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two slices: all is given back, and the cancel goes on."""
    monkeypatch.setattr(holds, "SLICE", 0.0)
    store = MemoryStore()
    async with Redlock(store) as client:
        leases = [await client(f"{name}:{i}").acquire(timeout=None) for i in range(20)]
        releasing = asyncio.create_task(client.release_all())
        for _ in range(5):
            await asyncio.sleep(0)
        assert any(lease.held for lease in leases)
        releasing.cancel()
        await asyncio.wait({releasing})
        assert releasing.cancelled()
        assert not any(lease.held for lease in leases)
        assert not any(state_of(store, f"{name}:{i}").holds for i in range(20))


async def test_e18_a_task_that_would_wait_for_itself(redlock: Redlock, name: str) -> None:
    """SelfDeadlock is raised at once; the watchdog would renew the deadlock for ever."""
    async with redlock(name) as lease:
        with pytest.raises(SelfDeadlock):
            await redlock(name).acquire()
        assert await redlock(name).acquire(timeout=0) is None
        assert lease.held


@pytest.mark.every_store
async def test_health(redlock: Redlock) -> None:
    """Every node answers, and reports its latency."""
    await redlock("any").locked()  # which connects, and on a busy machine takes more than the second of a check
    await back(redlock)
    health = await redlock.health()
    assert health.ok
    assert all(node.ok and node.latency is not None and node.error == "" for node in health.nodes)
