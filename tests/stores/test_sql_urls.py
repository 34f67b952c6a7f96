"""The urls of the SQL stores: which are accepted, and what a wrong one says."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
from sqlalchemy import make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg

from asynclock import ConfigError, Redlock
from asynclock.stores import store_for
from asynclock.stores.sql.engines import refused_option


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("postgresql://me:secret@db:5433/app", "postgresql://db:5433/app"),
        ("postgresql+asyncpg://me:secret@db/app?asynclock_table=locks", "postgresql://db/app (table locks)"),
        ("mysql://me:secret@db/app?charset=utf8mb4", "mysql://db/app"),
        ("mariadb://db/app", "mariadb://db/app"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("sqlite+aiosqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("postgresql://me@server:secret@db/app", "postgresql://db/app"),
        ("postgresql://me:secret@/app?host=/run/a&ssl=x", "postgresql:///app?host=/run/a"),
        ("postgresql:///app?host=/run/b&port=5433", "postgresql:///app?host=/run/b&port=5433"),
        ("postgresql://me@/app?host=a:1&host=b:2", "postgresql:///app?host=a:1&host=b:2"),
        (
            "postgresql://me@/app?target_session_attrs=standby&host=a:1&host=b:2&asynclock_table=locks",
            "postgresql:///app?host=a:1&host=b:2&target_session_attrs=standby (table locks)",
        ),
        ("mysql://me:secret@/app?unix_socket=/run/a.sock&charset=utf8mb4", "mysql:///app?unix_socket=/run/a.sock"),
    ],
)
def test_a_url_names_a_store(url: str, label: str) -> None:
    """Its label has no user and no password, and only the options that tell two servers apart."""
    assert store_for(url).label == label


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql+psycopg2://db/app", "psycopg2 is not an asyncio driver: use postgresql://"),
        ("mysql+pymysql://db/app", "pymysql is not an asyncio driver: use mysql://"),
        ("postgresql+nothing://db/app", "use postgresql://"),
        ("sqlite+pysqlite:///a.db", "use sqlite://"),
        ("postgresql://db/app?asynclock_table=a-b", "table="),
        ("sqlite://", "name a file"),
        ("sqlite://var/lib/a.db", "four before an absolute one"),
        ("sqlite:///:memory:", "name a file"),
        ("postgresql://db:port/app", "not the url"),
        ("mysql://db/app?init_command=SELECT+1", "init_command of the url: leave it out"),
        ("mysql://db/app?use_unicode=0", "use_unicode of the url: leave it out"),  # the names of columns would be bytes
        ("mysql+aiomysql://db/app?ssl_ca=/a.pem", "ssl_ca .* with aiomysql: TLS"),  # no TLS, where the server has none
        ("mysql+aiomysql://db/app?read_default_file=/a", "read_default_file .* with aiomysql"),  # with another charset
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    """When the client is made; the message shows no secret."""
    with pytest.raises(ConfigError, match=message):
        Redlock(url)


@pytest.mark.parametrize(
    ("scheme", "module", "package"),
    [
        ("postgresql", "asyncpg", "asynclock[postgresql]"),
        ("mariadb", "asyncmy", "asynclock[mysql]"),
        ("postgresql+psycopg", "psycopg", "psycopg[binary]"),
        ("mysql+aiomysql", "aiomysql", "aiomysql"),
    ],
)
def test_a_driver_that_is_absent_is_named(
    scheme: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(f"pip install '{package}'")):
        Redlock(f"{scheme}://db/app")


def test_psycopg_is_an_asyncio_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy has two dialects of that name."""
    monkeypatch.setattr(PGDialectAsync_psycopg, "import_dbapi", lambda: ModuleType("psycopg"))
    assert store_for("postgresql+psycopg://me:secret@db/app").label == "postgresql://db/app"


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "mariadb", "postgresql+asyncpg"])
@pytest.mark.parametrize(
    "rest",
    [
        *("app:p@ss:kilowatt@127.0.0.1:5999/app", "app:kilo@watt@db/app", "app:kilo@12/watt@db/app"),
        *("db:kilowatt/app", "app:kilo@12?watt@db/app", "/app:kilo@watt", "app:kilo@12/?watt=12@db/app"),
    ],
)
def test_a_wrong_url_of_a_database_does_not_show_its_password(scheme: str, rest: str) -> None:
    """Where an odd character cut it in two, a part of it would be the host or the port."""
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        Redlock(f"{scheme}://{rest}")
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__} {caught.value.__context__}"
    assert not [part for part in ("kilo", "watt", "12") if part in shown]


class ProgrammingError(Exception):
    """As that of psycopg."""


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ("watts=kilo", ProgrammingError('invalid connection option "watts"'), "the option 'watts' of the url"),
        ("watts=kilo&db=1", TypeError("connect() got an unexpected keyword argument 'watts'"), "the option 'watts'"),
        ("ssl=kilo&db=1", ValueError("`sslmode` parameter must be one of: disable"), "the option 'ssl' of the url"),
        ("size=kilo&time=7", ValueError("invalid literal for int() with base 10: 'kilo'"), "the option 'size'"),
        ("size=kilo&time=7", ValueError("out of range"), "one of the options 'size', 'time'"),
        ("", TypeError("connect() got an unexpected keyword argument 'watts'"), "an option of the engine"),
    ],
)
def test_the_option_that_a_driver_refuses_is_named(options: str, error: Exception, named: str) -> None:
    """As far as its error says which it is; never by its value."""
    said = refused_option(make_url(f"postgresql://db/app?{options}"), error)
    assert said.startswith(named)
    assert "kilo" not in said


def test_it_is_always_the_only_node() -> None:
    """No quorum, and no prefix."""
    with pytest.raises(ConfigError, match="only node"):
        Redlock("postgresql://a/app", "postgresql://b/app", "postgresql://c/app")
    with pytest.raises(ConfigError, match="prefix"):
        Redlock("postgresql://a/app", prefix="mine:")
