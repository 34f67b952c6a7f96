"""asynclock.fastapi: a lock that no request could take is refused where it is declared, or when the app starts."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from enum import Enum
from functools import partial, wraps
from itertools import product
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount

from asynclock import ConfigError, Lease, LockError, Redlock, Unsupported
from asynclock.fastapi import Locked, install
from asynclock.stores import MemoryStore, Wish
from asynclock.stores.redis.cluster.topology import apart
from tests.support.web import http


class OfACluster(MemoryStore):
    """A store that is limited as a Redis Cluster is."""

    def cannot(self, wish: Wish) -> str | None:
        return apart(wish.prefix, wish.names)


def named(order_id: int) -> str:
    return f"order:{order_id}"


def named_too(order_id: int) -> str:
    return f"stock:{order_id}"


async def made_later(client: Redlock, name: str) -> Any:
    return client(name)


def app_with(locked: Any, client: Redlock) -> FastAPI:
    """An app whose route takes this lock. The route is added after install(), so the start of the app checks it."""
    app = FastAPI()
    install(app, client)

    @app.post("/orders/{order_id}")
    async def charge(order_id: int, lease: Annotated[Lease, locked], to: int = 9) -> str:
        return lease.name

    return app


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("a", "b"), {"kind": "reentrant"}, "a lock of several names cannot be reentrant: leave kind out"),
    (("a", "b", "a"), {}, "'a' twice: name each lock once"),
    (("order:{order_id}", "order:{order_id}"), {"kind": "read"}, "twice"),
    ((named, named), {}, "twice"),
    (tuple(f"n{i}" for i in range(257)), {}, "257 names: give at most 256"),
    (("asynclock~all",), {}, "reserved: rename 'asynclock~all'"),
    (("a", "asynclock~{order_id}"), {}, r"reserved: rename 'asynclock~\{order_id\}'"),
    (("{order_id}\ud800",), {"label": "order"}, "lone surrogate"),
    (("order:{",), {}, "is no template"),
    (("order:{order_id.}",), {}, r"the field \{order_id\.\} cannot be read"),
    (("order:{}",), {}, "a field needs the name of a parameter"),
    (("a",), {"kind": ["read"]}, "kind is one of mutex"),
    (("a",), {"kind": lambda client: client("a")}, "kind is called with the client and the name"),
    (("a",), {"kind": Redlock.semaphore}, "kind is called with the client and the name"),
    (("a",), {"kind": made_later}, "a plain function, not an async def"),
    (("a",), {"cancel_body": "no"}, "cancel_body is True or False, not str"),
]


@pytest.mark.parametrize(("names", "options", "message"), WRONG)
def test_a_declaration_that_no_client_could_keep_is_refused_at_once(
    names: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    """Locked raises a ConfigError that says what to do, before there is an app."""
    with pytest.raises(ConfigError, match=message):
        Locked(*names, **options)


AT_THE_START: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("order:{order_id}", "all"), {"fencing": False}, "pass fencing=True to multi"),
    (("all",), {"kind": "read", "fencing": False}, "pass fencing=True for a read lock"),
    (("all",), {"kind": lambda client, name: name}, "kind returned str: return a lock"),
    ((named,), {"kind": lambda client, name: None}, "kind returned NoneType: return a lock"),
    (("a", "b"), {"kind": lambda client, name: None}, "kind returned NoneType: return a lock"),
    (("order:{order_id}",), {"kind": lambda client, name: client(name, lease=90)}, "lease=90 seconds is above"),
    (("a", "b"), {"kind": lambda client, name: client.semaphore(name, 0)}, "permits is a whole number from 1"),
    (("a", "b"), {"kind": lambda client, name: client(name, reentrant=True)}, "cannot be part of a multi lock"),
    ((named, named_too), {"kind": lambda client, name: client(name, reentrant=True)}, "cannot be part of a multi lock"),
    ((named, "a"), {"kind": lambda client, name: {}[name], "lease": 90}, "lease=90 seconds is above"),
    ((named,), {"fencing": False, "kind": "write"}, "pass fencing=True for a write lock"),
]


@pytest.mark.parametrize(("names", "options", "message"), AT_THE_START)
def test_a_lock_that_the_client_cannot_make_is_refused_when_the_app_starts(
    names: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    """The start raises what each request would raise, with the route."""
    app = app_with(Locked(*names, **options), Redlock("memory:"))
    with pytest.raises(LockError, match=message) as refused, TestClient(app):
        pass
    assert "/orders/{order_id}" in "".join(refused.value.__notes__)


def test_names_in_different_slots_of_a_cluster_are_refused_when_the_app_starts() -> None:
    """Two templates without a common hash tag. With one, also where it has a field, the app starts."""
    for apart_from in (("order:{order_id}", "stock:{order_id}"), ("order:{order_id}", "order:{to}"), ("a", "b")):
        app = app_with(Locked(*apart_from), Redlock(OfACluster()))
        with pytest.raises(Unsupported, match="the names are in different slots"), TestClient(app):
            pass
    for together in (
        ("{{{order_id}}}:a", "{{{order_id}}}:b"),
        ("{{{order_id}}}:a", "{{{to}}}:b"),  # it depends on the values
        ("{{all}}:{order_id}", "{{all}}:{to}"),
        (named, "a"),  # a function may give it the hash tag
    ):
        with TestClient(app_with(Locked(*together), Redlock(OfACluster()))):
            pass


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("all", lambda client, name: client.semaphore(name, {"order:7": 3}[name])),
        ("order:{order_id}", lambda client, name: client.semaphore(name, {"order:7": 3}[name])),
        ("order:{order_id}", lambda client, name: client.semaphore(name, int(name.partition(":")[2]))),
        (named, lambda client, name: client.semaphore(name, int(name.partition(":")[2] or "0"))),
    ],
)
def test_a_kind_that_knows_only_the_names_that_there_are(template: Any, kind: Callable[[Redlock, str], Any]) -> None:
    """The start asks it with a sample name. Its own exception does not keep the app from starting."""
    with TestClient(app_with(Locked(template, kind=kind), Redlock("memory:"))):
        pass


@pytest.mark.parametrize("kind", ["mutex", "write", lambda client, name: client.semaphore(name, 3)])
async def test_two_fields_with_equal_values_are_one_name(kind: Any) -> None:
    """A transfer from an account to itself locks this account, and is not a 500."""
    app = app_with(Locked("account:{order_id}", "account:{to}", kind=kind), Redlock("memory:"))
    async with app.router.lifespan_context(app), http(app) as web:
        answer = await web.post("/orders/7?to=07")
        assert (answer.status_code, answer.json()) == (200, "account:7")
        assert (await web.post("/orders/7?to=8")).json() == "account:7, account:8"


def test_a_websocket_route_is_refused() -> None:
    """A lock of a websocket route, also of its router, is a ConfigError of install() or of the start."""
    locked, router = Locked("x"), APIRouter(dependencies=[Locked("y")])

    async def talk(socket: WebSocket, lease: Annotated[Lease, locked]) -> None: ...

    @router.websocket("/talk")
    async def talk_of_router(socket: WebSocket) -> None: ...

    before, after = FastAPI(), FastAPI()
    before.websocket("/ws")(talk)
    with pytest.raises(ConfigError, match=r"in a websocket route, use `async with` of a lock \(/ws\)"):
        install(before, Redlock("memory:"))
    install(after, Redlock("memory:"))
    after.include_router(router, prefix="/of")
    with pytest.raises(ConfigError, match=r"websocket route.*\(/of/talk\)"), TestClient(after):
        pass


def test_a_mounted_app_is_checked_with_the_app_that_starts() -> None:
    """No server runs the lifespan of a mounted app. Without install() of its own, or with a wrong option, it is a
    ConfigError of the start. A mounted app without a lock needs no install()."""
    client = Redlock("memory:")
    cases: list[tuple[str, Any, bool, str]] = [
        ("/v1", Locked("x"), False, "mounted at /v1 has a Locked: call install"),
        ("/v2", Locked("x", lease=90), True, "lease=90 seconds is above"),
    ]
    for path, locked, installed, message in cases:
        app, mounted = FastAPI(), FastAPI()
        app.mount(path, mounted)
        mounted.post("/", dependencies=[locked])(lambda: None)
        install(app, client)
        if installed:
            install(mounted, client)
        with pytest.raises(ConfigError, match=message), TestClient(app):
            pass
    app = FastAPI()
    app.mount("/v1", FastAPI())
    install(app, client)
    with TestClient(app):
        pass


def mounted_in_router(app: FastAPI, mounted: Any) -> None:
    router = APIRouter()
    router.mount("/in", mounted)
    app.include_router(router, prefix="/of")


DEEPER: dict[str, tuple[Callable[[FastAPI, Any], object], str]] = {
    "behind a middleware": (lambda app, mounted: app.mount("/in", GZipMiddleware(mounted)), "/in"),
    "in a mount": (lambda app, mounted: app.routes.append(Mount("/of", routes=[Mount("/in", mounted)])), "/of/in"),
    "in another app": (lambda app, mounted: app.mount("/of", Starlette(routes=[Mount("/in", mounted)])), "/of/in"),
    "in an included router": (mounted_in_router, "/of/in"),
    "under a host": (lambda app, mounted: app.host("testserver", mounted), ""),
}


@pytest.mark.parametrize("how", DEEPER)
def test_an_app_is_checked_however_it_is_mounted(how: str) -> None:
    """An app that is mounted deeper than in a mount of the app that starts is a ConfigError of the start without
    install(); with it, its routes lock."""
    mount, path = DEEPER[how]
    for installed in (False, True):
        app, mounted, client = FastAPI(), FastAPI(), Redlock("memory:")
        mounted.post("/orders/{order_id}", dependencies=[Locked("order:{order_id}")])(named)
        mount(app, mounted)
        install(app, client)
        if installed:
            install(mounted, client)
            with TestClient(app) as web:
                assert web.post(f"{path}/orders/7").json() == "order:7"
        else:
            with pytest.raises(ConfigError, match=r"has a Locked: call install\(\) for that app"), TestClient(app):
                pass


def test_a_mounted_router_is_checked_with_its_app() -> None:
    """A router can be mounted as it is, without an app: its routes belong to the app around it, and lock."""
    for template, works in (("order:{order_id}", True), ("order:{order}", False)):
        app, router = FastAPI(), APIRouter()
        install(app, Redlock("memory:"))
        router.post("/orders/{order_id}", dependencies=[Locked(template)])(named)
        app.mount("/in", router)
        if works:
            with TestClient(app) as web:
                assert web.post("/in/orders/7").json() == "order:7"
                assert not web.get("/openapi.json").json()["paths"]
        else:
            with pytest.raises(ConfigError, match="names 'order', which named"), TestClient(app):
                pass


@pytest.mark.parametrize(
    ("locked", "message"), [(Locked("order:{order}"), "names 'order'"), (Locked("order", lease=90), "lease=90")]
)
def test_routes_that_the_lifespan_adds_are_checked(locked: Any, message: str) -> None:
    """The start of the app checks the routes that its own lifespan has added."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.post("/orders/{order_id}", dependencies=[locked])(named)
        yield

    app = FastAPI(lifespan=lifespan)
    install(app, Redlock("memory:"))
    with pytest.raises(ConfigError, match=message), TestClient(app):
        pass


