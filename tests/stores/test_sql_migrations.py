"""The migrations of docs/stores/sql.md. Alembic and Django make tables of them that keep locks (HAZARDS F24)."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Connection, MetaData, inspect
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.dialects import postgresql as postgresql_dialect
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Redlock
from asynclock.stores import lock_table
from asynclock.stores.sql.engines import url_of
from asynclock.stores.sql.schema import ddl
from tests.support.operators import Operated
from tests.support.programs import run_python
from tests.support.waiters import LIMIT


async def grants(url: str, name: str) -> None:
    async with Redlock(url, patience=LIMIT) as client, client(name):
        pass


PAGE = (Path(__file__).parents[2] / "docs/stores/sql.md").read_text("utf-8")


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def migrated(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A url, its table, and a function that calls another one with a connection of SQLAlchemy, as Alembic does."""
    pytest.importorskip("alembic")
    table, url = "asynclock", f"sqlite+aiosqlite:///{tmp_path}/locks.db"
    if request.param != "sqlite":
        operated: Operated = request.getfixturevalue(request.param)
        table, url = operated.table, operated.url

    async def migrate(run: Callable[[Connection], None]) -> None:
        if request.param == "mariadb":
            await operated.run(f"GRANT DROP ON locks.* TO {operated.user}@'%'")
        engine = create_async_engine(url_of(url).difference_update_query(["asynclock_table"]))
        try:
            async with engine.begin() as connection:
                await connection.run_sync(run)
        finally:
            await engine.dispose()

    return url, table, migrate


async def test_f24_the_migration_of_alembic_passes(migrated: Any, name: str) -> None:
    """As it stands in the docs, but for the name of the table. Its downgrade removes the table."""
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    url, table, migrate = migrated
    (snippet,) = re.findall(r"```py\n(from alembic import op\n.*?)```", PAGE, re.DOTALL)
    world: dict[str, Any] = {}
    exec(snippet.replace('"asynclock"', f'"{table}"').replace("TABLE asynclock", f"TABLE {table}"), world)

    def upgrade(connection: Connection) -> None:
        with Operations.context(MigrationContext.configure(connection)):
            world["upgrade"]()

    def downgrade(connection: Connection) -> None:
        with Operations.context(MigrationContext.configure(connection)):
            world["downgrade"]()
            assert not inspect(connection).has_table(table)
            world["upgrade"]()

    await migrate(upgrade)
    await grants(url, name)
    await migrate(downgrade)
    await grants(url, name)


async def test_f24_what_alembic_generates_passes(migrated: Any, name: str) -> None:
    """From the metadata of the application. It finds nothing to change afterwards."""
    from alembic import op
    from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    url, table, migrate = migrated
    lock_table(table, metadata := MetaData())

    def context_of(connection: Connection) -> MigrationContext:
        def is_ours(name: str | None, kind: str, parents: object) -> bool:
            return kind != "table" or name == table

        return MigrationContext.configure(connection, opts={"include_name": is_ours})

    def generate(connection: Connection) -> None:
        context = context_of(connection)
        ops = produce_migrations(context, metadata).upgrade_ops
        assert ops is not None
        world = {"op": op, "sa": sqlalchemy, "mysql": mysql, "postgresql": postgresql_dialect, "sqlite": sqlite}
        with Operations.context(context):
            exec(textwrap.dedent(render_python_code(ops).replace("\n    ", "\n")), world)
        assert compare_metadata(context_of(connection), metadata) == []

    await migrate(generate)
    await grants(url, name)


STATEMENTS = re.findall(r"```sql\n(CREATE TABLE asynclock .*?)```", PAGE, re.DOTALL)
DIALECTS = [postgresql_dialect.dialect(), mysql.dialect(), sqlite.dialect()]


@pytest.mark.parametrize("number", range(3))
def test_f24_the_statements_of_the_docs_are_those_of_the_store(number: int) -> None:
    """But for the spaces."""
    assert re.sub(r"\s+", "", STATEMENTS[number]) == re.sub(r"\s+", "", ddl(DIALECTS[number]))


DJANGO = """
import json, sys
import django
from django.conf import settings

database = json.loads(sys.argv[1])
if "mysql" in database["ENGINE"]:
    import pymysql
    pymysql.install_as_MySQLdb()
settings.configure(DATABASES={"default": database})
django.setup()
from django.db import connection
from django.db.migrations.state import ProjectState

world = {}
exec(sys.argv[2], world)
migration = world["Migration"]("0001_locks", "shop")
for change in (migration.apply, migration.unapply, migration.apply):
    with connection.schema_editor(atomic=migration.atomic) as editor:
        change(ProjectState(), editor)
connection.close()
"""


async def test_f24_the_migration_of_django_passes(migrated: Any, name: str) -> None:
    """With the statement of the docs. It is run backwards, too."""
    url, table, migrate = migrated
    at = url_of(url)
    number = [each.name for each in DIALECTS].index(at.get_backend_name().replace("mariadb", "mysql"))
    pytest.importorskip(("psycopg", "pymysql", "sqlite3")[number])
    (snippet,) = re.findall(r"```py\n(from django.db import migrations\n.*?)```", PAGE, re.DOTALL)
    statement = snippet.replace('"CREATE TABLE asynclock (...)"', repr(STATEMENTS[number])).replace("asynclock", table)
    engine = f"django.db.backends.{DIALECTS[number].name}{'3' if number == 2 else ''}"
    place = {"HOST": at.host or "", "PORT": at.port or "", "USER": at.username or ""}
    await migrate(lambda connection: None)  # with the right to drop it
    run_python(DJANGO, json.dumps({"ENGINE": engine, "NAME": at.database, **place}), statement)
    await grants(url, name)
