"""TLS before a server, since the server at hand speaks none."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trustme

from tests.support.servers import Server


class Tls:
    """A proxy that ends TLS before a server."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.ca, self.other_ca = trustme.CA(), trustme.CA()
        self.ca_file, self.other_ca_file = folder / "ca.pem", folder / "other.pem"
        self.ca.cert_pem.write_to_path(str(self.ca_file))
        self.other_ca.cert_pem.write_to_path(str(self.other_ca_file))
        self._path = str(server.path)
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    @asynccontextmanager
    async def serving(self, host: str = "localhost", *, client_certificates: bool = False) -> AsyncIterator[Tls]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ca.issue_cert(host).configure_cert(context)
        if client_certificates:
            self.ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        proxy = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = proxy.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            proxy.close()
            if self._pumps:
                await asyncio.wait(self._pumps)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._path)
        await asyncio.gather(self._pump(reader, inner_writer), self._pump(inner_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # either end may hang up whenever it likes
        finally:
            writer.close()
