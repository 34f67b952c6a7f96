"""The shops of examples/ under load: three processes, PostgreSQL, a payment provider; one process and one node die."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import runpy
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import httpx
import pytest
from aiohttp import web
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Redlock
from tests.support.example_programs import Program, Start
from tests.support.ports import free_port
from tests.support.servers import Server
from tests.support.web import hanging_up, until

pytestmark = pytest.mark.xdist_group("examples")  # one process imports the frameworks for all

EXAMPLES = Path(__file__).parents[2] / "examples"
ORDERS = range(1, 6)
DIES, HUNG_UP = 1, 2
"""The order whose process is killed while it pays, and the one whose client hangs up then."""
REQUESTS = 200
_numbers = itertools.count()


class Provider:
    """A payment provider on a socket. It takes the money once for each idempotency key, and answers a key that it
    knows with the receipt of that payment. As real ones do, it refuses a key that it works on at the moment."""

    def __init__(self) -> None:
        self.receipts: dict[str, str] = {}
        self.asked: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.begun: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.goes_on = asyncio.Event()
        """Payments of DIES and HUNG_UP wait for it."""
        self.answer = 0
        """If it is not 0: the status of each answer, and no payment is made."""
        self._under_way: set[str] = set()
        self.url = ""

    async def pay(self, request: web.Request) -> web.Response:
        key, order = request.headers["Idempotency-Key"], (await request.json())["order"]
        self.asked[key] += 1
        if self.answer:
            return web.Response(status=self.answer, text="the reason of the provider")
        if key in self._under_way:
            self.refused[key] += 1
            return web.Response(status=409)
        self._under_way.add(key)
        self.begun[order].set()
        if order in (DIES, HUNG_UP):
            await self.goes_on.wait()
        receipt = self.receipts.setdefault(key, f"receipt {len(self.receipts)}")
        self._under_way.discard(key)
        return web.json_response({"receipt": receipt})


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    made, app = Provider(), web.Application()
    app.router.add_post("/payments", made.pay)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def database(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The url of a database of its own, with the tables and the orders of the shop."""
    name = f"shop_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(postgresql_url)
    await admin.execute(f"CREATE DATABASE {name} STRATEGY file_copy")
    url = f"{postgresql_url.rpartition('/')[0]}/{name}"
    monkeypatch.setenv("DATABASE_URL", url.replace("://", "+asyncpg://"))
    await runpy.run_path(str(EXAMPLES / "orders.py"))["main"]()
    yield url
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture
async def make_orders(database: str) -> AsyncIterator[Callable[..., Any]]:
    """Makes the Orders of orders.py with a provider in this process, and the lock of order 1 around it."""
    world = runpy.run_path(str(EXAMPLES / "orders.py"))
    engine = create_async_engine(world["DATABASE"])

    @asynccontextmanager
    async def made(answer: Callable[[httpx.Request], Any], **patched: object) -> AsyncIterator[Any]:
        world["Orders"].pay.__globals__.update(patched)
        transport = httpx.MockTransport(answer)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://provider") as provider,
            Redlock("memory:") as client,
        ):
            async with client("order:1"):
                yield world["Orders"](engine, provider)

    yield made
    await engine.dispose()


async def test_a_payment_that_an_earlier_holder_records_meanwhile(
    database: str, make_orders: Callable[..., Any]
) -> None:
    """It was frozen before it recorded the payment, and wakes while the next holder asks the provider. Both have the
    receipt of one payment, and it is recorded once."""

    async def answer(request: httpx.Request) -> httpx.Response:
        shop = await asyncpg.connect(database)
        await shop.execute("UPDATE orders SET fence = 1 WHERE id = 1")
        await shop.execute("INSERT INTO payments VALUES (1, 'receipt 1')")
        await shop.close()
        return httpx.Response(200, json={"receipt": "receipt 1"})

    async with make_orders(answer) as orders:
        assert await orders.pay(1) == "receipt 1"


async def test_a_provider_that_answers_slowly_has_a_limit(make_orders: Callable[..., Any]) -> None:
    """One that sends a byte now and then keeps within each timeout of httpx. The payment ends all the same."""
    begun = asyncio.Event()

    async def bytes_now_and_then() -> AsyncIterator[bytes]:
        while True:
            begun.set()
            yield b" "
            await asyncio.sleep(0.01)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=bytes_now_and_then())

    async with make_orders(answer, ANSWERS_WITHIN=1.0) as orders:
        with pytest.raises(Exception, match="order 1: TimeoutError"):
            await orders.pay(1)
    assert begun.is_set()


@pytest.mark.parametrize("example", ["fastapi_shop.py", "aiohttp_shop.py"])
def test_sigterm_cuts_no_payment_off(example: str) -> None:
    """The server waits longer for a request than the request for the provider, and has time for the database."""
    (limit,) = re.findall(r"shutdown(?:_timeout)?=(\d+)\)", (EXAMPLES / example).read_text("utf-8"))
    assert int(limit) >= runpy.run_path(str(EXAMPLES / "orders.py"))["ANSWERS_WITHIN"] + 10


