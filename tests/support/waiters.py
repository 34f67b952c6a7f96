"""Processes whose tasks wait for locks, which tests start, freeze and kill. This file is the program and its driver.

They speak in lines of JSON: the test writes to stdin what to wait for; the process prints to stdout which task got it,
when (time.monotonic, which all processes of a machine share) and with which fence."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import uvloop

from asynclock import Health, QuorumUnavailable, Redlock
from asynclock.stores.embedded import server as valkey
from tests.support import programs
from tests.support.default_keys import key_of, keys_of
from tests.support.probes import nodes_of
from tests.support.servers import Server

_T = TypeVar("_T")

LIMIT = 20.0
"""So many seconds at most a test waits for what must happen; far above what any of it takes, far below a long lease."""

LONG = 60.0
"""A lease whose end no test could wait for."""

SHORT = 6.0
"""A lease, and so a ticket's life, that a test does wait for. A busy machine may stall a process for three seconds when
two thirds of it are left."""

PATIENT: dict[str, Any] = {"node_timeout": 5.0, "connect_timeout": LIMIT / 2, "patience": LIMIT}
"""Options of a client for which a busy machine is no outage."""

BRIEF = 0.5
"""A max_hold whose end a test waits for. A busy machine may stall a process for so long that the end of a much shorter
one comes before the body begins, and then it does not begin."""

RENEWED_AFTER = 0.8 / 3
"""The share of its life after which a ticket is renewed at the soonest."""

IN_VAIN = 2.0
"""A wait for a lock that stays taken. Without an answer in its last third it ends with QuorumUnavailable: `decided`."""

LOADED = 4.0
"""Seconds that a machine with other work to do may add. Times that a test distinguishes are longer."""


# -- the program -----------------------------------------------------------------------------------------------------


class Program:
    """The clients of one process, and the tasks that wait through them."""

    def __init__(self, nodes: list[str], clients: int, options: dict[str, Any]) -> None:
        self._clients = [Redlock(*nodes, **options) for _ in range(clients)]
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        async with AsyncExitStack() as stack:
            for client in self._clients:
                await stack.enter_async_context(client)
            say(event="up")
            while line := await reader.readline():
                self.obey(**json.loads(line))
        pipe.close()

    def obey(self, count: int, **terms: Any) -> None:
        """Let `count` tasks of each client wait."""
        for client in self._clients:
            self._tasks.update(asyncio.create_task(self._wait(client, **terms)) for _ in range(count))

    async def _wait(self, client: Redlock, name: str, who: str, fair: bool, rounds: int, ever: bool) -> None:
        try:
            for _ in range(rounds):
                async with client(name, fair=fair) as lease:
                    say(event="held", who=who, fence=lease.fence, at=time.monotonic())
                    await (asyncio.Event().wait() if ever else asyncio.sleep(0))
        except Exception as error:  # the test shall see it, whatever it is
            say(event="failed", who=who, error=repr(error))


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    if sys.platform == "linux":
        valkey.die_with_parent()
    factory = uvloop.new_event_loop if json.loads(sys.argv[1]) else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_program(json.loads(sys.argv[2])))


async def _program(spec: dict[str, Any]) -> None:
    await Program(**spec).run()


# -- its driver ------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """A tenure: when it began, its fence, and whose it was."""

    at: float
    fence: int
    who: str


class Process:
    """One such process; it runs on the same kind of loop as the test."""

    def __init__(self, process: programs.Program) -> None:
        self.served: list[Served] = []
        self.failed: list[str] = []
        self.up = asyncio.Event()
        self._process = process
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            async for line in reader:
                self._on_event(**json.loads(line))
        finally:
            pipe.close()

    def _on_event(self, event: str, who: str = "", fence: int = 0, at: float = 0.0, error: str = "") -> None:
        match event:
            case "up":
                self.up.set()
            case "held":
                self.served.append(Served(at, fence, who))
            case _:
                self.failed.append(f"{who}: {error}")

    def wait(
        self, name: str, *, who: str = "", count: int = 1, fair: bool = False, rounds: int = 1, ever: bool = False
    ) -> None:
        """Let `count` tasks of each client wait for it, so many times, one after the other; and hold it for `ever`."""
        assert self._process.stdin is not None
        terms = {"name": name, "who": who, "count": count, "fair": fair, "rounds": rounds, "ever": ever}
        self._process.stdin.write(json.dumps(terms).encode() + b"\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        """It keeps its connections, and does nothing."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    async def kill(self) -> None:
        """kill -9, frozen or not."""
        self._process.kill()
        await self._reading
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


