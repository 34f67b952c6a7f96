"""Proxies that make servers far: each way takes time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tests.support.proxy import Proxy, TcpProxy
from tests.support.servers import Server


class FarProxy(Proxy):
    """Each request and each reply takes `way` seconds at least."""

    way = 0.0

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._pass_on(reader, writer)

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._pass_on(reader, writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(65536):
            loop.call_later(self.way, _write, writer, data)


class FarDatabase(FarProxy, TcpProxy):
    """On a port of this machine."""


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


@asynccontextmanager
async def far_servers(servers: Sequence[Server]) -> AsyncIterator[list[FarProxy]]:
    """A proxy before each of them, which is near at first."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FarProxy(each.path.with_suffix(".far"), each.path)) for each in servers]
