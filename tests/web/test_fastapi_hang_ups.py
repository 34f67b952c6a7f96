"""asynclock.fastapi under uvicorn, on a socket: clients that hang up, and when the lock is free."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import anyio
import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse

from asynclock import Lease, Lock, Redlock
from asynclock.fastapi import Locked, install
from tests.support.web import BODY, hanging_up, serving, until


class Order(BaseModel):
    id: int


@pytest.fixture
async def application(shared_urls: list[str]) -> FastAPI:
    app = FastAPI()
    install(app, Redlock(shared_urls[0]))
    return app


async def pass_through(request: Request, call_next: Callable[..., Awaitable[object]]) -> object:
    return await call_next(request)


@pytest.mark.parametrize("middleware", [False, True], ids=["plain", "BaseHTTPMiddleware"])
async def test_f13_a_hang_up_ends_the_wait(application: FastAPI, other: Redlock, name: str, middleware: bool) -> None:
    """A client that hangs up while its request waits leaves the queue, and its endpoint does not run: with a body that
    FastAPI has read, with one that nobody has read, without a body, and where the endpoint is a `def`."""
    called = list[str]()
    if middleware:
        application.add_middleware(BaseHTTPMiddleware, dispatch=pass_through)

    @application.post("/model")
    async def model(order: Order, lease: Annotated[Lease, Locked(name)]) -> None:
        called.append("model")

    @application.post("/raw")
    async def raw(lease: Annotated[Lease, Locked(name)]) -> None:
        called.append("raw")

    @application.post("/def")
    def in_thread(lease: Annotated[Lease, Locked(name)]) -> None:
        called.append("def")

    async def waiting() -> bool:
        return bool((await other.inspect(name)).waiters)

    async def nobody() -> bool:
        return not await waiting()

    async with serving(application) as port, other(name):
        for path, body in (("/model", BODY), ("/raw", BODY), ("/raw", b""), ("/def", b"")):
            async with hanging_up(port, path, body):
                await until(waiting)
            await until(nobody)
    assert called == []


@pytest.mark.parametrize("middleware", [False, True], ids=["plain", "BaseHTTPMiddleware"])
async def test_the_body_is_replayed(application: FastAPI, other: Redlock, name: str, middleware: bool) -> None:
    """An endpoint that reads the body itself gets all of it after a wait, during which it was read."""
    if middleware:
        application.add_middleware(BaseHTTPMiddleware, dispatch=pass_through)

    @application.post("/")
    async def read(request: Request, lease: Annotated[Lease, Locked(name)]) -> int:
        return len([byte async for chunk in request.stream() for byte in chunk])

    async def waiting() -> bool:
        return bool((await other.inspect(name)).waiters)

    async with serving(application) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as web:
        for size in (0, 10, 3_000_000):
            async with other(name):
                answer = asyncio.create_task(web.post("/", content=b"x" * size))
                await until(waiting)
            assert (await answer).json() == size


class Receives:
    """A middleware that sees what the application has received."""

    def __init__(self, app: Any, size: list[int], disconnected: asyncio.Event) -> None:
        self.app, self.size, self.disconnected = app, size, disconnected

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            message = await receive()
            self.size[0] += len(message.get("body", b""))
            if message["type"] == "http.disconnect":
                self.disconnected.set()
            return message

        await self.app(scope, received, send)


async def test_a_large_body_is_not_read_while_its_request_waits(
    application: FastAPI, other: Redlock, name: str
) -> None:
    """A mebibyte of it is, and what came with that; the rest stays with the client."""
    size = [0]
    application.add_middleware(Receives, size=size, disconnected=asyncio.Event())

    @application.post("/")
    async def read(request: Request, lease: Annotated[Lease, Locked(name)]) -> int:
        return len(await request.body())

    async def read_a_mebibyte() -> bool:
        return size[0] > 1 << 20

    async with serving(application) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as web:
        async with other(name):
            answer = asyncio.create_task(web.post("/", content=b"x" * 8_000_000))
            await until(read_a_mebibyte)
            for _ in range(30):
                await other.inspect(name)
            assert size[0] < 3 << 20
        assert (await answer).json() == 8_000_000


class Limit:
    """A middleware that answers 413 to a body of more than 10 bytes, when that many have been read."""

    class Over(Exception):
        """A message had too many bytes."""

    def __init__(self, app: Any, over: asyncio.Event) -> None:
        self.app, self.over = app, over

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0

        async def received() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > 10:
                self.over.set()
                raise self.Over
            return message

        try:
            await self.app(scope, received, send)
        except self.Over:
            await PlainTextResponse("too large", 413)(scope, receive, send)


@pytest.mark.parametrize("path", ["/body", "/none"])
async def test_a_limit_of_the_body_is_exceeded_while_its_request_waits(
    application: FastAPI, other: Redlock, name: str, path: str
) -> None:
    """An endpoint that reads the body gets the exception of the middleware that limits it, as without a lock. One that
    reads none is answered."""
    over = asyncio.Event()
    application.add_middleware(Limit, over=over)

    @application.post("/body")
    async def body(request: Request, lease: Annotated[Lease, Locked(name)]) -> int:
        return len(await request.body())

    @application.post("/none")
    async def none(lease: Annotated[Lease, Locked(name)]) -> None: ...

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 20

    async with serving(application) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as web:
        async with other(name):
            answer = asyncio.create_task(web.post(path, content=chunks()))
            await over.wait()
        assert (await answer).status_code == {"/body": 413, "/none": 200}[path]


async def test_a_hang_up_at_the_moment_of_the_grant(application: FastAPI, other: Redlock, name: str) -> None:
    """The lock that was granted is released at once, and the endpoint does not run."""
    granted, disconnected, called = asyncio.Event(), asyncio.Event(), list[str]()
    application.add_middleware(Receives, size=[0], disconnected=disconnected)

    class Late(Lock):
        """A lock whose grant arrives together with the hang-up."""

        __slots__ = ()

        async def _leased(self) -> Lease:
            lease = await super()._leased()
            with anyio.CancelScope(shield=True):
                granted.set()
                await disconnected.wait()
                for _ in range(5):
                    await asyncio.sleep(0)
            return lease

    def late(client: Redlock, name: str) -> Lock:
        lock = client(name)
        lock.__class__ = Late
        return lock

    @application.post("/")
    async def pay(lease: Annotated[Lease, Locked(name, kind=late)]) -> None:
        called.append(name)

    async with serving(application) as port:
        async with hanging_up(port, "/", b""):
            await granted.wait()
        async with other(name, timeout=20):  # the lease is 30 s, and renewed
            assert called == []


async def test_f13_a_hang_up_does_not_end_the_body(application: FastAPI, other: Redlock, name: str) -> None:
    """Once the lock is held, the endpoint runs to its end under the lock, although its client has hung up."""
    begun, gone, done = asyncio.Event(), asyncio.Event(), list[bool]()

    @application.post("/")
    async def pay(request: Request, lease: Annotated[Lease, Locked(name)]) -> None:
        begun.set()
        await gone.wait()
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        done.append(lease.held)

    async def finished() -> bool:
        return bool(done)

    async with serving(application) as port:
        async with hanging_up(port, "/"):
            await begun.wait()
        gone.set()
        await until(finished)
    assert done == [True]


class Raises:
    """A server that sees which errors the application does not answer."""

    def __init__(self, app: FastAPI, raised: list[BaseException]) -> None:
        self.app, self.raised = app, raised

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except BaseException as error:
            self.raised.append(error)
            raise


async def test_cancel_body(application: FastAPI, other: Redlock, name: str) -> None:
    """With cancel_body=True the endpoint is cancelled when its client hangs up, and the lock is free. That is no error
    of the application."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @application.post("/")
    async def look(lease: Annotated[Lease, Locked(name, cancel_body=True)]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    raised = list[BaseException]()
    async with serving(Raises(application, raised)) as port:
        async with hanging_up(port, "/"):
            await begun.wait()
        await cancelled.wait()
        async with other(name, timeout=30):
            pass
    assert not raised


async def test_cancel_body_leaves_the_body_to_the_endpoint(application: FastAPI, name: str) -> None:
    """While a hang-up is watched for, an endpoint reads the body itself."""

    @application.post("/")
    async def read(request: Request, lease: Annotated[Lease, Locked(name, cancel_body=True)]) -> int:
        return len(await request.body())

    async with serving(application) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as web:
        for size in (0, 10, 3_000_000):
            assert (await web.post("/", content=b"x" * size)).json() == size


async def test_nothing_is_read_after_the_response(application: FastAPI, name: str) -> None:
    """A server may have nothing to read for as long as its connection is open. No task goes on reading."""
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None: ...

    @application.post("/")
    async def pay(lease: Annotated[Lease, Locked(name)]) -> None:
        await asyncio.sleep(0)

    async with application.router.lifespan_context(application):
        before = asyncio.all_tasks()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
        await application(scope, receive, send)
        assert asyncio.all_tasks() == before


async def test_a_middleware_that_loses_a_cancel_does_not_keep_the_response(application: FastAPI, name: str) -> None:
    """With cancel_body=True a hang-up is watched for until the endpoint returns. The cancel that ends this meets a
    message in a middleware, which returns the message, as `wait_for` of Python 3.11 does."""
    messages, waits, sent = [{"type": "http.request", "body": b"", "more_body": True}], asyncio.Event(), list[str]()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        try:
            waits.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return {"type": "http.request", "body": b"", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    @application.post("/")
    async def pay(lease: Annotated[Lease, Locked(name, cancel_body=True)]) -> None:
        await waits.wait()

    async with application.router.lifespan_context(application):
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
        await application(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]


async def test_the_lock_is_free_before_the_response_is_sent(application: FastAPI, other: Redlock, name: str) -> None:
    """A middleware that sees the response begin finds the lock free."""
    seen = list[bool]()

    class Look:
        def __init__(self, app: FastAPI) -> None:
            self.app = app

        async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
            async def sending(message: dict) -> None:
                if message["type"] == "http.response.start":
                    seen.append(await other(name).locked())
                await send(message)

            await self.app(scope, receive, sending if scope["type"] == "http" else send)

    application.add_middleware(Look)

    @application.post("/")
    async def charge(lease: Annotated[Lease, Locked(name)]) -> bool:
        return await other(name).locked()

    async with serving(application) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as web:
        assert (await web.post("/")).json() is True
    assert seen == [False]
