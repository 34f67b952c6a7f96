"""asynclock.aiohttp: connecting, answers, readiness and sub-applications, with a server of aiohttp on a real socket."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError, web
from aiohttp.test_utils import TestClient, TestServer

import asynclock
from asynclock import ConfigError, LockLost, LockNotHeld, QuorumUnavailable, Redlock
from asynclock.aiohttp import CLIENT, setup
from asynclock.fencing import StaleToken
from tests.support.servers import Server
from tests.support.waiters import LIMIT
from tests.support.web import until

PAGE = Path(__file__).parents[2] / "docs" / "aiohttp.md"


def served(app: web.Application) -> TestClient[Any, Any]:
    """A client of the application, which runs on a socket."""
    return TestClient(TestServer(app))


def app_over(client: Redlock, handler: Any, **options: Any) -> web.Application:
    app = web.Application()
    setup(app, client, **options)
    app.router.add_post("/", handler)
    return app


async def test_the_program_of_the_page(shared_urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It charges an order, and is ready."""
    monkeypatch.setattr(asynclock, "redlock", Redlock(shared_urls[0], prefix=name))
    world: dict[str, Any] = {}
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(snippet, "aiohttp.md", "exec"), world)
    async with served(world["app"]) as http:
        answer = await http.post("/orders/07/charge")
        assert (await answer.json())["order"] == 7
        async with asyncio.timeout(LIMIT):
            while (await (await http.get("/readyz")).json())["ready"] is not True:  # a server that takes a second
                await asyncio.sleep(0.01)


async def test_the_client_lives_as_long_as_the_application(shared_urls: list[str], name: str) -> None:
    """The other contexts begin after it is connected, and end before it is closed, whatever was added first."""
    client, seen = Redlock(shared_urls[0]), []

    async def context(app: web.Application) -> AsyncIterator[None]:
        async with app[CLIENT](name):
            seen.append("begins")
        yield
        async with app[CLIENT](name):
            seen.append("ends")

    app = web.Application()
    app.cleanup_ctx.append(context)
    setup(app, client)
    async with served(app):
        assert seen == ["begins"]
    assert seen == ["begins", "ends"]
    with pytest.raises(ConfigError, match="closed"):
        await client(name).acquire()


async def test_a_busy_lock(client: Redlock, other: Redlock, name: str) -> None:
    """409 by default, or the status of `busy_status`, as a problem that names no holder; with Retry-After."""

    async def handler(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name, timeout=0):
            return web.Response()

    async with other(name):
        for options, status in (({}, 409), ({"busy_status": 423}, 423)):
            async with served(app_over(client, handler, **options)) as http:
                answer = await http.post("/")
                assert (answer.status, answer.content_type) == (status, "application/problem+json")
                assert answer.headers["Retry-After"] == "1"
                body = await answer.json()
                assert (body["status"], body["code"]) == (status, "busy")
                assert name not in str(body)
            client = Redlock(other_url(client))


def other_url(client: Redlock) -> str:
    """The url of the server of a client that an application has closed."""
    return re.findall(r"<Redlock (\S+)>", repr(client))[0]


async def test_an_outage(server: Server, name: str) -> None:
    """503 while the server is down, of the readiness route, too; no answer names it. Then requests are served again."""

    async def handler(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name):
            return web.Response()

    async def serves() -> bool:
        return (await http.post("/")).status == 200

    async def ready() -> bool:
        return (await http.get("/ready")).status == 200

    client = Redlock(server.url, patience=0.2, connect_timeout=LIMIT)
    async with served(app_over(client, handler, ready="/ready")) as http:
        assert await serves()
        server.kill()
        answer = await http.post("/")
        assert (answer.status, answer.content_type) == (503, "application/problem+json")
        assert answer.headers["Retry-After"] == "1"
        body = await answer.json()
        assert body["code"] == "unavailable"
        assert server.url not in str(body)
        answer = await http.get("/ready")
        assert (answer.status, (await answer.json())["ready"]) == (503, False)
        server.restart()
        await until(serves)
        await until(ready)


async def test_an_application_does_not_start_without_its_servers(name: str) -> None:
    """Its start raises the error of the client."""
    app = web.Application()
    setup(app, Redlock(f"unix:///nowhere/{name}", patience=0.1))
    with pytest.raises(QuorumUnavailable, match="cast no vote"):
        await TestServer(app).start_server()


async def test_a_lost_lock_and_errors_of_the_program(client: Redlock) -> None:
    """LockLost and StaleToken are 503. Other errors of locks are faults of the program: 500, which tells nothing."""
    errors: list[Exception] = [LockLost("a", reason="taken", errors={}), StaleToken("a"), LockNotHeld("secret")]

    async def handler(request: web.Request) -> web.Response:
        raise errors.pop(0)

    async with served(app_over(client, handler)) as http:
        for _ in range(2):
            answer = await http.post("/")
            assert (answer.status, (await answer.json())["code"]) == (503, "lost")
        answer = await http.post("/")
        assert answer.status == 500
        assert "secret" not in await answer.text()


async def test_a_response_that_has_begun_has_no_other_answer(client: Redlock) -> None:
    """The client sees a connection that was cut, and not a second response in the middle of the first."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"half")
        raise LockLost("a", reason="taken", errors={})

    async with served(app_over(client, handler)) as http:
        answer = await http.post("/")
        assert answer.status == 200
        with pytest.raises(ClientPayloadError):
            await answer.read()


async def test_what_the_application_catches_itself(client: Redlock, other: Redlock, name: str) -> None:
    """A middleware of the application is nearer to the handler, and takes precedence."""

    @web.middleware
    async def mine(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except TimeoutError:
            return web.Response(status=418)

    async def handler(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name, timeout=0):
            return web.Response()

    app = web.Application(middlewares=[mine])
    setup(app, client)
    app.router.add_post("/", handler)
    async with other(name), served(app) as http:
        assert (await http.post("/")).status == 418


async def test_sub_applications(client: Redlock, other: Redlock, name: str) -> None:
    """They find the client of the outermost application, and it answers their errors."""

    async def handler(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name, timeout=0) as lease:
            return web.Response(text=lease.name)

    inner, app = web.Application(), web.Application()
    inner.router.add_post("/charge", handler)
    setup(app, client)
    app.add_subapp("/orders", inner)
    async with served(app) as http:
        assert await (await http.post("/orders/charge")).text() == name
        async with other(name):
            assert (await http.post("/orders/charge")).status == 409


async def test_wrong_calls(client: Redlock) -> None:
    """Each is a ConfigError that says what to do, and changes nothing."""
    app = web.Application()
    for call in (
        lambda: setup("app"),  # type: ignore[arg-type]
        lambda: setup(app, "client"),  # type: ignore[arg-type]
        lambda: setup(app, client, busy_status=200),
        lambda: setup(app, client, ready="ready"),
    ):
        with pytest.raises(ConfigError):
            call()
    setup(app, client)
    with pytest.raises(ConfigError, match="already"):
        setup(app, client)
    begun = web.Application()
    begun.freeze()
    with pytest.raises(ConfigError, match="before the application starts"):
        setup(begun, client)
