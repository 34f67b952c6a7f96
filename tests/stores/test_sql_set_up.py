"""A database that is set up in such a way that locks cannot work there: a ConfigError at once, with what to do. Urls
that name a socket, or several hosts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import ConfigError, Redlock
from asynclock.stores.sql import SQLStore, lines, table_watch
from asynclock.stores.sql.engines import url_of
from tests.support.operators import Operated
from tests.support.services.mariadb import MariaDB, own_mariadb
from tests.support.services.postgresql import pgbouncer
from tests.support.sql_states import administered, database_of
from tests.support.waiters import LIMIT, LONG, healthy

DATABASES = ["postgresql", "mariadb", "sqlite"]


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The url of a database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/app.db"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def table(name: str) -> str:
    """The name of a table that no other test uses."""
    return re.sub(r"\W", "_", name)


@pytest.mark.parametrize("database", DATABASES, indirect=True)
async def test_a_table_of_the_application_is_left_as_it_is(database: str, table: str, name: str) -> None:
    """The error says so, and how to name another one."""
    url = f"{database}?asynclock_table={table}"
    async with administered(database) as admin:
        await admin.exec_driver_sql(f"CREATE TABLE {table} (id INTEGER, fence INTEGER)")
        try:
            with pytest.raises(ConfigError, match=rf"{table} cannot keep locks: it has no column .*\?asynclock_table="):
                async with Redlock(url, patience=LIMIT) as client, client(name):
                    pass
            with pytest.raises(ConfigError, match="if it is a table of another program, name another one"):
                await SQLStore(url).create_schema()
            found = await admin.exec_driver_sql(f"SELECT * FROM {table}")
            assert (list(found.keys()), found.all()) == (["id", "fence"], [])
        finally:
            await admin.exec_driver_sql(f"DROP TABLE {table}")


@pytest.mark.parametrize("word", ["order", "user", "mine", "t"])
def test_a_reserved_word_of_postgresql_is_refused_when_the_store_is_made(word: str) -> None:
    """Some are functions of the server, and some are names in the statements of the store."""
    for make in (
        lambda: Redlock(f"postgresql://db/app?asynclock_table={word}"),
        lambda: SQLStore("postgresql://", word),
    ):
        with pytest.raises(ConfigError, match=f"table='{word}' is a reserved word: give another name"):
            make()


@pytest.mark.parametrize(("database", "word"), [("mariadb", "group"), ("sqlite", "order")], indirect=["database"])
async def test_another_reserved_word_is_refused_by_the_server(database: str, word: str) -> None:
    """It depends on the version which these are. No table is made either."""
    store = SQLStore(database, word)
    with pytest.raises(ConfigError, match=r"may be a reserved word.*give another one"):
        async with Redlock(store, patience=LIMIT):
            pass
    with pytest.raises(ConfigError, match="may be a reserved word"):
        await store.create_schema()


async def test_a_reserved_word_behind_a_schema_is_a_name(postgresql_url: str, name: str) -> None:
    """PostgreSQL takes any word there."""
    async with Redlock(f"{postgresql_url}?asynclock_table=public.user") as client, client(name):
        pass
    async with administered(postgresql_url) as admin:
        await admin.exec_driver_sql('DROP TABLE public."user"')


async def test_a_pooler_that_takes_no_transactions_is_a_config_error(postgresql_url: str) -> None:
    """PgBouncer with pool_mode=statement."""
    with (
        pgbouncer(postgresql_url, "statement") as url,
        pytest.raises(ConfigError, match=r"set pool_mode = transaction .* in PgBouncer"),
    ):
        async with Redlock(url, patience=LIMIT):
            pass


# -- settings of the sessions of MariaDB and MySQL -------------------------------------------------------------------


WAITS = "innodb_lock_wait_timeout", "lock_wait_timeout"

ON_ODD_SERVER = pytest.mark.xdist_group("odd-mariadb")


@pytest.fixture(scope="module")
def odd_server() -> Iterator[MariaDB]:
    """A server that takes '' for NULL, and closes a connection after each commit."""
    with own_mariadb("--sql-mode=EMPTY_STRING_IS_NULL", "--completion-type=RELEASE") as server:
        yield server


@ON_ODD_SERVER
async def test_no_setting_of_the_server_reaches_the_sessions_of_a_url(odd_server: MariaDB, name: str) -> None:
    """One statement for each op, and transactions."""
    async with Redlock(odd_server.url, lease=LONG) as client, Redlock(odd_server.url, lease=LONG) as other:
        for _ in range(3):
            async with client(name), client.multi(f"{name}:a", f"{name}:b"):
                assert await other(name).acquire(timeout=0) is None


@ON_ODD_SERVER
@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
async def test_no_setting_of_the_server_reaches_the_sessions_of_an_engine(
    odd_server: MariaDB, name: str, driver: str
) -> None:
    """While the store uses them. A row that is locked is waited for as with a url."""
    pytest.importorskip(driver)
    engine = create_async_engine(url_of(odd_server.url.replace("mariadb:", f"mariadb+{driver}:")))
    store = SQLStore(engine)
    async with Redlock(store, lease=LONG) as client, Redlock(odd_server.url, lease=LONG) as other:
        for _ in range(3):
            async with client(name), client.multi(f"{name}:a", f"{name}:b"):
                assert await other(name).acquire(timeout=0) is None
        async with database_of(store).connected.pool.line() as line:
            ((rows, table),) = await line.fetch("SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout")
            assert [f"{rows}", f"{table}"] == [lines.MYSQL_SETTINGS[each] for each in WAITS]
    await engine.dispose()


# -- policies of PostgreSQL --------------------------------------------------------------------------------------------

ANY_ROW = {"SELECT": "USING (true)", "INSERT": "WITH CHECK (true)", "UPDATE": "USING (true)", "DELETE": "USING (true)"}


@pytest.fixture
async def with_policies(
    postgresql: Operated, postgresql_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[Any]:
    """A user who has all rights on a table, and policies for all statements but these; and a client of its owner."""
    run, its = postgresql.run, postgresql.table
    await SQLStore(postgresql_url, its).create_schema()
    await run(f"GRANT ALL ON {its} TO {its}")
    await run(f"ALTER TABLE {its} ENABLE ROW LEVEL SECURITY")
    for each in ANY_ROW.keys() - set(request.param):
        await run(f"CREATE POLICY its_{each} ON {its} FOR {each} TO {its} {ANY_ROW[each]}")
    async with Redlock(SQLStore(postgresql_url, its), lease=LONG) as owner:
        yield postgresql, owner
    await run(f"DROP TABLE {its}")


@pytest.mark.parametrize(
    ("with_policies", "why"),
    [
        (["UPDATE"], "hides rows of .* from UPDATE by its user: CREATE POLICY"),
        (["DELETE"], "hides rows of .* from DELETE by its user: CREATE POLICY"),
        (["INSERT"], "violates row-level security policy .* CREATE POLICY"),
        (["SELECT", "INSERT", "UPDATE", "DELETE"], "violates row-level security policy .* CREATE POLICY"),
    ],
    indirect=["with_policies"],
)
async def test_a_policy_that_hides_rows_is_a_config_error(with_policies: Any, why: str, name: str) -> None:
    """A row that UPDATE does not find is no error of the server. A name that is held is never granted again."""
    operated, owner = with_policies
    async with owner(name) as lease:
        with pytest.raises(ConfigError, match=why):
            async with Redlock(operated.url, patience=LIMIT) as client, client(name, timeout=0):
                pass
        assert await operated.held() == 1
        await lease.extend()


@pytest.mark.parametrize("with_policies", [[]], indirect=True)
async def test_f24_a_policy_that_comes_while_clients_are_connected_stops_them(
    with_policies: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hides rows from UPDATE. The client goes on once it is gone."""
    operated, owner = with_policies
    async with owner(name), Redlock(operated.url, patience=LIMIT, lease=LONG) as client:
        async with client(f"{name}:mine"):
            pass
        monkeypatch.setattr(table_watch, "PAUSE", 0.1)
        await operated.run(f"CREATE POLICY hides ON {operated.table} AS RESTRICTIVE FOR UPDATE USING (false)")
        waiting = asyncio.create_task(client(name).acquire(timeout=None))  # its error lets the client look at once
        with pytest.raises(ConfigError, match=r"hides rows of .* from UPDATE by its user: CREATE POLICY"):
            await waiting
        await operated.run(f"DROP POLICY hides ON {operated.table}")
        await healthy(client)
        async with client(f"{name}:mine"):
            pass


