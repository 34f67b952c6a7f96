"""docs/starlette.md, docs/litestar.md and docs/quart.md: their programs run as they stand, under uvicorn."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.middleware.base import BaseHTTPMiddleware

import asynclock
from asynclock import Redlock
from asynclock.fencing import StaleToken
from tests.support.servers import Server
from tests.support.waiters import LIMIT
from tests.support.web import hanging_up, serving, until

DOCS = Path(__file__).parents[2] / "docs"
each_page = pytest.mark.parametrize("page", ["starlette", "litestar", "quart"])


class Shop:
    """The program of a page, with a payment that the test holds up."""

    def __init__(self, page: str, client: Redlock, monkeypatch: pytest.MonkeyPatch, wait: str = "600") -> None:
        pytest.importorskip(page)
        monkeypatch.setattr(asynclock, "redlock", client)
        self.client, self.begun, self.goes_on = client, asyncio.Event(), asyncio.Event()
        self.goes_on.set()
        self.charged: list[int] = []
        self._charges = False
        self.error: Exception | None = None
        (program,) = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text("utf-8"), re.DOTALL)
        program = program.replace("timeout=5)", f"timeout={wait})")  # a wait that ends, ends for another reason
        module = sys.modules[page + "_page"] = ModuleType(page + "_page")
        module.__dict__.update(charge=self.charge, is_charged=self.is_charged)
        exec(compile(program, page, "exec"), module.__dict__)
        self.app: Any = module.__dict__["app"]

    async def is_charged(self, order_id: int) -> bool:
        return order_id in self.charged

    async def charge(self, order_id: int, *, fence: int) -> None:
        assert fence > 0
        assert not self._charges
        self._charges = True
        try:
            self.begun.set()
            await asyncio.sleep(0)
            await self.goes_on.wait()
            if self.error is not None:
                raise self.error
            self.charged.append(order_id)
        finally:
            self._charges = False


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Litestar sets it up when an application is made. Later tests of this process would log more than they expect."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
async def shop(page: str, shared_urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(page, Redlock(shared_urls[0], prefix=name), monkeypatch)


@pytest.fixture
async def look(shared_urls: list[str], name: str) -> Any:
    """A client of another process, as far as the server knows."""
    async with Redlock(shared_urls[0], prefix=name) as made:
        yield made


def http(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)


@each_page
async def test_it_charges_an_order_once(shop: Shop, look: Redlock) -> None:
    """The second of two requests at once finds it charged. /orders/7 and /orders/07 are one order; another value is no
    order, and waits for nothing."""
    async with serving(shop.app) as port, http(port) as web:
        async with look("order:7"):
            both = [asyncio.create_task(web.post(f"/orders/{order}/charge")) for order in ("7", "07")]
            await until(waits(look))
            assert (await web.post("/orders/x/charge")).status_code == 404
            assert shop.charged == []
        answers = [await each for each in both]

        async def ready() -> bool:
            return (await web.get("/readyz")).json() == {"ready": True}

        await until(ready)
    assert [(each.status_code, each.json()["order"]) for each in answers] == [(200, 7)] * 2
    assert answers[0].json()["fence"] != answers[1].json()["fence"]
    assert shop.charged == [7]


def waits(look: Redlock, wanted: bool = True) -> Any:
    """Whether a request waits for order 7, to be awaited."""

    async def asked() -> bool:
        return bool((await look.inspect("order:7")).waiters) is wanted

    return asked


@each_page
async def test_the_answers(
    page: str, look: Redlock, shared_urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy is 409; a lost lock and a stale token are 503. They are problems with Retry-After, and name no lock."""
    shop = Shop(page, Redlock(shared_urls[0], prefix=name), monkeypatch, wait="0")
    async with serving(shop.app) as port, http(port) as web:
        async with look("order:7"):
            answers = [await web.post("/orders/7/charge")]
        for shop.error in (asynclock.LockLost("order:7", reason="taken"), StaleToken("order:7")):
            answers.append(await web.post("/orders/7/charge"))
        shop.error = None
        assert (await web.post("/orders/7/charge")).status_code == 200  # the lock is free
    assert [each.status_code for each in answers] == [409, 503, 503]
    for each in answers:
        assert each.headers["Content-Type"] == "application/problem+json"
        assert each.headers["Retry-After"] == "1"
        assert each.json()["status"] == each.status_code
        assert "order:7" not in each.text


@each_page
async def test_an_outage(page: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """503, also of the readiness route; then it serves again."""
    shop = Shop(page, Redlock(server.url, patience=0.2, connect_timeout=LIMIT), monkeypatch)
    async with serving(shop.app) as port, http(port) as web:

        async def serves() -> bool:
            return (await web.post("/orders/7/charge")).status_code == 200

        assert await serves()
        server.kill()
        answer = await web.post("/orders/7/charge")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert (await web.get("/readyz")).status_code == 503
        server.restart()
        await until(serves)


@pytest.mark.parametrize("page", ["starlette", "behind", "litestar", "quart"])
async def test_f13_a_hang_up_ends_the_wait(
    page: str, look: Redlock, shared_urls: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request leaves the queue, and charges nothing; in Starlette also behind a BaseHTTPMiddleware."""
    shop = Shop(page.replace("behind", "starlette"), Redlock(shared_urls[0], prefix=name), monkeypatch)
    if page == "behind":
        shop.app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    async with serving(shop.app) as port, look("order:7"):
        async with hanging_up(port, "/orders/7/charge"):
            await until(waits(look))
        await until(waits(look, False))
    assert shop.charged == []


@each_page
async def test_f13_a_hang_up_does_not_end_the_charge(shop: Shop, look: Redlock) -> None:
    """It runs to its end under the lock, which is free then."""
    shop.goes_on.clear()
    async with serving(shop.app) as port:
        async with hanging_up(port, "/orders/7/charge"):
            await shop.begun.wait()
        async with http(port) as web:
            await web.get("/readyz")  # the server has seen by now that the client is gone
        assert await look("order:7").locked()
        shop.goes_on.set()
        async with look("order:7", timeout=30):
            assert shop.charged == [7]
