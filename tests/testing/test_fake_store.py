"""What a test can do to a FakeStore, and what the clients of it then see."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from contextlib import aclosing
from sys import _getframe as frame_at
from typing import Any

import fakeredis
import pytest

from asynclock import ConfigError, Health, LockLost, LockNotHeld, LockTimeout, QuorumUnavailable, Redlock
from asynclock.events import NodeDown, NodeUp
from asynclock.rules.model import State
from asynclock.runtime import shutdown
from asynclock.stores import MemoryStore
from asynclock.stores.transactional import Change
from asynclock.testing import FakeStore
from tests.support.waiters import LIMIT

KINDS = {
    "mutex": lambda client: client("a"),
    "fair": lambda client: client("a", fair=True),
    "reentrant": lambda client: client("a", reentrant=True),
    "read": lambda client: client.read("a"),
    "write": lambda client: client.write("a"),
    "semaphore": lambda client: client.semaphore("a", 3),
    "multi": lambda client: client.multi("b", "a"),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
NODES = [pytest.param(1, id="one"), pytest.param(3, id="three")]


@pytest.mark.parametrize("nodes", NODES)
@each_kind
async def test_busy_and_free(kind: str, nodes: int) -> None:
    """Another owner keeps out every kind of lock. Once it gives the name back, a waiter enters without `advance`."""
    stores = [FakeStore() for _ in range(nodes)]
    for store in stores:
        store.busy("a")
    async with Redlock(*stores) as client:
        lock = KINDS[kind](client)
        assert await lock.acquire(timeout=0) is None
        assert await lock.locked()
        waiting = asyncio.create_task(lock.acquire(timeout=50))
        await stores[0].advance(20)
        assert not waiting.done()
        for store in stores:
            store.free("a")
        lease = await waiting
        assert lease is not None
        await lease.release()


async def test_busy_says_who_holds_it() -> None:
    """In the error of a waiter, and in `inspect`."""
    store = FakeStore()
    store.busy("a")
    async with Redlock(store, prefix="mine:") as client:
        with pytest.raises(LockTimeout) as caught:
            async with client("a", timeout=0):
                pass
        assert caught.value.holder is not None
        assert caught.value.holder.host == "another-host"
        assert [each.host for each in (await client.inspect("a")).holders] == ["another-host"]
        assert await client.break_lock("a")
        async with client("a", timeout=0):
            pass


async def test_busy_before_the_first_use() -> None:
    """`inspect` of a client with another prefix shows the other owner, and `free` lets the client in."""
    store = FakeStore()
    store.busy("a")
    async with Redlock(store, prefix="mine:") as client:
        assert [each.host for each in (await client.inspect("a")).holders] == ["another-host"]
        assert await client("a").acquire(timeout=0) is None
        store.free("a")
        assert not (await client.inspect("a")).holders


@pytest.mark.parametrize("fault", ["down", "hang"])
@pytest.mark.parametrize("nodes", NODES)
async def test_free_while_the_store_cannot_answer(fault: str, nodes: int) -> None:
    """The waiter enters once it is up, and not before."""
    stores = [FakeStore() for _ in range(nodes)]
    for each in stores:
        each.busy("a")
    async with Redlock(*stores) as client:
        waiting = asyncio.create_task(client("a").acquire(timeout=50))
        await stores[0].advance(1)
        for each in stores:
            getattr(each, fault)()
            each.free("a")
        await stores[0].advance(2)
        assert not waiting.done()
        for each in stores:
            each.up()
        lease = await waiting
        assert lease is not None
        await lease.release()


async def test_busy_again_before_the_store_is_up() -> None:
    """It stays busy."""
    store = FakeStore()
    store.busy("a")
    async with Redlock(store) as client:
        store.down()
        store.free("a")
        store.busy("a")
        store.up()
        await store.advance(1)
        assert await client("a").acquire(timeout=0) is None


async def test_busy_takes_a_lock_away() -> None:
    """Its holder learns of it at the next renewal."""
    store = FakeStore()
    async with Redlock(store) as client:
        with pytest.raises(LockLost) as caught:
            async with client("a"):
                store.busy("a")
                await store.advance(30)
        assert caught.value.reason == "taken"


async def test_a_waiter_of_another_client_enters() -> None:
    """Over several nodes, too, where it pauses for a round trip before it asks: such pauses pass by themselves."""
    stores = [FakeStore() for _ in range(3)]
    async with Redlock(*stores) as first, Redlock(*stores) as second:
        lease = await first("a").acquire(timeout=None)
        waiting = asyncio.create_task(second("a").acquire(timeout=50))
        await stores[0].advance(5)
        await lease.release()
        taken = await waiting
        assert taken is not None
        assert taken.fence > lease.fence
        await taken.release()


@pytest.mark.parametrize("nodes", NODES)
async def test_clients_take_turns(nodes: int) -> None:
    """Without `advance`, although one that has just released lets notified waiters reach the servers first."""
    stores = [FakeStore() for _ in range(nodes)]
    turns: list[str] = []

    async def take(name: str) -> None:
        async with Redlock(*stores) as client:
            for _ in range(10):
                async with client("a"):
                    turns.append(name)
                    await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in ("one", "two", "three"):
            group.create_task(take(name))
    assert sorted(turns) == sorted(["one", "two", "three"] * 10)


async def test_a_busy_semaphore_has_no_permit_left() -> None:
    """For a caller that brings more permits than the one before, too."""
    store = FakeStore()
    store.busy("a")
    async with Redlock(store) as client:
        for permits in (2, 5, 3):
            assert await client.semaphore("a", permits).acquire(timeout=0) is None
        store.free("a")
        async with client.semaphore("a", 5, timeout=0):
            pass


async def test_lose_while_others_wait() -> None:
    """The holder loses it, and the waiter of another client enters. Their prefix does not matter."""
    store = FakeStore()
    async with Redlock(store, prefix="mine:") as first, Redlock(store, prefix="mine:") as second:
        lease = await first("a").acquire(timeout=None)
        waiting = asyncio.create_task(second("a").acquire(timeout=100))
        await store.advance(1)
        store.lose("a")
        assert lease.held  # as in production, where nobody tells it
        await store.advance(40)
        assert not lease.held
        taken = await waiting
        assert taken is not None
        await taken.release()
        with pytest.raises(LockLost):
            await lease.release()


async def test_what_is_not_there_cannot_be_lost_or_freed() -> None:
    """A wrong name in a test is an error."""
    store = FakeStore()
    with pytest.raises(LockNotHeld, match="'a' is not held"):
        store.lose("a")
    with pytest.raises(LockNotHeld, match="'a' is not busy"):
        store.free("a")


async def test_down_and_up() -> None:
    """A waiter goes on without `advance` once the store is up; the client tells both; a lease ends in a long outage."""
    store = FakeStore()
    async with Redlock(store) as client:
        seen: list[object] = []
        client.subscribe(seen.append)
        store.down()
        waiting = asyncio.create_task(client("a").acquire(timeout=60))
        await store.advance(2)
        assert not waiting.done()
        assert not (await client.health()).ok
        store.up()
        lease = await waiting
        assert lease is not None
        assert [type(each) for each in seen if isinstance(each, NodeDown | NodeUp)] == [NodeDown, NodeUp]
        store.down()
        await store.advance(20)
        assert lease.held
        await store.advance(20)
        assert not lease.held
        with pytest.raises(QuorumUnavailable, match="is down"):
            task = asyncio.create_task(client("b").acquire())
            await store.advance(10)
            await task


async def test_up_in_another_thread_as_a_client_begins_to_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is between two steps of the client: it has seen that the store is down, and is not yet woken by `up`.
    The client goes on."""
    store = FakeStore()
    loop = asyncio.get_running_loop()
    create, ups = loop.create_future, list[threading.Thread]()

    def create_future() -> asyncio.Future[Any]:
        if not ups and frame_at(1).f_code.co_filename == inspect.getfile(FakeStore):
            ups.append(threading.Thread(target=store.up))
            ups[0].start()
            ups[0].join()
        return create()

    async with Redlock(store) as client:
        monkeypatch.setattr(loop, "create_future", create_future)
        store.down()
        async with asyncio.timeout(LIMIT), client("a", timeout=None):
            assert ups


