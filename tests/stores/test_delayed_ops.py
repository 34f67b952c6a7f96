"""Databases that delay or refuse an op (HAZARDS F23): the error of the caller names the cause, and health and doctor do
so, too."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Lease, QuorumUnavailable, Redlock
from asynclock.cli.doctor import databases
from asynclock.stores.sql import SQLStore, pool, transactions
from asynclock.stores.sql.engines import url_of
from asynclock.stores.sql.errors import Meaning, explained, is_crowded, meaning
from tests.support.commands import examined
from tests.support.operators import Operated
from tests.support.proxy import TcpProxy
from tests.support.waiters import LIMIT, LONG

ANSWER = 1.0
"""Seconds that a client gives its database here: a healthy one answers within it on a busy machine, too."""

OPTIONS: dict[str, Any] = {"lease": LONG, "node_timeout": ANSWER, "connect_timeout": LIMIT, "patience": 0}


async def used(client: Redlock) -> None:
    """It is connected, and the table is there."""
    async with asyncio.timeout(LIMIT):
        while True:
            with suppress(QuorumUnavailable):  # a busy machine may need longer than this client allows
                async with client.multi("a", "b"):
                    return


async def told(client: Redlock) -> str:
    """The error of an acquire."""
    async with asyncio.timeout(LIMIT):
        with pytest.raises(QuorumUnavailable) as caught:
            await client.multi("a", "b").acquire(timeout=0)
    return str(caught.value)


async def examined_at(url: str) -> str:
    """What doctor says is wrong, and what to do."""
    code, found = await asyncio.to_thread(examined, (), ASYNCLOCK_URLS=url)
    assert code == 2
    errors = [each for each in found.values() if each["severity"] == "error"]
    return " ".join(f"{each['what']} {each['advice']}" for each in errors)


async def test_f23_a_table_of_postgresql_that_is_locked(postgresql: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    """By LOCK TABLE, or by a migration."""
    monkeypatch.setattr(databases, "_ANSWER", ANSWER)
    async with aclosing(Redlock(postgresql.url, **OPTIONS)) as client:
        await used(client)
        async with postgresql.locked():
            assert "another session" in await told(client)
            health = await client.health()
            assert not health.ok
            assert "another session" in health.reason
            assert "another session" in await examined_at(postgresql.url)


async def test_f23_a_table_of_postgresql_that_is_locked_while_an_op_is_one_statement(postgresql: Operated) -> None:
    """The server ends the wait of the statement, and says why."""
    async with aclosing(Redlock(postgresql.url, **{**OPTIONS, "node_timeout": 2 * ANSWER})) as client:
        await used(client)
        async with asyncio.timeout(LIMIT):
            for _ in range(3):  # from the second on it is one statement
                async with client("a"):
                    pass
        async with postgresql.locked():
            with pytest.raises(QuorumUnavailable, match="due to lock timeout; another session"):
                await client("a").acquire(timeout=0)


async def test_f23_a_statement_timeout_of_postgresql(postgresql: Operated) -> None:
    """The user of the database has one, and waits for a lock for longer."""
    await postgresql.run(f"ALTER ROLE {postgresql.user} SET statement_timeout = '300ms'")
    async with aclosing(Redlock(postgresql.url, **{**OPTIONS, "node_timeout": 2 * ANSWER})) as client:
        await used(client)
        async with postgresql.locked():
            said = await told(client)
    assert "due to statement timeout; another session" in said or "due to lock timeout; another session" in said


async def test_f23_a_table_of_mariadb_that_a_dump_has_locked(mariadb: Operated) -> None:
    """LOCK TABLES ... READ, as mysqldump takes it."""
    async with aclosing(Redlock(mariadb.url, **OPTIONS)) as client:
        await used(client)
        await mariadb.run(f"LOCK TABLES {mariadb.table} READ")
        try:
            assert "another session" in await told(client)
            assert "another session" in (await client.health()).reason
        finally:
            await mariadb.run("UNLOCK TABLES")


async def test_f23_a_file_that_is_locked(tmp_path: Path) -> None:
    """By BEGIN EXCLUSIVE of another program."""
    url = f"sqlite:///{tmp_path}/locks.db"
    async with aclosing(Redlock(url, **OPTIONS)) as client:
        await used(client)
        neighbour = sqlite3.connect(tmp_path / "locks.db", isolation_level=None)
        neighbour.execute("BEGIN EXCLUSIVE")
        assert "database is locked; another session" in await told(client)
        assert "database is locked; another session" in (await client.health()).reason
        assert "database is locked; another session" in await examined_at(url)
        neighbour.close()


async def test_f23_a_disk_that_is_full(tmp_path: Path) -> None:
    """A file that may not grow, for SQLite."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/locks.db")

    @event.listens_for(engine.sync_engine, "connect")
    def limit(connection: Any, record: object) -> None:
        del record
        connection.execute("PRAGMA max_page_count = 8")

    async with aclosing(Redlock(SQLStore(engine), **OPTIONS)) as client:
        await used(client)
        leases: list[Lease | None] = []
        with pytest.raises(QuorumUnavailable, match="database or disk is full; make room on the disk"):
            for number in range(100):
                leases += [await client(f"{number}:{'x' * 200}").acquire(timeout=0)]
        assert leases
    await engine.dispose()


