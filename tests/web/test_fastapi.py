"""asynclock.fastapi in the process of the test: names, validation, answers, the lifespan, the order of dependencies."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Depends,
    FastAPI,
    Form,
    HTTPException,
    Query,
    UploadFile,
    WebSocket,
)
from fastapi.testclient import TestClient
from pydantic import BaseModel
from sqlalchemy import BigInteger, Column, MetaData, Table, create_engine
from starlette.responses import PlainTextResponse

from asynclock import ConfigError, Lease, LockLost, QuorumUnavailable, Redlock, current_lease
from asynclock.fastapi import Locked, install
from asynclock.fencing import StaleToken, fenced_sync
from tests.support.example_programs import wait_for
from tests.support.web import http, names_of


class Order(BaseModel):
    id: int


async def test_equal_values_have_one_lock(client: Redlock, name: str) -> None:
    """A name is made of validated values: /orders/7 and /orders/07 are one order, in a router with a prefix, too."""
    app, router = FastAPI(), APIRouter(prefix="/orders")
    install(app, client)

    @router.post("/{order_id}")
    async def charge(order_id: int, lease: Annotated[Lease, Locked(name + ":{order_id}")]) -> str:
        return lease.name

    app.include_router(router, prefix="/shop")  # after install()
    async with http(app) as web:
        assert (await web.post("/shop/orders/7")).json() == f"{name}:7"
        assert (await web.post("/shop/orders/07")).json() == f"{name}:7"


async def test_names_from_query_body_and_functions(client: Redlock, name: str) -> None:
    """A field may be a parameter of the query, of a form with a file, of a body that is a model, or of several; a
    callable is a dependency."""
    app = FastAPI()
    install(app, client)

    async def named(shop: Annotated[str, Query(alias="s")]) -> str:
        return f"{name}:{shop}"

    @app.post("/query")
    async def query(shop: Annotated[int, Query(alias="s")], lease: Annotated[Lease, Locked(name + ":{shop}")]) -> str:
        return lease.name

    @app.post("/body")
    async def body(order: Order, lease: Annotated[Lease, Locked(name + ":{order.id}")]) -> str:
        return lease.name

    @app.post("/embedded")
    async def embedded(
        order: Order, count: Annotated[int, Body()], lease: Annotated[Lease, Locked(name + ":{order.id}:{count}")]
    ) -> str:
        return lease.name

    @app.post("/form")
    async def form(
        shop: Annotated[int, Form()], file: UploadFile, lease: Annotated[Lease, Locked(name + ":{shop}")]
    ) -> tuple[str, int]:
        return lease.name, len(await file.read())

    @app.post("/function")
    async def function(lease: Annotated[Lease, Locked(named)]) -> str:
        return lease.name

    async with http(app) as web:
        assert (await web.post("/query?s=07")).json() == f"{name}:7"
        assert (await web.post("/body", json={"id": "07"})).json() == f"{name}:7"
        assert (await web.post("/embedded", json={"order": {"id": 7}, "count": "2"})).json() == f"{name}:7:2"
        answer = await web.post("/form", data={"shop": "07"}, files={"file": b"x" * 9})
        assert answer.json() == [f"{name}:7", 9]
        assert (await web.post("/function?s=b")).json() == f"{name}:b"


async def test_a_request_that_fails_validation_takes_no_lock(client: Redlock, other: Redlock, name: str) -> None:
    """A wrong parameter of the endpoint, of its body or of a dependency that comes later: 422 as without a lock, at
    once, although another owner holds the name."""

    def page(number: int) -> int:
        return number

    async def without(order_id: int, order: Order, number: Annotated[int, Depends(page)]) -> None: ...

    async def charge(
        order_id: int,
        lease: Annotated[Lease, Locked(name, timeout=None)],
        order: Order,
        number: Annotated[int, Depends(page)],
    ) -> None: ...

    app = FastAPI()
    install(app, client)
    app.post("/plain/{order_id}")(without)
    app.post("/locked/{order_id}")(charge)
    async with http(app) as web, other(name):
        for path, body in (("x?number=1", {"id": 1}), ("7?number=1", {}), ("7?number=y", {"id": 1}), ("x", {})):
            locked, plain = await web.post(f"/locked/{path}", json=body), await web.post(f"/plain/{path}", json=body)
            assert locked.status_code == plain.status_code == 422
            assert locked.json() == plain.json()


async def test_answers(client: Redlock, other: Redlock, name: str) -> None:
    """LockTimeout is 409, QuorumUnavailable, LockLost and StaleToken are 503, each a problem with Retry-After; no name
    of a lock and no address goes to the client."""
    app = FastAPI()
    install(app, client)

    @app.post("/busy")
    async def busy(lease: Annotated[Lease, Locked(name, timeout=0)]) -> None: ...

    @app.post("/down")
    async def down() -> None:
        raise QuorumUnavailable(f"secret {name}", name=name, errors={"secret:6379": OSError("secret")})

    @app.post("/lost")
    async def lost(lease: Annotated[Lease, Locked(name, "free")]) -> None:
        assert await other.break_lock(name)
        await asyncio.Event().wait()

    @app.post("/stale")
    async def stale(lease: Annotated[Lease, Locked(name)]) -> None:
        raise StaleToken(f"secret {name}", name=name)

    async with http(app) as web:
        async with other(name, metadata="secret"):
            answers = [await web.post("/busy"), await web.post("/down")]
        answers += [await web.post("/lost"), await web.post("/stale")]
    assert [each.status_code for each in answers] == [409, 503, 503, 503]
    assert [each.json()["code"] for each in answers] == ["busy", "unavailable", "lost", "lost"]
    for each in answers:
        assert each.headers["Content-Type"] == "application/problem+json"
        assert int(each.headers["Retry-After"]) > 0
        assert each.json()["status"] == each.status_code
        assert "secret" not in each.text
        assert name not in each.text


async def test_own_answers(client: Redlock, other: Redlock, name: str) -> None:
    """The status of a busy lock can be set; it stands in the schema of the routes that lock, and in no other."""
    app, router = FastAPI(), APIRouter()
    install(app, client, busy_status=423)

    @router.post("/busy/{it:path}")
    async def busy(lease: Annotated[Lease, Locked(name, timeout=0)]) -> None: ...

    @app.post("/plain")
    async def plain() -> None: ...

    app.include_router(router, prefix="/later")
    async with http(app) as web, other(name):
        assert (await web.post("/later/busy/1/2")).status_code == 423
        paths = (await web.get("/openapi.json")).json()["paths"]
    assert {"423", "503"} <= set(paths["/later/busy/{it}"]["post"]["responses"])
    assert "application/problem+json" in paths["/later/busy/{it}"]["post"]["responses"]["503"]["content"]
    assert set(paths["/plain"]["post"]["responses"]) == {"200"}


async def test_several_names_are_one_lock(client: Redlock, other: Redlock, name: str) -> None:
    """A transfer holds both accounts, whatever their kind; afterwards both are free."""
    app = FastAPI()
    install(app, client)

    @app.post("/{a}/{b}")
    async def transfer(a: int, b: int, lease: Annotated[Lease, Locked(name + ":{a}", name + ":{b}", lease=9)]) -> Any:
        return sorted(await names_of(other, name))

    async with http(app) as web:
        assert (await web.post("/2/1")).json() == [f"{name}:1", f"{name}:2"]
    assert await names_of(other, name) == []


async def test_def_endpoint(client: Redlock, other: Redlock, name: str) -> None:
    """A `def` endpoint runs in a thread, under the lock."""
    app = FastAPI()
    install(app, client)
    loop, main = asyncio.get_running_loop(), threading.get_ident()

    @app.post("/")
    def endpoint(lease: Annotated[Lease, Locked(name)]) -> Any:
        assert threading.get_ident() != main
        assert current_lease() is not None
        return asyncio.run_coroutine_threadsafe(names_of(other, name), loop).result()

    async with http(app) as web:
        assert (await web.post("/")).json() == [name]
    assert await names_of(other, name) == []


@pytest.mark.parametrize("kind", ["mutex", lambda client, name: client.write(name)])
async def test_loss_in_a_def_endpoint(client: Redlock, other: Redlock, name: str, kind: Any) -> None:
    """A loss cannot cancel a thread. It is raised when the endpoint has returned: 503, and not ignored."""
    app, went_on = FastAPI(), threading.Event()
    install(app, client)
    loop = asyncio.get_running_loop()

    @app.post("/")
    def endpoint(lease: Annotated[Lease, Locked(name, kind=kind)]) -> None:
        asyncio.run_coroutine_threadsafe(other.break_lock(name), loop).result()
        asyncio.run_coroutine_threadsafe(lease.wait_lost(), loop).result()
        for _ in range(20):  # a cancelled request would be answered now
            asyncio.run_coroutine_threadsafe(names_of(other, name), loop).result()
        went_on.set()

    async with http(app) as web:
        answer = await web.post("/")
    assert went_on.is_set()
    assert (answer.status_code, answer.json()["code"]) == (503, "lost")


@pytest.mark.parametrize("kind", ["mutex", lambda client, name: client.write(name)])
async def test_an_exception_of_a_def_endpoint_precedes_the_loss(
    client: Redlock, other: Redlock, name: str, kind: Any
) -> None:
    """The lease is lost, and then the endpoint raises: its own answer is sent, as that of an `async def`. Up to there
    the block of the lease encloses it: its write is compared with the token of that lease."""
    app, loop = FastAPI(), asyncio.get_running_loop()
    install(app, client)
    engine = create_engine("sqlite://")
    row = Table("row", MetaData(), Column("fence", BigInteger))

    @app.post("/")
    def endpoint(lease: Annotated[Lease, Locked(name, kind=kind)]) -> None:
        asyncio.run_coroutine_threadsafe(other.break_lock(name), loop).result()
        asyncio.run_coroutine_threadsafe(lease.wait_lost(), loop).result()
        with engine.begin() as connection:
            row.create(connection)
            connection.execute(row.insert().values(fence=lease.fence + 1))
            with pytest.raises(StaleToken):
                fenced_sync(connection, row.update(), row.c.fence)
        raise HTTPException(402)

    async with http(app) as web:
        assert (await web.post("/")).status_code == 402
    engine.dispose()


@pytest.mark.parametrize("kind", ["mutex", lambda client, name: client(name)])
async def test_a_def_endpoint_whose_lease_was_detached(client: Redlock, other: Redlock, name: str, kind: Any) -> None:
    """A dependency hands the hold over to another process. That is no error of the request."""
    app, locked = FastAPI(), Locked(name, kind=kind)
    install(app, client)

    async def handle(lease: Annotated[Lease, locked]) -> str:
        return await lease.detach()

    @app.post("/")
    def endpoint(handle: Annotated[str, Depends(handle)]) -> str:
        return handle

    async with http(app) as web:
        answer = await web.post("/")
    assert answer.status_code == 200
    async with await other.adopt(answer.json()) as adopted:
        assert adopted.name == name


def sessions(log: list[str], other: Redlock, name: str) -> Callable[[], AsyncIterator[None]]:
    """A dependency as of a database session: it commits at its end, and logs whether the lock is held then."""

    async def session() -> AsyncIterator[None]:
        yield
        log.append("held" if await names_of(other, name) else "FREE")

    return session


async def test_the_right_session_commits_under_the_lock(client: Redlock, other: Redlock, name: str) -> None:
    """A session of the function scope that comes after the lock commits while the lock is held."""
    app, log = FastAPI(), list[str]()
    install(app, client)
    session = sessions(log, other, name)

    @app.post("/")
    async def charge(
        lease: Annotated[Lease, Locked(name)], session: Annotated[None, Depends(session, scope="function")]
    ) -> None: ...

    async with http(app) as web:
        await web.post("/")
    assert log == ["held"]


async def test_the_trap_of_sessions(client: Redlock, other: Redlock, name: str) -> None:
    """A session of the default scope, or one before the lock, commits when the lock is free: the overlap."""
    app, log = FastAPI(), list[str]()
    install(app, client)
    session = sessions(log, other, name)

    @app.post("/default")
    async def default(lease: Annotated[Lease, Locked(name)], session: Annotated[None, Depends(session)]) -> None: ...

    @app.post("/before")
    async def before(
        session: Annotated[None, Depends(session, scope="function")], lease: Annotated[Lease, Locked(name)]
    ) -> None: ...

    async with http(app) as web:
        await web.post("/default")
        await web.post("/before")
    assert log == ["FREE", "FREE"]


async def test_freed_before_background_tasks(client: Redlock, other: Redlock, name: str) -> None:
    """The lock is free when the response is sent, so also in background tasks."""
    app, log = FastAPI(), list[list[str]]()
    install(app, client)

    async def later() -> None:
        log.append(await names_of(other, name))

    @app.post("/")
    async def charge(lease: Annotated[Lease, Locked(name)], tasks: BackgroundTasks) -> None:
        tasks.add_task(later)

    async with http(app) as web:
        await web.post("/")
    assert log == [[]]


async def test_lock_of_a_router_and_of_a_dependency(client: Redlock, other: Redlock, name: str) -> None:
    """A lock may stand in the dependencies of a router, or of another dependency; the same Locked is taken once."""
    order_lock = Locked(name + ":{order_id}")
    app, router = FastAPI(), APIRouter(dependencies=[order_lock])
    install(app, client)

    async def order(order_id: int, lease: Annotated[Lease, order_lock]) -> int:
        return lease.fence

    @router.post("/{order_id}")
    async def charge(order_id: int, fence: Annotated[int, Depends(order)]) -> Any:
        return await names_of(other, name)

    app.include_router(router, prefix="/orders")
    async with http(app) as web:
        assert (await web.post("/orders/07")).json() == [f"{name}:7"]


async def test_lock_where_a_router_is_included(client: Redlock, other: Redlock, name: str) -> None:
    """A lock and other dependencies may stand where the router is included. A wrong parameter there is a 422, too."""
    app, router = FastAPI(), APIRouter()
    install(app, client)

    def page(number: int) -> int:
        return number

    @router.post("/{order_id}")
    async def charge(order_id: int) -> Any:
        return await names_of(other, name)

    app.include_router(router, prefix="/orders", dependencies=[Locked(name + ":{order_id}:{number}"), Depends(page)])
    async with http(app) as web:
        assert (await web.post("/orders/07?number=01")).json() == [f"{name}:7:1"]
        async with other(f"{name}:7:1"):
            assert (await web.post("/orders/07?number=x")).status_code == 422


async def test_an_exception_frees_the_lock(client: Redlock, other: Redlock, name: str) -> None:
    """An error of the endpoint goes to its own handler, and the lock is free."""
    app = FastAPI()
    install(app, client)

    @app.post("/")
    async def charge(lease: Annotated[Lease, Locked(name)]) -> None:
        raise HTTPException(418)

    async with http(app) as web:
        assert (await web.post("/")).status_code == 418
    assert await names_of(other, name) == []


async def test_overridden_dependency(client: Redlock, name: str) -> None:
    """A dependency that a test overrides is not validated for the lock."""
    app = FastAPI()
    install(app, client)

    def user(token: int) -> int:
        return token

    @app.post("/")
    async def charge(lease: Annotated[Lease, Locked(name)], user: Annotated[int, Depends(user)]) -> int:
        return user

    app.dependency_overrides[user] = lambda: 5
    async with http(app) as web:
        assert (await web.post("/")).json() == 5


def test_lifespan_and_readiness(shared_urls: list[str], name: str) -> None:
    """The client is connected before the app's own lifespan begins and closed after it has ended; the readiness route
    answers without addresses, and does not stand in the schema."""
    client, log = Redlock(shared_urls[0]), list[str]()

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, int]]:
        async with client(name):
            log.append("start")
            yield {"mine": 1}
        async with client(name):
            log.append("end")

    app = FastAPI(lifespan=own)
    install(app, client, ready="/ready")
    leases = list[Lease | None]()

    @app.post("/keep")
    async def keep() -> None:
        leases.append(await client(name + ":kept").acquire())

    for _ in range(2):
        with TestClient(app) as web:
            ready = {"ready": True, "nodes": 1, "voting": 1, "spare": 0}
            wait_for(lambda: web.get("/ready").json() == ready, "it is not ready")  # noqa: B023 - at once
            assert "/ready" not in web.get("/openapi.json").json()["paths"]
            web.post("/keep")
            assert leases[-1] is not None
            assert leases[-1].held
        assert not leases[-1].held
    assert log == ["start", "end"] * 2


def test_an_application_does_not_start_without_its_servers(name: str) -> None:
    """Its start raises the error of the client, before the app's own lifespan begins."""
    log = list[str]()

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        log.append("begun")
        yield

    app = FastAPI(lifespan=own)
    install(app, Redlock(f"unix:///nowhere/{name}", patience=0.1))
    with pytest.raises(QuorumUnavailable, match="cast no vote"), TestClient(app):
        pass
    assert log == []