@pytest.mark.parametrize("with_policies", [[]], indirect=True)
async def test_a_policy_for_all_rows_is_enough(with_policies: Any, name: str) -> None:
    """The two clients exclude each other. The proof leaves no row."""
    operated, owner = with_policies
    async with Redlock(operated.url, lease=LONG) as client:
        async with owner(name):
            assert await client(name).acquire(timeout=0) is None
        async with client(name):
            assert await owner(name).acquire(timeout=0) is None
    assert not await operated.run(f"SELECT count(*) FROM {operated.table} WHERE resource_name LIKE 'asynclock~tried%'")


# -- where a database is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["socket of PostgreSQL", "several hosts", "socket of MariaDB"])
async def test_a_socket_and_several_hosts(where: str, postgresql_url: str, mariadb_url: str, name: str) -> None:
    """They work, and each message names them."""
    server, port = postgresql_url.rpartition("@")[0], url_of(postgresql_url).port
    if where == "several hosts":
        url = f"{server}@/postgres?host=127.0.0.1:1&host=127.0.0.1:{port}&target_session_attrs=read-write"
    elif where == "socket of PostgreSQL":
        async with administered(postgresql_url) as admin:
            folder = (await admin.exec_driver_sql("SHOW unix_socket_directories")).scalar_one()
        url = f"{server}@/postgres?host={folder}&port={port}"
    else:
        async with administered(mariadb_url) as admin:
            socket = (await admin.exec_driver_sql("SELECT @@socket")).scalar_one()
        url = f"mariadb://asynclock@/locks?unix_socket={socket}"
    async with Redlock(url) as client, client(name):
        await healthy(client)
        (node,) = (await client.health()).nodes
    assert node.node == re.sub("//.*@", "//", url)
