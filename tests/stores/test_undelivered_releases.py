"""A release that fails while client and server are healthy is kept, and sent again (HAZARDS F23): with long leases, the
names are free soon after the cause is over. No other op of these names is sent meanwhile."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Redlock
from asynclock.events import NodeDown, ReleaseFailed
from asynclock.runtime import shutdown
from asynclock.stores import transactional
from asynclock.stores.sql import SQLStore, pool, single, transactions
from asynclock.stores.sql.engines import url_of
from asynclock.stores.transactional import Notice, Step
from tests.support.operators import Operated
from tests.support.probes import undelivered_by
from tests.support.proxy import TcpProxy
from tests.support.services.postgresql import own_postgresql
from tests.support.user_store import DictStore
from tests.support.waiters import LIMIT, LONG

OPTIONS: dict[str, Any] = {"lease": LONG, "node_timeout": 1.0, "patience": LIMIT}
NAMES = [f"order:{number}" for number in range(20)]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that does not end is given up after half a second, not after five."""
    for module in (pool, single, transactions):
        monkeypatch.setattr(module, "LIMIT", 0.5)


@asynccontextmanager
async def holder(url: str | SQLStore, names: list[str] = NAMES) -> AsyncIterator[Redlock]:
    """A client that holds these names."""
    async with Redlock(url, **OPTIONS) as client:
        async with asyncio.timeout(LIMIT):
            leases = [await client(each).acquire(timeout=None) for each in names]
        yield client
        del leases


async def test_f23_a_server_that_restarts_with_releases_in_flight(short_limits: None) -> None:
    """They wait for a table that is locked, when the server ends as after a crash."""
    del short_limits
    with own_postgresql() as server:
        async with holder(server.url, [f"order:{number}" for number in range(40)]) as client:
            admin = await asyncpg.connect(server.url)
            operated = Operated(server.url, "postgres", "asynclock", admin.fetchval)
            await admin.execute("BEGIN; LOCK TABLE asynclock IN ACCESS EXCLUSIVE MODE")
            releasing = asyncio.create_task(client.release_all())
            await operated.waits()
            server.stop()
            admin.terminate()
            server.start()
            admin = await asyncpg.connect(server.url)
            await Operated(server.url, "postgres", "asynclock", admin.fetchval).is_free()
            await releasing
            await admin.close()


async def test_f23_a_network_that_is_silent_for_a_while(postgresql: Operated, short_limits: None) -> None:
    """The releases are lost, and the connections with them."""
    del short_limits
    await _silent_for_a_while(postgresql)


async def test_f23_a_network_to_mariadb_that_is_silent_for_a_while(mariadb: Operated, short_limits: None) -> None:
    """The same."""
    del short_limits
    await _silent_for_a_while(mariadb)


async def _silent_for_a_while(operated: Operated) -> None:
    async with proxied(operated) as (network, url), holder(url) as client:
        network.drop_replies = network.drop_requests = True
        await client.release_all()
        network.freeze()
        network.drop_replies = network.drop_requests = False
        await operated.is_free()


@asynccontextmanager
async def proxied(operated: Operated) -> AsyncIterator[tuple[TcpProxy, str]]:
    """A network, and the url through it."""
    port = urlsplit(operated.url).port
    async with TcpProxy(port or 0) as network:
        yield network, operated.url.replace(f":{port}/", f":{network.port}/")


async def test_f23_too_many_connections_for_a_moment(postgresql: Operated) -> None:
    """The connections were closed, and the server has no room for others."""
    async with holder(postgresql.url) as client:
        await postgresql.run(f"ALTER ROLE {postgresql.user} CONNECTION LIMIT 1")
        for pid in await postgresql.connections():
            await postgresql.run(f"SELECT pg_terminate_backend({pid}, 5000)")
        await client.release_all()
        await postgresql.run(f"ALTER ROLE {postgresql.user} CONNECTION LIMIT -1")
        await postgresql.is_free()


async def test_f23_too_many_connections_of_a_user_of_mariadb(mariadb: Operated) -> None:
    """The same, while others have all connections of the user."""
    rename = f"ALTER USER {mariadb.user}@'%' WITH MAX_USER_CONNECTIONS"
    async with holder(mariadb.url) as client:
        query = f"SELECT group_concat(id) FROM information_schema.processlist WHERE user = '{mariadb.user}'"
        await mariadb.run(f"{rename} 1")
        other, connection = create_async_engine(url_of(mariadb.url.partition("?")[0])), None
        async with asyncio.timeout(LIMIT):
            while connection is None:  # one that is killed counts until its thread ends, and the client may be first
                for each in filter(None, (await mariadb.run(query) or "").split(",")):
                    with suppress(OperationalError):  # it has ended meanwhile
                        await mariadb.run(f"KILL {each}")
                with suppress(OperationalError):
                    connection = await other.connect()
        await client.release_all()
        await connection.close()
        await other.dispose()
        await mariadb.is_free()