async def test_down_before_the_first_use() -> None:
    """A client that connects goes on without `advance`, too; without `up` its patience ends."""
    store = FakeStore()
    store.down()
    client = Redlock(store)
    entering = asyncio.create_task(client.__aenter__())
    await store.advance(1)
    assert not entering.done()
    store.up()
    await entering
    await client.aclose()
    store.down()
    client = Redlock(store)
    waiting = asyncio.create_task(client("a").acquire())
    await store.advance(6)
    with pytest.raises(QuorumUnavailable, match="is down"):
        await waiting
    store.up()
    await store.advance(10)
    async with client("a"):
        pass
    await client.aclose()


async def test_hang_and_up() -> None:
    """Requests are answered once the store is up. Until then only time ends the wait for an answer."""
    store = FakeStore()
    async with Redlock(store) as client:
        store.hang()
        waiting = asyncio.create_task(client("a").acquire())
        await store.advance(1)
        assert not waiting.done()
        store.up()
        lease = await waiting
        assert lease is not None
        await lease.release()
        store.hang()
        waiting = asyncio.create_task(client("a").acquire())
        await store.advance(20)
        with pytest.raises(QuorumUnavailable, match="did not answer within 3 s"):
            await waiting
        store.up()
        async with client("a", timeout=0):
            pass


