"""Fenced writes: the columns of a model and of a table, sessions and connections of both sorts, and Redis."""

from typing import Any

from redis.asyncio import Redis, RedisCluster
from sqlalchemy import BigInteger, Column, Connection, CursorResult, Integer, MetaData, Table, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from asynclock import Lease, LockError, blocking
from asynclock.fencing import StaleToken, fenced, fenced_set, fenced_sync


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    fence: Mapped[int | None] = mapped_column(BigInteger)  # as docs/fencing.md shows it


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[int] = mapped_column(primary_key=True)
    fence: Mapped[int] = mapped_column(BigInteger)


orders = Table("orders", MetaData(), Column("id", Integer, primary_key=True), Column("fence", BigInteger))
paid = update(Order).where(Order.id == 42).values(state="paid")


async def in_a_session(session: AsyncSession, lease: Lease) -> int:
    await fenced(session, paid, Order.fence)
    await fenced(session, paid, Account.fence, lease)
    result: CursorResult[Any] = await fenced(session, paid, Order.fence, lease)
    changed: int = result.rowcount
    return changed


async def on_a_connection(connection: AsyncConnection) -> int:
    return (await fenced(connection, update(orders).where(orders.c.id == 42), orders.c.fence)).rowcount


def without_asyncio(session: Session, connection: Connection, lease: blocking.Lease, other: Lease) -> str:
    try:
        fenced_sync(session, paid, Order.fence, lease)
        fenced_sync(session, paid, Account.fence, lease)
        fenced_sync(connection, paid, Order.fence, other)
        fenced_sync(connection, update(orders), orders.c.fence)
    except StaleToken as refused:
        error: LockError = refused
        return error.name
    return ""


async def a_key(client: Redis, cluster: RedisCluster, lease: Lease) -> None:
    await fenced_set(client, "order:42", "paid")
    await fenced_set(cluster, "order:42", "paid")
    await fenced_set(client, "order:42", b"paid", lease)