async def test_not_ready() -> None:
    """Without a server: 503, with Retry-After and without an address."""
    app = FastAPI()
    install(app, Redlock("redis://127.0.0.1:1"), ready="/ready")
    async with http(app) as web:
        answer = await web.get("/ready")
    assert (answer.status_code, answer.json()["ready"], answer.headers["Retry-After"]) == (503, False, "1")
    assert "127.0.0.1" not in answer.text


async def test_readiness_does_not_have_the_dependencies_of_the_app(client: Redlock, other: Redlock, name: str) -> None:
    """Neither a lock, which is held here, nor a token is asked for; the other routes have them."""

    def user(token: int) -> None: ...

    app = FastAPI(dependencies=[Locked(name, timeout=0), Depends(user)])
    install(app, client, ready="/ready")

    @app.get("/")
    async def plain() -> None: ...

    async with http(app) as web, other(name):
        assert [(await web.get(path)).status_code for path in ("/", "/?token=1")] == [422, 409]
        assert "ready" in (await web.get("/ready")).json()
        assert (await web.post("/ready")).status_code == 405


async def test_readiness_goes_before_a_catch_all() -> None:
    """A route or a mount that takes each path, and that was there before install(), does not answer for it."""
    by_route, by_mount = FastAPI(), FastAPI()
    by_route.get("/{path:path}")(lambda path: path)
    by_mount.mount("/", PlainTextResponse("page"))
    for app in (by_route, by_mount):
        install(app, Redlock("memory:"), ready="/ready")
        async with http(app) as web:
            assert (await web.get("/ready")).json()["ready"] is True
            assert "page" in (await web.get("/page")).text


