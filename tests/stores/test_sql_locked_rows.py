"""Locks of other sessions on PostgreSQL (HAZARDS F6): on a row, on the whole table, and a commit that waits for a
standby that is gone. The other session is a connection of the test's own."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from asynclock import Lease, LockTimeout, QuorumUnavailable, Redlock
from asynclock.events import NodeDown
from asynclock.stores.sql import SQLStore, engines, lines, pool, single, transactions
from tests.support.gone_standby import standby_gone
from tests.support.services.postgresql import PostgreSQL, own_postgresql
from tests.support.waiters import LIMIT, LONG, until

PROMPT = 4.0
"""Seconds in which other names are served: less than the limit of a statement, and enough for a busy machine."""

AT_ONCE = 6
"""Connections of a client: four for its ops, one that listens, one that is just being closed."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """A server of the module's own, whose settings a test may change."""
    with own_postgresql() as server:
        yield server


@asynccontextmanager
async def another_session(server: PostgreSQL, *statements: str) -> AsyncIterator[asyncpg.Connection]:
    """With these statements in an open transaction."""
    session = await asyncpg.connect(server.url)
    try:
        await session.execute("BEGIN")
        for each in statements:
            await session.execute(each)
        yield session
    finally:
        session.terminate()


def locks(*names: str, table: str = "asynclock") -> str:
    """Locks the rows of these names."""
    return f"SELECT 1 FROM {table} WHERE resource_name IN ({', '.join(map(repr, names))}) FOR UPDATE"


async def make_rows(client: Redlock, *names: str) -> None:
    for each in names:
        async with client(each):
            pass


async def told(client: Redlock, name: str) -> bool:
    """Acquire it for a moment; whether the acquire was told as failed."""
    try:
        return await client(name).acquire(timeout=0) is None
    except (QuorumUnavailable, LockTimeout):
        return True


async def held(session: asyncpg.Connection, table: str) -> list[str]:
    """The names that anybody holds."""
    now = "extract(epoch FROM clock_timestamp())"
    found = await session.fetch(f"SELECT resource_name FROM {table} WHERE count > 0 AND expires_at > {now}")
    return [each for (each,) in found]


async def test_f6_a_locked_row_delays_no_other_name(server: PostgreSQL, name: str) -> None:
    """Nine acquires leave in one statement. One of them waits for its row, and then holds its name."""
    names = [f"{name}:{number}" for number in range(9)]
    async with Redlock(server.url, lease=LONG) as client:
        await make_rows(client, *names)
        async with another_session(server, locks(names[4])) as session:
            acquiring = [asyncio.create_task(client(each).acquire(timeout=None)) for each in names]
            others = [each for each in acquiring if each is not acquiring[4]]
            async with asyncio.timeout(PROMPT):
                leases = await asyncio.gather(*others)
                for each in leases:
                    await each.release()
            assert not acquiring[4].done()
            await session.execute("ROLLBACK")
            async with asyncio.timeout(LIMIT):
                assert (await acquiring[4]).held


async def test_f6_a_row_that_another_session_inserts_delays_no_other_name(server: PostgreSQL, name: str) -> None:
    """It is not committed, so nobody sees it, and an INSERT of the same name waits for it."""
    inserted = f"INSERT INTO asynclock VALUES ('{name}:4', '', '', 0, 1, 0, 0, 0, 0, NULL)"
    async with Redlock(server.url, lease=LONG) as client:
        await make_rows(client, name)
        async with another_session(server, inserted):
            acquiring = [asyncio.create_task(client(f"{name}:{number}").acquire(timeout=None)) for number in range(9)]
            async with asyncio.timeout(PROMPT):
                await asyncio.gather(*(each for each in acquiring if each is not acquiring[4]))
            assert not acquiring[4].done()
        async with asyncio.timeout(LIMIT):
            assert (await acquiring[4]).held


async def test_f6_many_locked_rows_do_not_take_all_connections(server: PostgreSQL, name: str) -> None:
    """An op of two names needs a transaction. One gets a connection while 24 others wait for their rows; and the node
    is not down."""
    names, events = [f"{name}:{number}" for number in range(24)], list[object]()
    async with Redlock(server.url, lease=LONG) as client:
        client.subscribe(lambda event: events.append(event) if isinstance(event, NodeDown) else None)
        await make_rows(client, *names)
        async with another_session(server, locks(*names)) as session:
            acquiring = [asyncio.create_task(client.multi(each, f"{each}:b").acquire(timeout=None)) for each in names]
            await asyncio.sleep(0.1)  # so that they wait already
            async with asyncio.timeout(PROMPT), client.multi(f"{name}:a", f"{name}:b"):
                pass
            assert not any(each.done() for each in acquiring)
            await session.execute("ROLLBACK")
            async with asyncio.timeout(LIMIT):
                assert all(isinstance(each, Lease) for each in await asyncio.gather(*acquiring))
    assert not events


