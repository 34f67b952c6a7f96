"""Fleets in which other programs use the same locks: those of kazoo's recipes, and those of Apache Curator on the
JVM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from asynclock import ConfigError, LockTimeout, Redlock
from asynclock.stores.zookeeper import ZooKeeperStore
from tests.support.services.curator import Curator
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import IN_VAIN, LIMIT, decided

MOMENT = 0.3
"""Seconds in which a waiter would have got a lock that is free."""


@pytest.fixture
def kazoo(shared_zookeeper: ZooKeeper) -> Iterator[KazooClient]:
    client = KazooClient(shared_zookeeper.address)
    client.start()
    yield client
    client.stop()
    client.close()


@pytest.fixture
async def redlock(shared_zookeeper: ZooKeeper) -> AsyncIterator[Redlock]:
    async with Redlock(shared_zookeeper.url()) as client:
        yield client


async def enter(redlock: Redlock, name: str) -> None:
    """Try to enter a lock that is held, and wait for a while."""
    async with redlock(name, timeout=IN_VAIN):
        pytest.fail("entered")


# -- kazoo -----------------------------------------------------------------------------------------------------------


async def test_kazoos_lock_and_ours_exclude_each_other(kazoo: KazooClient, redlock: Redlock, name: str) -> None:
    """In both directions, and each is notified of the other's release: no poll, no wait for a session to end."""
    theirs = kazoo.Lock(f"/locks/{name}", "a program of kazoo")
    async with redlock(name) as lease:
        assert not await asyncio.to_thread(theirs.acquire, blocking=False)
        waiting = asyncio.create_task(asyncio.to_thread(theirs.acquire, timeout=LIMIT))
        await asyncio.sleep(MOMENT)
        assert not waiting.done()
    assert await waiting
    with pytest.raises(LockTimeout, match="another program"):
        await decided(partial(enter, redlock, name))
    assert await redlock(name).acquire(timeout=0) is None
    ours = asyncio.create_task(redlock(name).acquire(timeout=LIMIT))
    await asyncio.sleep(MOMENT)
    assert not ours.done()
    await asyncio.to_thread(theirs.release)
    again = await ours
    assert again is not None
    assert again.fence > lease.fence
    await again.release()


async def test_a_node_that_belongs_to_no_session_has_no_end(kazoo: KazooClient, redlock: Redlock, name: str) -> None:
    """A persistent node in the place of a holder has no client that can die: nobody is told when the hold ends."""
    await asyncio.to_thread(kazoo.create, f"/locks/{name}/x__lock__", b"", sequence=True, makepath=True)
    with pytest.raises(LockTimeout, match="without an expiry: if nothing uses it, delete it by hand"):
        await decided(partial(enter, redlock, name))
    info = await redlock.inspect(name)
    assert [each.remaining for each in info.holders] == [None]
    assert "another program, without an expiry" in "".join(info.nodes.values())
    assert await redlock.break_lock(name, foreign=True)
    async with redlock(name, timeout=LIMIT):
        pass


async def test_the_token_is_the_czxid_of_the_node(kazoo: KazooClient, redlock: Redlock, name: str) -> None:
    """So programs of kazoo can take part in it."""
    async with redlock(name) as lease:
        (node,) = kazoo.get_children(f"/locks/{name}")
        assert kazoo.exists(f"/locks/{name}/{node}").czxid == lease.fence
        before = lease.fence
    theirs = kazoo.Lock(f"/locks/{name}")
    await asyncio.to_thread(theirs.acquire)
    assert kazoo.exists(f"/locks/{name}/{theirs.node}").czxid > before
    await asyncio.to_thread(theirs.release)


async def test_kazoo_reads_who_holds_and_waits(kazoo: KazooClient, redlock: Redlock, name: str) -> None:
    """`contenders()` has the ids, which end with the note for operators."""
    theirs = kazoo.Lock(f"/locks/{name}", "theirs")
    async with redlock(name, metadata="ours"):
        waiting = asyncio.create_task(asyncio.to_thread(theirs.acquire, timeout=LIMIT))
        async with asyncio.timeout(LIMIT):
            while len(found := await asyncio.to_thread(theirs.contenders)) < 2:
                await asyncio.sleep(0.01)
        assert found[0].endswith("|ours")
        assert found[1] == "theirs"
        info = await redlock.inspect(name)
        assert [holder.metadata for holder in info.holders] == ["ours"]
        assert len(info.waiters) == 1
    assert await waiting
    info = await redlock.inspect(name)
    assert [(holder.host, holder.pid) for holder in info.holders] == [("", 0)]
    await asyncio.to_thread(theirs.release)