@pytest.mark.usefixtures("patient_releases")
async def test_f23_a_user_with_few_connections(postgresql: Operated) -> None:
    """One that listens, and one for transactions, serve all ops: none fails for want of more."""
    await postgresql.run(f"ALTER ROLE {postgresql.user} CONNECTION LIMIT 2")
    events: list[Any] = []
    # The ops wait for their turn on the one connection.
    async with Redlock(postgresql.url, **{**OPTIONS, "node_timeout": 6.0}) as client:
        async with asyncio.timeout(LIMIT), client.multi("a", "b"):  # the connection that tried out push is gone
            pass
        client.subscribe(events.append)
        leases = await asyncio.gather(*[client.multi(each, f"{each}:2").acquire(timeout=0) for each in NAMES])
        assert all(leases)
        await client.release_all()
        await postgresql.is_free()
    assert [each for each in events if isinstance(each, NodeDown | ReleaseFailed)] == []


async def test_f23_a_statement_timeout_over_locked_rows(postgresql: Operated) -> None:
    """Another program has locked the rows for longer than the server lets a statement run."""
    await postgresql.run(f"ALTER ROLE {postgresql.user} SET statement_timeout = '1s'")
    async with holder(postgresql.url) as client:
        async with postgresql.locked():
            await client.release_all()
        await postgresql.is_free()


async def test_f23_statements_that_an_operator_cancels(postgresql: Operated) -> None:
    """pg_cancel_backend for all connections of the client, while its releases wait."""
    async with holder(postgresql.url) as client:
        async with postgresql.locked():
            releasing = asyncio.create_task(client.release_all())
            await postgresql.waits()
            for pid in await postgresql.connections():
                await postgresql.run(f"SELECT pg_cancel_backend({pid})")
        await releasing
        await postgresql.is_free()


@pytest.mark.usefixtures("patient_releases")
async def test_f23_a_table_that_is_altered(postgresql: Operated) -> None:
    """The statements that the client has prepared are not valid any more. No op fails of that."""
    events: list[Any] = []
    async with Redlock(postgresql.url, **{**OPTIONS, "node_timeout": 6.0}) as client:
        client.subscribe(events.append)
        leases = [await client.multi(each, f"{each}:2").acquire(timeout=None) for each in NAMES]
        await postgresql.run(f"ALTER TABLE {postgresql.table} ALTER COLUMN owner TYPE varchar(300)")
        await client.release_all()
        await postgresql.is_free()
        assert len(leases) == len(NAMES)
    assert [each for each in events if isinstance(each, ReleaseFailed)] == []


async def test_f23_connections_that_an_operator_ends_again_and_again(postgresql: Operated) -> None:
    """pg_terminate_backend for all connections of the client, while its releases wait, and are sent again."""
    async with holder(postgresql.url) as client:
        async with postgresql.locked():
            releasing = asyncio.create_task(client.release_all())
            await postgresql.waits()
            while not releasing.done():
                for pid in await postgresql.connections():
                    await postgresql.run(f"SELECT pg_terminate_backend({pid})")
                await asyncio.sleep(0.01)
        await releasing
        await postgresql.is_free()


async def test_f23_a_table_that_a_dump_has_locked(mariadb: Operated, short_limits: None) -> None:
    """LOCK TABLES ... READ, as mysqldump takes it."""
    del short_limits
    async with holder(mariadb.url) as client:
        await mariadb.run(f"LOCK TABLES {mariadb.table} READ")
        await client.release_all()
        await mariadb.run("UNLOCK TABLES")
        await mariadb.is_free()


async def test_f23_a_file_that_a_neighbour_has_locked(tmp_path: Path, short_limits: None) -> None:
    """BEGIN EXCLUSIVE of another program on SQLite."""
    del short_limits
    path = tmp_path / "locks.db"
    async with holder(f"sqlite:///{path}") as client:
        neighbour = sqlite3.connect(path, isolation_level=None)

        async def run(statement: str) -> Any:
            return neighbour.execute(statement).fetchone()[0]

        neighbour.execute("BEGIN EXCLUSIVE")
        await client.release_all()
        neighbour.execute("ROLLBACK")
        await Operated("", "", "asynclock", run).is_free()
        neighbour.close()


