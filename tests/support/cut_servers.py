"""Proxies before servers that a test cuts and heals, and stores of real servers on a clock that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any

from asynclock.stores.redis.store import RedisStore
from tests.support.fake_clock import FakeClock
from tests.support.proxy import Proxy
from tests.support.servers import Server


class Clocked(RedisStore):
    """A real server, for a client whose clock the test moves."""

    clock: Any = None

    def __init__(self, url: str, clock: FakeClock) -> None:
        super().__init__(url)
        self.clock = clock


class FaultyProxy(Proxy):
    """A proxy that can lose one request, and replace one reply. It can cut all connections at each request with a
    part, and hold the replies from such a request on."""

    lose: bytes = b""
    hang_up_on: bytes = b""
    hold_from: tuple[bytes, ...] = ()
    lost: asyncio.Event | None = None
    instead: tuple[bytes, bytes] = (b"", b"")

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.lose and self.lose in data:
                self.lose = b""
                self.cut()
                assert self.lost is not None
                self.lost.set()
                return
            if self.hang_up_on and self.hang_up_on in data:
                self.cut()
                return
            if any(part in data for part in self.hold_from):
                self.hold_replies()
            if not self.drop_requests:
                writer.write(data)
            for part, event in self._wanted:
                if part in data:
                    event.set()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flow.wait()
            begin, instead = self.instead
            if begin and data.startswith(begin):
                self.instead = b"", b""
                data = instead
            if not self.drop_replies:
                writer.write(data)


async def proxies_to(stack: AsyncExitStack, servers: Iterable[Server]) -> list[FaultyProxy]:
    """A proxy to each of them."""
    made = [FaultyProxy(each.path.with_suffix(".cut"), each.path) for each in servers]
    for each in made:
        await stack.enter_async_context(each)
        stack.callback(each.let_go)
    return made


def cut_proxies(proxies: Iterable[Proxy]) -> None:
    """The connections break; a new connection gets no reply."""
    for each in proxies:
        each.drop_requests = True
        each.cut()


def heal_proxies(proxies: Iterable[Proxy]) -> None:
    """The proxies work again; connections that were made meanwhile are cut once more."""
    for each in proxies:
        each.drop_requests = False
        each.cut()


def swallow(proxy: FaultyProxy, part: bytes) -> asyncio.Event:
    """The next request with that part does not arrive, and its connection breaks. Set once it has."""
    proxy.lose, proxy.lost = part, asyncio.Event()
    return proxy.lost
