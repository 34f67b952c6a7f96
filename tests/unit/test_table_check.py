"""What is wrong with a table, by the facts about it, and which statements mend it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.dialects import mysql, postgresql, sqlite

from asynclock.stores.sql.table_check import (
    ColumnFacts,
    IndexFacts,
    KeyProof,
    TableFacts,
    affinity,
    explain,
    faults,
)

DIALECTS = {"postgresql": postgresql.dialect(), "mysql": mysql.dialect(), "sqlite": sqlite.dialect()}
TEXTS = {"postgresql": "text", "mysql": "longtext", "sqlite": "text"}
TIMES = {"postgresql": "double precision", "mysql": "double", "sqlite": "real"}
PRIMARY = IndexFacts("PRIMARY", ("resource_name",))


def good(backend: str, **instead: Any) -> TableFacts:
    """A table as the store makes it, with other columns instead of some."""
    text, time, number = TEXTS[backend], TIMES[backend], "int" if backend == "mysql" else "integer"
    key = ColumnFacts("resource_name", "varchar" if backend == "mysql" else text, nullable=False, exact=True)
    columns = {
        "resource_name": key,
        **{each: ColumnFacts(each, text) for each in ("owner", "node_info", "state")},
        "count": ColumnFacts("count", number),
        "fence": ColumnFacts("fence", "integer" if backend == "sqlite" else "bigint"),
        **{each: ColumnFacts(each, time) for each in ("expires_at", "keep_until", "create_time", "update_time")},
    }
    return TableFacts(True, "", columns | instead, [PRIMARY])


def of(backend: str, facts: TableFacts) -> list[str]:
    return [each.what for each in faults(DIALECTS[backend], "asynclock", facts)]


@pytest.mark.parametrize("backend", DIALECTS)
def test_f24_a_table_as_the_store_makes_it_has_no_fault(backend: str) -> None:
    """Nor one with a further column and a further index."""
    further = {"tenant": ColumnFacts("tenant", "text"), "made": ColumnFacts("made", "text", False, True)}
    facts = good(backend, **further)
    another = IndexFacts("another", ("count", "resource_name"))
    assert of(backend, facts._replace(indexes=[*(facts.indexes or ()), another])) == []


@pytest.mark.parametrize("backend", DIALECTS)
def test_f24_what_is_not_known_is_no_fault(backend: str) -> None:
    """A role that may not look is not refused."""
    assert of(backend, TableFacts()) == []
    assert of(backend, TableFacts(proof=KeyProof(has_key=True, exact=True))) == []


@pytest.mark.parametrize("backend", DIALECTS)
def test_f24_a_key_that_inserts_did_not_show_is_not_there(backend: str) -> None:
    """Although nothing else is known."""
    assert of(backend, TableFacts(proof=KeyProof(has_key=False, exact=True)))
    assert of(backend, TableFacts(proof=KeyProof(has_key=True, exact=False)))


def test_f24_a_key_that_inserts_have_shown_is_there() -> None:
    """The index is not shown to the role."""
    hidden = good("mysql")._replace(indexes=None, proof=KeyProof(has_key=True, exact=True))
    assert of("mysql", hidden) == []


def test_f24_one_statement_for_each_fault() -> None:
    """They are joined, if all faults can be mended so. Else the table must be made anew."""
    small = ColumnFacts("fence", "int", nullable=False)
    facts = good("mysql", fence=small)._replace(engine="Aria", indexes=[])
    what, mend = explain(DIALECTS["mysql"], "asynclock", faults(DIALECTS["mysql"], "asynclock", facts))
    assert "engine is Aria" in what
    assert "ENGINE = InnoDB; ALTER TABLE asynclock MODIFY fence BIGINT NOT NULL; ALTER TABLE asynclock ADD PRI" in mend
    counted = good("mysql", id=ColumnFacts("id", "bigint", counts=True))
    _, mend = explain(DIALECTS["mysql"], "asynclock", faults(DIALECTS["mysql"], "asynclock", counted))
    assert "CREATE TABLE asynclock" in mend


def test_f24_a_second_primary_key_is_not_proposed() -> None:
    """MySQL has one at most."""
    other = [IndexFacts("PRIMARY", ("id",))]
    facts = good("mysql", id=ColumnFacts("id", "bigint"))._replace(indexes=other)
    mends = [each.mend for each in faults(DIALECTS["mysql"], "asynclock", facts)]
    assert mends == ["ALTER TABLE asynclock ADD UNIQUE KEY (resource_name)", "ALTER TABLE asynclock DROP PRIMARY KEY"]


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        ("BIGINT", "integer"),
        ("VARCHAR(255)", "text"),
        ("STRING", "numeric"),
        ("REAL", "real"),
        ("DOUBLE PRECISION", "real"),
        ("FLOATING POINT", "integer"),
        ("", "blob"),
        ("DATETIME", "numeric"),
    ],
)
def test_the_affinity_of_sqlite(declared: str, found: str) -> None:
    """By the rules of its documentation, in their order: POINT contains INT."""
    assert affinity(declared) == found
