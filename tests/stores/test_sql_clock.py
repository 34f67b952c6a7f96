"""The clock of a SQL store is that of the server. No setting of a session, or of the server's zone, changes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from asynclock import ConfigError, Redlock
from asynclock.stores.sql import SQLStore, engines
from asynclock.stores.sql.lines import AsyncmyLine
from tests.support.sql_states import read_rows, transactions_only
from tests.support.waiters import LIMIT, until

_HOUR = 3600


@asynccontextmanager
async def session(url: str, *statements: str) -> AsyncIterator[AsyncConnection]:
    """A connection of a stranger, which has sent these statements."""
    engine = create_async_engine(url.replace("mariadb:", "mariadb+asyncmy:"))
    try:
        async with engine.connect() as connection:
            for each in statements:
                await connection.exec_driver_sql(each)
            yield connection
    finally:
        await engine.dispose()


async def make_zone(url: str, name: str, changes: int, before: int, after: int) -> None:
    """A time zone of the server. At the Unix time `changes` its offset becomes `after`; it was `before`, in seconds."""
    insert = "INSERT INTO mysql.time_zone"
    async with session(
        url,
        f"{insert} (Use_leap_seconds) VALUES ('N')",
        "SET @id = LAST_INSERT_ID()",
        f"{insert}_name VALUES ('{name}', @id)",
        f"{insert}_transition_type VALUES (@id, 0, {before}, {int(before > after)}, 'A')",
        f"{insert}_transition_type VALUES (@id, 1, {after}, {int(before < after)}, 'B')",
        f"{insert}_transition VALUES (@id, 0, 0), (@id, {changes}, 1)",
    ):
        pass


@asynccontextmanager
async def client_with(url: str, setting: str) -> AsyncIterator[Redlock]:
    """A client of an engine of the user, whose sessions have that setting."""
    where = url.replace("mariadb:", "mariadb+asyncmy:").replace("postgresql:", "postgresql+asyncpg:")
    arguments: dict[str, Any] = {"init_command": f"SET SESSION {setting}"}
    if url.startswith("postgresql"):
        name, _, value = setting.partition("=")
        arguments = {"server_settings": {name: value.strip("'")}}
    engine = create_async_engine(where, connect_args=arguments)
    try:
        async with Redlock(SQLStore(engine), lease=60) as client:
            yield client
    finally:
        await engine.dispose()


@pytest.mark.parametrize("ended", [-_HOUR // 2, _HOUR // 2], ids=["half an hour ago", "in half an hour"])
@pytest.mark.parametrize("database", ["mariadb", "postgresql"])
async def test_f1_summer_time_ends(database: str, ended: int, name: str, request: pytest.FixtureRequest) -> None:
    """A client whose session is in the hour that comes twice finds a lock held, for as long as all others do; and they
    find its own held."""
    url, at = request.getfixturevalue(f"{database}_url"), int(time.time()) + ended
    if database == "mariadb":
        await make_zone(url, zone := f"Test/{name[-40:]}", at, 2 * _HOUR, _HOUR)
    else:  # the zone as POSIX writes it: its change is a day of the year, and a local time of the day
        local = time.gmtime(at + 2 * _HOUR)
        zone = f"A-1B-2,J1/0,{local.tm_yday - 1}/{time.strftime('%H:%M:%S', local)}"
    setting = f"{'time_zone' if database == 'mariadb' else 'TimeZone'}='{zone}'"
    async with Redlock(url, lease=60) as plain, client_with(url, setting) as other:
        for holds, asks in ((plain, other), (other, plain)):
            async with holds(name):
                assert await asks(name).acquire(timeout=0) is None
                assert (await asks.inspect(name)).holders[0].remaining == pytest.approx(60, abs=LIMIT)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)], ids=["ends", "begins"])
async def test_f1_the_zone_changes_while_an_op_waits_for_a_row(
    before: int, after: int, name: str, mariadb_url: str
) -> None:
    """Then the hold of that op ends a lease after its grant, as always."""
    at = int(time.time()) + 2
    await make_zone(mariadb_url, zone := f"Test/{name[-40:]}", at, before * _HOUR, after * _HOUR)
    async with client_with(mariadb_url, f"time_zone='{zone}'") as client, Redlock(mariadb_url, lease=60) as plain:
        async with plain(name):  # there is a row
            pass
        async with session(mariadb_url, f"SELECT 1 FROM asynclock WHERE resource_name = '{name}' FOR UPDATE"):
            await until(lambda: time.time() > at - 0.5)
            waiting = asyncio.create_task(client(name).acquire(timeout=0))
            await until(lambda: time.time() > at + 0.1)
        lease = await waiting
        assert lease is not None
        assert (await plain.inspect(name)).holders[0].remaining == pytest.approx(60, abs=LIMIT)
        await lease.release()


async def test_f1_a_statement_reads_the_local_time_once(
    name: str, mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zone may change between two mentions of SYSDATE, so that a check of one says nothing of the other."""
    sent = list[str]()

    class Session(AsyncmyLine):
        async def fetch(self, sql: str, params: Mapping[str, Any] = {}) -> Sequence[Any]:
            sent.append(sql)
            return await super().fetch(sql, params)

    monkeypatch.setattr(engines, "AsyncmyLine", Session)
    transactions_only(monkeypatch)
    async with Redlock(mariadb_url) as client:
        for _ in range(2):  # without a row, and with one
            async with client(name):
                assert (await client.inspect(name)).holders
    assert {each.count("SYSDATE") for each in sent} == {0, 1}


