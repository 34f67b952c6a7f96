"""The table, as SQLAlchemy describes it, for `create_schema()` and for migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, Table, Text
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateTable

from asynclock.stores.sql.rows import LONGEST

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect
    from sqlalchemy.types import TypeEngine

_EXACT: dict[str, Any] = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}


def lock_table(name: str = "asynclock", metadata: MetaData | None = None, schema: str | None = None) -> Table:
    """The table of that name, in `metadata`. Names are compared byte by byte; times are Unix seconds."""
    key = (
        Text()
        .with_variant(postgresql.TEXT(collation="C"), "postgresql")
        .with_variant(mysql.VARCHAR(LONGEST, **_EXACT), "mysql", "mariadb")
    )
    text = Text().with_variant(mysql.TEXT(**_EXACT), "mysql", "mariadb")
    state = Text().with_variant(mysql.LONGTEXT(**_EXACT), "mysql", "mariadb")
    # Not Double() alone: MySQL would call it DOUBLE, and SQLite would take an affinity from the name.
    seconds: TypeEngine[float] = (
        Double(53).with_variant(mysql.DOUBLE(), "mysql", "mariadb").with_variant(sqlite.REAL(), "sqlite")
    )
    return Table(
        name,
        metadata if metadata is not None else MetaData(),
        Column("resource_name", key, primary_key=True),
        Column("owner", text, nullable=False),
        Column("node_info", text, nullable=False),
        Column("count", Integer(), nullable=False),
        Column("fence", BigInteger(), nullable=False),
        Column("expires_at", seconds),
        Column("keep_until", seconds),
        Column("create_time", seconds, nullable=False),
        Column("update_time", seconds, nullable=False),
        Column("state", state),
        schema=schema,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


def ddl(dialect: Dialect, table: Table | None = None, *, if_absent: bool = False) -> str:
    """The statement that creates the table in that dialect. Rows are updated in place: half of each page of PostgreSQL
    stays free for that. SQLAlchemy 2.0 has no option for this."""
    created = lock_table() if table is None else table
    statement = str(CreateTable(created, if_not_exists=if_absent).compile(dialect=dialect)).strip()
    return f"{statement} WITH (fillfactor = 50)" if dialect.name == "postgresql" else statement
