"""asynclock.aiohttp on a socket: clients that hang up, and handlers that still run when the application ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from aiohttp import ClientSession, web

from asynclock import LockTimeout, Redlock
from asynclock.aiohttp import CLIENT, setup
from tests.support.web import hanging_up, until


@asynccontextmanager
async def serving(app: web.Application, grace: float = 60.0) -> AsyncIterator[int]:
    """The port of a server that cancels the handlers of clients that hang up."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=grace)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
def app_of(shared_urls: list[str]) -> Callable[[Any], web.Application]:
    """Makes an application with a handler."""

    def made(handler: Any) -> web.Application:
        app = web.Application()
        setup(app, Redlock(shared_urls[0]))
        app.router.add_post("/", handler)
        return app

    return made


async def test_f13_a_hang_up_ends_the_wait(app_of: Callable[[Any], web.Application], other: Redlock, name: str) -> None:
    """A client that hangs up while its request waits leaves the queue, and its block does not run."""
    called = list[str]()

    async def pay(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name, timeout=None):
            called.append(name)
        return web.Response()

    async def waiting() -> bool:
        return bool((await other.inspect(name)).waiters)

    async def nobody() -> bool:
        return not await waiting()

    async with serving(app_of(pay)) as port, other(name):
        async with hanging_up(port, "/"):
            await until(waiting)
        await until(nobody)
    assert called == []


async def test_f13_a_hang_up_does_not_end_the_body(
    app_of: Callable[[Any], web.Application], other: Redlock, name: str
) -> None:
    """Once the lock is held, the handler runs to its end under the lock, although its client has hung up."""
    begun, gone, ended, done = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[bool]()

    async def pay(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name) as lease:
            begun.set()
            await until(closed(request))
            await gone.wait()  # a cancel would come here
            done.append(lease.held)
        await asyncio.sleep(0)
        done.append(lease.held)
        ended.set()
        return web.Response()

    async with serving(app_of(pay)) as port:
        async with hanging_up(port, "/"):
            await begun.wait()
        assert await other(name).locked()
        gone.set()
        await ended.wait()
    assert done == [True, False]


async def test_f13_a_hang_up_after_the_lock_was_released(app_of: Callable[[Any], web.Application], name: str) -> None:
    """A handler that commits when it has released the lock is not cancelled before."""
    freed, committed = asyncio.Event(), asyncio.Event()

    async def pay(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name):
            pass
        freed.set()
        await until(closed(request))
        await asyncio.sleep(0)
        committed.set()
        return web.Response()

    async with serving(app_of(pay)) as port:
        async with hanging_up(port, "/"):
            await freed.wait()
        await committed.wait()


def closed(request: web.Request) -> Any:
    """Whether the client of the request has hung up, to be awaited."""

    async def asked() -> bool:
        return request.transport is None or request.transport.is_closing()

    return asked


async def test_an_error_that_no_client_receives_is_reported(
    app_of: Callable[[Any], web.Application], name: str
) -> None:
    """A body that fails after its client has hung up does not fail silently."""
    begun, told = asyncio.Event(), asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.set_result(context))

    async def pay(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name):
            begun.set()
            await until(closed(request))
            raise ZeroDivisionError

    async with serving(app_of(pay)) as port:
        async with hanging_up(port, "/"):
            await begun.wait()
        context = await told
    assert isinstance(context["exception"], ZeroDivisionError)
    assert "hung up" in context["message"]


@pytest.mark.parametrize("answer", [web.HTTPConflict(), LockTimeout("the lock is taken")], ids=["HTTP", "lock"])
async def test_an_answer_that_no_client_receives_is_no_error(
    app_of: Callable[[Any], web.Application], name: str, answer: Exception
) -> None:
    """A client that hangs up would have got an answer to an exception of aiohttp, or to one of a lock: neither is
    reported."""
    begun, ended, told = asyncio.Event(), asyncio.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    async def pay(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name):
            begun.set()
            await until(closed(request))
        ended.set()
        raise answer

    async with serving(app_of(pay)) as port:
        async with hanging_up(port, "/"):
            await begun.wait()
        await ended.wait()
    assert not told


async def test_a_handler_that_outlasts_the_server(
    app_of: Callable[[Any], web.Application], other: Redlock, name: str
) -> None:
    """It is cancelled when its grace is over, before the contexts that it uses end; and its lock is free."""
    begun, log = asyncio.Event(), list[str]()

    async def pay(request: web.Request) -> web.Response:
        async with request.config_dict[CLIENT](name):
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                log.append("handler")
        return web.Response()

    async def database(app: web.Application) -> AsyncIterator[None]:
        yield
        assert not await other(name).locked()
        log.append("database")

    app = app_of(pay)
    app.cleanup_ctx.append(database)
    async with serving(app, grace=0.01) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: shop\r\nContent-Length: 0\r\n\r\n")
        await begun.wait()
    writer.close()
    assert log == ["handler", "database"]


async def test_what_a_handler_sets_is_seen_by_the_server(app_of: Callable[[Any], web.Application]) -> None:
    """Its context variables, as without asynclock: by signals and the log of accesses."""
    number = ContextVar[int]("number")
    seen = list[int]()

    async def handler(request: web.Request) -> web.Response:
        number.set(7)
        return web.Response()

    async def prepared(request: web.Request, response: web.StreamResponse) -> None:
        seen.append(number.get(0))

    app = app_of(handler)
    app.on_response_prepare.append(prepared)
    async with serving(app) as port, ClientSession() as session, session.post(f"http://127.0.0.1:{port}/") as answer:
        assert answer.status == 200
    assert seen == [7]
