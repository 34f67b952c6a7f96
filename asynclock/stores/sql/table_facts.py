"""Reads what a database shows of the table: its columns, its unique indexes, and for `doctor` its triggers.

A role may not be allowed to read that, or sees a part of it only. Then the fact stays unknown, except for the key: rows
that are inserted, and rolled back, show whether there is one. Nothing here locks a row that others use, or waits for a
lock for longer than an op would.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

from asynclock._options import RESERVED
from asynclock.stores.sql.errors import Meaning, is_duplicate, meaning
from asynclock.stores.sql.table_check import KEY, ColumnFacts, IndexFacts, KeyProof, TableFacts, affinity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line

_INSERT = (
    "INSERT INTO {table} (resource_name, owner, node_info, count, fence, expires_at, keep_until, create_time, "
    "update_time) VALUES (:name, '{0}', '{0}', {0}, {0}, {0}, {0}, {0}, {0})"
)
"""Rows that differ in all other columns: an index on one of these, too, shows no key."""


async def table_facts(line: Line, dialect: Dialect) -> TableFacts:
    """What the database shows of a table that exists. Raises the error of a database that does not answer, or asks for
    another try."""
    facts = await _READERS[dialect.name](line, dialect.table).read()
    found = [each for each in facts.indexes or () if each.columns == (KEY,)]
    if dialect.name == "sqlite" or found or facts.is_table is False:
        return facts
    return facts._replace(proof=await _proof(line, dialect))


async def table_triggers(line: Line, dialect: Dialect) -> tuple[str, ...] | None:
    """The triggers, and on PostgreSQL the rules; None: the database does not show them."""
    return await _READERS[dialect.name](line, dialect.table).triggers()


class _Reader:
    """The questions to one database. Columns and indexes that are not shown at all are unknown: a table has some."""

    def __init__(self, line: Line, table: str) -> None:
        self._line = line
        schema, _, name = table.rpartition(".")
        self._schema = schema or None
        self._whole: dict[str, Any] = {"whole": table}
        self._at: dict[str, Any] = {"name": name, "schema": self._schema}
        self._hidden: list[str] = []

    async def read(self) -> TableFacts:
        raise NotImplementedError

    async def triggers(self) -> tuple[str, ...] | None:
        raise NotImplementedError

    async def _ask(self, question: str, sql: str) -> Sequence[Any]:
        """The rows; () if the database refuses."""
        try:
            return await self._fetch(sql)
        except Exception as error:
            if meaning(error) in (Meaning.LOST, Meaning.AGAIN):
                raise
            self._hidden.append(question)
            return ()

    async def _fetch(self, sql: str) -> Sequence[Any]:
        return await self._line.fetch(sql, self._at)

    def _columns(self, found: Sequence[Any], make: Callable[[Any], ColumnFacts]) -> dict[str, ColumnFacts] | None:
        if not found and "columns" not in self._hidden:
            self._hidden.append("columns")
        return {column.name: column for column in map(make, found)} or None


class _PostgreSQL(_Reader):
    """One transaction: a pooler may give each to another session. All questions are one statement; if the server
    refuses one of them, each has a statement of its own."""

    _BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 2000; SET LOCAL lock_timeout = 20"

    async def read(self) -> TableFacts:
        found = await self._together({"table": _PG_TABLE, "columns": _PG_COLUMNS, "indexes": _PG_INDEXES})
        tables, columns, indexes = found["table"], found["columns"], found["indexes"]
        return TableFacts(
            is_table=None if not tables else tables[0][0] in ("r", "p") and tables[0][1] != "t",
            columns=self._columns(columns, _of_postgresql),
            indexes=None if "indexes" in self._hidden else list(map(_index_of_postgresql, indexes)),
            is_ordered=next((_is_bytewise(each[5], *each[7:]) for each in columns if each[0] == KEY), None),
            hidden=tuple(self._hidden),
        )

    async def triggers(self) -> tuple[str, ...] | None:
        found = await self._together({"triggers": _PG_TRIGGERS})
        return None if self._hidden else tuple(each for (each,) in found["triggers"])

    async def _together(self, questions: Mapping[str, str]) -> Mapping[str, Sequence[Any]]:
        await self._line.run(self._BEGIN)
        try:
            await self._line.run("SAVEPOINT asynclock_facts")
            (found,) = await self._line.fetch(f"SELECT {', '.join(map(_as_text, questions.values()))}", self._whole)
            return {question: json.loads(rows) for question, rows in zip(questions, found, strict=True)}
        except Exception as error:
            if meaning(error) in (Meaning.LOST, Meaning.AGAIN):
                raise
            return {question: await self._ask(question, sql) for question, sql in questions.items()}
        finally:
            await self._line.run("ROLLBACK")

    async def _fetch(self, sql: str) -> Sequence[Any]:
        await self._line.run("ROLLBACK TO SAVEPOINT asynclock_facts")
        ((rows,),) = await self._line.fetch(f"SELECT {_as_text(sql)}", self._whole)
        found: Sequence[Any] = json.loads(rows)
        return found


def _as_text(sql: str) -> str:
    """The rows of a statement as JSON, which all drivers return alike as a text."""
    return f"CAST(coalesce((SELECT json_agg(line) FROM ({sql}) AS q(line)), '[]') AS text)"  # noqa: S608


_PG_TABLE = """
    SELECT json_build_array(CAST(relkind AS text), CAST(relpersistence AS text))
    FROM pg_class WHERE oid = to_regclass(CAST(:whole AS text))"""

_PG_COLUMNS = """
    SELECT json_build_array(CAST(a.attname AS text), format_type(a.atttypid, NULL),
        CASE WHEN a.atttypid = CAST('varchar' AS regtype) AND a.atttypmod > 4 THEN a.atttypmod - 4 END,
        NOT a.attnotnull, a.atthasdef OR a.attidentity <> '',
        CAST(coalesce(c.collname, '') AS text), CAST(to_jsonb(c) ->> 'collisdeterministic' AS boolean),
        CAST(d.datcollate AS text), coalesce(to_jsonb(d) ->> 'datlocprovider', 'c'))
    FROM pg_attribute AS a LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
        JOIN pg_database AS d ON d.datname = current_database()
    WHERE a.attrelid = to_regclass(CAST(:whole AS text)) AND a.attnum > 0 AND NOT a.attisdropped"""

_PG_INDEXES = """
    SELECT json_build_array(CAST(n.relname AS text), CASE WHEN i.indnkeyatts = 1 THEN CAST(a.attname AS text) END,
        i.indisvalid AND i.indisready AND i.indpred IS NULL,
        CAST(to_jsonb(c) ->> 'collisdeterministic' AS boolean), i.indimmediate)
    FROM pg_index AS i JOIN pg_class AS n ON n.oid = i.indexrelid
        LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
        LEFT JOIN pg_collation AS c ON c.oid = i.indcollation[0]
    WHERE i.indrelid = to_regclass(CAST(:whole AS text)) AND i.indisunique"""

_PG_TRIGGERS = """
    SELECT json_build_array(CAST(tgname AS text)) FROM pg_trigger
    WHERE tgrelid = to_regclass(CAST(:whole AS text)) AND NOT tgisinternal AND tgenabled <> 'D'
    UNION ALL SELECT json_build_array(CAST(rulename AS text)) FROM pg_rewrite
    WHERE ev_class = to_regclass(CAST(:whole AS text)) AND rulename <> '_RETURN' AND ev_enabled <> 'D'"""


def _of_postgresql(row: Any) -> ColumnFacts:
    name, kind, length, nullable, has_default, collation, exact, *_ = row
    return ColumnFacts(name, kind, nullable, has_default, length, "", collation, exact)


def _index_of_postgresql(row: Any) -> IndexFacts:
    name, column, whole, exact, at_once = row
    return IndexFacts(name, (column or "",), whole, exact, at_once)


def _is_bytewise(collation: str, database: str, provider: str) -> bool:
    """Whether names are in the order of their bytes. `database`: the collation of the database, which is `default`."""
    if collation == "default" and provider == "i":
        return False
    said = database if collation == "default" else collation
    return said.upper() in ("C", "POSIX", "UCS_BASIC", "PG_C_UTF8") or said.upper().startswith("C.UTF")


class _MySQL(_Reader):
    """`information_schema` shows a role the tables and columns on which it has a right."""

    async def triggers(self) -> tuple[str, ...] | None:
        """They are shown to those who may make some."""
        found = await self._ask("triggers", _MYSQL_TRIGGERS)
        if not found and not await self._ask("rights", _MYSQL_MAY):
            return None
        return tuple(str(each) for (each,) in found)

    async def read(self) -> TableFacts:
        tables = await self._ask("table", _MYSQL_TABLE)
        columns = await self._ask("columns", _MYSQL_COLUMNS)
        indexes = await self._ask("indexes", _MYSQL_INDEXES)
        return TableFacts(
            is_table=None if not tables else "VIEW" not in str(tables[0][0]).upper(),
            engine=str(tables[0][1] or "") if tables else "",
            columns=self._columns(columns, _of_mysql),
            indexes=_indexes_of_mysql(indexes) if indexes else None,
            hidden=tuple(self._hidden),
        )


_THERE = "TABLE_NAME = :name AND TABLE_SCHEMA = coalesce(:schema, database())"
_MYSQL_TABLE = f"SELECT TABLE_TYPE, ENGINE FROM information_schema.TABLES WHERE {_THERE}"  # noqa: S608
_MYSQL_COLUMNS = (
    "SELECT COLUMN_NAME, DATA_TYPE, IS_NULLABLE, COLUMN_DEFAULT, CHARACTER_MAXIMUM_LENGTH, CHARACTER_SET_NAME, "  # noqa: S608
    f"COLLATION_NAME, EXTRA FROM information_schema.COLUMNS WHERE {_THERE} ORDER BY ORDINAL_POSITION"
)
_MYSQL_INDEXES = (
    "SELECT INDEX_NAME, COLUMN_NAME, SUB_PART FROM information_schema.STATISTICS "  # noqa: S608
    f"WHERE {_THERE} AND NON_UNIQUE = 0 ORDER BY INDEX_NAME, SEQ_IN_INDEX"
)
_MYSQL_TRIGGERS = (
    "SELECT TRIGGER_NAME FROM information_schema.TRIGGERS "
    "WHERE EVENT_OBJECT_TABLE = :name AND EVENT_OBJECT_SCHEMA = coalesce(:schema, database())"
)

_MYSQL_MAY = " UNION ALL ".join(
    f"SELECT 1 FROM information_schema.{rights} WHERE PRIVILEGE_TYPE = 'TRIGGER' "  # noqa: S608
    f"AND GRANTEE = concat('''', replace(current_user(), '@', '''@'''), '''') {of}"
    for rights, of in (
        ("USER_PRIVILEGES", ""),
        ("SCHEMA_PRIVILEGES", "AND coalesce(:schema, database()) LIKE TABLE_SCHEMA"),
        ("TABLE_PRIVILEGES", f"AND {_THERE}"),
    )
)


def _of_mysql(row: Any) -> ColumnFacts:
    name, kind, nullable, default, length, charset, collation, extra = (
        "" if each is None else str(each) for each in row
    )
    return ColumnFacts(
        name.lower(),
        kind.lower(),
        nullable.upper() == "YES",
        (row[3] is not None and default.upper() != "NULL") or "GENERATED" in extra.upper(),
        int(length) if length else None,
        charset.lower(),
        collation,
        collation.lower().endswith("_bin") if collation else None,
        "auto_increment" in extra.lower(),
    )


def _indexes_of_mysql(rows: Sequence[Any]) -> list[IndexFacts]:
    found: dict[str, IndexFacts] = {}
    for index, column, part in rows:
        before = found.get(str(index), IndexFacts(str(index), ()))
        columns = (*before.columns, str(column or "").lower())
        found[str(index)] = before._replace(columns=columns, whole=before.whole and part is None)
    return list(found.values())


class _SQLite(_Reader):
    """Everybody may read all of it."""

    def __init__(self, line: Line, table: str) -> None:
        super().__init__(line, table)
        self._table = table
        self._at["schema"] = self._schema or "main"
        self._master = f"{self._at['schema']}.sqlite_master"

    async def triggers(self) -> tuple[str, ...] | None:
        sql = f"SELECT name FROM {self._master} WHERE type = 'trigger' AND tbl_name = :name"  # noqa: S608
        return tuple(each for (each,) in await self._ask("triggers", sql))

    async def read(self) -> TableFacts:
        tables = await self._ask("table", f"SELECT type FROM {self._master} WHERE name = :name")  # noqa: S608
        columns = await self._ask("columns", _SQLITE_COLUMNS)
        indexes = await self._ask("indexes", _SQLITE_INDEXES)
        known = self._columns(columns, _of_sqlite)
        if known is not None and KEY in known:
            known[KEY] = known[KEY]._replace(exact=await self._is_exact(), collation="NOCASE or RTRIM")
        return TableFacts(
            is_table=None if not tables else tables[0][0] == "table",
            columns=known,
            indexes=_indexes_of_sqlite(indexes),
            hidden=tuple(self._hidden),
        )

    async def _is_exact(self) -> bool | None:
        """No pragma shows the collation of a column. The first part of a UNION gives it to the rows of the others."""
        found = await self._ask(
            "collation",
            f"SELECT count(*) FROM (SELECT {KEY} FROM {self._table} WHERE 0 UNION ALL SELECT 'a') "  # noqa: S608
            f"WHERE {KEY} = 'A' OR {KEY} = 'a '",
        )
        return found[0][0] == 0 if found else None


_SQLITE_COLUMNS = 'SELECT name, type, "notnull", dflt_value, hidden FROM pragma_table_xinfo(:name, :schema)'
_SQLITE_INDEXES = (
    "SELECT l.name, i.name, l.partial, i.coll FROM pragma_index_list(:name, :schema) AS l, "
    "pragma_index_xinfo(l.name, :schema) AS i "
    'WHERE i.key = 1 AND l."unique" = 1 ORDER BY l.name, i.seqno'
)


def _of_sqlite(row: Any) -> ColumnFacts:
    name, declared, is_filled, default, hidden = row
    has_default = (default is not None and default.upper() != "NULL") or bool(hidden)
    return ColumnFacts(name.lower(), affinity(declared), not is_filled, has_default)


def _indexes_of_sqlite(rows: Sequence[Any]) -> list[IndexFacts]:
    found: dict[str, IndexFacts] = {}
    for index, column, partial, collation in rows:
        before = found.get(index, IndexFacts(index, (), not partial, exact=True))
        columns = (*before.columns, (column or "").lower())
        found[index] = before._replace(columns=columns, exact=bool(before.exact) and collation.upper() == "BINARY")
    return list(found.values())


_READERS: dict[str, type[_Reader]] = {"postgresql": _PostgreSQL, "mysql": _MySQL, "sqlite": _SQLite}
"""By the name of a Dialect of the store."""


async def _proof(line: Line, dialect: Dialect) -> KeyProof | None:
    """Insert one name twice, and one that differs from it in its case. The name is new, so nobody waits for its rows.
    None: the database refuses that."""
    name = f"{RESERVED}key:{secrets.token_hex(8)}"
    await line.run(dialect.begin)
    try:
        proof = await _inserted(line, dialect.table, name)
    except Exception as error:
        if meaning(error) in (Meaning.LOST, Meaning.AGAIN):
            raise
        return None
    finally:
        await line.run("ROLLBACK")
    if dialect.name == "mysql":  # an engine without transactions has kept them
        sql = f"DELETE FROM {dialect.table} WHERE resource_name IN (:name, :other)"  # noqa: S608
        await line.fetch(sql, {"name": name, "other": name.upper()})
    return proof


async def _inserted(line: Line, table: str, name: str) -> KeyProof:
    for number, each in enumerate((name, name.upper(), name)):
        try:
            await line.fetch(_INSERT.format(number, table=table), {"name": each})
        except Exception as error:
            if not number or not is_duplicate(error):
                raise
            return KeyProof(has_key=True, exact=number > 1)
    return KeyProof(has_key=False, exact=True)
