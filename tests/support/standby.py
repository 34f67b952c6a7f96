"""A server that takes the place of another one behind the same address, and lacks its last writes, as a replica that is
promoted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asynclock.rules.model import RELEASE
from asynclock.stores.redis.connection import Connection
from tests.support.proxy import Proxy
from tests.support.servers import Server, Servers
from tests.support.waiters import reconnected


class HoldingProxy(Proxy):
    """From a request with the part `hold_on` on, replies wait."""

    hold_on = b""

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.hold_on and self.hold_on in data:
                self.hold_replies()
            writer.write(data)
            for part, event in self._wanted:
                if part in data:
                    event.set()


class Standby:
    """`main`, the server behind a proxy, and `spare`, which takes its place."""

    def __init__(self, main: Server, spare: Server, proxy: HoldingProxy) -> None:
        self.main = main
        self.spare = spare
        self.proxy = proxy

    @property
    def url(self) -> str:
        return self.proxy.url

    def replicate(self) -> None:
        """The spare has all that the main server has now, and nothing of what that writes later."""
        with self.main.cli() as main, self.spare.cli() as spare:
            spare.flushall()
            keys: Any = main.keys("*")
            for key in keys:
                left: Any = main.pttl(key)
                dump: Any = main.dump(key)
                spare.restore(key, max(left, 0), dump)

    async def fail_over(self, node: Any) -> None:
        """Return once that node is connected to the spare."""
        self.proxy.back = self.spare.path
        self.proxy.let_go()
        self.proxy.hold_on = b""
        self.proxy.cut()
        await reconnected(node)


@asynccontextmanager
async def standby(servers: Servers) -> AsyncIterator[Standby]:
    """Two servers of their own."""
    main, spare = servers.start_together(2)
    async with HoldingProxy(main.path.with_suffix(".p"), main.path) as proxy:
        yield Standby(main, spare, proxy)
        proxy.let_go()


def released_ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids whose release is sent from now on, in order."""
    ids: list[str] = []
    send = Connection.send

    def noted(connection: Connection, wire: bytes, handler: Any) -> None:
        op = getattr(handler, "op", None)
        if op is not None and op.verb is RELEASE:
            ids.append(op.id)
        send(connection, wire, handler)

    monkeypatch.setattr(Connection, "send", noted)
    return ids
