"""Locks of other libraries, and of what their sources send, that share names with a mutex of asynclock.

Each is taken in a thread or a task of the test, with real clients on real servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import redis
import redis.asyncio

LEASE = 30


class Peer(Protocol):
    """A lock of another library."""

    async def take(self, wait: float) -> bool:
        """Whether it was acquired, within so many seconds. 0: at once."""

    async def free(self) -> None:
        """Release it."""


class Blocking:
    """A library that blocks its thread."""

    def __init__(self, take: Callable[[float], Any], free: Callable[[], object]) -> None:
        self._take, self._free = take, free

    async def take(self, wait: float) -> bool:
        return bool(await asyncio.to_thread(self._take, wait))

    async def free(self) -> None:
        await asyncio.to_thread(self._free)


class Awaited:
    """A library for asyncio."""

    def __init__(self, take: Callable[[float], Any], free: Callable[[], Any]) -> None:
        self._take, self._free = take, free

    async def take(self, wait: float) -> bool:
        return bool(await self._take(wait))

    async def free(self) -> None:
        await self._free()


async def redis_py(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    client = redis.asyncio.Redis.from_url(urls[0])
    stack.push_async_callback(client.aclose)
    lock = client.lock(name, timeout=LEASE)
    return Awaited(lambda wait: lock.acquire(blocking=wait > 0, blocking_timeout=wait or None), lock.release)


async def redis_py_sync(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    client = redis.Redis.from_url(urls[0])
    stack.callback(client.close)
    lock = client.lock(name, timeout=LEASE, thread_local=False)  # it moves between the threads of the test
    return Blocking(lambda wait: lock.acquire(blocking=wait > 0, blocking_timeout=wait or None), lock.release)


async def python_redis_lock(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    module = pytest.importorskip("redis_lock")
    client = redis.Redis.from_url(urls[0])
    stack.callback(client.close)
    lock = module.Lock(client, name, expire=LEASE)

    def take(wait: float) -> bool:
        until = time.monotonic() + wait  # asynclock sends it no signal, so a wait ends by its own limit only
        while not (taken := lock.acquire(blocking=wait > 0, timeout=1 if wait else None)):
            if time.monotonic() > until:
                break
        return bool(taken)

    return Blocking(take, lock.release)


async def sherlock(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    module = pytest.importorskip("sherlock")
    client = redis.Redis.from_url(urls[0])
    stack.callback(client.close)
    lock = module.RedisLock(name, client=client, namespace="shop", expire=LEASE, timeout=LEASE)
    return Blocking(lambda wait: lock.acquire(blocking=wait > 0), lock.release)


async def tooz(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    coordination = pytest.importorskip("tooz.coordination")
    coordinator = coordination.get_coordinator(f"redis://{urls[0].removeprefix('unix://')}", b"test")
    await asyncio.to_thread(coordinator.start)
    stack.callback(stop_tooz, coordinator)
    lock = coordinator.get_lock(name.encode())
    return Blocking(lambda wait: lock.acquire(blocking=wait or False), lock.release)


def stop_tooz(coordinator: Any) -> None:
    """Its own stop leaves the sockets of its client to the garbage collector."""
    client = coordinator._client if hasattr(coordinator, "_client") else coordinator._coord
    coordinator.stop()
    client.close()


async def pottery(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    module = pytest.importorskip("pottery")
    masters = {redis.asyncio.Redis.from_url(url) for url in urls}
    for master in masters:
        stack.push_async_callback(master.aclose)
    lock = module.AIORedlock(key=name, masters=masters, auto_release_time=LEASE)
    return Awaited(lambda wait: lock.acquire(blocking=wait > 0, timeout=wait or -1), lock.release)


async def redlock_py(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    module = pytest.importorskip("redlock")
    nodes = [stack.enter_context(contextlib.closing(redis.Redis.from_url(url))) for url in urls]
    manager, held = module.Redlock(nodes), []

    def take(wait: float) -> bool:
        until = time.monotonic() + wait
        while not (lock := manager.lock(name, LEASE * 1000)):
            if time.monotonic() > until:
                return False
        held.append(lock)
        return True

    return Blocking(take, lambda: manager.unlock(held.pop()))


async def aioredlock(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    pytest.importorskip("distutils", reason="aioredlock imports distutils, which Python 3.12 does not have")
    module = pytest.importorskip("aioredlock")
    manager, held = module.Aioredlock([url.removeprefix("unix://") for url in urls]), []
    stack.push_async_callback(manager.destroy)

    async def take(wait: float) -> bool:
        until = time.monotonic() + wait
        while True:
            with contextlib.suppress(module.LockError):
                held.append(await manager.lock(name, lock_timeout=LEASE))
                return True
            if time.monotonic() > until:
                return False

    return Awaited(take, lambda: manager.unlock(held.pop()))


async def shedlock(urls: list[str], name: str, stack: contextlib.AsyncExitStack) -> Peer:
    """The commands that its provider for Redis sends, from its source: no JVM runs here."""
    client = redis.asyncio.Redis.from_url(urls[0])
    stack.push_async_callback(client.aclose)
    key, value = f"job-lock:default:{name}", f"ADDED:2026-01-01T00:00:00.000Z@host:{uuid.uuid4()}"

    async def take(wait: float) -> bool:
        until = time.monotonic() + wait  # ShedLock skips a run, and does not wait: its scheduler tries again
        while not await client.set(key, value, nx=True, px=LEASE * 1000):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.01)
        return True

    return Awaited(take, lambda: client.delete(key))


PEERS: dict[str, tuple[Callable[..., Any], int, str, str]] = {
    "redis-py": (redis_py, 1, "", "{}"),
    "redis-py, sync": (redis_py_sync, 1, "", "{}"),
    "python-redis-lock": (python_redis_lock, 1, "lock:", "{}"),
    "sherlock": (sherlock, 1, "shop_", "{}"),
    "tooz": (tooz, 1, "_tooz_", "{}_lock"),
    "pottery": (pottery, 3, "redlock:", "{}"),
    "redlock-py": (redlock_py, 3, "", "{}"),
    "aioredlock": (aioredlock, 3, "", "{}"),
    "ShedLock": (shedlock, 1, "job-lock:default:", "{}"),
}
"""How to make its lock, over so many servers; the prefix of our client; and our name for its name."""