async def test_f6_a_multi_that_waits_for_a_row_keeps_no_renewal_waiting(
    server: PostgreSQL, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of the same client holds the first name. Its renewal comes after the multi, which waits for less time than
    an op of one name."""
    monkeypatch.setattr(transactions, "LIMIT", 10 * LIMIT)
    a, b, store = f"{name}:a", f"{name}:b", SQLStore(server.url)
    async with Redlock(store, lease=LONG, patience=LIMIT) as client:
        await make_rows(client, a, b)
        async with client(a, renew=False) as lease, another_session(server, locks(b)):
            asking = asyncio.create_task(client.multi(a, b).acquire(timeout=None))
            await until(lambda: store.delay([b], math.inf))
            async with asyncio.timeout(LIMIT):
                await lease.extend()
            asking.cancel()
            await asyncio.wait({asking})


@pytest.mark.parametrize("how", ["row", "table", "standby"])
async def test_f6_what_was_told_as_failed_is_held_by_nobody(
    server: PostgreSQL, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows or the table are locked, or commits wait for a standby that is gone, for longer than a statement may take.
    The statements of the acquires end at the server, so none is carried out later, and the client has no more
    connections than usual."""
    monkeypatch.setattr(pool, "LIMIT", 0.5)
    table, names = f"locked_{how}", [f"{name}:{number}" for number in range(6)]
    async with Redlock(SQLStore(server.url, table), lease=LONG, node_timeout=1.0, patience=LIMIT) as client:
        await make_rows(client, *names)
        async with stopped(server, how, table, names) as session:
            for _ in range(3):
                assert all(await asyncio.gather(*(told(client, each) for each in names)))
            await become(lambda: waiting(session, table), 0)
            async with asyncio.timeout(LIMIT):  # the process of one that was closed ends a moment later
                while await connections(session) > AT_ONCE:
                    await asyncio.sleep(0.01)
        async with another_session(server) as session:
            await become(lambda: held(session, table), [])


@asynccontextmanager
async def stopped(server: PostgreSQL, how: str, table: str, names: list[str]) -> AsyncIterator[asyncpg.Connection]:
    """Nobody can lock these names; a session that can look on."""
    if how != "standby":
        lock = f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE" if how == "table" else locks(*names, table=table)
        async with another_session(server, lock) as session:
            yield session
        return
    async with standby_gone(server) as session:
        yield session


async def test_f6_releases_that_wait_for_a_standby_are_no_outage(
    server: PostgreSQL, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers, and ends each statement when it is asked to. The release is sent again and again. It leaves
    the name taken for a while, so its commit is awaited."""
    for module in (pool, single, transactions):
        monkeypatch.setattr(module, "LIMIT", 0.5)
    for module in (pool, lines):
        monkeypatch.setattr(module, "STOPPING", LIMIT)
    deliver, tries = SQLStore.deliver, asyncio.Semaphore(0)

    def counted(*arguments: Any) -> Any:
        tries.release()
        return deliver(*arguments)

    monkeypatch.setattr(SQLStore, "deliver", counted)
    table, events = name.replace(":", "_"), list[object]()
    async with Redlock(SQLStore(server.url, table), lease=LONG, node_timeout=LIMIT) as client:
        client.subscribe(events.append)
        lease = await client(name, min_hold=LONG).acquire(timeout=None)
        assert lease
        async with stopped(server, "standby", table, [name]), asyncio.timeout(LIMIT):
            await lease.release()
            for _ in range(3):  # the third begins after the second has failed
                await tries.acquire()
    assert not any(isinstance(each, NodeDown) for each in events)


@asynccontextmanager
async def with_statements_that_cannot_be_ended(
    server: PostgreSQL, monkeypatch: pytest.MonkeyPatch, number: int
) -> AsyncIterator[tuple[pool.Pool, list[int]]]:
    """A pool of two places, and the processes of the server that stand still and so obey no cancel. Each of the two
    places has had so many of them."""
    monkeypatch.setattr(pool, "LIMIT", 0.5)
    monkeypatch.setattr(lines, "STOPPING", 0.1, raising=False)
    engine = engines.engine_of(engines.url_of(server.url), LIMIT, pooler=False)
    used, frozen = pool.Pool(engines.EngineSource(engine, LIMIT, own=True), size=2, pooler=False), list[int]()

    async def use() -> None:
        async with used.line() as line:
            assert isinstance(line, lines.AsyncpgLine)
            frozen.append(line.driver.get_server_pid())
            os.kill(frozen[-1], signal.SIGSTOP)
            await line.run("SELECT 1")

    try:
        async with asyncio.timeout(LIMIT):
            for _ in range(number):
                for error in await asyncio.gather(use(), use(), return_exceptions=True):
                    assert isinstance(error, TimeoutError)
        yield used, frozen
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        await used.aclose()


async def test_f6_statements_that_cannot_be_ended_leave_few_connections(
    server: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two places is used twice, since it might be the network, and then no more."""
    async with with_statements_that_cannot_be_ended(server, monkeypatch, 3) as (_, frozen):
        assert len(frozen) <= 5  # one of them looks whether the server is well again


async def test_f6_a_minute_after_statements_that_could_not_be_ended_all_places_are_there(
    server: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two connections are in use at the same time again."""
    both = asyncio.Barrier(2)

    async def use(used: pool.Pool) -> None:
        async with used.line():
            await both.wait()

    async with with_statements_that_cannot_be_ended(server, monkeypatch, 2) as (used, _):
        monkeypatch.setattr(pool, "LIMIT", LIMIT)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + 61.0)
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(use(used), use(used))


async def waiting(session: asyncpg.Connection, table: str) -> int:
    """The acquires that wait at the server."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE $1"
    await look_again(session)
    found: int = await session.fetchval(sql, f"%INSERT INTO {table} AS l%")
    return found


async def connections(session: asyncpg.Connection) -> int:
    """Those of other programs than this session."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    await look_again(session)
    found: int = await session.fetchval(sql)
    return found


async def look_again(session: asyncpg.Connection) -> None:
    """Within a transaction the server shows the same sessions and numbers as at the first look."""
    await session.execute("SELECT pg_stat_clear_snapshot()")


async def become(look: Callable[[], Awaitable[object]], value: object) -> None:
    """Wait until a look finds that."""
    found: object = None
    try:
        async with asyncio.timeout(LIMIT):
            while (found := await look()) != value:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"it is {found}, not {value}") from None


@pytest.mark.parametrize("number", [1, 8])
async def test_f6_an_open_transaction_elsewhere_does_not_make_ops_slower(
    server: PostgreSQL, name: str, number: int
) -> None:
    """All old versions of a row stay, and more and more entries of the index lead to them. An op reads no more entries
    than before, also where ops of several names share a statement, and where the server has counted rows and pages."""
    oldest = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT 1"
    names = [f"{name}:{each}" for each in range(number)]
    async with Redlock(SQLStore(server.url, "kept")) as client:
        await make_rows(client, *names)
    async with another_session(server, *oldest) as session:
        before = await entries(server, session, names, 30)
        await make_versions(server, 20_000)
        # The fewest of three: on a busy machine an op may be repeated as a transaction, which reads more of them.
        after = min([await entries(server, session, names, 30) for _ in range(3)])
        assert after < 2 * before + 20 * number  # there are hundreds


async def make_versions(server: PostgreSQL, number: int) -> None:
    """Of the rows of that table, in turn."""
    session = await asyncpg.connect(server.url)
    try:
        await session.execute(
            f"""DO $$ DECLARE places tid[]; place tid; BEGIN
                SELECT array_agg(ctid) INTO places FROM kept;
                FOR turn IN 1..{number} LOOP
                    place := places[1 + turn % array_length(places, 1)];
                    UPDATE kept SET update_time = update_time WHERE ctid = place RETURNING ctid INTO place;
                    places[1 + turn % array_length(places, 1)] := place;
                END LOOP;
            END $$"""
        )
        await session.execute("ANALYZE kept")
    finally:
        await session.close()


async def entries(server: PostgreSQL, session: asyncpg.Connection, names: Sequence[str], cycles: int) -> float:
    """Entries of the index that a cycle of these names reads. The server counts them once the sessions of a client have
    ended."""

    async def read() -> int:
        await look_again(session)
        found: int = await session.fetchval("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE relname = 'kept'")
        return found

    already = await read()
    async with Redlock(SQLStore(server.url, "kept"), lease=LONG) as client:
        for _ in range(cycles):
            await asyncio.gather(*(make_rows(client, each) for each in names))
    await become(lambda: connections(session), 0)
    return (await read() - already) / cycles