async def test_f23_an_engine_whose_connections_the_program_uses(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has taken all of its pool for a while."""
    monkeypatch.setattr(pool, "_KEPT", 0.05)
    engine = create_async_engine(url_of(postgresql.url.partition("?")[0]), pool_size=2, max_overflow=0)
    async with holder(SQLStore(engine, table=postgresql.table)) as client:
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(engine.connect())
            await client.release_all()
        await postgresql.is_free()
    await engine.dispose()


async def test_f23_a_client_that_closes_delivers_what_it_can(
    postgresql: Operated, short_limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The releases fail, and work again before the close of the client is over."""
    del short_limits
    monkeypatch.setattr(transactional, "AT_MOST", LIMIT)
    monkeypatch.setattr(shutdown, "CLOSING", 2 * LIMIT)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(holder(postgresql.url))
        async with postgresql.locked():
            await client.release_all()
            await is_undelivered(client, len(NAMES))
            closing = asyncio.create_task(stack.aclose())
            await asyncio.wait({closing}, timeout=0.3)
        await closing
        assert await postgresql.held() == 0


async def test_f23_a_client_that_closes_waits_for_releases_that_are_overdue(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their callers have given up, and their statements wait for a lock."""
    monkeypatch.setattr(transactional, "AT_MOST", LIMIT)
    monkeypatch.setattr(shutdown, "CLOSING", 2 * LIMIT)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(holder(postgresql.url))
        async with postgresql.locked():
            await client.release_all()
            closing = asyncio.create_task(stack.aclose())
            await asyncio.wait({closing}, timeout=0.3)
        await closing
        assert await postgresql.held() == 0


async def test_f23_a_release_that_is_sent_twice_ends_no_other_hold(postgresql: Operated, short_limits: None) -> None:
    """It was carried out, and only its answer was lost. Meanwhile another client holds the name."""
    del short_limits
    async with proxied(postgresql) as (network, url), Redlock(postgresql.url, **OPTIONS) as other:
        async with holder(url, NAMES[:1]) as client:
            async with client("another"):  # the statement of a release is prepared by now
                pass
            network.drop_replies = True
            await client.release_all()
            lease = await other(NAMES[0]).acquire(timeout=LIMIT)
            assert lease is not None
            await is_undelivered(client, 1)
            network.freeze()
            network.drop_replies = False
            await is_undelivered(client, 0)
            await lease.extend()
            await lease.release()


async def is_undelivered(client: Redlock, number: int) -> None:
    """Returns once so many releases are kept: none, or at least that number, since some that were answered may be kept,
    too (`sql/unflushed.py`)."""
    async with asyncio.timeout(LIMIT):
        while undelivered_by(client) < number or (not number and undelivered_by(client)):
            await asyncio.sleep(0.01)


async def test_f23_releases_that_cannot_be_delivered_are_in_the_way_of_no_other_name(
    postgresql: Operated, short_limits: None
) -> None:
    """Twenty rows are locked by another session; other names go on."""
    del short_limits
    async with holder(postgresql.url) as client:
        await postgresql.run("BEGIN")
        await postgresql.run(f"SELECT count(*) FROM (SELECT 1 FROM {postgresql.table} FOR UPDATE) AS locked")
        await client.release_all()
        await is_undelivered(client, len(NAMES))
        async with asyncio.timeout(LIMIT):
            for _ in range(20):
                async with client("another"):
                    pass
        assert undelivered_by(client) == len(NAMES)
        await postgresql.run("ROLLBACK")
        await postgresql.is_free()


class Unlucky(DictStore):
    """A store of a user's own whose transactions fail while `fails` is set; in its call, or when it is awaited."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.fails = False

    def transact(self, keys: Sequence[str], step: Step) -> Coroutine[Any, Any, None]:
        if self.fails and self.at_once:
            raise RuntimeError("no")
        return self._transact(keys, step)

    async def _transact(self, keys: Sequence[str], step: Step) -> None:
        if self.fails:
            raise RuntimeError("no")
        await super().transact(keys, step)


@pytest.mark.parametrize("at_once", [True, False])
async def test_f23_a_store_of_a_user(at_once: bool) -> None:
    """A release and the undo of an acquire fail, and are carried out before the next op of the name."""
    store = Unlucky(at_once)
    async with Redlock(store, **OPTIONS) as client:
        lease = await client("a").acquire()
        assert lease is not None
        store.fails = True
        await lease.release()
        store.fails = False
        lease = await client("a").acquire(timeout=0)
        assert lease is not None
        await is_undelivered(client, 0)
        await lease.release()


class Lost(DictStore):
    """A store of a user's own, whose transactions fail with `error` while it is set; OSError: it cannot be reached."""

    error: Exception | None = None

    def transact(self, keys: Sequence[str], step: Step) -> Coroutine[Any, Any, None]:
        if self.error is not None:
            raise self.error
        return super().transact(keys, step)

    def listen(self, tag: str, receive: Callable[[Notice], object]) -> None:
        if isinstance(self.error, OSError):
            raise self.error
        super().listen(tag, receive)

    def is_down(self, error: Exception) -> bool:
        return isinstance(error, OSError)


async def test_f23_a_release_that_is_sent_again_finds_that_the_node_is_down() -> None:
    """Nothing else asks it. Thousands of releases need not find it out one by one; all are sent once it is up again."""
    store, events = Lost(), asyncio.Queue[Any]()
    async with Redlock(store, **OPTIONS) as client, asyncio.timeout(LIMIT):
        leases = [await client(each).acquire(timeout=None) for each in NAMES]
        store.error = RuntimeError("no")
        await client.release_all()
        client.subscribe(events.put_nowait)
        store.error = OSError("gone")
        while not isinstance(await events.get(), NodeDown):
            pass
        store.error = None
        await is_undelivered(client, 0)
        assert len(leases) == len(NAMES)
