"""The bare side of a store: a program that sends the statements of a lock to the driver itself, without asynclock.

It takes a free name by one statement and gives it back by another, each a transaction of its own, with the settings
that the store gives to its connections. It has no queue, no renewal and no undo.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sqlalchemy.engine import make_url

from benchmarks.sides import rival

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from benchmarks.sides import Cycle

    BareStore = Callable[[str], AbstractAsyncContextManager[Cycle]]

LEASE = 30.0
CONNECTIONS = 4
TASKS = 64


class BareSQLite:
    """aiosqlite: an upsert and an UPDATE, over `connections` connections in turn, to a file of its own beside that of
    the store."""

    SETTINGS = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", "PRAGMA busy_timeout = 5000")
    TABLE = (
        "CREATE TABLE IF NOT EXISTS bare (name TEXT PRIMARY KEY, owner TEXT NOT NULL, fence INTEGER NOT NULL, "
        "expires_at REAL NOT NULL)"
    )
    TAKE = (
        "INSERT INTO bare VALUES (?, ?, 1, ?) ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, "
        "fence = fence + 1, expires_at = excluded.expires_at WHERE expires_at <= ?"
    )
    GIVE = "UPDATE bare SET owner = '', expires_at = 0 WHERE name = ? AND owner = ?"

    def __init__(self, connections: int) -> None:
        self._connections = connections

    @contextlib.asynccontextmanager
    async def __call__(self, url: str) -> AsyncIterator[Cycle]:
        path = f"{make_url(url).database}.bare"
        async with contextlib.AsyncExitStack() as stack:
            opened = []
            for _ in range(self._connections):
                connecting = rival("aiosqlite").connect(path, isolation_level=None)
                opened.append(await stack.enter_async_context(connecting))
                for sql in (*self.SETTINGS, self.TABLE):
                    await opened[-1].execute(sql)
            in_turn = itertools.cycle(opened)

            async def cycle(i: int) -> None:
                name, owner, now, connection = f"order:{i}", secrets.token_hex(16), time.time(), next(in_turn)
                taken = await connection.execute(self.TAKE, (name, owner, now + LEASE, now))
                given = await connection.execute(self.GIVE, (name, owner))
                if (taken.rowcount, given.rowcount) != (1, 1):
                    raise RuntimeError(f"the bare program did not get the free name {name}")

            yield cycle


@contextlib.asynccontextmanager
async def bare_postgresql(url: str) -> AsyncIterator[Cycle]:
    """asyncpg: an upsert and an UPDATE, over four connections. asyncpg prepares both. Half of each page stays free,
    as in the table of the store, so that rows are updated in place."""
    take = (
        "INSERT INTO bare VALUES ($1, $2, 1, extract(epoch FROM clock_timestamp()) + $3) ON CONFLICT (name) DO UPDATE "
        "SET owner = excluded.owner, fence = bare.fence + 1, expires_at = excluded.expires_at "
        "WHERE bare.expires_at <= extract(epoch FROM clock_timestamp()) RETURNING fence"
    )
    give = "UPDATE bare SET owner = '', expires_at = 0 WHERE name = $1 AND owner = $2"
    free = asyncio.LifoQueue[Any]()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = await rival("asyncpg").connect(url)
            stack.push_async_callback(connection.close)
            free.put_nowait(connection)
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS bare (name TEXT PRIMARY KEY, owner TEXT NOT NULL, fence BIGINT NOT NULL, "
            "expires_at DOUBLE PRECISION NOT NULL) WITH (fillfactor = 50)"
        )

        async def cycle(i: int) -> None:
            name, owner, connection = f"order:{i}", secrets.token_hex(16), await free.get()
            try:
                if await connection.fetchval(take, name, owner, LEASE) is None:
                    raise RuntimeError(f"the bare program did not get the free name {name}")
                if await connection.execute(give, name, owner) != "UPDATE 1":
                    raise RuntimeError(f"the bare program lost the name {name}")
            finally:
                free.put_nowait(connection)

        yield cycle


@contextlib.asynccontextmanager
async def bare_mariadb(url: str) -> AsyncIterator[Cycle]:
    """asyncmy: an upsert and an UPDATE, over four connections."""
    take = (
        "INSERT INTO bare VALUES (%s, %s, 1, %s) ON DUPLICATE KEY UPDATE owner = IF(expires_at <= %s, VALUES(owner), "
        "owner), fence = fence + (expires_at <= %s), "
        "expires_at = IF(expires_at <= %s, VALUES(expires_at), expires_at)"
    )
    give = "UPDATE bare SET owner = '', expires_at = 0 WHERE name = %s AND owner = %s"
    where, free = make_url(url), asyncio.LifoQueue[Any]()
    options = {"host": where.host, "port": where.port, "user": where.username, "password": where.password or ""}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            connecting = rival("asyncmy").connect(**options, db=where.database, autocommit=True)
            free.put_nowait(connection := await stack.enter_async_context(connecting))
        async with connection.cursor() as cursor:
            if not await cursor.execute("SHOW TABLES LIKE 'bare'"):
                await cursor.execute(
                    "CREATE TABLE bare (name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY, "
                    "owner VARCHAR(255) NOT NULL, fence BIGINT NOT NULL, expires_at DOUBLE NOT NULL)"
                )

        async def cycle(i: int) -> None:
            name, owner, now, connection = f"order:{i}", secrets.token_hex(16), time.time(), await free.get()
            try:
                async with connection.cursor() as cursor:
                    await cursor.execute(take, (name, owner, now + LEASE, now, now, now))
                    if await cursor.execute(give, (name, owner)) != 1:
                        raise RuntimeError(f"the bare program did not get the free name {name}")
            finally:
                free.put_nowait(connection)

        yield cycle


@contextlib.asynccontextmanager
async def bare_zookeeper(url: str) -> AsyncIterator[Cycle]:
    """kazoo: create an ephemeral, sequential node, read the children, delete it. Its answers wake the event loop."""
    loop, client = asyncio.get_running_loop(), rival("kazoo.client").KazooClient(urlsplit(url).netloc)

    def asked(request: Any) -> asyncio.Future[Any]:
        future = loop.create_future()

        def settle() -> None:
            try:
                future.set_result(request.get_nowait())
            except Exception as error:
                future.set_exception(error)

        request.rawlink(lambda _: loop.call_soon_threadsafe(settle))
        return future

    async def cycle(i: int) -> None:
        made = await asked(client.create_async(f"/bare/{i}/lock-", b"owner", ephemeral=True, sequence=True))
        if len(await asked(client.get_children_async(f"/bare/{i}"))) != 1:
            raise RuntimeError(f"the bare program did not get the free name {i}")
        await asked(client.delete_async(made))

    await asyncio.to_thread(client.start)
    try:
        for number in range(TASKS):
            await asyncio.to_thread(client.ensure_path, f"/bare/{number}")
        yield cycle
    finally:
        await asyncio.to_thread(client.stop)
        client.close()


BARE: dict[str, Sequence[BareStore]] = {
    "sqlite": (BareSQLite(1), BareSQLite(CONNECTIONS)),
    "postgresql": (bare_postgresql,),
    "mariadb": (bare_mariadb,),
    "zookeeper": (bare_zookeeper,),
}
"""By the scheme of a url. The fastest one of a round is the one to compare with."""


RELAYS: dict[str, Sequence[str]] = {"postgresql": ("postgresql-relay-a", "postgresql-relay-b")}
"""By the scheme: the sides of benchmarks.contender that hand over by the push of the bare driver."""


def bare_of(urls: Sequence[str]) -> Sequence[BareStore]:
    """Those of a store with one url; () if there is none."""
    return BARE.get(urls[0].partition(":")[0].partition("+")[0], ()) if len(urls) == 1 else ()
