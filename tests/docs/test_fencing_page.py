"""docs/fencing.md: what it shows of HTTP and of object stores runs as it stands, over sockets. test_docs.py runs its
program for SQLAlchemy, and tests/stores/test_fencing_django.py its snippet for Django."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import httpx
import pytest
from sqlalchemy import event, text

import asynclock
from asynclock import Lease, Redlock
from asynclock.fencing import StaleToken
from tests.support.object_store import object_store
from tests.support.web import serving, until

PAGE = Path(__file__).parents[2] / "docs" / "fencing.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def world_of(part: str, **turned: str) -> dict[str, Any]:
    """The names of a module with the snippet that has this part."""
    (snippet,) = (each for each in SNIPPETS if part in each)
    for old, new in turned.items():
        assert old in snippet
        snippet = snippet.replace(old, new)
    module = sys.modules["fencing_page"] = ModuleType("fencing_page")
    exec(compile(snippet, "fencing_page", "exec"), module.__dict__)
    return module.__dict__


def http(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)


# ---- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, Any]]:
    """The service of the page with order 42, and `shop`: a client of it, over a socket."""
    monkeypatch.chdir(tmp_path)
    world = world_of("FastAPI")
    async with world["engine"].begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT, fence BIGINT)"))
        await connection.execute(text("INSERT INTO orders VALUES (42, 'new', NULL)"))
    async with serving(world["app"]) as port, http(f"http://127.0.0.1:{port}") as world["shop"]:
        yield world
    await world["engine"].dispose()


async def row(service: dict[str, Any]) -> tuple[Any, ...]:
    async with service["engine"].connect() as connection:
        return tuple((await connection.execute(text("SELECT state, fence FROM orders"))).one())


async def post(service: dict[str, Any], token: str | None, order_id: int = 42) -> int:
    headers = {} if token is None else {"Fencing-Token": token}
    answer: httpx.Response = await service["shop"].post(f"/orders/{order_id}/pay", headers=headers)
    return answer.status_code


async def test_the_dependency_refuses_an_older_token(service: dict[str, Any]) -> None:
    """A first token, and the same again, write the order; an older one changes nothing."""
    assert [await post(service, token) for token in ("8", "8")] == [200, 200]
    assert await row(service) == ("paid", 8)
    async with service["engine"].begin() as connection:
        await connection.execute(text("UPDATE orders SET state = 'returned'"))
    assert await post(service, "7") == 409
    assert await row(service) == ("returned", 8)


async def test_the_dependency_refuses_an_order_that_is_absent(service: dict[str, Any]) -> None:
    """With 409, too, and makes none."""
    assert await post(service, "8", order_id=1) == 409
    assert await row(service) == ("new", None)


@pytest.mark.parametrize("token", [None, "", "seven", "0", "-1", str(2**53), str(2**64)])
async def test_the_dependency_validates_the_header(service: dict[str, Any], token: str | None) -> None:
    """A request without a token, or with a value that is none, writes nothing: such a number could shut out all later
    holders."""
    assert await post(service, token) == 422
    assert await row(service) == ("new", None)


async def test_an_endpoint_that_raises_leaves_no_token(service: dict[str, Any]) -> None:
    """Its transaction is rolled back, the token of the dependency included."""

    async def fail(order: Any) -> None:
        await order.execute(text("UPDATE orders SET state = 'half'"))
        raise service["HTTPException"](402)

    fail.__annotations__["order"] = service["FencedOrder"]
    service["app"].post("/orders/{id}/fail")(fail)
    answer = await service["shop"].post("/orders/42/fail", headers={"Fencing-Token": "8"})
    assert answer.status_code == 402
    assert await row(service) == ("new", None)


async def test_the_commit_comes_before_the_answer(service: dict[str, Any]) -> None:
    """A client that has its answer finds the write; a commit that fails is no success."""
    order: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            order.append(message["type"])
            await send(message)

        await service["app"](scope, receive, sent)

    event.listen(service["engine"].sync_engine, "commit", lambda _: order.append("commit"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(noting), base_url="http://shop") as service["shop"]:
        assert await post(service, "8") == 200
    assert order == ["commit", "http.response.start", "http.response.body"]


async def test_the_client_sends_its_token(
    service: dict[str, Any], shared_urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call pays under the token of its lease; it raises if a later holder has written the order."""
    async with Redlock(shared_urls[0], prefix=name) as client:
        monkeypatch.setattr(asynclock, "redlock", client)
        pay = world_of("Fencing-Token")["pay"]
        async with client("order:42") as before:
            pass
        await pay(service["shop"], 42)
        state, fence = await row(service)
        assert state == "paid"
        async with client("order:42") as after:
            assert before.fence < fence < after.fence
        async with service["engine"].begin() as connection:
            await connection.execute(text("UPDATE orders SET state = 'later', fence = 9007199254740991"))
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            await pay(service["shop"], 42)
    assert await row(service) == ("later", 2**53 - 1)


