"""Clients whose requests a test holds back before they reach a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from asynclock import Redlock
from tests.support.proxy import RELEASE, Proxy
from tests.support.servers import Server


class Gate(Proxy):
    """A proxy that also holds back requests while it is shut."""

    def __init__(self, server: Server, front: str) -> None:
        super().__init__(server.path.with_name(front), server.path)
        self.open = asyncio.Event()
        self.open.set()
        self.passed = bytearray()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self.open.wait()
            self.passed += data
            if not self.drop_requests:
                writer.write(data)

    @property
    def releases(self) -> bool:
        """Whether a release is among the requests that have passed."""
        return any(part in self.passed for part in RELEASE)


@asynccontextmanager
async def behind_gates(
    servers: Sequence[Server], who: int, **options: Any
) -> AsyncIterator[tuple[Redlock, list[Gate]]]:
    """A client with a gate of its own before each server."""
    async with AsyncExitStack() as stack:
        gates = [await stack.enter_async_context(Gate(each, f"g{who}-{i}.sock")) for i, each in enumerate(servers)]
        yield await stack.enter_async_context(Redlock(*(gate.url for gate in gates), **options)), gates