class Customer(BaseModel):
    id: int
    referrer: "Customer | None" = None

    @property
    def region(self) -> str:
        return "eu"


class Rank(float, Enum):
    """Its members have names."""

    FIRST = 1.0


class Order(BaseModel):
    customer: Customer
    paid: bool = False
    tags: list[str] = []
    rank: Rank = Rank.FIRST


class Loose(BaseModel, extra="allow"):
    """A model that takes any field."""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{order.customer.id}", ""),
        ("{order.customer.region}", ""),
        ("{order.customer.referrer.id}", ""),
        ("{order.rank}", ""),
        ("{loose.id}", ""),
        ("{price}", "price, of type float, does not name a lock: give a str"),
        ("{order}", "order, of type Order, does not name a lock"),
        ("{order.paid}", "order.paid, of type bool, does not name a lock"),
        ("{order.tags}", "order.tags, of type list, does not name a lock"),
        ("{order.customer.idd}", "names 'idd', which Customer does not have; its fields: id, referrer"),
        ("{order.id}", "names 'id', which Order does not have"),
    ],
)
def test_a_field_that_names_no_lock(template: str, message: str) -> None:
    """A template with a field that a model does not have, or whose values name no lock, is a ConfigError of the start.
    Properties and models that take any field have more."""
    app = FastAPI()
    install(app, Redlock("memory:"))

    @app.post("/")
    async def charge(order: Order, loose: Loose, price: float, lease: Annotated[Lease, Locked(template)]) -> None: ...

    with ExitStack() as stack:
        if message:
            stack.enter_context(pytest.raises(ConfigError, match=message))
        stack.enter_context(TestClient(app))