@pytest.mark.parametrize("way", ["a transaction", "one statement first"])
async def test_f1_the_time_of_an_op_that_waits(
    name: str, mariadb_url: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a row that another client had locked: what is written later has the later time."""
    if way == "a transaction":
        transactions_only(monkeypatch)
    store = SQLStore(mariadb_url)
    async with Redlock(store, lease=60) as client:
        async with client(name):
            pass
        async with session(mariadb_url, f"SELECT 1 FROM asynclock WHERE resource_name = '{name}' FOR UPDATE") as other:
            waiting = asyncio.create_task(client(name).acquire(timeout=0))
            await waits_for_row(mariadb_url)
            ((freed,),) = await other.exec_driver_sql("SELECT @@timestamp + 0e0 FROM (SELECT SLEEP(0.2)) AS slept")
        lease = await waiting
        assert lease is not None
        rows, _ = await read_rows(store, [name])
        assert (rows[name].expires_at or 0.0) - 60 >= freed
        await lease.release()


async def test_f1_a_single_statement_does_nothing_while_the_clock_of_its_session_stands_still(
    name: str, mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction that follows says so."""
    clock = "DEFAULT"

    class Session(AsyncmyLine):
        async def change(self, sql: str, params: Mapping[str, Any]) -> int:
            await super().run(f"SET timestamp = {clock}")
            return await super().change(sql, params)

        async def run(self, sql: str) -> None:
            await super().run(f"SET timestamp = {clock}; {sql}")

    monkeypatch.setattr(engines, "AsyncmyLine", Session)
    async with Redlock(mariadb_url) as client:
        clock = "1700000000"
        with pytest.raises(ConfigError, match="stands still"):
            await client(name).acquire(timeout=0)
        clock = "DEFAULT"
        async with client(f"{name}:2") as lease:
            clock = "1700000000"
            with pytest.raises(ConfigError, match="stands still"):
                await lease.extend()
            clock = "DEFAULT"


async def waits_for_row(url: str) -> None:
    """Return once a transaction waits for the lock of a row."""
    async with session(url) as connection, asyncio.timeout(LIMIT):
        sql = "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"
        while (await connection.exec_driver_sql(sql)).scalar() == 0:
            await asyncio.sleep(0.2)  # the table is a copy, made anew only if nobody has read it for 0.1 s


async def test_a_session_whose_clock_stands_still_is_a_config_error(mariadb_url: str) -> None:
    """It cannot count leases."""
    with pytest.raises(ConfigError, match="SET timestamp"):
        async with client_with(mariadb_url, "timestamp=1000000000"):
            pass