async def test_readers_and_writers_of_both(kazoo: KazooClient, redlock: Redlock, name: str) -> None:
    """Readers share the lock, whoever they are; writers do not."""
    read, write = kazoo.ReadLock(f"/locks/{name}"), kazoo.WriteLock(f"/locks/{name}")
    async with redlock.read(name):
        assert await asyncio.to_thread(read.acquire, blocking=False)
        assert not await asyncio.to_thread(write.acquire, blocking=False)
    assert await redlock.write(name).acquire(timeout=0) is None
    await asyncio.to_thread(read.release)
    async with redlock.write(name):
        assert not await asyncio.to_thread(read.acquire, blocking=False)
    assert await asyncio.to_thread(write.acquire, blocking=False)
    assert await redlock.read(name).acquire(timeout=0) is None
    await asyncio.to_thread(write.release)
    async with redlock.read(name, timeout=LIMIT):
        pass


async def test_d11_a_lock_of_kazoo_is_broken_only_on_demand(kazoo: KazooClient, redlock: Redlock, name: str) -> None:
    theirs = kazoo.Lock(f"/locks/{name}")
    await asyncio.to_thread(theirs.acquire)
    with pytest.raises(ConfigError, match="foreign=True"):
        await redlock.break_lock(name)
    assert await redlock.break_lock(name, foreign=True)
    async with redlock(name, timeout=LIMIT):
        pass


async def test_names_are_escaped(kazoo: KazooClient, redlock: Redlock, name: str) -> None:
    """As the page says, so that other programs find the lock."""
    odd = f"{name}/a%b\x00"
    async with redlock(odd):
        assert f"{name}%2Fa%25b%00" in kazoo.get_children("/locks")
        theirs = kazoo.Lock(f"/locks/{name}%2Fa%25b%00")
        assert not await asyncio.to_thread(theirs.acquire, blocking=False)
        assert [holder.name async for holder in redlock.holders(f"{name}/")] == [odd]


# -- Curator ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def curator(shared_zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[Curator]:
    program = Curator(shared_zookeeper.address, tmp_path)
    yield program
    program.stop()


async def test_curators_locks_and_ours_exclude_each_other(
    curator: Curator, shared_zookeeper: ZooKeeper, name: str
) -> None:
    """InterProcessMutex and InterProcessReadWriteLock, in both directions, with the nodes of layout="curator"."""
    store, path = ZooKeeperStore(shared_zookeeper.url("/curator"), layout="curator"), f"/curator/{name}"
    async with Redlock(store) as redlock, Redlock(store) as other, asyncio.timeout(LIMIT):
        async with redlock(name):
            assert await curator.ask(f"try {path}") == "busy"
            curator.tell(f"mutex {path}")
            while len((await redlock.inspect(name)).waiters) != 1:
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(curator.said) == "held"
        assert await redlock(name).acquire(timeout=0) is None
        waiting = asyncio.create_task(redlock(name).acquire(timeout=None))
        await asyncio.sleep(MOMENT)
        assert not waiting.done()
        assert await curator.ask("release") == "free"
        await (await waiting).release()

        path, name = f"{path}:rw", f"{name}:rw"
        async with redlock.read(name):
            assert await curator.ask(f"read {path}") == "held"
            assert await decided(partial(other.write(name).acquire, timeout=IN_VAIN)) is None
        assert await decided(partial(redlock.write(name).acquire, timeout=IN_VAIN)) is None
        assert await curator.ask("release") == "free"
        assert await curator.ask(f"write {path}") == "held"
        assert await decided(partial(redlock.read(name).acquire, timeout=IN_VAIN)) is None
        assert await curator.ask("release") == "free"
        async with redlock.write(name):
            curator.tell(f"read {path}")
            while len((await redlock.inspect(name)).waiters) != 1:
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(curator.said) == "held"


async def test_all_kinds_with_curators_nodes(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Among clients of asynclock."""
    store = ZooKeeperStore(shared_zookeeper.url("/curator"), layout="curator")
    async with Redlock(store) as redlock, Redlock(store) as other, asyncio.timeout(LIMIT):
        async with redlock.semaphore(name, 2), redlock.semaphore(name, 2):
            assert await other.semaphore(name, 2).acquire(timeout=0) is None
        async with redlock.multi(f"{name}:a", redlock.read(f"{name}:b")):
            waiting = asyncio.create_task(other.multi(f"{name}:a", f"{name}:c").acquire(timeout=None))
            await asyncio.sleep(MOMENT)
            assert not waiting.done()
        await (await waiting).release()
