"""Fleets in which some programs use another lock library, and some asynclock: with the prefix that docs/from/ names,
they exclude each other on the same names. (test_zookeeper_fleets.py: kazoo and Curator.)"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio

from asynclock import ConfigError, Redlock
from asynclock.events import Released
from tests.support.peers import PEERS, Peer, stop_tooz
from tests.support.services.zookeeper import ZooKeeper
from tests.support.waiters import LIMIT, PATIENT

pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")  # aioredlock

MOMENT = 0.3
"""Seconds in which a waiter would have got a lock that is free."""


@dataclass
class Fleet:
    """A client of asynclock, the name of a lock there, and two locks of that name in another library."""

    ours: Redlock
    name: str
    theirs: Peer
    other: Peer


@pytest.fixture(params=PEERS)
async def fleet(request: pytest.FixtureRequest, shared_urls: list[str], name: str) -> AsyncIterator[Fleet]:
    make, servers, prefix, pattern = PEERS[request.param]
    urls = shared_urls[:servers]
    async with contextlib.AsyncExitStack() as stack, Redlock(*urls, prefix=prefix, **PATIENT) as ours:
        peers = [await make(urls, name, stack) for _ in range(2)]
        yield Fleet(ours, pattern.format(name), *peers)


async def test_ours_waits_for_theirs(fleet: Fleet) -> None:
    """While a lock of the other library is held, ours is refused; a waiter of ours gets it after the release."""
    lock = fleet.ours(fleet.name)
    assert await fleet.theirs.take(0)
    assert await lock.acquire(timeout=0) is None
    waiting = asyncio.create_task(lock.acquire(timeout=LIMIT))
    await asyncio.sleep(MOMENT)
    assert not waiting.done()
    await fleet.theirs.free()
    lease = await waiting
    assert lease is not None
    await lease.release()


async def test_theirs_waits_for_ours(fleet: Fleet) -> None:
    """While ours is held, the lock of the other library is refused; a waiter of it gets it after our release."""
    lease = await fleet.ours(fleet.name).acquire(timeout=LIMIT)
    assert lease is not None
    assert not await fleet.theirs.take(0)
    waiting = asyncio.create_task(fleet.other.take(LIMIT))
    await asyncio.sleep(MOMENT)
    assert not waiting.done()
    await lease.release()
    assert await waiting
    await fleet.other.free()


async def test_other_prefixes_exclude_nothing(shared_urls: list[str], name: str) -> None:
    """The first sentence of the page: with the default prefix both hold at once, and nothing warns of it."""
    async with redis.asyncio.Redis.from_url(shared_urls[0]) as client, Redlock(shared_urls[0], **PATIENT) as ours:
        async with client.lock(name, timeout=LIMIT), ours(name, timeout=0):
            assert await client.exists(name, f"lock:{name}") == 2
        async with client.lock(f"lock:{name}", timeout=LIMIT):
            assert await ours(name).acquire(timeout=0) is None


async def test_a_signal_wakes_the_waiters_of_python_redis_lock(shared_urls: list[str], name: str) -> None:
    """With the listener of its page, a waiter without any limit gets the lock: without it, it would wait for ever."""
    module = pytest.importorskip("redis_lock")
    signals: set[asyncio.Task[Any]] = set()
    with redis.Redis.from_url(shared_urls[0]) as blocking:
        async with redis.asyncio.Redis.from_url(shared_urls[0]) as client, Redlock(shared_urls[0], **PATIENT) as ours:

            def wake(event: object) -> None:
                if isinstance(event, Released):
                    key = f"lock-signal:{event.name}"
                    pipeline = client.pipeline().delete(key).lpush(key, 1).pexpire(key, 1000)
                    signals.add(asyncio.create_task(pipeline.execute()))

            ours.subscribe(wake)
            async with ours(name, timeout=LIMIT):
                theirs = module.Lock(blocking, name)
                waiting = asyncio.create_task(asyncio.to_thread(theirs.acquire))
                async with asyncio.timeout(LIMIT):
                    while not any("b" in each["flags"] for each in await client.client_list()):  # in its BLPOP
                        await asyncio.sleep(0.01)
            async with asyncio.timeout(LIMIT):
                assert await waiting
            theirs.release()
            await asyncio.gather(*signals)


async def test_a_lock_of_redisson_is_no_holder(shared_urls: list[str], name: str) -> None:
    """It is a hash: a ConfigError says so at once, and nothing is overwritten."""
    async with redis.asyncio.Redis.from_url(shared_urls[0]) as client, Redlock(shared_urls[0], prefix="") as ours:
        await client.hset(name, "0b6f4a0e-4b0e-4a8b-9c3c-0d7f2f6f8f11:47", "1")
        with pytest.raises(ConfigError, match="hash"):
            await ours(name).acquire(timeout=0)
        assert await client.hlen(name) == 1
        await client.delete(name)


async def test_tooz_over_zookeeper(shared_zookeeper: ZooKeeper, name: str) -> None:
    """Its locks are kazoo's, below /tooz/locks: in both directions."""
    coordination = pytest.importorskip("tooz.coordination")
    theirs = coordination.get_coordinator(f"zookeeper://{shared_zookeeper.address}", b"test")
    await asyncio.to_thread(theirs.start)
    try:
        lock = theirs.get_lock(name.encode())
        async with Redlock(shared_zookeeper.url("/tooz/locks")) as ours:
            async with ours(name, timeout=LIMIT):
                assert not await asyncio.to_thread(lock.acquire, blocking=False)
            assert await asyncio.to_thread(lock.acquire, blocking=LIMIT)
            assert await ours(name).acquire(timeout=0) is None
            await asyncio.to_thread(lock.release)
            async with ours(name, timeout=LIMIT):
                pass
    finally:
        await asyncio.to_thread(stop_tooz, theirs)


async def test_shedlock_skips_a_job_that_once_has_done(shared_urls: list[str], name: str) -> None:
    """The mark of the run is in the key of the lock until `within` has passed."""
    async with contextlib.AsyncExitStack() as stack:
        make, _, prefix, _ = PEERS["ShedLock"]
        theirs: Peer = await make(shared_urls, name, stack)
        ours = await stack.enter_async_context(Redlock(shared_urls[0], prefix=prefix, **PATIENT))
        done: list[str] = []

        async def job() -> None:
            done.append(name)

        await ours.once(name, within=LIMIT)(job)()
        assert done == [name]
        assert not await theirs.take(0)
