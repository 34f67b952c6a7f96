"""The upper bound of this machine: asynclock's own commands with nothing around them.

It sends the same EVALSHA with the same script and arguments, from a protocol that only sends and counts. The commands
of one loop turn leave in one write, and the replies go to a deque of callbacks. There is no lease, no watchdog, no
timeout, no undo and no release after a cancellation: it is a bound for comparison, not a lock.
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

from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis.encoding import encode
from asynclock.stores.redis.scripts import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from benchmarks.servers import Server
    from benchmarks.sides import Cycle

LEASE = 30.0
MEMORY = LEASE + 300.0
"""asynclock's defaults, so that the commands are the same to the byte count."""


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

    def send(self, wire: bytes, hear: Callable[[Any], object]) -> None:
        if not self._out:
            self._call_soon(self._flush)
        self._out.append(wire)
        self._waiting.append(hear)

    def _flush(self) -> None:
        self.transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        reader, take = self._reader, self._waiting.popleft
        reader.feed(data)
        while (reply := reader.gets()) is not False:
            take()(reply)


class Vote:
    """One op at all nodes. Its future gets the greatest token once a majority has granted."""

    __slots__ = ("_fence", "_future", "_wanted")

    def __init__(self, future: asyncio.Future[int], wanted: int) -> None:
        self._future = future
        self._wanted = wanted
        self._fence = 0

    def __call__(self, reply: Any) -> None:
        if self._wanted == 0:
            return
        if type(reply) is not list or reply[0] != 1:
            self._wanted = 0
            self._future.set_exception(RuntimeError(f"the bare protocol got the reply {reply!r}"))
            return
        if reply[1] > self._fence:
            self._fence = reply[1]
        self._wanted -= 1
        if self._wanted == 0:
            self._future.set_result(self._fence)


@contextlib.asynccontextmanager
async def bare(servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """Cycles of the bare protocol over one node or several."""
    loop = asyncio.get_running_loop()
    wires = [(await loop.create_unix_connection(Wire, str(server.path)))[1] for server in servers]
    load: tuple[Any, ...] = ("SCRIPT", "LOAD", SCRIPTS[""])
    for wire in wires:
        loaded: asyncio.Future[Any] = loop.create_future()
        wire.send(hiredis.pack_command(load), loaded.set_result)
        await loaded
    try:
        yield _one(wires[0]) if len(wires) == 1 else _many(wires)
    finally:
        for wire in wires:
            wire.transport.close()


def _one(wire: Wire) -> Cycle:
    """Cycles over one node, with one future per command."""
    new_future = asyncio.get_running_loop().create_future
    make = _maker()

    async def ask(op: Op) -> int:
        future: asyncio.Future[Any] = new_future()
        wire.send(encode(op, ""), future.set_result)
        reply = await future
        if type(reply) is not list or reply[0] != 1:
            raise RuntimeError(f"the bare protocol got the reply {reply!r}")
        fence: int = reply[1]
        return fence

    async def cycle(i: int) -> None:
        op = make(f"bare:{i}")
        await ask(_release(op, await ask(op)))

    return cycle


def _many(wires: Sequence[Wire]) -> Cycle:
    """Cycles over several nodes, with one vote per command, which is in the deque of each node."""
    new_future = asyncio.get_running_loop().create_future
    make = _maker()
    majority = len(wires) // 2 + 1

    async def ask(op: Op) -> int:
        future: asyncio.Future[int] = new_future()
        vote, command = Vote(future, majority), encode(op, "")
        for wire in wires:
            wire.send(command, vote)
        return await future

    async def cycle(i: int) -> None:
        op = make(f"bare:{i}")
        await ask(_release(op, await ask(op)))

    return cycle


def _maker() -> Callable[[str], Op]:
    """A function that makes acquires like asynclock: with a fresh random id, and the process and host in it."""
    whoami = f"{os.getpid()}|{socket.gethostname().replace('|', '_')}"

    def make(name: str) -> Op:
        seed = int(time.time() * 1_000_000)
        return Op(Verb.ACQUIRE, MUTEX, name, f"{secrets.token_hex(16)}|{seed}|{whoami}|", LEASE, seed, MEMORY)

    return make


def _release(op: Op, fence: int) -> Op:
    return Op(Verb.RELEASE, op.kind, op.name, op.id, op.lease, fence, op.memory)
