"""A MariaDB that is demoted (`SET GLOBAL read_only = ON`) while clients use it, by a user whom it does not refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.sql import SQLStore
from asynclock.stores.sql.dialects import MySQL
from asynclock.stores.sql.errors import Demoted
from asynclock.stores.sql.lines import Line
from asynclock.stores.sql.mysql_single import statement
from asynclock.stores.sql.rows import FLOOR
from asynclock.stores.sql.sending import Single
from tests.support.services.mariadb import MariaDB, own_mariadb
from tests.support.sql_states import database_of, read_rows, session, transactions_only
from tests.support.waiters import LIMIT, LONG

DEMOTED, PROMOTED = "SET GLOBAL read_only = ON", "SET GLOBAL read_only = OFF"


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDB]:
    """A server of the module's own: the variable is that of all its clients."""
    with own_mariadb() as server:
        yield server


@pytest.fixture
async def admin(server: MariaDB) -> AsyncIterator[AsyncConnection]:
    """An operator. The server is the primary afterwards."""
    async with session(server.url) as admin:
        await admin.execution_options(isolation_level="AUTOCOMMIT")
        yield admin
        await admin.exec_driver_sql(PROMOTED)


@asynccontextmanager
async def by_engine(server: MariaDB) -> AsyncIterator[SQLStore]:
    """Over an engine of the user's."""
    engine = create_async_engine(server.url.replace("mariadb:", "mariadb+asyncmy:"))
    yield SQLStore(engine)
    await engine.dispose()


@asynccontextmanager
async def by_url(server: MariaDB) -> AsyncIterator[SQLStore]:
    """Its ops are single statements, where they can be."""
    yield SQLStore(server.url)


@pytest.mark.parametrize("store_at", [by_url, by_engine])
async def test_f24_a_demoted_primary_grants_and_renews_nothing(
    store_at: Callable[..., object], server: MariaDB, admin: AsyncConnection, name: str
) -> None:
    """Whether the name is free, new or held, alone or beside others: it is an outage, and not a refusal. Nothing is
    written. Once it is the primary again, the clients go on."""
    names = [f"{name}:{each}" for each in range(12)]
    async with (
        store_at(server) as store,  # type: ignore[attr-defined]
        Redlock(store, lease=LONG, patience=0, connect_timeout=LIMIT) as client,
        Redlock(store, patience=0, connect_timeout=LIMIT) as other,
    ):
        lease = await client(f"{name}:held").acquire()
        for each in names[:8]:
            await (await client(each).acquire()).release()
        await admin.exec_driver_sql(DEMOTED)
        before, _ = await read_rows(store)
        asked = [client(each).acquire() for each in names]
        asked += [other(each).acquire(timeout=0) for each in (f"{name}:held", f"{name}:new")]
        told = await asyncio.gather(*asked, lease.extend(), return_exceptions=True)
        assert [type(each) for each in told] == [QuorumUnavailable] * 15
        assert all("is read-only (it has read_only=ON)" in str(each) for each in told)
        assert (await read_rows(store))[0] == before
        await admin.exec_driver_sql(PROMOTED)
        await lease.extend()
        for each in names:
            async with client(each):
                pass


async def test_f24_a_release_waits_for_the_next_primary(server: MariaDB, admin: AsyncConnection, name: str) -> None:
    """The old one frees nothing: a release there would be carried out at no other server. So it is kept, and sent
    again."""
    store = SQLStore(server.url)
    async with Redlock(store, lease=LONG) as client, Redlock(server.url) as other:
        lease = await client(name).acquire()
        await admin.exec_driver_sql(DEMOTED)
        await lease.release()
        rows, _ = await read_rows(store, [name])
        assert rows[name].holds == 1
        await admin.exec_driver_sql(PROMOTED)
        async with other(name, timeout=LIMIT):
            pass


async def test_f24_a_transaction_that_is_committed_after_the_demotion_grants_nothing(
    server: MariaDB, admin: AsyncConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SET GLOBAL read_only does not wait for transactions that have written, and are not committed yet."""
    commit = MySQL.commit

    async def demoted_before(self: MySQL, line: Line) -> None:
        await admin.exec_driver_sql(DEMOTED)
        await commit(self, line)

    transactions_only(monkeypatch)
    store = SQLStore(server.url)
    async with Redlock(store, lease=LONG, patience=0, connect_timeout=LIMIT) as client:
        async with client(name):
            pass
        monkeypatch.setattr(MySQL, "commit", demoted_before)
        with pytest.raises(QuorumUnavailable, match="is read-only"):
            await client(name).acquire()
        rows, _ = await read_rows(store, [name])
        assert rows[name].holds == 1  # it was committed, and counts for nobody
        monkeypatch.undo()
        await admin.exec_driver_sql(PROMOTED)  # so that the undo need not wait


async def test_f24_a_packet_that_is_committed_after_the_demotion_grants_nothing(
    server: MariaDB, admin: AsyncConnection, name: str
) -> None:
    """The same of ops that leave in one packet: their COMMIT comes after the last statement."""
    store, sql = SQLStore(server.url), statement("asynclock", "acquire 1")
    acquires = [
        (sql, {**Single(f"{name}:{each}", "its id", "", 0, LIMIT, LIMIT)._asdict(), "floor": FLOOR})
        for each in range(2)
    ]
    waits = ("DO GET_LOCK(:gate, 60)", {"gate": name})
    waiting = "SELECT count(*) FROM information_schema.processlist WHERE state = 'User lock'"
    async with Redlock(store), asyncio.timeout(LIMIT):
        async with database_of(store).connected.pool.line() as line:
            await admin.exec_driver_sql(f"DO GET_LOCK('{name}', 0)")
            packet = asyncio.create_task(line.change_all([*acquires, waits]))
            while not (await admin.exec_driver_sql(waiting)).scalar():
                await asyncio.sleep(0.01)
            await admin.exec_driver_sql(DEMOTED)
            await admin.exec_driver_sql(f"DO RELEASE_LOCK('{name}')")
            with pytest.raises(Demoted):
                await packet
        rows, _ = await read_rows(store, [f"{name}:0", f"{name}:1"])
        assert [row.holds for row in rows.values()] == [1, 1]  # they were committed, and count for nobody


async def test_f24_a_notice_of_a_demoted_primary_grants_nothing(
    server: MariaDB, admin: AsyncConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release makes the next waiter the holder, and is committed after the demotion. The waiter finds its notice, and
    goes on waiting, until this server is the primary again."""
    commit, check, asked = MySQL.commit, MySQL.check_primary, asyncio.Event()
    demotes = False

    async def demoted_before(self: MySQL, line: Line) -> None:
        nonlocal demotes
        if demotes:
            demotes = False
            await admin.exec_driver_sql(DEMOTED)
        await commit(self, line)

    async def noted(self: MySQL, line: Line) -> None:
        try:
            await check(self, line)
        finally:
            asked.set()

    monkeypatch.setattr(MySQL, "commit", demoted_before)
    monkeypatch.setattr(MySQL, "check_primary", noted)
    async with Redlock(server.url, lease=LONG) as holds, Redlock(server.url, lease=LONG, patience=LONG) as waits:
        lease = await holds(name).acquire()
        waiting = asyncio.create_task(waits(name).acquire(timeout=None))
        while not (await holds.inspect(name)).waiters:
            await asyncio.sleep(0.01)
        demotes = True
        await lease.release()
        async with asyncio.timeout(LIMIT):
            await asked.wait()
            assert not waiting.done()
            await admin.exec_driver_sql(PROMOTED)
            await (await waiting).release()
