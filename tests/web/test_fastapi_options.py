"""asynclock.fastapi: the kinds and the options of Locked, and wrong ones."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
import pytest
from anyio.abc import TaskGroup
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from asynclock import ConfigError, Lease, Redlock, current_lease
from asynclock.fastapi import Locked, install
from tests.support.servers import Server
from tests.support.waiters import PATIENT, in_queue, processes, until, urls_of
from tests.support.web import http, names_of


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mutex", "mutex"),
        ("fair", "mutex"),
        ("reentrant", "mutex"),
        ("read", "read"),
        ("write", "write"),
        (lambda client, name: client.semaphore(name, 3), "semaphore"),
    ],
)
async def test_every_kind(client: Redlock, other: Redlock, name: str, kind: Any, expected: str) -> None:
    """A route may take a lock of every kind."""
    app = FastAPI()
    install(app, client)

    @app.post("/")
    async def endpoint(lease: Annotated[Lease, Locked(name, kind=kind)]) -> str:
        assert current_lease() is not None
        return (await other.inspect(name)).kind

    async with http(app) as web:
        assert expected in (await web.post("/")).json()


async def test_a_fair_route_overtakes_no_waiter(five: Sequence[Server], name: str) -> None:
    """A process waits for the name, and does not run when the name becomes free. A request for a fair lock comes after
    it; a request for a plain mutex enters before it."""
    servers, app = five[:3], FastAPI()
    urls = urls_of(servers)

    @app.post("/fair")
    async def fair(lease: Annotated[Lease, Locked(name, kind="fair", timeout=0)]) -> None: ...

    @app.post("/plain")
    async def plain(lease: Annotated[Lease, Locked(name, timeout=0)]) -> None: ...

    async with (
        Redlock(*urls, **PATIENT) as client,
        Redlock(*urls, **PATIENT) as other,
        processes(1, urls, **PATIENT) as started,
    ):
        install(app, client)
        async with other(name):
            started[0].wait(name, fair=True)
            await until(in_queue(servers, name, 1))
            started[0].freeze()
        async with http(app) as web:
            assert (await web.post("/fair")).status_code == 409
            assert (await web.post("/plain")).status_code == 200


async def test_a_reentrant_route_may_enter_its_lock_again(client: Redlock, other: Redlock, name: str) -> None:
    """The endpoint acquires the same reentrant lock in its body, and has the same fencing token. The lock is free only
    after the request."""
    app = FastAPI()
    install(app, client)

    @app.post("/")
    async def endpoint(lease: Annotated[Lease, Locked(name, kind="reentrant")]) -> Any:
        async with client(name, reentrant=True) as again:
            fences = lease.fence, again.fence
        return fences[0] == fences[1], await names_of(other, name)

    async with http(app) as web:
        assert (await web.post("/")).json() == [True, [name]]
    assert await names_of(other, name) == []


@pytest.mark.parametrize(("cancel_body", "scope"), [(False, "request"), (False, "function"), (True, "function")])
async def test_a_dependency_may_yield_in_a_task_group(
    client: Redlock, name: str, cancel_body: bool, scope: Any
) -> None:
    """After the lock. In the default scope it ends after the lock, so only without cancel_body."""

    async def group() -> AsyncIterator[TaskGroup]:
        async with anyio.create_task_group() as group:
            yield group

    app = FastAPI()
    install(app, client)

    @app.post("/")
    async def endpoint(
        lease: Annotated[Lease, Locked(name, cancel_body=cancel_body)],
        group: Annotated[TaskGroup, Depends(group, scope=scope)],
    ) -> str:
        return lease.name

    async with http(app) as web:
        assert (await web.post("/")).json() == name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tiemout": 5}, "'tiemout' is no option of a lock: did you mean 'timeout'"),
        ({"kind": "read", "tiemout": 5}, "'tiemout' is no option of a lock: did you mean 'timeout'"),
        ({"kind": "fair", "renew": 1}, "renew is True, False or 'thread', not 1"),
        ({"timeout": -1}, "timeout=-1 s is out of range"),
    ],
)
def test_a_wrong_option_is_found_when_the_route_is_declared(wrong: Any, message: str) -> None:
    """A misspelt option and a wrong value are a ConfigError of Locked, for one name and for several. It names the
    option."""
    for names in (("a",), ("a", "b")):
        with pytest.raises(ConfigError, match=message):
            Locked(*names, **wrong)


@pytest.mark.parametrize("names", [("order:{order_id}",), ("order:{order_id}", "all")])
def test_an_option_that_does_not_fit_the_client_is_found_when_the_app_starts(
    shared_urls: list[str], names: tuple[str, ...]
) -> None:
    """A lease above the client's max_lease is a ConfigError of the start, which names the option and the route. The
    app's own lifespan does not begin. A client that allows this lease starts the app."""
    log = list[str]()

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        log.append("begun")
        yield

    def app_over(client: Redlock) -> FastAPI:
        app = FastAPI(lifespan=own)

        @app.post("/orders/{order_id}")
        async def charge(order_id: int, lease: Annotated[Lease, Locked(*names, lease=90)]) -> None: ...

        install(app, client)
        return app

    with pytest.raises(ConfigError, match="lease=90 seconds is above max_lease=60") as refused:
        with TestClient(app_over(Redlock(shared_urls[0]))):
            pass
    assert "/orders/{order_id}" in "".join(refused.value.__notes__)
    assert log == []
    with TestClient(app_over(Redlock(shared_urls[0], max_lease=90))):
        assert log == ["begun"]


async def test_options_of_a_mutex(client: Redlock, name: str) -> None:
    """Locked of one mutex takes `fair` and `reentrant`, as the client does."""
    app = FastAPI()

    @app.post("/")
    async def charge(lease: Annotated[Lease, Locked(name, fair=True, reentrant=True)]) -> str:
        async with client(name, reentrant=True) as again:
            return again.name

    install(app, client)
    async with app.router.lifespan_context(app), http(app) as web:
        assert (await web.post("/")).json() == name


def test_wrong_uses() -> None:
    """What cannot work is a ConfigError, with what to do."""
    with pytest.raises(ConfigError, match="names"):
        Locked()
    with pytest.raises(ConfigError, match="kind is one of"):
        Locked("x", kind="rw")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give them there"):
        Locked("x", kind=lambda client, name: client(name), lease=5)
    app = FastAPI()
    for wrong in ({"busy_status": 200}, {"ready": "ready"}):
        with pytest.raises(ConfigError):
            install(app, **wrong)  # type: ignore[arg-type]
    install(app)
    with pytest.raises(ConfigError, match="already"):
        install(app)