async def test_f23_an_engine_whose_connections_the_program_uses(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a database that is down."""
    monkeypatch.setattr(pool, "_KEPT", 0.05)
    engine = create_async_engine(
        url_of(postgresql.url.partition("?")[0]), pool_size=2, max_overflow=0, pool_timeout=0.3
    )
    options = {**OPTIONS, "connect_timeout": 2.0}
    async with aclosing(Redlock(SQLStore(engine, table=postgresql.table), **options)) as client:
        events: list[Any] = []
        client.subscribe(events.append)
        await used(client)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(engine.connect())
            assert "all 2 connections of the engine are in use, mostly by the program; raise its" in await told(client)
        await used(client)
        assert not [each for each in events if type(each).__name__ == "NodeDown"]
    await engine.dispose()


async def test_f23_an_op_that_gets_no_connection_does_not_say_that_the_database_is_down(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program uses its engine, and the time of the op is over before that of a connect."""
    monkeypatch.setattr(pool, "_KEPT", 0.05)
    engine = create_async_engine(url_of(postgresql.url.partition("?")[0]), pool_size=2, max_overflow=0)
    async with aclosing(Redlock(SQLStore(engine, table=postgresql.table), **OPTIONS)) as client:
        events: list[Any] = []
        client.subscribe(events.append)
        await used(client)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(engine.connect())
            with monkeypatch.context() as limits:
                for module in (pool, transactions):
                    limits.setattr(module, "LIMIT", ANSWER / 2)
                assert await told(client)
        await used(client)
        assert not [each for each in events if type(each).__name__ == "NodeDown"]
    await engine.dispose()


async def test_f23_a_connect_without_an_answer_does_not_say_that_the_program_uses_the_engine(mariadb: Operated) -> None:
    """It takes the last place in the pool of the engine itself."""
    port = urlsplit(mariadb.url).port or 0
    async with TcpProxy(port) as network:
        network.drop_replies = True
        url = mariadb.url.partition("?")[0].replace(f":{port}/", f":{network.port}/")
        engine = create_async_engine(url_of(url), pool_size=1, max_overflow=0)
        client = Redlock(SQLStore(engine, mariadb.table), **{**OPTIONS, "connect_timeout": 0.3})
        async with asyncio.timeout(LIMIT):
            with pytest.raises(QuorumUnavailable) as caught:
                await client.__aenter__()
            await client.aclose()
        assert "in use" not in str(caught.value)
        await engine.dispose()


async def test_f23_health_tells_of_releases_that_could_not_be_delivered(
    postgresql: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database grants, but a name is not free because of another session."""
    async with aclosing(Redlock(postgresql.url, **OPTIONS)) as client:
        await used(client)
        monkeypatch.setattr(pool, "LIMIT", 0.5)
        lease = await client.multi("a", "b").acquire(timeout=None)
        assert lease is not None
        await postgresql.run("BEGIN")
        await postgresql.run(f"SELECT 1 FROM {postgresql.table} WHERE resource_name = 'a' FOR UPDATE")
        await lease.release()
        async with asyncio.timeout(LIMIT):
            while not (node := (await client.health()).nodes[0]).error or not node.ok:
                await asyncio.sleep(0.05)
        assert "1 releases could not be delivered yet: " in node.error
        await postgresql.run("ROLLBACK")
        await postgresql.is_free()


@pytest.mark.parametrize(
    ("said", "do"),
    [
        ('could not extend file "base/5/16384": No space left on device', "make room"),
        ("The table 'asynclock' is full", "make room"),
        ("Lock wait timeout exceeded; try restarting transaction", "another session has locked"),
        ("Query execution was interrupted (max_statement_time exceeded)", "another session may have locked"),
        ("canceling statement due to lock timeout", "another session has locked"),
    ],
)
def test_f23_what_databases_say(said: str, do: str) -> None:
    """Each has its remedy."""
    with pytest.raises(Exception, match=do) as caught, explained("mariadb://db/locks"):
        raise RuntimeError(said)
    assert str(caught.value).startswith(f"mariadb://db/locks: {said}; ")


@pytest.mark.parametrize(
    ("code", "said", "means", "crowded"),
    [
        ("53300", "too many connections for role", Meaning.FAILED, True),
        (1040, "Too many connections", Meaning.FAILED, True),
        (1203, "User already has more than 'max_user_connections' active connections", Meaning.FAILED, True),
        ("57014", "canceling statement due to user request", Meaning.AGAIN, False),
        (1317, "Query execution was interrupted", Meaning.AGAIN, False),
        (1969, "Query execution was interrupted (max_statement_time exceeded)", Meaning.AGAIN, False),
        ("0A000", "cached statement plan is invalid", Meaning.AGAIN, False),
        ("0A000", "cached plan must not change result type", Meaning.AGAIN, False),
        ("0A000", "this is not supported", Meaning.FAILED, False),
        ("57P05", "terminating connection due to idle-session timeout", Meaning.LOST, False),
    ],
)
def test_f23_what_the_errors_of_databases_mean(code: str | int, said: str, means: Meaning, crowded: bool) -> None:
    """By the SQLSTATE of PostgreSQL, and by the number of MariaDB and MySQL."""
    error = DatabaseError(said) if isinstance(code, str) else DatabaseError(code, said)
    error.sqlstate = code if isinstance(code, str) else None
    assert meaning(error) is means
    assert is_crowded(error) is crowded


class DatabaseError(Exception):
    """Of a driver."""

    sqlstate: str | None
