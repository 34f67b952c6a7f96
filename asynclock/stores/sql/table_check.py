"""What a table needs so that its rows exclude and fence, and what to do where it has something else. Pure.

A migration may have made the table, and anybody may have changed it since. What would let two clients have one name, or
would lose a fencing token, is a fault, and so is what makes the statements of the store fail. What the database does
not show is taken as right, except for the key (`table_facts.py`).
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy.schema import CreateColumn

from asynclock.stores.sql.rows import LONGEST
from asynclock.stores.sql.schema import ddl, lock_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy.engine import Dialect


class ColumnFacts(NamedTuple):
    """A column, as the catalog shows it."""

    name: str
    type: str  # in small letters, without its length
    nullable: bool = True
    has_default: bool = False
    length: int | None = None  # characters, at most; None: no limit
    charset: str = ""  # of MySQL and MariaDB
    collation: str = ""
    exact: bool | None = None  # whether that collation tells all texts apart; None: unknown
    counts: bool = False  # AUTO_INCREMENT


class IndexFacts(NamedTuple):
    """A unique index."""

    name: str
    columns: tuple[str, ...]  # an expression is ""
    whole: bool = True  # it is valid, and of the whole texts of all rows
    exact: bool | None = None  # whether its collation tells all texts apart; None: unknown
    at_once: bool = True  # it is checked with each statement, and not with the COMMIT


class KeyProof(NamedTuple):
    """What inserts have shown, which were rolled back."""

    has_key: bool
    exact: bool  # two names that differ in their case are two names


class TableFacts(NamedTuple):
    """None and "": unknown."""

    is_table: bool | None = None  # and no view, no foreign table, no temporary one
    engine: str = ""  # of MySQL and MariaDB
    columns: Mapping[str, ColumnFacts] | None = None
    indexes: Sequence[IndexFacts] | None = None
    proof: KeyProof | None = None
    is_ordered: bool | None = None  # names are in the order of their bytes
    hidden: tuple[str, ...] = ()  # what the database did not show


class Fault(NamedTuple):
    """What is wrong with the table, and the statement that mends it; "": only another table does."""

    what: str
    mend: str = ""


KEY = "resource_name"

_TEXTS = {KEY: LONGEST, "owner": 1400, "node_info": LONGEST, "state": 2**24 - 1}
"""The characters that the columns of texts must have room for. A queue of 1,000 waiters has some 150,000."""

_TIMES = ("expires_at", "keep_until", "create_time", "update_time")

_MAY_BE_NULL = ("expires_at", "keep_until", "state")
"""A hold without an end, and a row that is plain, have NULL there."""

_KINDS = {
    "postgresql": {
        "key": {"text", "character varying"},
        "text": {"text", "character varying"},
        "count": {"integer", "bigint"},
        "fence": {"bigint"},
        "time": {"double precision"},
    },
    "mysql": {
        "key": {"varchar", "char"},  # MariaDB keeps a unique index of others as hashes, by which it finds no row
        "text": {"varchar", "char", "text", "mediumtext", "longtext"},
        "count": {"int", "bigint"},
        "fence": {"bigint"},
        "time": {"double"},
    },
    # The affinities of SQLite. The last three columns may have any that keeps numbers as numbers.
    "sqlite": {
        "key": {"text", "blob"},
        "text": {"text", "blob"},
        "count": {"integer", "numeric", "blob"},
        "fence": {"integer", "numeric", "blob"},
        "time": {"real", "numeric", "blob"},
    },
}

_ALL_OF_UNICODE = {"utf8mb4", "utf16", "utf16le", "utf32"}
"""Character sets of MySQL and MariaDB. Others say `?` in place of a character that they lack, or refuse it."""


def faults(dialect: Dialect, table: str, facts: TableFacts) -> list[Fault]:
    """All faults of the table; none: it excludes and fences. Pure."""
    check = _Check(dialect, table, facts)
    if facts.is_table is False:
        return [Fault(f"{table} is no table that all clients share, but a view, a foreign or a temporary table")]
    if facts.columns is not None and (missing := [each for each in _columns() if each not in facts.columns]):
        return [Fault(f"it has no column {', '.join(missing)}")]
    return [*check.engine(), *check.columns(), *check.key(), *check.others()]


def explain(dialect: Dialect, table: str, found: Sequence[Fault]) -> tuple[str, str]:
    """What is wrong, and what to do. Pure."""
    what = f"the table {table} cannot keep locks: {'; '.join(each.what for each in found)}"
    if all(each.mend for each in found):
        statements = dict.fromkeys(each.mend for each in found)
        return what, f"as its owner, run: {'; '.join(statements)}{_WHERE_TWICE}"
    return what, (
        "if it is a table of another program, name another one (?asynclock_table=...); else stop all clients, drop it, "
        f"and let its owner run: {_created(dialect, table)}"
    )


_WHERE_TWICE = (
    " (docs/stores/sql.md; if a statement finds one name in two rows: stop all clients, and DELETE the rows first)"
)


@cache
def _columns() -> Sequence[str]:
    return tuple(each.name for each in lock_table().columns)


def _created(dialect: Dialect, table: str) -> str:
    schema, _, name = table.rpartition(".")
    return re.sub(r"\s+", " ", ddl(dialect, lock_table(name, schema=schema or None)))


class _Check:
    """The checks of one table."""

    def __init__(self, dialect: Dialect, table: str, facts: TableFacts) -> None:
        self._dialect = dialect
        self._backend = "mysql" if dialect.name == "mariadb" else dialect.name
        self._table = table
        self._facts = facts
        self._known = facts.columns or {}

    def engine(self) -> Iterator[Fault]:
        engine = self._facts.engine
        if engine and engine.lower() != "innodb":
            yield Fault(
                f"its engine is {engine}, which has no transactions", f"ALTER TABLE {self._table} ENGINE = InnoDB"
            )

    def columns(self) -> Iterator[Fault]:
        for column in self._known.values():
            if column.name in _columns():
                if wrong := [*self._wrong(column)]:
                    yield Fault(f"{column.name} {', '.join(wrong)}", self._as_it_should_be(column.name, column))
            elif column.counts:
                yield Fault(f"{column.name} is AUTO_INCREMENT, whose number clients would take for a fencing token")
            elif not column.nullable and not column.has_default:
                yield Fault(f"its further column {column.name} needs a value, and clients know none")

    def _wrong(self, column: ColumnFacts) -> Iterator[str]:
        name, kind = column.name, _kind_of(column.name)
        if column.type not in _KINDS[self._backend][kind]:
            yield f"has the type {column.type}"
        elif column.length is not None and column.length < _TEXTS.get(name, 0):
            yield f"has room for {column.length} characters"
        if name == KEY and column.charset and column.charset not in _ALL_OF_UNICODE:
            yield f"has the character set {column.charset}, which cannot say all names"
        if name == KEY and column.exact is False:
            yield f"has the collation {column.collation}, to which different names are one name, as Order:1 and order:1"
        if not column.nullable and name in _MAY_BE_NULL:
            yield "is NOT NULL"
        if column.has_default and name == "state":
            yield "has a default, or is computed"
        if column.counts:
            yield "is AUTO_INCREMENT"

    def _as_it_should_be(self, name: str, found: ColumnFacts) -> str:
        column = lock_table().columns[name]
        if self._backend == "mysql":
            return f"ALTER TABLE {self._table} MODIFY {CreateColumn(column).compile(dialect=self._dialect)}"
        if self._backend != "postgresql":
            return ""
        kind = column.type.compile(dialect=self._dialect)
        changes = [f"ALTER COLUMN {name} TYPE {kind} USING CAST({name} AS {kind.partition(' COLLATE')[0]})"]
        if not found.nullable and name in _MAY_BE_NULL:
            changes.append(f"ALTER COLUMN {name} DROP NOT NULL")
        if found.has_default:
            changes.insert(0, f"ALTER COLUMN {name} DROP DEFAULT")
        return f"ALTER TABLE {self._table} {', '.join(changes)}"

    def key(self) -> Iterator[Fault]:
        """What two inserts of one name rest on. An index that the database does not show may be there."""
        facts, proof = self._facts, self._facts.proof
        found = [each for each in facts.indexes or () if each.columns == (KEY,)]
        for each in found:
            if not each.at_once:  # ON CONFLICT refuses the table for it, even beside another one
                yield Fault(
                    f"its key {each.name} is DEFERRABLE",
                    f"ALTER TABLE {self._table} DROP CONSTRAINT {each.name}, ADD UNIQUE ({KEY})",
                )
        if any(not each.at_once or (each.whole and each.exact is not False) for each in found):
            return
        if proof is not None and not proof.exact:
            yield Fault(
                f"{KEY} takes names that differ in their case for one name",
                self._as_it_should_be(KEY, ColumnFacts(KEY, "text", nullable=False)),
            )
        elif found or (facts.indexes is not None if proof is None else not proof.has_key):
            why = " that is valid and of the whole text of all rows" if found else ""
            yield Fault(f"it has no primary key or unique index{why} on {KEY} alone", self._keyed())

    def _keyed(self) -> str:
        primary = any(each.name.lower() == "primary" for each in self._facts.indexes or ())
        if self._backend == "mysql" and not primary:
            return f"ALTER TABLE {self._table} ADD PRIMARY KEY ({KEY})"
        if self._backend == "mysql":
            return f"ALTER TABLE {self._table} ADD UNIQUE KEY ({KEY})"
        if self._backend == "postgresql":  # there may be a primary key on something else
            return f"CREATE UNIQUE INDEX ON {self._table} ({KEY})"
        return f"CREATE UNIQUE INDEX {self._table}_{KEY} ON {self._table.rpartition('.')[2]} ({KEY})"

    def others(self) -> Iterator[Fault]:
        """INSERT ... ON DUPLICATE KEY UPDATE would grant a name on the row of another one."""
        for each in self._facts.indexes or ():
            if self._backend == "mysql" and KEY not in each.columns:
                of = ", ".join(each.columns)
                yield Fault(
                    f"it has another unique index, {each.name} on {of}: a name would be granted on the row of another",
                    f"ALTER TABLE {self._table} "
                    + ("DROP PRIMARY KEY" if each.name.lower() == "primary" else f"DROP INDEX {each.name}"),
                )


def _kind_of(column: str) -> str:
    if column == KEY:
        return "key"
    if column in _TEXTS:
        return "text"
    return "time" if column in _TIMES else column


def affinity(declared: str) -> str:
    """How SQLite keeps the values of a column with that declared type."""
    said = declared.upper()
    for words, found in (
        (("INT",), "integer"),
        (("CHAR", "CLOB", "TEXT"), "text"),
        (("BLOB",), "blob"),
        (("REAL", "FLOA", "DOUB"), "real"),
    ):
        if any(each in said for each in words):
            return found
    return "numeric" if said else "blob"
