"""Names and labels with characters that a database, its table or a connection does not have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import ConfigError, Lease, Redlock
from asynclock.stores.sql import SQLStore, dialects
from asynclock.stores.sql.engines import url_of
from tests.support.sql_states import session
from tests.support.waiters import LIMIT, LONG

MANY = 20
CAFE, SNOW, KEY = "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{SNOWMAN}", "\N{KEY}"


@pytest.fixture
async def latin1(postgresql_url: str) -> AsyncIterator[str]:
    """A database of PostgreSQL with the encoding LATIN1."""
    its = f"latin1_{uuid4().hex[:8]}"
    admin = await asyncpg.connect(postgresql_url)
    await admin.execute(f"CREATE DATABASE {its} ENCODING LATIN1 TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    yield f"{postgresql_url.rpartition('/')[0]}/{its}"
    await admin.execute(f"DROP DATABASE {its} WITH (FORCE)")
    await admin.close()


@pytest.fixture
async def narrow(mariadb_url: str) -> AsyncIterator[str]:
    """A table of MariaDB with utf8mb3, which somebody has made by hand."""
    its = f"narrow_{uuid4().hex[:8]}"
    url = f"{mariadb_url}?asynclock_table={its}"
    await SQLStore(url).create_schema()
    async with session(mariadb_url) as admin:
        for column in ("owner TEXT", "node_info TEXT"):
            charset = "CHARACTER SET utf8mb3 COLLATE utf8mb3_bin"
            await admin.exec_driver_sql(f"ALTER TABLE {its} MODIFY {column} {charset} NOT NULL")
        yield url
        await admin.exec_driver_sql(f"DROP TABLE {its}")


async def at_once(client: Redlock, names: list[str], **options: Any) -> list[Any]:
    """Their leases, or errors; asked for in the same turn of the loop."""
    return await asyncio.gather(*(client(each, **options).acquire() for each in names), return_exceptions=True)


async def owes_nothing(client: Redlock) -> None:
    """No undo of what was never carried out is kept, to be sent again."""
    async with asyncio.timeout(LIMIT):
        while not (health := await client.health()).ok:
            await asyncio.sleep(0.01)
    assert not any(each.error for each in health.nodes)


async def refuses(client: Redlock, name: str, unsaid: str) -> None:
    """The name, and a label of another one, are ConfigErrors at once. Nothing of them is left to send."""
    for told in [*await at_once(client, [f"{name}:{unsaid}"]), *await at_once(client, [name], metadata=unsaid)]:
        assert isinstance(told, ConfigError)
        assert "cannot write this name, or the label" in str(told)
    await owes_nothing(client)


async def test_d8_a_name_that_the_database_cannot_write_is_a_config_error(latin1: str, name: str) -> None:
    """With the character and the encoding. A name that it has excludes as any other."""
    async with Redlock(latin1, lease=LONG, patience=LONG) as client, Redlock(latin1) as other:
        await refuses(client, name, SNOW)
        with pytest.raises(ConfigError, match=f"LATIN1 has no '{SNOW}'"):
            await client.multi(f"{name}:a", f"{name}:{SNOW}").acquire()
        async with client(f"{name}:{CAFE}", metadata=CAFE):
            assert await other(f"{name}:{CAFE}").acquire(timeout=0) is None
            (holder,) = (await other.inspect(f"{name}:{CAFE}")).holders
            assert holder.metadata == CAFE


async def test_d8_a_name_that_only_the_server_finds_unfit_fails_alone(
    latin1: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoding that this client does not know: the ops that leave in one statement with such a name succeed, and no
    connection is closed."""
    monkeypatch.setattr(dialects, "narrowest", lambda names: None)
    store, admin = SQLStore(latin1), await asyncpg.connect(latin1)
    sessions = "SELECT array_agg(pid ORDER BY pid) FROM pg_stat_activity WHERE datname = current_database()"
    async with Redlock(store, lease=LONG, patience=LONG) as client:
        for lease in await at_once(client, [f"{name}:{each}" for each in range(MANY)]):
            await lease.release()
        before = await admin.fetchval(sessions)
        unfit = [f"{name}:{SNOW}{each}" for each in range(3)]
        for turn in range(3):
            fit = [f"{name}:{turn}:{each}" for each in range(MANY)]  # names without a row have a statement of their own
            told = await at_once(client, [*unfit, *fit])
            assert [type(each) for each in told] == [ConfigError] * 3 + [Lease] * MANY
            await asyncio.gather(*(each.release() for each in told[3:]))
        assert set(before) <= set(await admin.fetchval(sessions))
        await owes_nothing(client)
        assert "LATIN1" in str(told[0])
    await admin.close()


@pytest.mark.parametrize("charset", ["latin1", "utf8"])
async def test_d8_a_connection_that_reads_only_some_characters_takes_no_lock_away(
    charset: str, mariadb_url: str, name: str
) -> None:
    """It reads `?` for the others, and would write that back as the owner of the lock for which it waits. So it is a
    ConfigError."""
    with pytest.raises(ConfigError, match="the option charset of the url: leave it out"):
        SQLStore(f"{mariadb_url}?charset={charset}")
    engine = create_async_engine(url_of(mariadb_url), connect_args={"charset": charset})
    async with Redlock(mariadb_url, lease=LONG) as owner, owner(name, metadata=KEY) as lease:
        with pytest.raises(ConfigError, match=r"of the engine is (latin1|utf8).* connect with charset=utf8mb4"):
            async with Redlock(SQLStore(engine), patience=LONG) as client, client(name, timeout=0):
                pass
        await lease.extend()
    await engine.dispose()


async def test_d8_a_label_that_the_table_cannot_keep_fails_alone(narrow: str, name: str) -> None:
    """MariaDB finds it when it writes the row: the ops that leave in one packet with it succeed."""
    store = SQLStore(narrow)
    async with Redlock(store, lease=LONG, patience=LONG) as client:
        for _ in range(3):
            told = await asyncio.gather(
                client(f"{name}:labelled", metadata=KEY).acquire(),
                *(client(f"{name}:{each}").acquire() for each in range(MANY)),
                return_exceptions=True,
            )
            assert [type(each) for each in told] == [ConfigError] + [Lease] * MANY
            await asyncio.gather(*(each.release() for each in told if isinstance(each, Lease)))
        await owes_nothing(client)
        (alone,) = await at_once(client, [f"{name}:labelled"], metadata=KEY)
        assert isinstance(alone, ConfigError)


@pytest.mark.parametrize("service", ["postgresql", "mariadb", "sqlite"])
async def test_d8_any_text_is_a_name(service: str, name: str, request: pytest.FixtureRequest, tmp_path: Any) -> None:
    """With the settings that the store makes. A lone surrogate is no text, and is refused before any store is asked."""
    url = f"sqlite:///{tmp_path}/locks.db" if service == "sqlite" else request.getfixturevalue(f"{service}_url")
    async with Redlock(url, lease=LIMIT) as client:
        for each in (CAFE, SNOW, KEY, "\x00", "\uffff", "\U0010ffff", "\x85"):
            async with client(f"{name}:{each}", metadata=each):
                pass
        with pytest.raises(ConfigError, match="lone surrogate"):
            client(f"{name}:\ud800")
        with pytest.raises(ConfigError, match="lone surrogate"):
            client(name, metadata="\ud800")
