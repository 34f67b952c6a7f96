"""The sides. Each is an async context manager over servers that yields `cycle(i)`: acquire and release the free lock of
task i once, or raise.

Each side is used as its own documentation shows, with connections made beforehand, the same lease, and without
unnecessary features: without the watchdog of aioredlock, without extensions and metadata. Only asynclock runs with its
watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import secrets
import time
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from asynclock import Redlock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from benchmarks.servers import Server

    Cycle = Callable[[int], Awaitable[None]]
    Side = Callable[[Sequence[Server]], AbstractAsyncContextManager[Cycle]]

LEASE = 30.0


def rival(module: str) -> Any:
    """The module of a side that is an optional install. Raises ImportError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # the module is installed, but does not work on this Python
        raise ImportError(f"{module} is not installed: pip install -e '.[bench]'") from None


def blocks_of(redlock: Redlock, what: str = "asynclock") -> Cycle:
    """`async with` of a lock for each task; `what` begins its name."""

    async def cycle(i: int) -> None:
        async with redlock(f"{what}:{i}"):
            pass

    return cycle


@contextlib.asynccontextmanager
async def asynclock(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """`async with redlock(name)`: with guarded body, watchdog and fencing token."""
    async with Redlock(*(server.url for server in servers), lease=LEASE) as redlock:
        yield blocks_of(redlock)


@contextlib.asynccontextmanager
async def fresh_names(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """The same, with a name that was never used before and never will be, as for an order or a job."""
    async with Redlock(*(server.url for server in servers), lease=LEASE) as redlock:
        numbers = itertools.count()

        async def cycle(i: int) -> None:
            async with redlock(f"fresh:{i}:{next(numbers)}"):
                pass

        yield cycle


@contextlib.asynccontextmanager
async def redis_py(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """`async with client.lock(name)` of redis-py, with its default pool, on the first server: it supports only one."""
    async with Redis.from_url(servers[0].url) as client:

        async def cycle(i: int) -> None:
            async with client.lock(f"redis-py:{i}", timeout=LEASE):
                pass

        yield cycle


@contextlib.asynccontextmanager
async def gathered(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """Redlock as people write it by hand: gather and wait_for over redis-py clients."""
    async with _clients(servers) as clients:
        free = clients[0].register_script(
            "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
        )

        async def vote(asked: Awaitable[Any]) -> bool:
            try:
                return bool(await asyncio.wait_for(asked, 1.0))
            except (RedisError, OSError, TimeoutError):
                return False

        async def cycle(i: int) -> None:
            name, token, began = f"gather:{i}", secrets.token_hex(16), time.monotonic()
            px = int(LEASE * 1000)
            votes = await asyncio.gather(*(vote(client.set(name, token, nx=True, px=px)) for client in clients))
            left = LEASE - (time.monotonic() - began) - LEASE * 0.01 - 0.002
            if sum(votes) <= len(clients) // 2 or left <= 0:
                raise RuntimeError(f"the hand-written Redlock won {sum(votes)} of {len(clients)} for a free name")
            await asyncio.gather(*(vote(free(keys=[name], args=[token], client=client)) for client in clients))

        yield cycle


@contextlib.asynccontextmanager
async def pottery(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """pottery's AIORedlock."""
    lock_type: Any = rival("pottery").AIORedlock
    async with _clients(servers) as clients:
        masters = frozenset(clients)

        async def cycle(i: int) -> None:
            async with lock_type(key=f"pottery:{i}", masters=masters, auto_release_time=LEASE):
                pass

        yield cycle


@contextlib.asynccontextmanager
async def aioredlock(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """aioredlock over aioredis 1.3. Its import needs distutils, which Python 3.12 does not have."""
    manager: Any = rival("aioredlock").Aioredlock([str(server.path) for server in servers])
    try:

        async def cycle(i: int) -> None:
            await manager.unlock(await manager.lock(f"aioredlock:{i}", lock_timeout=LEASE))

        yield cycle
    finally:
        await manager.destroy()


@contextlib.asynccontextmanager
async def two_stopped(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """asynclock while the last two servers are frozen (SIGSTOP). They are frozen after it has connected and worked."""
    async with asynclock(servers) as cycle:
        await cycle(0)
        for server in servers[-2:]:
            server.freeze()
        try:
            yield cycle
        finally:
            for server in servers[-2:]:
                server.thaw()


@contextlib.asynccontextmanager
async def _clients(servers: Sequence[Server]) -> AsyncIterator[list[Redis]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Redis.from_url(server.url)) for server in servers]