@asynccontextmanager
async def processes(
    number: int, nodes: Iterable[str], clients: int = 1, **options: Any
) -> AsyncIterator[list[Process]]:
    """So many processes with so many clients each, connected; killed at the end, if they still run. A busy machine is
    no outage for them, as for the clients of the tests (conftest.py)."""
    known = list(nodes)
    patient = {"connect_timeout": LIMIT / 2, "patience": LIMIT, **({"node_timeout": 1.0} if len(known) > 1 else {})}
    spec = json.dumps({"nodes": known, "clients": clients, "options": {**patient, **options}})
    fast = json.dumps(isinstance(asyncio.get_running_loop(), uvloop.Loop))
    started: list[Process] = []
    try:
        for _ in range(number):
            process = programs.Program(
                ["-c", "from tests.support.waiters import main; main()", fast, spec],
                (*programs.LIBRARY, "tests.support.waiters"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=programs.REPO,
            )
            started.append(Process(process))
        async with asyncio.timeout(LIMIT):
            for each in started:
                await each.up.wait()
        yield started
    finally:
        for each in started:
            await each.kill()


# -- what tests look at ----------------------------------------------------------------------------------------------


def urls_of(servers: Iterable[Server]) -> list[str]:
    return [each.url for each in servers]


async def is_free(client: Redlock, name: str) -> bool:
    """Checked behind the client's commands in flight: its connection keeps the order."""
    return not await client(name).locked()


async def back(client: Redlock) -> None:
    """Return once the client's nodes all answer again, also in quarantine."""
    for node in nodes_of(client):
        while True:
            with suppress(Exception):
                async with asyncio.timeout(1.0):
                    await node.probe("any")
                    break
            await asyncio.sleep(0.01)


async def reconnected(node: Any) -> None:
    """Return once the node has lost its connection and has another one. It looks in each turn of the loop, since that
    may take a moment only."""
    async with asyncio.timeout(LIMIT):
        while node.error is None:
            await asyncio.sleep(0)
        while node.error is not None:
            await asyncio.sleep(0.005)


async def works(redlock: Redlock, name: str) -> None:
    """The client still works after the error."""
    async with redlock(name, timeout=LIMIT) as lease:
        assert lease.held
    assert not await redlock(name).locked()


LATE = re.compile("not connected yet|did not answer within")
"""Of a node in a check that a busy machine has delayed."""


async def healthy(client: Redlock) -> Health:
    """Its health, once that is ok. On a busy machine a first connect may take longer than `health` waits."""
    async with asyncio.timeout(LIMIT):
        while not (health := await client.health()).ok:
            await asyncio.sleep(0.01)
    return health


async def decided(attempt: Callable[[], Awaitable[_T]]) -> _T:
    """The outcome of an acquire that waits in vain. It waits again where no server answered near its end, as on a
    machine that was busy just then: whether the name is taken is not known then."""
    while True:
        with suppress(QuorumUnavailable):
            return await attempt()


async def until(check: Callable[[], object]) -> None:
    """Return once `check` says so; a server tells of its keys only when asked. The longer it takes, the less often this
    asks: other tests need the CPU."""
    pause = 0.005
    async with asyncio.timeout(LIMIT):
        while not check():
            await asyncio.sleep(pause)
            pause = min(1.1 * pause, 0.015)


def queue(server: Server, name: str) -> list[bytes]:
    """The waiters for `name` at that server, the head first."""
    with server.cli() as cli:
        found: Any = cli.zrange(keys_of(name).queue, 0, -1)
    return list(found)


def holder(server: Server, name: str) -> bytes:
    """The id that holds it at the server; b"": none."""
    with server.cli() as cli:
        found: Any = cli.get(key_of(name))
    return bytes(found or b"").removeprefix(b"+")


def in_queue(servers: Iterable[Server], name: str, count: int) -> Callable[[], bool]:
    """Whether so many wait there, at each of these."""
    return lambda: all(len(queue(each, name)) == count for each in servers)


def in_order(started: Iterable[Process]) -> list[Served]:
    """All tenures of these processes as they came."""
    return sorted(served for each in started for served in each.served)


def rise(fences: Iterable[int]) -> bool:
    """Whether each is greater than the one before."""
    known = list(fences)
    return known == sorted(set(known))


def calls(server: Server) -> int:
    """So many commands on locks the server has carried out."""
    with server.cli() as cli:
        stats: Any = cli.info("commandstats")
    return sum(int(its["calls"]) for name, its in stats.items() if name in {"cmdstat_evalsha", "cmdstat_eval"})