@pytest.mark.parametrize("fault", ["restart", "down"])
async def test_a_request_that_hangs_is_lost_with_its_connection(fault: str) -> None:
    """It is not carried out when the store is up again."""
    store, carried_out = FakeStore(), list[float]()

    def step(states: Sequence[State], now: float) -> Change:
        carried_out.append(now)
        return Change(states)

    store.hang()
    hanging = asyncio.create_task(store.transact(["lock:a"], step))
    await store.advance(1)
    getattr(store, fault)()
    store.up()
    with pytest.raises(ConnectionError):
        await hanging
    assert not carried_out


@pytest.mark.parametrize(("fault", "says"), [("down", "is down"), ("hang", "did not answer")])
async def test_holders_of_a_store_that_cannot_answer(fault: str, says: str) -> None:
    """An error, and not an empty list."""
    store = FakeStore()
    async with Redlock(store) as client:
        getattr(store, fault)()

        async def names() -> list[str]:
            return [each.name async for each in client.holders()]

        asking = asyncio.create_task(names())
        await store.advance(6)
        with pytest.raises(QuorumUnavailable, match=says):
            await asking
        store.up()
        await store.advance(1)
        assert await names() == []


async def test_a_hanging_store_at_the_first_use() -> None:
    """The wait for the first answer follows the clock, too; so do `health` and `inspect`."""
    store = FakeStore()
    store.hang()
    async with aclosing(Redlock(store)) as hasty:
        waiting = asyncio.create_task(hasty("a").acquire(timeout=1))
        await store.advance(1.5)
        assert waiting.done()
        with pytest.raises(QuorumUnavailable):
            await waiting
    client, entered = Redlock(store), Redlock(store)
    works: list[asyncio.Task[Any]] = [
        asyncio.create_task(entered.__aenter__()),
        asyncio.create_task(client("a").acquire()),
        asyncio.create_task(client.health()),
        asyncio.create_task(client.inspect("a")),
    ]
    await store.advance(0.5)
    assert not any(each.done() for each in works)
    await store.advance(30)
    *_, health, _ = done = await asyncio.gather(*works, return_exceptions=True)
    assert [type(each) for each in done] == [QuorumUnavailable, QuorumUnavailable, Health, QuorumUnavailable]
    assert isinstance(health, Health)
    assert not health.ok
    await client.aclose()


@pytest.mark.parametrize("fault", ["hang", "down"])
async def test_a_client_closes_without_its_store(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though no time passes: no limit of real time ends the close. And the lease is lost."""
    monkeypatch.setattr(shutdown, "CLOSING", 3600.0)
    store = FakeStore()
    client = Redlock(store)
    lease = await client("a").acquire(timeout=None)
    getattr(store, fault)()
    waiting = asyncio.create_task(client("b").acquire(timeout=60))
    await asyncio.sleep(0)
    began = store.clock.now()
    await client.aclose()
    assert store.clock.now() == began
    with pytest.raises(ConfigError):
        await waiting
    with pytest.raises(LockLost) as caught:
        lease.ensure_held()
    assert caught.value.reason == "closed"


async def test_a_minority_that_is_down() -> None:
    """A quorum of three goes on without one node, and not without two."""
    stores = [FakeStore() for _ in range(3)]
    async with Redlock(*stores) as client:
        lease = await client("a").acquire(timeout=None)
        stores[0].down()
        await stores[0].advance(300)
        assert lease.held
        stores[1].hang()
        await stores[2].advance(60)
        assert not lease.held
        with pytest.raises(LockLost):
            await lease.release()


async def test_restart() -> None:
    """It forgets everything. Holders lose their locks, and what was busy is free."""
    store = FakeStore()
    async with Redlock(store) as client:
        store.busy("b")
        lease = await client("a").acquire(timeout=None)
        store.restart()
        await store.advance(1)
        assert not lease.held
        async with client("b", timeout=0) as other:
            assert other.fence > lease.fence
        with pytest.raises(LockLost):
            await lease.release()


async def test_stores_of_one_client_share_their_time() -> None:
    """From its first use on, whichever of them advances; also what was scheduled before."""
    one, two, three = stores = [FakeStore() for _ in range(3)]
    async with Redlock(two) as alone:
        lease = await alone("x", max_hold=50).acquire(timeout=None)
        await two.advance(10)
        async with Redlock(*stores) as client, client("a"):
            before = [each.clock.now() for each in stores]
            await three.advance(39)
            assert lease.held
            await one.advance(2)
            assert not lease.held
            assert [each.clock.now() for each in stores] == [each + 41 for each in before]
        with pytest.raises(LockLost):
            await lease.release()


def test_other_stores_beside_it() -> None:
    """Its time is no other store's, so they cannot be one quorum."""
    with pytest.raises(ConfigError, match="different stores"):
        Redlock(FakeStore(), MemoryStore(), MemoryStore())


@pytest.mark.parametrize("kind", [fakeredis.FakeAsyncRedis, fakeredis.FakeStrictRedis])
def test_fakeredis_is_refused(kind: Any) -> None:
    """The error names what to take instead."""
    with pytest.raises(ConfigError, match=r"asynclock\.testing\.FakeStore"):
        Redlock(kind())
