"""Mistakes with FastAPI, aiohttp and fenced writes."""

from aiohttp import web
from fastapi import FastAPI
from redis.asyncio import Redis
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from asynclock import Lease, aiohttp, blocking, fastapi
from asynclock.fencing import fenced, fenced_set, fenced_sync


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]
    fence: Mapped[int | None]


paid = update(Order).where(Order.id == 42).values(state="paid")

fastapi.Locked("order:{id}", leese=30)  # E:
fastapi.Locked("order:{id}", timeout="5")  # E:
fastapi.Locked("order:{id}", kind="semaphore")  # E:
fastapi.Locked("order:{id}", kind=lambda client, name: name)  # E:
fastapi.install(FastAPI(), busy_status="409")  # E:
fastapi.install(FastAPI(), blocking.redlock)  # E:
fastapi.install(FastAPI(), ready=True)  # E:
aiohttp.setup(web.Application(), busy_status="409")  # E:
aiohttp.setup(web.Application(), blocking.redlock)  # E:
aiohttp.setup(FastAPI())  # E:


def uses_the_client_without_asyncio(app: web.Application) -> None:
    with app[aiohttp.CLIENT]("order:42"):  # E:
        pass


async def wrong_writes(session: AsyncSession, plain: Session, redis: Redis, lease: Lease) -> None:
    await fenced(session, paid, Order.state)  # E:
    await fenced(session, paid, "fence")  # E:
    await fenced(session, select(Order), Order.fence)  # E:
    await fenced(plain, paid, Order.fence)  # E:
    await fenced(session, paid, Order.fence, lease.fence)  # E:
    await fenced(session, paid)  # E:
    fenced_sync(session, paid, Order.fence)  # E:
    await fenced_set(redis, "order:42", 42)  # E:
