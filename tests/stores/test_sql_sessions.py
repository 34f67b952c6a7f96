"""Tables and sessions of databases that are set up in another way than usual, and single statements over them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import QuorumUnavailable, Redlock
from asynclock.stores.sql import SQLStore, engines, lines
from asynclock.stores.sql import pool as pools
from asynclock.stores.sql.engines import url_of
from asynclock.stores.sql.lines import AsyncmyLine, AsyncpgLine
from asynclock.stores.sql.pool import Overdue
from asynclock.stores.sql.sending import Single
from tests.support.far_servers import FarDatabase
from tests.support.probes import acquisitions_of, waits_for_notice
from tests.support.services.mariadb import MariaDB, own_mariadb
from tests.support.sql_states import database_of, read_rows, session
from tests.support.waiters import LIMIT, LONG, healthy, until

BACKGROUND = ["looks for notices", "removes rows", "looks at the table", "watches a connection"]


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with own_mariadb() as server:
        yield server


@pytest.mark.parametrize("service", ["postgresql", "mariadb"])
async def test_a_lock_without_fencing_of_a_new_name(service: str, name: str, request: pytest.FixtureRequest) -> None:
    """Its fence is 0, which is not taken for "nothing was done": the release finds its hold."""
    async with Redlock(request.getfixturevalue(f"{service}_url")) as client:
        async with client(name, fencing=False) as lease:
            await lease.extend()
        async with client(name, fencing=False):
            pass


async def test_a_table_with_partitions(postgresql_url: str, name: str) -> None:
    """Rows of several partitions have the same place (ctid). The release of one name frees no other."""
    table = re.sub(r"\W", "_", name)
    url = f"{postgresql_url}?asynclock_table={table}"
    admin = await asyncpg.connect(postgresql_url)
    await admin.execute(
        f'CREATE TABLE {table} (resource_name TEXT COLLATE "C" NOT NULL, owner TEXT NOT NULL, node_info TEXT NOT NULL, '
        "count INTEGER NOT NULL, fence BIGINT NOT NULL, expires_at DOUBLE PRECISION, keep_until DOUBLE PRECISION, "
        "create_time DOUBLE PRECISION NOT NULL, update_time DOUBLE PRECISION NOT NULL, state TEXT, "
        "PRIMARY KEY (resource_name)) PARTITION BY HASH (resource_name)"
    )
    for number in range(4):
        await admin.execute(
            f"CREATE TABLE {table}_{number} PARTITION OF {table} FOR VALUES WITH (MODULUS 4, REMAINDER {number})"
        )
    async with Redlock(url, lease=LIMIT) as client, Redlock(url) as other:
        leases = [await client(f"{name}:{each}").acquire(timeout=None) for each in range(12)]
        both = await client.multi(f"{name}:a", f"{name}:b").acquire(timeout=None)  # rows that a transaction writes
        await leases[0].release()
        await both.release()
        taken = [each for each in range(1, 12) if await other(f"{name}:{each}").acquire(timeout=0)]
        assert taken == []
    await admin.execute(f"DROP TABLE {table}")
    await admin.close()


async def test_a_server_that_chains_transactions(mariadb: MariaDB, name: str) -> None:
    """A COMMIT begins the next transaction there. What a single statement grants is nevertheless committed."""
    async with session(mariadb.url) as admin:
        await admin.exec_driver_sql("SET GLOBAL completion_type = CHAIN")
    async with Redlock(mariadb.url) as client, Redlock(mariadb.url) as other:
        async with client.multi(name, f"{name}:3"):  # by transactions
            pass
        async with client(f"{name}:2"):
            assert await other(f"{name}:2").acquire(timeout=0) is None
    if find_spec("aiomysql"):
        async with Redlock(mariadb.url.replace("mariadb:", "mariadb+aiomysql:")) as client, client.multi(name, "any"):
            pass
    async with session(mariadb.url) as admin:
        await admin.exec_driver_sql("SET GLOBAL completion_type = NO_CHAIN")


async def test_f1_the_clock_of_a_session_was_stopped_a_moment_ago(
    mariadb_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single statement goes by the clock of the transactions: the row lives for the whole lease."""

    class Session(AsyncmyLine):
        async def change(self, sql: str, params: Mapping[str, Any]) -> int:
            await self.run("SET timestamp = UNIX_TIMESTAMP(SYSDATE(6)) - 20")
            return await super().change(sql, params)

    store = SQLStore(mariadb_url)
    await store.create_schema()
    _, before = await read_rows(store, [name])
    monkeypatch.setattr(engines, "AsyncmyLine", Session)
    async with Redlock(store, lease=LIMIT) as client, client(name):
        rows, _ = await read_rows(store, [name])
        assert (rows[name].expires_at or 0.0) >= before + LIMIT


async def test_an_op_that_nobody_waits_for_is_not_sent(postgresql_url: str, name: str) -> None:
    """Its client has closed while it waited for others, and the name may be another client's."""
    store = SQLStore(postgresql_url)
    async with Redlock(store) as client:
        await client.health()
        singles = database_of(store).singles
        assert singles is not None
        asked = {}
        for each in "abcd":
            values = Single(f"{name}:{each}", "owner", "", 1, LIMIT, LIMIT)
            asked[each] = singles.add("acquire 1", values, lambda fence, error: error)
        asked["c"].forget()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(asked[each] for each in "abd"))
        rows, _ = await read_rows(store, [f"{name}:{each}" for each in "abcd"])
    assert {each[-1] for each in rows} == set("abd")


async def test_locked_rows_of_mariadb_delay_no_other_name(
    mariadb: MariaDB, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the client has connections. Only some of these wait for a row at the same time."""
    monkeypatch.setitem(lines.MYSQL_SETTINGS, "innodb_lock_wait_timeout", "3")
    names = [f"{name}:{each}" for each in range(engines.CONNECTIONS)]
    options: Any = {"lease": LIMIT, "node_timeout": 2.0, "patience": 0, "connect_timeout": LIMIT}
    async with aclosing(Redlock(mariadb.url, **options)) as client:
        await healthy(client)
        for each in (*names, f"{name}:other"):
            async with client(each):
                pass
        async with session(mariadb.url) as admin, session(mariadb.url) as watching:
            for each in names:
                await admin.exec_driver_sql(f"SELECT 1 FROM asynclock WHERE resource_name = '{each}' FOR UPDATE")
            waiting = [asyncio.create_task(client(each).acquire(timeout=0)) for each in names]
            count = "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"
            async with asyncio.timeout(LIMIT):
                while (await watching.exec_driver_sql(count)).scalar() == 0:
                    await asyncio.sleep(0.2)  # the table is made anew only if nobody has read it for 0.1 s
            async with client(f"{name}:other"):  # a wait for a row takes 3 s, more than its node timeout
                pass
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, QuorumUnavailable) or each for each in found)


async def test_a_begin_that_fails_leaves_no_transaction(postgresql_url: str, name: str) -> None:
    """BEGIN and its settings are one message. If one of these fails, the connection is rolled back."""
    store = SQLStore(postgresql_url)
    async with Redlock(store, patience=0, connect_timeout=LIMIT) as client:
        async with client(name):
            pass
        dialect = database_of(store).dialect
        dialect.begin = "BEGIN; SELECT 1 / 0"
        with pytest.raises(QuorumUnavailable):
            await client.multi(name, f"{name}:2").acquire(timeout=0)
        del dialect.begin
        for _ in range(2 * engines.CONNECTIONS):
            async with client.multi(name, f"{name}:2"):
                pass


async def test_a_connection_whose_rollback_was_refused_is_not_used_again(
    postgresql_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statement was cancelled in a transaction. The cancel may reach the server late, and end the ROLLBACK. The
    statement has ended nevertheless."""
    run = AsyncpgLine.run

    async def refused(line: AsyncpgLine, sql: str) -> None:
        await run(line, "SELECT 1" if sql == "ROLLBACK" else sql)  # an error, since the transaction has failed

    store = SQLStore(postgresql_url, name.replace(":", "_"))
    async with Redlock(store, patience=LIMIT) as client:
        await healthy(client)
        pool = database_of(store).connected.pool
        monkeypatch.setattr(AsyncpgLine, "run", refused)
        for module in (lines, pools):
            monkeypatch.setattr(module, "STOPPING", LIMIT)
        with pytest.raises(Overdue) as caught:
            async with pool.line(asyncio.get_running_loop().time() + 4.0) as used:
                await used.run("BEGIN")
                await used.run("SELECT pg_sleep(60)")
        assert caught.value.ended
        async with pool.line() as line:
            assert line is not used
            assert await line.fetch("SELECT 1") == [(1,)]


@pytest.mark.usefixtures("patient_returns")
async def test_an_engine_gets_its_connections_back_with_their_settings(postgresql_url: str, name: str) -> None:
    """Also those that the program has set itself."""
    engine = create_async_engine(postgresql_url.replace("postgresql:", "postgresql+asyncpg:"))
    connected = list[Any]()

    @event.listens_for(engine.sync_engine, "connect")
    def set_up(connection: Any, record: object) -> None:
        del record
        connected.append(connection)
        cursor = connection.cursor()
        cursor.execute("SET jit = off")
        cursor.execute("SET enable_hashjoin = on")
        cursor.close()
        connection.commit()

    async with Redlock(SQLStore(engine)) as client, client(name):
        pass
    async with AsyncExitStack() as stack:
        made, again = list(connected), list[Any]()
        for _ in range(engine.sync_engine.pool.checkedin()):  # type: ignore[attr-defined]
            back = await stack.enter_async_context(engine.connect())
            again.append((await back.get_raw_connection()).dbapi_connection)
            found = [(await back.exec_driver_sql(f"SHOW {each}")).scalar() for each in ("jit", "enable_hashjoin")]
            assert found == ["off", "on"]
        assert any(each in made for each in again)
    await engine.dispose()


SET = {"innodb_lock_wait_timeout": 7, "sql_mode": "ANSI_QUOTES", "tx_isolation": "SERIALIZABLE"}


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
@pytest.mark.usefixtures("patient_returns")
async def test_an_engine_of_mariadb_gets_its_connections_back_with_their_settings(
    mariadb: MariaDB, name: str, driver: str
) -> None:
    """Also those that the program has set itself."""
    pytest.importorskip(driver)
    set_up = ", ".join(f"{each} = {value!r}" for each, value in SET.items())
    options = {"init_command": f"SET SESSION {set_up}, completion_type = 'CHAIN'"}
    # With another isolation_level SQLAlchemy itself sets that of a connection that returns.
    url = url_of(mariadb.url.replace("mariadb:", f"mariadb+{driver}:"))
    engine = create_async_engine(url, connect_args=options, isolation_level="AUTOCOMMIT")
    made = list[Any]()
    event.listen(engine.sync_engine, "connect", lambda connection, _: made.append(connection))
    async with Redlock(SQLStore(engine)) as client:
        for _ in range(3):
            async with client(name):
                pass
    async with AsyncExitStack() as stack:
        again = list[Any]()
        for _ in range(engine.sync_engine.pool.checkedin()):  # type: ignore[attr-defined]
            back = await stack.enter_async_context(engine.connect())
            again.append((await back.get_raw_connection()).dbapi_connection)
            variables = ", ".join(f"@@SESSION.{each}" for each in (*SET, "completion_type"))
            assert (await back.exec_driver_sql(f"SELECT {variables}")).one() == (*SET.values(), "CHAIN")
        assert any(each in made for each in again)
    await engine.dispose()


@pytest.mark.parametrize("service", ["postgresql", "mariadb"])
async def test_an_engine_that_is_far_away_gets_its_connections_back(
    service: str, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes several round trips. One that was cut meanwhile could keep its place in the pool for ever."""
    monkeypatch.setattr(pools, "_KEPT", 0.1)
    url = request.getfixturevalue(f"{service}_url")
    async with FarDatabase(urlsplit(url).port or 0) as proxy:
        engine = create_async_engine(url_of(url.replace(f":{urlsplit(url).port}/", f":{proxy.port}/")))
        ended = list[Any]()
        for each in ("close", "invalidate"):
            event.listen(engine.sync_engine, each, lambda *call: ended.append(call))
        its: Any = engine.sync_engine.pool
        async with Redlock(SQLStore(engine), lease=LONG, node_timeout=LIMIT, connect_timeout=LIMIT) as client:
            async with client(name):
                pass
            proxy.way = 0.05
            async with client(name):
                pass
            await until(lambda: its.checkedin() > 0 and its.checkedout() == 0)
            assert ended == []
        await engine.dispose()


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
async def test_an_engine_whose_sessions_chain_transactions(mariadb: MariaDB, name: str, driver: str) -> None:
    """In the one that is open when a connection comes from its pool a grant would be lost."""
    pytest.importorskip(driver)
    options = {"init_command": "SET SESSION completion_type = 'CHAIN'"}
    url = url_of(mariadb.url.replace("mariadb:", f"mariadb+{driver}:"))
    engine = create_async_engine(url, connect_args=options, isolation_level="AUTOCOMMIT")
    async with AsyncExitStack() as stack:  # afterwards the pool sends a ROLLBACK, which begins the next transaction
        for _ in range(engines.CONNECTIONS):
            await stack.enter_async_context(engine.connect())
    async with Redlock(SQLStore(engine), lease=LONG) as client, Redlock(mariadb.url) as other:
        async with client(name):  # the first op is a transaction
            pass
        for turn in range(3):  # each turn needs more connections
            names = [f"{name}:{turn}:{each}" for each in range(2 * engines.CONNECTIONS)]
            leases = await asyncio.gather(*(client(each).acquire(timeout=None) for each in names))
            assert await asyncio.gather(*(other(each).acquire(timeout=0) for each in names)) == [None] * len(names)
            await asyncio.gather(*(each.release() for each in leases))
    await engine.dispose()


@pytest.mark.parametrize("service", ["postgresql", "mariadb"])
async def test_statements_are_sent_although_the_program_cancels_all_tasks(
    service: str, name: str, request: pytest.FixtureRequest
) -> None:
    """Also those of the library that send them, in the turn in which they begin: the ops that wait get others."""
    async with Redlock(request.getfixturevalue(f"{service}_url"), lease=LIMIT, patience=LIMIT) as client:
        for _ in range(4):
            asking = [asyncio.create_task(client(f"{name}:{each}").acquire(timeout=None)) for each in range(8)]
            senders: list[asyncio.Task[Any]] = []
            while not senders and not all(each.done() for each in asking):
                await asyncio.sleep(0)
                senders = [each for each in asyncio.all_tasks() if each.get_name() == "asynclock sends statements"]
            for each in senders:
                each.cancel()
            async with asyncio.timeout(LIMIT):
                for lease in await asyncio.gather(*asking):
                    await lease.release()


@pytest.mark.parametrize("service", ["postgresql", "mariadb"])
async def test_the_background_begins_again_after_the_program_has_cancelled_all_tasks(
    service: str, name: str, request: pytest.FixtureRequest
) -> None:
    """As asyncio.run does after Ctrl-C, in a program that goes on: what looks for notices, at the table, at rows that
    have ended, and at the connection that listens. A waiter is notified as before."""
    url, long = request.getfixturevalue(f"{service}_url"), 10 * LONG  # its ticket is not renewed within the test

    def background() -> set[str]:
        return {each.get_name() for each in asyncio.all_tasks()} & {f"asynclock {each}" for each in BACKGROUND}

    def client() -> Redlock:
        return Redlock(SQLStore(url), lease=long, max_lease=long, patience=LIMIT, node_timeout=LIMIT)

    async with client() as holder, client() as waiter:
        lease = await holder(name).acquire()
        async with waiter(f"{name}:other"):
            pass
        before = background()
        assert len(before) == 3
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        waiting = asyncio.create_task(waiter(name).acquire())
        await until(lambda: [waits_for_notice(each) for each in acquisitions_of(waiter)] == [True])
        await until(lambda: background() >= before)
        async with asyncio.timeout(LIMIT):
            await lease.release()
            await (await waiting).release()
