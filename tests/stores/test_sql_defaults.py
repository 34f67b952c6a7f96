"""What the role, the database or the server sets by default for each session: the isolation level, read-only
transactions, and how long a session may be idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.sql import SQLStore
from tests.support.operators import Operated
from tests.support.services.mariadb import MariaDB, own_mariadb
from tests.support.services.postgresql import pgbouncer
from tests.support.sql_states import administered
from tests.support.waiters import LIMIT, LONG

OPTIONS: dict[str, Any] = {"lease": LONG, "node_timeout": 5.0, "connect_timeout": 10.0, "patience": LIMIT}


@pytest.fixture(scope="module")
def hasty_mariadb() -> Iterator[MariaDB]:
    with own_mariadb("--wait-timeout=1", "--transaction-isolation=SERIALIZABLE") as server:
        yield server


async def some_ops(client: Redlock, other: Redlock) -> None:
    """Single statements, transactions, and a waiter that is notified by a row or by a message."""
    async with client("a", timeout=LIMIT) as lease:
        await lease.extend()
    async with client.multi("a", "b"):
        waiting = asyncio.create_task(other("b").acquire(timeout=LIMIT))
        while not (await client.inspect("b")).waiters:
            await asyncio.sleep(0.01)
    lease = await waiting
    assert lease is not None
    await lease.release()


@pytest.mark.parametrize("mode", ["", "transaction"])
async def test_f26_each_transaction_names_its_isolation_level(postgresql: Operated, mode: str) -> None:
    """Whatever the role has as its default: each write is READ COMMITTED, and ends by a limit of its own."""
    its, url = postgresql.user, postgresql.url
    await postgresql.run(f"ALTER ROLE {its} SET default_transaction_isolation = 'serializable'")
    async with Redlock(url, **OPTIONS) as client, client("made"):
        pass
    await postgresql.run(f"CREATE TABLE {its}_levels AS SELECT '' AS level, '' AS ends WHERE false")
    await postgresql.run(f"GRANT INSERT ON {its}_levels TO {its}")
    await postgresql.run(
        f"CREATE FUNCTION {its}_note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO {its}_levels VALUES "
        "(current_setting('transaction_isolation'), current_setting('statement_timeout')); RETURN NULL; END $$"
    )
    await postgresql.run(
        f"CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON {its} FOR EACH ROW EXECUTE FUNCTION {its}_note()"
    )
    try:
        if mode:
            with pgbouncer(url.replace(f"//{its}@", "//postgres@").partition("?")[0], mode, user=its) as bouncer:
                pooled = f"{bouncer}?asynclock_table={its}"
                async with Redlock(pooled, **OPTIONS) as client, Redlock(pooled, **OPTIONS) as other:
                    await some_ops(client, other)
        else:
            async with Redlock(url, **OPTIONS) as client, Redlock(url, **OPTIONS) as other:
                await some_ops(client, other)
        found = await postgresql.run(f"SELECT array_agg(DISTINCT level || ' ' || ends) FROM {its}_levels")
    finally:
        await postgresql.run(f"DROP TABLE {its}_levels")
        await postgresql.run(f"DROP FUNCTION {its}_note CASCADE")
    assert found == ["read committed 6s"]


async def test_f26_a_look_of_mariadb_waits_for_no_row_whatever_its_isolation_level(hasty_mariadb: MariaDB) -> None:
    """With SERIALIZABLE, each SELECT of a transaction would lock the rows that it reads. An engine of the program has
    that level."""
    engine = create_async_engine(hasty_mariadb.url.replace("mariadb:", "mariadb+asyncmy:"))
    async with Redlock(SQLStore(engine), **OPTIONS) as client, client("a"):
        async with administered(hasty_mariadb.url) as admin:
            await admin.exec_driver_sql("SET SESSION wait_timeout = 100")
            await admin.exec_driver_sql("BEGIN")
            await admin.exec_driver_sql("SELECT 1 FROM asynclock FOR UPDATE")
            assert (await client.inspect("a")).holders
            await admin.exec_driver_sql("ROLLBACK")
    await engine.dispose()


async def test_f26_transactions_that_are_read_only_by_default(postgresql: Operated) -> None:
    """An administrator wants no writes, so nothing is written. The error says which setting; the client goes on by
    itself once it is off."""
    async with Redlock(postgresql.url, **OPTIONS) as client, client("a"):
        pass
    setting = f"ALTER ROLE {postgresql.user} SET default_transaction_read_only"
    await postgresql.run(f"{setting} = on")
    async with asyncio.timeout(2 * LIMIT):
        client = Redlock(postgresql.url, **{**OPTIONS, "patience": 1.0})
        with pytest.raises(QuorumUnavailable, match=r"or default_transaction_read_only is set; .* = off \(ALTER"):
            await client("a").acquire(timeout=0)
        assert not await client("a").locked()
        await postgresql.run(f"{setting} = off")
        async with client("a", timeout=LIMIT):
            pass
        await client.aclose()


# -- idle sessions -----------------------------------------------------------------------------------------------------


async def test_f15_idle_sessions_that_postgresql_closes(postgresql: Operated) -> None:
    """idle_session_timeout: the one that listens and the others, often at the same moment. New ones are made, and no
    outage is told."""
    its = postgresql.user
    # A new connection must not be idle for so long before its first statement, on a busy machine either.
    await postgresql.run(f"ALTER ROLE {its} SET idle_session_timeout = '1500ms'")
    events: list[Any] = []
    async with Redlock(postgresql.url, **OPTIONS) as client:
        client.subscribe(events.append)
        for _ in range(3):
            await asyncio.gather(*(some_ops_of(client, number) for number in range(6)))
            await _all_are_closed(postgresql)
    assert [each for each in events if type(each).__name__ == "NodeDown"] == []


async def some_ops_of(client: Redlock, number: int) -> None:
    async with client(f"a:{number}", timeout=LIMIT):
        pass


async def _all_are_closed(operated: Operated) -> None:
    """Returns once none of the sessions of now is there any more."""
    sessions = f"SELECT array_agg(pid) FROM pg_stat_activity WHERE usename = '{operated.user}'"
    now = set(await operated.run(sessions) or ())
    async with asyncio.timeout(LIMIT):
        while now & set(await operated.run(sessions) or ()):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
async def test_f15_idle_sessions_that_mariadb_closes(driver: str, name: str, hasty_mariadb: MariaDB) -> None:
    """wait_timeout."""
    pytest.importorskip(driver)
    events: list[Any] = []
    url = hasty_mariadb.url.replace("mariadb:", f"mariadb+{driver}:")
    async with administered(hasty_mariadb.url) as admin, Redlock(url, **OPTIONS) as client:
        client.subscribe(events.append)
        await admin.exec_driver_sql("SET SESSION wait_timeout = 100")
        async with client(name):
            pass
        async with asyncio.timeout(LIMIT):
            while await _sessions(admin) > 1:
                await asyncio.sleep(0.1)
        async with client(name):
            pass
    assert [each for each in events if type(each).__name__ == "NodeDown"] == []


async def _sessions(admin: Any) -> int:
    found = await admin.exec_driver_sql("SELECT count(*) FROM information_schema.processlist WHERE user = 'asynclock'")
    return int(found.scalar())
