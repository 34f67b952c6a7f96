"""Databases that serve no connection and say why (HAZARDS F15): the user reads their sentence, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asynclock import ConfigError, QuorumUnavailable, Redlock
from asynclock.stores.sql.engines import url_of
from asynclock.stores.sql.errors import Meaning, explained, meaning
from tests.support.commands import examined
from tests.support.services.postgresql import own_postgresql
from tests.support.waiters import LIMIT, PATIENT, works


@asynccontextmanager
async def connecting(url: str) -> AsyncIterator[AsyncEngine]:
    """An engine of another program."""
    engine = create_async_engine(url_of(url), isolation_level="AUTOCOMMIT", pool_size=10)
    try:
        yield engine
    finally:
        await engine.dispose()


async def run(url: str, *statements: str) -> None:
    async with connecting(url) as engine, engine.connect() as connection:
        for each in statements:
            await connection.execute(text(each))


async def told(url: str) -> str:
    """The message of an acquire there. doctor gives the same advice."""
    async with aclosing(Redlock(url, **PATIENT)) as client, asyncio.timeout(LIMIT):
        with pytest.raises(QuorumUnavailable) as caught:
            await client("order:42").acquire(timeout=0)
    code, found = await asyncio.to_thread(examined, (), ASYNCLOCK_URLS=url)
    assert code == 2
    assert str(caught.value).endswith(found["reachable"]["advice"][1:-1])
    return str(caught.value)


async def test_f15_a_user_of_postgresql_with_too_many_connections(postgresql_url: str) -> None:
    """The limit of a role is an outage: it ends when others close."""
    its = f"full_{uuid4().hex[:8]}"
    await run(postgresql_url, f"CREATE ROLE {its} LOGIN CONNECTION LIMIT 0")
    try:
        said = await told(postgresql_url.replace("//postgres@", f"//{its}@"))
    finally:
        await run(postgresql_url, f"DROP ROLE {its}")
    assert f'too many connections for role "{its}"; raise its limit (ALTER ROLE name CONNECTION LIMIT n)' in said


async def test_f15_a_user_of_mariadb_with_too_many_connections(mariadb_url: str) -> None:
    """The same with its limit."""
    its = f"full_{uuid4().hex[:8]}"
    limited = mariadb_url.replace("//asynclock@", f"//{its}@")
    rights = f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON locks.* TO {its}@'%'"
    await run(mariadb_url, f"CREATE USER {its}@'%' WITH MAX_USER_CONNECTIONS 1", rights)
    try:
        async with connecting(limited) as engine, engine.connect():
            said = await told(limited)
    finally:
        await run(mariadb_url, f"DROP USER {its}@'%'")
    assert "exceeded the 'max_user_connections' resource" in said
    assert "; raise the limit of the user (max_user_connections), or close connections" in said


async def test_f15_a_full_postgresql(name: str) -> None:
    """Once there is room, the same client works."""
    with own_postgresql(max_connections="4", superuser_reserved_connections="0") as server:
        async with aclosing(Redlock(server.url, **PATIENT)) as client:
            async with connecting(server.url) as engine, AsyncExitStack() as stack:
                for _ in range(4):
                    await stack.enter_async_context(engine.connect())
                with pytest.raises(QuorumUnavailable, match="too many clients already; raise max_connections at"):
                    await client(name).acquire(timeout=0)
            await works(client, name)


BLOCKED = "Host '10.0.0.7' is blocked because of many connection errors; unblock with 'mariadb-admin flush-hosts'"


@pytest.mark.parametrize(
    ("number", "said", "raises", "do"),
    [
        (1040, "Too many connections", Exception, "; raise max_connections at the server, or close"),
        (1129, BLOCKED, ConfigError, "; run FLUSH HOSTS at the server"),
        (1130, "Host 'a' is not allowed to connect to this MariaDB server", ConfigError, r"\(CREATE USER name@host\)"),
    ],
)
def test_f15_what_mysql_and_mariadb_say(number: int, said: str, raises: type[Exception], do: str) -> None:
    """Of a blocked host only the user can solve it. A server that is full stays an outage, and no connection that is
    there is given up."""
    with pytest.raises(raises, match=do) as caught, explained("mariadb://db/locks"):
        raise OperationalError(number, said)
    assert str(caught.value).startswith("mariadb://db/locks")
    assert isinstance(caught.value, ConfigError) or meaning(caught.value) is Meaning.FAILED


class OperationalError(Exception):
    """Of a driver."""