class Charge:
    """An endpoint that is an object."""

    async def __call__(self, order_id: int, lease: Annotated[Lease, Locked("order:{order_id}")]) -> str:
        return lease.name


class Stream:
    """One that streams."""

    async def __call__(self, order_id: int, lease: Annotated[Lease, Locked("order:{order_id}")]) -> AsyncIterator[str]:
        yield lease.name


async def charge_at(shop: str, order_id: int, lease: Annotated[Lease, Locked("order:{order_id}")]) -> str:
    return lease.name


def test_an_endpoint_need_not_be_a_function() -> None:
    """A partial and an object with `__call__` lock, as FastAPI allows both. Such an object that streams is refused."""
    app = FastAPI()
    install(app, Redlock("memory:"))
    app.post("/partial/{order_id}")(partial(charge_at, "main"))
    app.post("/object/{order_id}")(Charge())
    with TestClient(app) as web:
        assert [web.post(f"/{each}/7").json() for each in ("partial", "object")] == ["order:7", "order:7"]
    app.post("/stream/{order_id}")(Stream())
    with pytest.raises(ConfigError, match="streams its response"), TestClient(app):
        pass


async def test_a_loss_cancels_an_endpoint_that_is_an_object() -> None:
    """An endpoint that is an object with an async `__call__` runs in the loop: the loss of its lease cancels it."""
    client, entered = Redlock("memory:"), asyncio.Event()

    class Working:
        async def __call__(self, lease: Annotated[Lease, Locked("order")]) -> None:
            entered.set()
            await asyncio.Event().wait()

    app = FastAPI()
    install(app, client)
    app.post("/")(Working())
    async with app.router.lifespan_context(app), http(app) as web:
        asking = asyncio.create_task(web.post("/"))
        await entered.wait()
        assert await client.break_lock("order")
        assert (await asking).json()["code"] == "lost"


