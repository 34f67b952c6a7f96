"""A proxy before several servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tests.support.proxy import Proxy
from tests.support.servers import Server


class Balancer(Proxy):
    """Each connection goes to the next server."""

    def __init__(self, front: Path, servers: Sequence[Server]) -> None:
        super().__init__(front, servers[0].path)
        self.servers = list(servers)
        self.number = 0

    async def _to_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        chosen = self.servers[self.number % len(self.servers)]
        self.number += 1
        return await asyncio.open_unix_connection(str(chosen.path))