async def test_a_later_token_waits_for_the_endpoint(postgresql_url: str, name: str) -> None:
    """On PostgreSQL, the request of an older token is between the dependency and its write: the later holder's request
    writes after it, so its state remains."""
    table = re.sub(r"\W", "_", f"fenced_{name}")
    url = postgresql_url.replace("postgresql://", "postgresql+asyncpg://")
    world = world_of("FastAPI", **{"sqlite+aiosqlite:///orders.db": url, "UPDATE orders": f"UPDATE {table}"})
    entered, goes_on = asyncio.Event(), asyncio.Event()

    async def late(id: int, order: Any) -> None:
        entered.set()
        await goes_on.wait()
        await order.execute(text(f"UPDATE {table} SET state = 'older' WHERE id = :id"), {"id": id})

    late.__annotations__.update(id=int, order=world["FencedOrder"])
    world["app"].post("/orders/{id}/late")(late)
    watcher = await asyncpg.connect(postgresql_url)
    await watcher.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, state TEXT, fence BIGINT)")
    await watcher.execute(f"INSERT INTO {table} VALUES (42, 'new', NULL)")
    async with serving(world["app"]) as port, http(f"http://127.0.0.1:{port}") as shop, asyncio.TaskGroup() as group:
        older = group.create_task(shop.post("/orders/42/late", headers={"Fencing-Token": "7"}))
        await entered.wait()
        later = group.create_task(shop.post("/orders/42/pay", headers={"Fencing-Token": "8"}))

        async def waits() -> bool:
            asked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE $1"
            return later.done() or bool(await watcher.fetchval(asked, f"UPDATE {table}%"))

        await until(waits)
        assert not later.done()
        goes_on.set()
    assert (older.result().status_code, later.result().status_code) == (200, 200)
    assert tuple(await watcher.fetchrow(f"SELECT state, fence FROM {table}")) == ("paid", 8)
    await watcher.execute(f"DROP TABLE {table}")
    await watcher.close()
    await world["engine"].dispose()


# ---- S3 and other object stores --------------------------------------------------------------------------------------
# No S3 can run here. Its stand-in is tests/support/object_store.py, a server of HTTP with the conditions of S3.


@pytest.fixture
async def bucket() -> AsyncIterator[httpx.AsyncClient]:
    """A client of an empty object store, which is the stand-in of these tests for S3."""
    with object_store() as url:
        async with http(url) as client:
            yield client


@pytest.fixture
async def leases() -> AsyncIterator[tuple[Lease, Lease]]:
    """Of one name: that of a holder which was overtaken, and that of the holder after it."""
    async with Redlock("memory:") as client:
        async with client("report") as older:
            pass
        async with client("report") as newer:
            yield older, newer


class Interrupted:
    """A client of the same store whose first GET is followed by another writer's work. It notes its answers."""

    def __init__(self, bucket: httpx.AsyncClient, between: Callable[[], Any]) -> None:
        self.answers: list[tuple[str, int]] = []
        self._between: Callable[[], Any] | None = between
        self.client = http(str(bucket.base_url))
        self.client.event_hooks = {"response": [self._answered]}

    async def _answered(self, answer: httpx.Response) -> None:
        self.answers.append((answer.request.method, answer.status_code))
        between, self._between = self._between, None
        if between is not None:
            await between()


async def test_an_object_refuses_an_older_token(bucket: httpx.AsyncClient, leases: tuple[Lease, Lease]) -> None:
    """Of two writers, at the stand-in for S3: the first write, and each of the newer token, pass; the older one leaves
    the object as it is."""
    older, newer = leases
    put_fenced = world_of("If-None-Match")["put_fenced"]
    await put_fenced(bucket, "/report", "older, in time", older)
    for data in ("newer", "done"):
        await put_fenced(bucket, "/report", data, newer)
    with pytest.raises(StaleToken) as refused:
        await put_fenced(bucket, "/report", "older, too late", older)
    assert refused.value.name == "report"
    assert (await bucket.get("/report")).json() == {"fence": newer.fence, "data": "done"}


@pytest.mark.parametrize("there", [False, True], ids=["no object", "an object"])
async def test_a_lost_race_is_tried_again(bucket: httpx.AsyncClient, leases: tuple[Lease, Lease], there: bool) -> None:
    """At the stand-in for S3, another write comes between the newer writer's look and its write: 412, and the second
    try writes."""
    older, newer = leases
    put_fenced = world_of("If-None-Match")["put_fenced"]
    if there:
        await put_fenced(bucket, "/report", "first", older)
    writer = Interrupted(bucket, lambda: put_fenced(bucket, "/report", "between", older))
    async with writer.client:
        await put_fenced(writer.client, "/report", "newer", newer)
    look = ("GET", 200 if there else 404)
    assert writer.answers == [look, ("PUT", 412), ("GET", 200), ("PUT", 200)]
    assert (await bucket.get("/report")).json() == {"fence": newer.fence, "data": "newer"}


@pytest.mark.parametrize("data", ["newer", "the same"])
async def test_a_stale_writer_that_has_looked_is_refused(
    bucket: httpx.AsyncClient, leases: tuple[Lease, Lease], data: str
) -> None:
    """At the stand-in for S3, whose ETag is a digest of the content: the newer holder writes after the older one's
    look, also if it writes the data that was there."""
    older, newer = leases
    put_fenced = world_of("If-None-Match")["put_fenced"]
    await put_fenced(bucket, "/report", "the same", older)
    writer = Interrupted(bucket, lambda: put_fenced(bucket, "/report", data, newer))
    async with writer.client:
        with pytest.raises(StaleToken):
            await put_fenced(writer.client, "/report", "too late", older)
    assert writer.answers == [("GET", 200), ("PUT", 412), ("GET", 200)]
    assert (await bucket.get("/report")).json() == {"fence": newer.fence, "data": data}
