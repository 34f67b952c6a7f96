"""Web applications, in this process and on a socket, and clients that hang up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from asynclock import Redlock

BODY = b'{"id": 7}'


def http(app: Any) -> httpx.AsyncClient:
    """A client of the app, without a socket and without the app's lifespan."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


async def names_of(client: Redlock, prefix: str) -> list[str]:
    return [each.name async for each in client.holders(prefix)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # the test's own limit ends it
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """The port of a uvicorn that serves the app (ASGI)."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


@asynccontextmanager
async def hanging_up(port: int, path: str, body: bytes = BODY) -> AsyncIterator[None]:
    """A request whose client hangs up at the end of the block."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: shop\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        yield
    finally:
        writer.close()
        await writer.wait_closed()