def test_a_decorator_that_streams_is_refused() -> None:
    """FastAPI calls what the decorator returned, whatever the function inside is."""

    async def plain(lease: Annotated[Lease, Locked("order")]) -> str:
        return lease.name

    @wraps(plain)
    async def stream(**values: Any) -> AsyncIterator[str]:
        yield await plain(**values)

    @wraps(plain)
    def stream_in_thread(**values: Any) -> Iterator[str]:
        yield "order"

    for each in (stream, stream_in_thread):
        app = FastAPI()
        app.get("/")(each)
        with pytest.raises(ConfigError, match="streams its response"):
            install(app, Redlock("memory:"))


async def test_a_loss_cancels_an_async_decorator_of_a_def() -> None:
    """The function is a `def`, and its wrapper, which FastAPI calls, runs in the loop."""
    client, entered = Redlock("memory:"), asyncio.Event()

    def plain(lease: Annotated[Lease, Locked("order")]) -> None: ...

    @wraps(plain)
    async def endpoint(**values: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    app = FastAPI()
    install(app, client)
    app.post("/")(endpoint)
    async with app.router.lifespan_context(app), http(app) as web:
        asking = asyncio.create_task(web.post("/"))
        await entered.wait()
        assert await client.break_lock("order")
        assert (await asking).json()["code"] == "lost"


def test_an_app_that_has_started_is_refused() -> None:
    """In a lifespan, install() would be too late: errors would be answered with 500, and no client would be closed."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        install(app, Redlock("memory:"))
        yield

    with pytest.raises(ConfigError, match="where the app is made"), TestClient(FastAPI(lifespan=lifespan)):
        pass


def test_an_app_that_is_dropped_is_collected() -> None:
    """A program, such as a suite with an app per test, keeps no app with a lock, nor its client."""
    app = app_with(Locked("order:{order_id}"), Redlock("memory:"))
    with TestClient(app) as web:
        assert web.post("/orders/7").status_code == 200
    left = weakref.ref(app)
    del app, web
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("by_lifespan", [False, True])
async def test_the_client_of_a_mounted_app_is_closed(by_lifespan: bool) -> None:
    """No server runs the lifespan of a mounted app, so the app that starts connects and closes its client, too. That
    includes an app that its own lifespan mounts."""
    mounted, client = FastAPI(), Redlock("memory:")
    mounted.post("/", dependencies=[Locked("x")])(lambda: None)
    install(mounted, client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.mount("/in", mounted)
        yield

    app = FastAPI(lifespan=lifespan if by_lifespan else None)
    if not by_lifespan:
        app.mount("/in", mounted)
    install(app, Redlock("memory:"))
    async with app.router.lifespan_context(app):
        async with client("x"):
            pass
    with pytest.raises(ConfigError, match="closed"):
        await client("x").acquire()


@pytest.mark.parametrize(
    ("one", "other", "works"),
    [
        ({}, {}, False),
        ({"kind": "fair"}, {"kind": "reentrant"}, False),
        ({"kind": "read"}, {"kind": "write"}, False),
        ({"kind": "reentrant"}, {"reentrant": True, "owner": "me"}, False),
        ({"kind": "read"}, {"kind": "read"}, True),
        ({"kind": "reentrant"}, {"reentrant": True}, True),
    ],
)
def test_two_locks_of_one_name_in_a_route(one: dict[str, Any], other: dict[str, Any], works: bool) -> None:
    """The request would wait for itself, so install() refuses it. Two read locks, and reentrant locks of one owner,
    can be held together."""
    app = FastAPI(dependencies=[Locked("order:{order_id}", **one)])

    @app.post("/orders/{order_id}")
    async def charge(order_id: int, lease: Annotated[Lease, Locked("order:{order_id}", **other)]) -> str:
        return lease.name

    if not works:
        with pytest.raises(ConfigError, match=r"two locks of the route /orders/\{order_id\} have the name"):
            install(app, Redlock("memory:"))
        return
    install(app, Redlock("memory:"))
    with TestClient(app) as web:
        assert web.post("/orders/7").json() == "order:7"


KINDS: list[Any] = [
    *("mutex", "fair", "reentrant", "read", "write"),
    lambda client, name: client.semaphore(name, 3),
    lambda client, name: client(name, reentrant=True),
    lambda client, name: client.multi(name, name + ":too"),
]
NAMES: list[tuple[Any, ...]] = [("all",), ("order:{order_id}",), (named,), ("a", "order:{to}"), ("a", named)]
VALUES: dict[str, list[Any]] = {
    "lease": [10, 90, 0.05],
    "timeout": [0, None, -1],
    "renew": ["thread", False, "never"],
    "max_hold": [5, 0],
    "min_hold": [0.1, 31],
    "cancel_on_lost": [False, 1],
    "metadata": ["web", "x" * 1025],
    "label": ["order", "\ud800"],
    "fencing": [False, 0],
    "fair": [True, 1],
    "reentrant": [True, 1],
    "owner": ["me", []],
}
OPTIONS: list[dict[str, Any]] = [
    *({option: value} for option, values in VALUES.items() for value in values),
    {"reentrant": True, "owner": "me"},
    {"reentrant": True, "owner": []},
    {"fencing": False, "min_hold": 0.1},
    {},
]


@pytest.mark.parametrize("of_client", [{}, {"fencing": False}, {"lease": 1, "node_timeout": 0.3}])
async def test_what_fails_each_request_fails_the_start(of_client: dict[str, Any]) -> None:
    """Each kind with one name and with several, with each option: an app that starts answers its requests. (A function
    as kind may refuse what a function as name returns: only a request knows that name.)"""
    answered = 0
    for kind, names, options in product(KINDS, NAMES, OPTIONS):
        if of_client and (callable(kind) or len(names) > 1):  # what a client changes does not depend on these
            continue
        if names not in (NAMES[1], NAMES[3]) and options not in OPTIONS[::6]:  # one name and several, with each option
            continue
        async with AsyncExitStack() as stack:
            try:
                app = app_with(Locked(*names, kind=kind, **options), Redlock("memory:", **of_client))
                await stack.enter_async_context(app.router.lifespan_context(app))
            except (ConfigError, Unsupported):
                continue
            web = await stack.enter_async_context(http(app))
            answer = await web.post("/orders/7")  # raises what the app raises
            assert answer.status_code == 200, (kind, names, options)
            answered += 1
    assert answered > (20 if of_client else 100)