class Customers:
    """Their requests, spread over the processes of a shop, as a load balancer does it."""

    def __init__(self, apps: list[Program]) -> None:
        self._apps = apps
        self.statuses: Counter[int] = Counter()
        self.receipts: defaultdict[int, set[str]] = defaultdict(set)
        self.hang_up = asyncio.Event()

    async def pays(self, web: aiohttp.ClientSession, number: int, order: int) -> None:
        """One that waits for the answer. If its process dies, another one gets its request."""
        for app in itertools.islice(itertools.cycle(self._apps), number, None):
            try:
                async with web.post(f"http://127.0.0.1:{app.port}/orders/{order}/pay") as answer:
                    receipt = (await answer.json())["receipt"] if answer.status == 200 else None
                self.statuses[answer.status] += 1
                self.receipts[order].update([receipt] if receipt else [])
                return
            except (
                aiohttp.ClientConnectionError,
                aiohttp.ClientPayloadError,
            ):  # the latter: in the middle of its answer
                assert app.process.poll() is not None, app.said

    async def hangs_up(self, number: int, order: int) -> None:
        async with hanging_up(self._apps[number % 3].port, f"/orders/{order}/pay"):
            await self.hang_up.wait()


def serving(start: Start, urls: list[str], provider: Provider, example: str) -> Any:
    """One process of a shop, which serves."""
    app = start(urls[:1], example, "--port", str(port := free_port()), PROVIDER_URL=provider.url)
    app.port = port
    app.serves()
    return app


both_shops = pytest.mark.parametrize("example", ["fastapi_shop.py", "aiohttp_shop.py"])


@both_shops
async def test_what_the_provider_refuses(
    start: Start, shared_urls: list[str], provider: Provider, database: str, example: str
) -> None:
    """A customer is asked to try again only where that may help, and the log of the shop has the reason."""
    app = serving(start, shared_urls, provider, example)
    each_its_own = aiohttp.TCPConnector(force_close=True)  # a server closes a connection after some errors
    async with aiohttp.ClientSession(connector=each_its_own) as http:
        for provider.answer, status in ((402, 402), (401, 500), (422, 500), (409, 503), (429, 503), (500, 503)):
            before = app.said.count("the reason of the provider")
            async with http.post(f"http://127.0.0.1:{app.port}/orders/1/pay") as answer:
                text = await answer.text()
                assert (answer.status, "Try again" in text) == (status, status == 503)
            assert "the reason of the provider" not in text

            async def logged(before: int = before) -> bool:
                return app.said.count("the reason of the provider") > before

            await until(logged)


@both_shops
async def test_an_order_that_does_not_exist(
    start: Start, shared_urls: list[str], provider: Provider, database: str, example: str
) -> None:
    """Not found, also for a number that is too great for the column."""
    app = serving(start, shared_urls, provider, example)
    async with aiohttp.ClientSession() as http:
        for order in (99, 0, 2**31, 99999999999, 10**30):
            async with http.post(f"http://127.0.0.1:{app.port}/orders/{order}/pay") as answer:
                assert answer.status == 404, await answer.text()


@pytest.mark.timeout(180)
@both_shops
async def test_each_order_is_paid_and_recorded_once(
    start: Start, five: list[Server], provider: Provider, database: str, example: str
) -> None:
    """A process is killed while it pays, and a node of the quorum, too; clients hang up while they wait, and one while
    its order is paid. Each order is paid once and recorded once; each customer gets an answer, 200 or 503 or 409; no
    order stays locked."""
    urls = [each.url for each in five]
    options, apps = ("--wait", "30", "--lease", "9"), []  # a process that stands still does not lose an order
    for _ in range(3):
        port = free_port()
        apps.append(start(urls, example, "--port", str(port), *options, PROVIDER_URL=provider.url))
        apps[-1].port = port
    for app in apps:
        app.serves()
    customers = Customers(apps)
    connector = aiohttp.TCPConnector(limit=0)
    async with Redlock(*urls) as look, aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as all_:
        all_.create_task(customers.pays(http, 0, DIES))
        await provider.begun[DIES].wait()
        async with hanging_up(apps[1].port, f"/orders/{HUNG_UP}/pay"):
            await provider.begun[HUNG_UP].wait()
        for number in range(2, REQUESTS):
            order = ORDERS[number % len(ORDERS)]
            hangs_up = number % 10 < 2  # those of the first two orders wait
            all_.create_task(customers.hangs_up(number, order) if hangs_up else customers.pays(http, number, order))

        async def many_wait() -> bool:  # not all are seen: those of the process that holds the order have no ticket
            found = [await look.inspect(f"order:{order}") for order in (DIES, HUNG_UP)]
            return all(sum(each.tasks for each in one.waiters) >= 10 for one in found)

        await until(many_wait)
        customers.hang_up.set()
        apps[0].kill()
        five[0].kill()
        provider.goes_on.set()

    assert set(customers.statuses) <= {200, 409, 503}, customers.statuses
    assert customers.statuses.total() == REQUESTS - 39  # 38 hang up while they wait, and one while its order is paid
    keys = {order: f"order-{order}" for order in ORDERS}
    assert not provider.refused  # no two requests paid one order at the same time
    assert (provider.asked[keys[DIES]], provider.asked[keys[HUNG_UP]]) == (2, 1)
    assert set(provider.asked.values()) <= {1, 2}  # the process may have paid other orders, too, when it was killed
    assert customers.receipts == {order: {provider.receipts[keys[order]]} for order in ORDERS}

    shop = await asyncpg.connect(database)
    recorded = await shop.fetch("SELECT order_id, receipt FROM payments ORDER BY order_id")
    await shop.close()
    assert [tuple(each) for each in recorded] == [(order, provider.receipts[keys[order]]) for order in ORDERS]

    async with Redlock(*urls) as look:

        async def nobody() -> bool:
            return [each async for each in look.holders("order:")] == []

        await until(nobody)
    assert not any("Traceback" in app.said for app in apps)
