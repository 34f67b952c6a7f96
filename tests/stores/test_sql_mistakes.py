"""Mistakes that only the user can solve: a SQL store says so at once, and what to do."""

from __future__ import annotations

import time

import pytest

from asynclock import ConfigError, Redlock
from asynclock.stores import store_for

pytestmark = pytest.mark.one_loop("the database has the part that counts")


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite:///a.db?asynclock_tabel=locks", "sqlite:///a.db?table=locks", "sqlite:///a.db?prefix=x&timeout="),
        *("sqlite+aiosqlite:///a.db?timeout=5", "sqlite:///a.db?asynclock_table=", "sqlite:///a.db?asynclock_table"),
        *("postgresql://db/a?asynclock_tabel=x", "mariadb://db/a?ssl_ca=b&asynclock_tabel", "mysql://h?asynclock_t=1"),
        "postgresql://db/a?asynclock_table=b&asynclock_table=c",
    ],
)
def test_an_option_that_would_be_ignored_is_refused(url: str) -> None:
    """Two clients would use two tables, and would not exclude each other."""
    with pytest.raises(ConfigError, match="asynclock_table"):
        store_for(url)


@pytest.mark.parametrize(
    ("option", "database", "hint"),
    [
        ("sslmode=require", "postgresql", "ssl=require"),
        ("ssl=kilowatt", "postgresql", "ssl=require"),
        ("kilowatt=1", "postgresql", "asyncpg refuses an option"),
        ("ssl=kilowatt", "mariadb", "ssl_ca"),
        ("connect_timeout=kilowatt", "mariadb", "asyncmy refuses an option"),
        ("kilowatt=1", "mariadb", "asyncmy refuses an option"),
    ],
)
async def test_an_option_that_the_driver_refuses_is_a_config_error(
    option: str, database: str, hint: str, request: pytest.FixtureRequest
) -> None:
    """At once; and it shows no value, which may be secret."""
    url = request.getfixturevalue(f"{database}_url")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=hint) as caught:
        async with Redlock(f"{url}?{option}", patience=60):
            pass
    assert "kilowatt" not in f"{caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert time.monotonic() - began < 20
