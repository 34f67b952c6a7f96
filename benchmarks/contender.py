"""One of the processes that contend for one name.

`python -m benchmarks.contender SIDE[@SECONDS] TASKS URL...` prints "ready", waits for a line, works until the next line
(each tenure takes SECONDS), and prints its measurements as JSON. Times are seconds of CLOCK_MONOTONIC, which all
processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from hashlib import sha1
from typing import TYPE_CHECKING, Any

import hiredis
from redis.asyncio import Redis

from asynclock import Redlock
from asynclock.stores.redis.encoding import pack
from benchmarks.bare import questions
from benchmarks.sides import rival

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

NAME = "hot"
LEASE = 30.0

LATE = 5.0
"""Seconds after the end in which each task gets the lock once more. A lost wake-up takes longer."""

Take = Callable[[], "AbstractAsyncContextManager[Any]"]


@contextlib.asynccontextmanager
async def ours(urls: Sequence[str], fair: bool = False) -> AsyncIterator[Take]:
    async with Redlock(*urls, lease=LEASE) as client:
        yield lambda: client(NAME, fair=fair)


@contextlib.asynccontextmanager
async def redis_py(urls: Sequence[str], sleep: float = 0.1) -> AsyncIterator[Take]:
    async with Redis.from_url(urls[0]) as client:
        yield lambda: client.lock(NAME, timeout=LEASE, sleep=sleep)


@contextlib.asynccontextmanager
async def pottery(urls: Sequence[str]) -> AsyncIterator[Take]:
    lock_type = rival("pottery").AIORedlock
    async with contextlib.AsyncExitStack() as stack:
        masters = {await stack.enter_async_context(Redis.from_url(url)) for url in urls}
        yield lambda: lock_type(key=NAME, masters=masters, auto_release_time=LEASE)


class Relay(asyncio.Protocol):
    """The bare hand-over: the release script sets the next holder and publishes. There is nothing around it. The server
    has the script, as that of asynclock."""

    RELEASE = "redis.call('SET', KEYS[1], ARGV[1], 'PX', 30000) return redis.call('PUBLISH', ARGV[1], '')"
    SHA = sha1(RELEASE.encode()).hexdigest()

    def __init__(self, me: str, other: str) -> None:
        self.me, self.other = me, other
        self.mine, self.subscribed = asyncio.Event(), asyncio.Event()
        self.transport: Any = None
        self._reader = hiredis.Reader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.say("HELLO", "3")
        self.say("SCRIPT", "LOAD", self.RELEASE)
        self.say("SUBSCRIBE", self.me)

    def say(self, *words: str) -> None:
        self.transport.write(pack(*words))

    def give(self) -> None:
        self.mine.clear()
        self.say("EVALSHA", self.SHA, "1", NAME, self.other)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if isinstance(reply, hiredis.PushNotification):
                (self.mine if reply[0] == b"message" else self.subscribed).set()


@contextlib.asynccontextmanager
async def relay(urls: Sequence[str], me: str) -> AsyncIterator[Take]:
    made: Any = await asyncio.get_running_loop().create_unix_connection(
        lambda: Relay(me, "b" if me == "a" else "a"), urls[0].removeprefix("unix://")
    )
    wire: Relay = made[1]
    await wire.subscribed.wait()  # a message published before that would be lost, and both would wait for ever
    if me == "a":
        wire.mine.set()

    @contextlib.asynccontextmanager
    async def take() -> AsyncIterator[None]:
        await wire.mine.wait()
        yield
        wire.give()

    yield take
    wire.transport.close()


@contextlib.asynccontextmanager
async def postgresql_relay(urls: Sequence[str], me: str) -> AsyncIterator[Take]:
    """The same over PostgreSQL and asyncpg: one statement sets the next holder and notifies it when it commits."""
    other, mine = "b" if me == "a" else "a", asyncio.Event()
    give = "WITH next AS (UPDATE bare_relay SET owner = $1 RETURNING owner) SELECT pg_notify(owner, '') FROM next"
    connection = await rival("asyncpg").connect(urls[0])
    await connection.add_listener(me, lambda *_: mine.set())
    if me == "a":
        await connection.execute("CREATE TABLE IF NOT EXISTS bare_relay (owner TEXT NOT NULL)")
        await connection.execute("DELETE FROM bare_relay")
        await connection.execute("INSERT INTO bare_relay VALUES ('a')")
        mine.set()

    @contextlib.asynccontextmanager
    async def take() -> AsyncIterator[None]:
        await mine.wait()
        mine.clear()
        yield
        await connection.execute(give, other)

    yield take
    await connection.close()


SIDES: dict[str, Callable[[Sequence[str]], AbstractAsyncContextManager[Take]]] = {
    "ours": ours,
    "fair": lambda urls: ours(urls, fair=True),
    "redis-py": redis_py,
    "redis-py-1ms": lambda urls: redis_py(urls, sleep=0.001),
    "pottery": pottery,
    "relay-a": lambda urls: relay(urls, "a"),
    "relay-b": lambda urls: relay(urls, "b"),
    "postgresql-relay-a": lambda urls: postgresql_relay(urls, "a"),
    "postgresql-relay-b": lambda urls: postgresql_relay(urls, "b"),
}


async def contend(side: str, tasks: int, urls: Sequence[str], tenure: float) -> dict[str, Any]:
    """Acquire and release again and again until the next line. Returns each wait, the times of grant and release, and
    how many tasks still waited `LATE` seconds after the end: their waits are not among the others."""
    stop, now = asyncio.Event(), time.monotonic
    waits: list[float] = []
    took: list[float] = []
    gave: list[float] = []

    async def work(take: Take) -> None:
        while not stop.is_set():
            asked = now()
            async with take():
                took.append(now())
                waits.append(took[-1] - asked)
                if tenure:
                    await asyncio.sleep(tenure)
                gave.append(now())

    async with SIDES[side](urls) as take:
        await say_and_wait("ready")
        working = [asyncio.create_task(work(take)) for _ in range(tasks)]
        await say_and_wait("working")
        stop.set()
        _, late = await asyncio.wait(working, timeout=LATE)
        for task in late:
            task.cancel()
        for error in await asyncio.gather(*working, return_exceptions=True):
            if isinstance(error, Exception):
                raise error
    # The last hand-over of a relay goes to a process that has ended, so the other one waits for ever.
    return {"waits": waits, "took": took, "gave": gave, "late": 0 if "relay" in side else len(late)}


async def line_up(tasks: int, urls: Sequence[str], lease: float) -> dict[str, Any]:
    """`tasks` clients wait, each with one task; each releases the lock at once when it gets it."""
    clients = [Redlock(*urls, lease=lease) for _ in range(tasks)]

    async def once(client: Redlock) -> None:
        async with client(NAME):
            pass

    await asyncio.gather(*(client.health() for client in clients))
    await say_and_wait("ready")
    waiting = [asyncio.create_task(once(client)) for client in clients]
    await say_and_wait("waiting")
    await asyncio.gather(*waiting)
    for client in clients:
        await client.aclose()
    return {}


async def hold(urls: Sequence[str]) -> dict[str, Any]:
    """Hold the lock until the next line."""
    async with Redlock(*urls) as client, client(NAME):
        await say_and_wait("ready")
    return {}


async def trip(urls: Sequence[str], pause: float) -> dict[str, Any]:
    """The median time of one question of the bare protocol to all nodes, alone, with pauses between the questions."""
    times = []
    async with questions([url.removeprefix("unix://") for url in urls]) as ask:
        await say_and_wait("ready")
        for _ in range(600):
            began = time.monotonic()
            await ask()
            times.append(time.monotonic() - began)
            await asyncio.sleep(pause)
    return {"rtt": sorted(times)[len(times) // 2]}


async def say_and_wait(what: str) -> None:
    """Print a word, and wait for a line."""
    print(what, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def main() -> None:
    side, tasks, *urls = sys.argv[1:]
    side, _, tenure = side.partition("@")
    work: Awaitable[dict[str, Any]]
    if side == "trip":
        work = trip(urls, float(tenure or 0))
    elif side == "hold":
        work = hold(urls)
    elif side.startswith("line:"):
        work = line_up(int(tasks), urls, float(side.removeprefix("line:")))
    else:
        work = contend(side, int(tasks), urls, float(tenure or 0))
    print(json.dumps(asyncio.run(work)), flush=True)


if __name__ == "__main__":
    main()
