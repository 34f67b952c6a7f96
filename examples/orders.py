"""The orders of a shop in PostgreSQL, and its payment provider: each order is paid once, and recorded once.

Three things work together, and none of them is enough alone:

- The lock. While one request pays an order, no other request asks the provider about that order.
- The idempotency key. If a process dies after it has asked, the next one asks with the same key: the provider answers
  what it did then, and takes no more money.
- The fencing token. A process that was frozen beyond its lease cannot record anything under its old token.

Make the tables and some orders:

    DATABASE_URL=postgresql+asyncpg://postgres@127.0.0.1/shop python examples/orders.py

$PROVIDER_URL is a payment provider: `POST /payments` with an Idempotency-Key answers with a receipt.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from sqlalchemy import BigInteger, Column, ForeignKey, Integer, MetaData, String, Table, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asynclock.fencing import fenced

DATABASE = os.environ.get("DATABASE_URL", "postgresql+asyncpg://postgres@127.0.0.1/shop")
PROVIDER = os.environ.get("PROVIDER_URL", "http://127.0.0.1:9000")
ANSWERS_WITHIN = 10.0
"""Seconds for the provider, in all: httpx counts its own timeout for each step anew (connect, write, each read)."""

tables = MetaData()
orders = Table(
    "orders",
    tables,
    Column("id", Integer, primary_key=True),
    Column("amount", Integer, nullable=False),
    Column("fence", BigInteger),  # the token that wrote last
)
payments = Table(
    "payments",
    tables,
    Column("order_id", ForeignKey(orders.c.id), primary_key=True),
    Column("receipt", String, nullable=False),
)


_GREATEST = 2**31 - 1
"""The greatest number that a column of PostgreSQL's type Integer has. A query for a greater one fails."""


class Declined(Exception):
    """The provider takes no money for this order, and says why. To ask again does not help."""


class NoAnswer(Exception):
    """The provider did not answer, or was busy, so the order may be paid. The next call asks again."""


class Refused(Exception):
    """The provider refuses the request, such as one with a wrong key or a wrong field: a fault of this program."""


class Orders:
    """Pays orders. Call `pay` under the lock of its order."""

    def __init__(self, database: AsyncEngine, provider: httpx.AsyncClient) -> None:
        self._database, self._provider = database, provider

    async def pay(self, order_id: int) -> str | None:
        """The receipt of the order, which is paid if it was not yet. None: there is no such order. Raises Declined,
        NoAnswer and Refused."""
        if not 0 < order_id <= _GREATEST:
            return None
        async with self._database.connect() as database:
            found = select(orders.c.amount, payments.c.receipt).outerjoin_from(orders, payments)
            order = (await database.execute(found.where(orders.c.id == order_id))).first()
        if order is None or order.receipt is not None:
            return order and order.receipt
        receipt = await self._ask_provider(order_id, order.amount)  # no transaction is open meanwhile
        async with self._database.begin() as database:
            await fenced(database, update(orders).where(orders.c.id == order_id), orders.c.fence)
            # An earlier holder that was frozen may have recorded it a moment ago: by the key, with the same receipt.
            await database.execute(insert(payments).values(order_id=order_id, receipt=receipt).on_conflict_do_nothing())
        return receipt

    async def _ask_provider(self, order_id: int, amount: int) -> str:
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                answer = await self._provider.post(
                    "/payments",
                    json={"order": order_id, "amount": amount},
                    headers={"Idempotency-Key": f"order-{order_id}"},  # the same in each attempt
                )
        except (httpx.TransportError, TimeoutError) as error:
            raise NoAnswer(f"order {order_id}: {error!r}") from error
        said = f"order {order_id}: {answer.status_code} {answer.text}"
        if answer.status_code == 402:
            raise Declined(said)
        if answer.status_code in (409, 429) or answer.is_server_error:  # 409: it works on this key at the moment
            raise NoAnswer(said)
        if not answer.is_success:
            raise Refused(said)
        receipt: str = answer.json()["receipt"]
        return receipt


@asynccontextmanager
async def open_orders() -> AsyncIterator[Orders]:
    """Connects with the database and the provider."""
    engine = create_async_engine(DATABASE)
    try:
        async with httpx.AsyncClient(base_url=PROVIDER, timeout=ANSWERS_WITHIN) as provider:
            yield Orders(engine, provider)
    finally:
        await engine.dispose()


async def main() -> None:
    """Make the tables, and five orders."""
    engine = create_async_engine(DATABASE)
    async with engine.begin() as database:
        await database.run_sync(tables.create_all)
        five = [{"id": number, "amount": number * 100} for number in range(1, 6)]
        await database.execute(insert(orders).on_conflict_do_nothing(), five)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
