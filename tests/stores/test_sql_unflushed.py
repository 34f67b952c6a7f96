"""The commits of PostgreSQL that a client does not await: those of a release that frees a name and does nothing else
(`stores/sql/single.py`)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from asynclock import Redlock
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.sql import SQLStore, engines, unflushed
from asynclock.stores.sql.dialects import Dialect
from asynclock.stores.sql.pool import Pool
from asynclock.stores.sql.rows import FLOOR
from asynclock.stores.sql.sending import Single
from asynclock.stores.sql.single import statement, statement_of_one
from asynclock.stores.sql.unflushed import MOST, RECENT, Unflushed
from tests.support.gone_standby import standby_gone, waits
from tests.support.probes import acquisitions_of, nodes_of, waits_for_notice
from tests.support.services.postgresql import PostgreSQL, own_postgresql
from tests.support.sql_states import database_of, read_rows
from tests.support.waiters import LIMIT, LONG, until

TABLE = "unflushed"
HELD = {"kilo": 5, "lima": 7}
"""Names that are held, each by an owner of that name, and the fences of their rows."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """A server of the module's own, whose settings a test changes."""
    with own_postgresql() as server:
        yield server


async def in_statements(client: Redlock, store: SQLStore) -> Unflushed:
    """Returns once its ops are single statements, because push messages have come."""
    async with asyncio.timeout(LIMIT):
        while (found := database_of(store).unflushed) is None:
            async with client("first"):
                await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize("number", [1, 3])
async def test_a_release_waits_for_no_standby(server: PostgreSQL, name: str, number: int) -> None:
    """It ends, alone or in a statement with others, and the names are free."""
    names = [f"{name}:{each}" for each in range(number)]
    store = SQLStore(server.url, TABLE)
    async with Redlock(store, lease=LONG, node_timeout=LIMIT) as client:
        await in_statements(client, store)
        leases = [await client(each).acquire(timeout=None) for each in names]
        async with standby_gone(server) as session, asyncio.timeout(LIMIT):
            releasing = [asyncio.create_task(each.release()) for each in leases]
            while not all(each.done() for each in releasing):
                assert not await waits(session, "WITH %")
            assert not any(await asyncio.gather(*(client(each).locked() for each in names)))


@asynccontextmanager
async def without_log() -> AsyncIterator[tuple[PostgreSQL, Callable[[], Awaitable[None]]]]:
    """A server that writes its log only for commits that are awaited; and what makes it crash, and waits until it has
    started again."""
    with own_postgresql() as server:
        session = await asyncpg.connect(server.url)
        writer: int = await session.fetchval("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
        os.kill(writer, signal.SIGSTOP)

        async def crash() -> None:
            os.kill(writer, signal.SIGKILL)  # the server ends all its processes, and starts anew
            await until(session.is_closed)
            async with asyncio.timeout(LIMIT):
                while not await connects(server):
                    await asyncio.sleep(0.01)

        yield server, crash


async def connects(server: PostgreSQL) -> bool:
    try:
        session = await asyncpg.connect(server.url)
    except (asyncpg.PostgresError, OSError):
        return False
    await session.close()
    return True


async def test_f6_a_release_that_was_lost_in_a_crash_is_sent_again(name: str) -> None:
    """By the client, once it is connected again. Only that of the last name was lost."""
    async with without_log() as (server, crash):
        store = SQLStore(server.url, TABLE)
        async with Redlock(store, lease=LONG, node_timeout=LIMIT, patience=LIMIT) as client:
            kept = await in_statements(client, store)
            for each in "abc":
                async with client(f"{name}:{each}") as lease:
                    pass
            assert len(kept) == 1
            await crash()
            async with asyncio.timeout(LIMIT), client(f"{name}:c") as after:
                assert after.fence > lease.fence
                assert not len(kept)
                rows, _ = await read_rows(store, [f"{name}:c"])
                assert rows[f"{name}:c"].state is None  # no tombstone, which would make all ops of the name slower


async def test_f6_a_release_that_was_lost_is_sent_again_however_long_the_server_is_away(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recent counts from when the client has noticed the outage."""
    async with without_log() as (server, _):
        store = SQLStore(server.url, TABLE)
        async with Redlock(store, lease=LONG, node_timeout=LIMIT, patience=LIMIT) as client:
            await in_statements(client, store)
            async with client(name):
                pass
            await asyncio.to_thread(server.stop)
            await until(lambda: nodes_of(client)[0].error is not None)
            monkeypatch.setattr(unflushed, "RECENT", 0.0)
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(LIMIT), client(name):
                pass


async def test_f6_a_hold_whose_release_was_lost_in_a_crash_is_there_again(name: str) -> None:
    """If the client that has released it has closed: until its lease ends, or somebody breaks it."""
    async with without_log() as (server, crash):
        store, options = SQLStore(server.url, TABLE), dict[str, Any](lease=LONG, node_timeout=LIMIT, patience=LIMIT)
        async with Redlock(store, **options) as client:
            await in_statements(client, store)
            async with client(name) as before:
                pass
        await crash()
        async with Redlock(SQLStore(server.url, TABLE), **options) as client:
            assert await client(name).acquire(timeout=0) is None
            assert await client.break_lock(name)
            async with asyncio.timeout(LIMIT), client(name) as after:
                assert after.fence > before.fence


async def test_a_release_that_serves_a_waiter_waits_for_the_standby(server: PostgreSQL, name: str) -> None:
    """Else a crash of the server could give the hold back to one whose lease ends before that of the waiter."""
    async with Redlock(SQLStore(server.url, TABLE), lease=LONG, node_timeout=LIMIT) as client:
        async with Redlock(SQLStore(server.url, TABLE), lease=LONG, node_timeout=LIMIT) as other:
            lease = await client(name).acquire(timeout=None)
            waiting = asyncio.create_task(other(name).acquire(timeout=None))
            await until(lambda: [waits_for_notice(each) for each in acquisitions_of(other)] == [True])
            async with standby_gone(server) as session, asyncio.timeout(LIMIT):
                releasing = asyncio.create_task(lease.release())
                while not await waits(session):
                    await asyncio.sleep(0.01)
                assert not releasing.done()
                assert not waiting.done()
            async with asyncio.timeout(LIMIT):
                await (await waiting).release()
                await releasing


@pytest.fixture
async def pool(server: PostgreSQL) -> AsyncIterator[Pool]:
    """With a table of two holds and a free name."""
    source = engines.EngineSource(engines.engine_of(engines.url_of(server.url), LIMIT, pooler=False), LIMIT, own=True)
    pool = Pool(source, size=1, pooler=False)
    await SQLStore(server.url, TABLE).create_schema()
    async with pool.line() as line:
        await line.run(f"DELETE FROM {TABLE}")
        for name, fence in {**HELD, "mike": 3}.items():
            owner, count, ends = (name, 1, "1e18") if name in HELD else ("", 0, "0")
            await line.run(
                f"INSERT INTO {TABLE} (resource_name, owner, node_info, count, fence, expires_at, create_time, "
                f"update_time) VALUES ('{name}', '{owner}', '', {count}, {fence}, {ends}, 0, 0)"
            )
    yield pool
    await pool.aclose()


async def flushes(pool: Pool, build: Callable[[str, str, str], str], group: str, numbers: dict[str, int]) -> bool:
    """Whether the commit of this statement is awaited. It changes all of these rows."""
    values = [Single(name, name, "", number, 10.0, 10.0) for name, number in numbers.items()]
    params = values[0]._asdict()
    if build is statement:
        params = {field: [getattr(each, field) for each in values] for field in Single._fields}
    async with pool.line() as line:
        await line.run("BEGIN")
        found = await line.fetch(build(TABLE, Dialect.now, group), {**params, "floor": FLOOR})
        assert len(found) == len(values)
        ((setting,),) = await line.fetch("SHOW synchronous_commit")
        await line.run("ROLLBACK")
    return setting != "off"


@pytest.mark.parametrize(
    ("numbers", "awaited"),
    [
        ({"kilo": 5}, False),
        ({"kilo": 0}, True),
        ({"kilo": 6}, True),
        ({"kilo": 5, "lima": 7}, False),
        ({"kilo": 5, "lima": 8}, True),
    ],
    ids=str,
)
async def test_a_release_that_raises_the_fence_of_a_row_is_flushed(
    pool: Pool, numbers: dict[str, int], *, awaited: bool
) -> None:
    """Each number is a token: on a quorum, one that is greater than the fence of this node."""
    builds = [statement, statement_of_one] if len(numbers) == 1 else [statement]
    assert [await flushes(pool, each, "release", numbers) for each in builds] == [awaited] * len(builds)


@pytest.mark.parametrize(
    ("group", "name"), [("acquire 1", "mike"), ("acquire 1", "new"), ("reacquire 1", "mike"), ("extend", "kilo")]
)
@pytest.mark.parametrize("build", [statement, statement_of_one])
async def test_other_statements_are_flushed(
    pool: Pool, build: Callable[[str, str, str], str], group: str, name: str
) -> None:
    """After a crash a grant or a renewal must be there."""
    assert await flushes(pool, build, group, {name: 0})


def op(verb: Verb, number: int, tag: str = "a") -> Op:
    return Op(verb, MUTEX, "job", f"{tag * 12}{number:020d}|", 10.0)


def test_what_is_behind_an_awaited_commit_is_kept_no_longer() -> None:
    """An op that was sent before a release was answered says nothing of it."""
    kept = Unflushed()
    for number in range(3):
        kept.released(op(Verb.RELEASE, number), 0.0)
    sent = kept.answered
    kept.released(op(Verb.RELEASE, 3), 0.0)
    kept.released(op(Verb.RELEASE, 4, "b"), 0.0)
    kept.flushed(sent)
    assert [each.id[-2] for each in kept.take("a" * 12, 1.0)] == ["3"]
    assert [each.id[-2] for each in kept.take("b" * 12, 1.0)] == ["4"]
    assert not len(kept)


def test_what_was_released_long_ago_is_kept_no_longer() -> None:
    """The log was on the disk soon after."""
    kept = Unflushed()
    kept.released(op(Verb.RELEASE, 1), 0.0)
    kept.released(op(Verb.RELEASE, 2), RECENT)
    assert [each.id[-2] for each in kept.take("a" * 12, RECENT + 1)] == ["2"]
    assert not len(kept)


def test_only_so_many_releases_are_kept() -> None:
    """The newest."""
    kept = Unflushed()
    for number in range(MOST + 5):
        kept.released(op(Verb.RELEASE, number), 0.0)
    assert len(kept) == MOST
    assert kept.take("a" * 12, 1.0)[0].id == op(Verb.RELEASE, 5).id
