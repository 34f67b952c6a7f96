"""Connects to hosts with several addresses, as RFC 8305 says ("Happy Eyeballs"): if an address does not answer, the
next one is tried as well, and the first connection that comes up is used. Else an address that leads nowhere would take
the whole time of each attempt."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from aiohappyeyeballs import start_connection

from asynclock.stores.forks import Origin, keep_from_children
from asynclock.stores.lookups import addresses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.stores.lookups import Address

_DELAY = 0.25
"""Seconds after which the next address is tried as well: the recommendation of RFC 8305."""

_LEAST = 0.01
"""The shortest delay that RFC 8305 allows."""


def delay_of(addresses: int, limit: float) -> float:
    """Seconds between two addresses. The last one is tried before half of the limit of the connect is over. Pure."""
    return max(_LEAST, min(_DELAY, limit / 2 / max(1, addresses - 1)))


async def dial(host: str, port: int, limit: float) -> socket.socket:
    """A connection to a host. `limit`: seconds that the whole connect may take; the caller enforces it. Raises
    OSError."""
    return await connected(await addresses_of(host, port), limit)


async def connected(addresses: Sequence[Address], limit: float) -> socket.socket:
    """A connection to one of these addresses, the first ones preferred. Raises OSError."""
    task = asyncio.current_task()
    cancels = 0 if task is None else task.cancelling()
    delay = delay_of(len(addresses), limit)
    sock = await start_connection(addresses, happy_eyeballs_delay=delay, socket_factory=_socket)
    if task is not None and task.cancelling() > cancels:  # it loses a cancel while it ends the other attempts
        sock.close()
        raise asyncio.CancelledError
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _socket(address: Address) -> socket.socket:
    """For a connect. A child that is forked before the connection is up has not this socket either."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    keep_from_children(sock.fileno())
    return sock


class DialingLoop:
    """Stands in for an event loop, for a driver that connects with `loop.create_connection`: it connects as `dial`
    does. The name of the host stays the server name of TLS. A driver keeps it, and may connect by it later, to ask the
    server to end a statement. In a forked child it raises ConnectionError: that statement is one of the parent."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float) -> None:
        self._loop = loop
        self._limit = limit
        self._origin = Origin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str | None = None, port: Any = None, **options: Any
    ) -> Any:
        self._origin.check()
        if host is not None:
            options["sock"] = await dial(host, int(port), self._limit)
            if options.get("ssl"):
                options.setdefault("server_hostname", host)
        return await self._loop.create_connection(factory, **options)

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        self._origin.check()
        return await self._loop.create_unix_connection(*args, **options)
