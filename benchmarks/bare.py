"""asynclock's own commands with nothing around them.

It sends what asynclock sends to the same servers, from a protocol that only sends and counts: an EVALSHA with the same
script and arguments, and DELIFEQ as the release. The commands of one loop turn leave in one write, and the replies go
to a deque of callbacks. There is no lease, no watchdog, no timeout, no undo and no release after a cancellation: it is
there for comparison, and is no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis

from asynclock.rules.model import ALONE, PEEK_ID, QUIET, Op, Queueing, Serve, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis.encoding import encode, encode_native
from asynclock.stores.redis.scripts import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from benchmarks.servers import Server
    from benchmarks.sides import Cycle

PREFIX = "lock:"
LEASE = 30.0
MEMORY = LEASE + 300.0
"""asynclock's defaults, so that the commands are the same to the byte count."""

RELEASE = ("DELIFEQ",)
"""The release of asynclock on Valkey 9, which the servers of the wheel are."""


class Wire(asyncio.Protocol):
    """One connection, and the callback for each reply."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[Any], object]] = deque()
        self._out: list[bytes] = []
        self._reader = hiredis.Reader()
        self._call_soon = asyncio.get_running_loop().call_soon
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, wire: bytes, on_reply: Callable[[Any], object]) -> None:
        if not self._out:
            self._call_soon(self._flush)
        self._out.append(wire)
        self._waiting.append(on_reply)

    def _flush(self) -> None:
        self.transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        reader, take = self._reader, self._waiting.popleft
        reader.feed(data)
        while (reply := reader.gets()) is not False:
            take()(reply)


class Vote:
    """One op at all nodes. Its future gets the greatest token once a majority has granted; that of a release gets 0."""

    __slots__ = ("_fence", "_future", "_wanted")

    def __init__(self, future: asyncio.Future[int], wanted: int) -> None:
        self._future = future
        self._wanted = wanted
        self._fence = 0

    def __call__(self, reply: Any) -> None:
        if self._wanted == 0:
            return
        if type(reply) is list and reply[0] == 1:
            if reply[1] > self._fence:
                self._fence = reply[1]
        elif reply != 1:
            self._wanted = 0
            self._future.set_exception(RuntimeError(f"the bare protocol got the reply {reply!r}"))
            return
        self._wanted -= 1
        if self._wanted == 0:
            self._future.set_result(self._fence)


@contextlib.asynccontextmanager
async def bare(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """Cycles of the bare protocol over one node or several."""
    async with _connected([str(server.path) for server in servers]) as wires:
        yield _one(wires[0]) if len(wires) == 1 else _many(wires)


@contextlib.asynccontextmanager
async def questions(paths: Sequence[str]) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """One round trip: the question of `locked()` to all nodes, whether a free name is held."""
    op = Op(Verb.PEEK, MUTEX, "free", PEEK_ID, 0.0)
    async with _connected(paths) as wires:
        new_future = asyncio.get_running_loop().create_future

        async def ask() -> None:
            replies, command = [new_future() for _ in wires], encode(op, PREFIX)
            for wire, reply in zip(wires, replies, strict=True):
                wire.send(command, reply.set_result)
            for reply in replies:
                if type(await reply) is not list:
                    raise RuntimeError(f"the bare protocol got the reply {reply.result()!r}")

        yield ask


@contextlib.asynccontextmanager
async def _connected(paths: Sequence[str]) -> AsyncIterator[list[Wire]]:
    """A connection to each server, which has the script."""
    loop = asyncio.get_running_loop()
    wires = [(await loop.create_unix_connection(Wire, path))[1] for path in paths]
    load: tuple[Any, ...] = ("SCRIPT", "LOAD", SCRIPTS[""])
    for wire in wires:
        loaded: asyncio.Future[Any] = loop.create_future()
        wire.send(hiredis.pack_command(load), loaded.set_result)
        await loaded
    try:
        yield wires
    finally:
        for wire in wires:
            wire.transport.close()


def _one(wire: Wire) -> Cycle:
    """Cycles over one node, with one future per command. The acquire carries a first ticket, as that of asynclock."""
    new_future = asyncio.get_running_loop().create_future
    make = _maker(Queueing(Serve.GRANT, number=1, fresh=LEASE / 2))

    async def ask(command: bytes) -> int:
        future: asyncio.Future[Any] = new_future()
        wire.send(command, future.set_result)
        reply = await future
        if type(reply) is list and reply[0] == 1:
            fence: int = reply[1]
            return fence
        if reply != 1:
            raise RuntimeError(f"the bare protocol got the reply {reply!r}")
        return 0

    return _cycle(make, ask)


def _many(wires: Sequence[Wire]) -> Cycle:
    """Cycles over several nodes, with one vote per command, which is in the deque of each node."""
    new_future = asyncio.get_running_loop().create_future
    make = _maker(QUIET[Serve.WAKE])
    majority = len(wires) // 2 + 1

    async def ask(command: bytes) -> int:
        future: asyncio.Future[int] = new_future()
        vote = Vote(future, majority)
        for wire in wires:
            wire.send(command, vote)
        return await future

    return _cycle(make, ask)


def _cycle(make: Callable[[str], Op], ask: Callable[[bytes], Awaitable[int]]) -> Cycle:
    async def cycle(i: int) -> None:
        op = make(f"bare_lock:{i}")
        await ask(encode(op, PREFIX))
        op.queueing = ALONE  # without the ticket, the hold is deleted by the server's own command
        release = encode_native(op, PREFIX, RELEASE)
        if release is None:
            raise RuntimeError("asynclock would release by a script")
        await ask(release)

    return cycle


def _maker(queueing: Queueing) -> Callable[[str], Op]:
    """A function that makes acquires like asynclock: with a fresh random id, and the process and host in it."""
    whoami = f"{os.getpid()}|{socket.gethostname().replace('|', '_')}"

    def make(name: str) -> Op:
        seed = int(time.time() * 1_000_000)
        owner = f"{secrets.token_hex(16)}|{seed}|{whoami}|"
        return Op(Verb.ACQUIRE, MUTEX, name, owner, LEASE, seed, MEMORY, queueing=queueing)

    return make
