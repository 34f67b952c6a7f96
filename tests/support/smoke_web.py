"""What smoke.py does with FastAPI under uvicorn, and with aiohttp: servers on sockets, and clients that hang up.

Most of `asynclock.fastapi` depends on names that FastAPI and Starlette do not document, so each step is one that a
version could break."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import uvicorn
from aiohttp import web
from fastapi import APIRouter, FastAPI, File, Request, UploadFile
from pydantic import BaseModel

import asynclock.aiohttp
import asynclock.fastapi
from asynclock import Lease, Redlock
from asynclock.fastapi import Locked


class Order(BaseModel):
    id: int


@asynccontextmanager
async def hanging_up(port: int, path: str, body: bytes = b"{}") -> AsyncIterator[None]:
    """A client that hangs up at the end of the block."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: shop\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    yield
    writer.close()
    await writer.wait_closed()


async def waits_until_it_hangs_up(client: Redlock, port: int, path: str, name: str) -> None:
    """A request that waits for the name leaves the queue."""
    async with client(name):
        async with hanging_up(port, path):
            while not (await client.inspect(name)).waiters:
                await asyncio.sleep(0.01)
        while (await client.inspect(name)).waiters:
            await asyncio.sleep(0.01)


async def answers(client: Redlock, port: int) -> None:
    """Of an app with the path /orders/{id}, which answers with the name of its lock after a short wait."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        for path in ("/orders/7", "/orders/07"):
            answer = await http.post(path, json={"id": "1"})
            assert (answer.status_code, answer.json()["name"]) == (200, "order:7"), answer.text
        async with client("order:7"):
            answer = await http.post("/orders/7", json={"id": 1})
            assert (answer.status_code, answer.headers["Content-Type"]) == (409, "application/problem+json")
            assert answer.headers["Retry-After"] == "1"
        assert (await http.get("/ready")).json()["ready"] is True


async def fastapi(url: str) -> None:
    """asynclock.fastapi: names, validation, kinds, answers, the schema, def endpoints, hang-ups."""
    app, router = FastAPI(), APIRouter()
    asynclock.fastapi.install(app, Redlock(url), ready="/ready")
    begun, gone, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @router.post("/orders/{order_id}")
    async def order(
        order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", timeout=0)], order: Order
    ) -> dict[str, str]:
        return {"name": lease.name}

    @app.post("/both/{a}/{b}")
    def both(a: int, b: int, lease: Annotated[Lease, Locked("a:{a}", "b:{b}", kind="write")]) -> bool:
        return lease.held

    @app.post("/file/{number}")
    async def file(
        number: int, lease: Annotated[Lease, Locked("file:{number}")], text: Annotated[bytes, File()], other: UploadFile
    ) -> tuple[int, int]:
        return len(text), len(await other.read())

    @app.post("/wait")
    async def wait(lease: Annotated[Lease, Locked("wait")]) -> None: ...

    @app.post("/pay")
    async def pay(request: Request, lease: Annotated[Lease, Locked("pay")]) -> None:
        begun.set()
        await gone.wait()
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        assert lease.held
        done.set()

    app.include_router(router)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with Redlock(url) as client:
        await answers(client, port)
        async with client("order:7"), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            assert (await http.post("/orders/7", json={})).status_code == 422  # although the lock is taken
            assert (await http.post("/both/1/2")).json() is True
            files = {"text": b"x" * 9, "other": b"x" * 5}
            assert (await http.post("/file/1", files=files)).json() == [9, 5]
            schema = (await http.get("/openapi.json")).json()["paths"]
            assert {"409", "503"} <= set(schema["/orders/{order_id}"]["post"]["responses"]), json.dumps(schema)
        await waits_until_it_hangs_up(client, port, "/wait", "wait")
        async with hanging_up(port, "/pay"):
            await begun.wait()
        gone.set()
        await done.wait()
    server.should_exit = True
    await serving
    listener.close()


async def aiohttp(url: str) -> None:
    """asynclock.aiohttp: answers, and hang-ups."""
    begun, gone, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def order(request: web.Request) -> web.Response:
        order_id = int(request.match_info["order_id"])
        async with request.config_dict[asynclock.aiohttp.CLIENT](f"order:{order_id}", timeout=0) as lease:
            return web.json_response({"name": lease.name})

    async def wait(request: web.Request) -> web.Response:
        async with request.config_dict[asynclock.aiohttp.CLIENT]("wait"):
            return web.Response()

    async def pay(request: web.Request) -> web.Response:
        async with request.config_dict[asynclock.aiohttp.CLIENT]("pay") as lease:
            begun.set()
            await gone.wait()
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
            assert lease.held
        done.set()
        return web.Response()

    app = web.Application()
    asynclock.aiohttp.setup(app, Redlock(url), ready="/ready")
    routes: list[Any] = [web.post("/orders/{order_id}", order), web.post("/wait", wait), web.post("/pay", pay)]
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with Redlock(url) as client:
        await answers(client, port)
        await waits_until_it_hangs_up(client, port, "/wait", "wait")
        async with hanging_up(port, "/pay"):
            await begun.wait()
        gone.set()
        await done.wait()
    await runner.cleanup()