def test_a_template_that_does_not_fit() -> None:
    """An unknown field is a ConfigError of install(), or of the start of the app; it names the route."""

    async def charge(order_id: int, lease: Annotated[Lease, Locked("order:{id}")]) -> None: ...

    before, after = FastAPI(), FastAPI()
    before.post("/orders/{order_id}")(charge)
    with pytest.raises(ConfigError, match=r"names 'id'.*charge.*/orders/\{order_id\}.*order_id"):
        install(before)
    install(after, Redlock("memory:"))
    after.post("/orders/{order_id}")(charge)
    with pytest.raises(ConfigError, match="names 'id'"), TestClient(after):
        pass


def test_a_stream_cannot_be_locked() -> None:
    """An endpoint that streams runs after the lock was freed, so it is refused."""
    app = FastAPI()

    @app.get("/")
    async def stream(lease: Annotated[Lease, Locked("x")]) -> AsyncIterator[str]:
        yield "a"

    with pytest.raises(ConfigError, match="streams"):
        install(app)


def test_without_install_and_in_a_websocket() -> None:
    """Without install() a route that locks never runs unlocked; a websocket route says what to do instead."""
    app = FastAPI()

    @app.post("/")
    async def charge(lease: Annotated[Lease, Locked("x")]) -> None: ...

    @app.websocket("/ws")
    async def talk(socket: WebSocket, lease: Annotated[Lease, Locked("x")]) -> None: ...

    web = TestClient(app)
    with pytest.raises(ConfigError, match="install"):
        web.post("/")
    with pytest.raises(ConfigError, match="websocket"), web.websocket_connect("/ws"):
        pass


def test_lock_lost_has_its_own_handler(client: Redlock) -> None:
    """A handler that the app has for an error of a lock takes precedence."""
    app = FastAPI()

    @app.exception_handler(LockLost)
    async def own(request: object, error: Exception) -> httpx.Response: ...  # type: ignore[empty-body]

    install(app, client)
    assert app.exception_handlers[LockLost] is own
