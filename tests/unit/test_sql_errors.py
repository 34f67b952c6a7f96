"""What errors of databases mean."""

from __future__ import annotations

import re

import pytest
from sqlalchemy.exc import DBAPIError

from asynclock import ConfigError
from asynclock.stores.port import WrongKind
from asynclock.stores.sql.dialects import DIALECTS
from asynclock.stores.sql.errors import Meaning, ends_connection, explained, is_lock_wait, meaning
from asynclock.stores.sql.settings import _OURS
from asynclock.stores.sql.single import statement, statement_of_one


@pytest.mark.parametrize("code", ["55P03", 1205, 3572])
def test_a_lock_that_was_not_free_is_told_from_other_errors(code: str | int) -> None:
    """Of PostgreSQL, of MariaDB, and what MySQL says to NOWAIT. The op waits then, beside few others."""
    error = RuntimeError(code, "the row is locked")
    error.sqlstate = code  # type: ignore[attr-defined]
    assert is_lock_wait(error)


def test_a_config_error_that_looks_like_an_error_of_a_database_stays_as_it_is() -> None:
    """It may contain the name of a lock, which users choose, or an error of the database that it explains."""
    for each in (WrongKind("'too many connections' is in use"), ConfigError("there is no table (disk is full)")):
        with pytest.raises(ConfigError, match=f"^{re.escape(str(each))}$"), explained("mariadb://db/locks"):
            raise each


@pytest.mark.parametrize("name", ["statement pooling mode", "disk I/O error"])
def test_the_name_of_a_lock_is_not_taken_for_what_a_server_says(name: str) -> None:
    """SQLAlchemy shows the statement and its parameters."""
    error = DBAPIError("SELECT :name", {"name": name}, RuntimeError(1205, "Lock wait timeout exceeded"))
    assert name in str(error)
    assert meaning(error) is Meaning.AGAIN
    assert not ends_connection(error)


@pytest.mark.parametrize("build", [statement, statement_of_one])
@pytest.mark.parametrize("group", ["acquire 1", "release", "extend"])
def test_no_table_has_the_name_of_a_part_of_a_statement(build: object, group: str) -> None:
    """That part would hide the table from the rest of the statement (PostgreSQL)."""
    assert callable(build)
    parts = re.findall(r"(\w+) AS (?:MATERIALIZED )?\(", build("locks", DIALECTS["postgresql"].now, group))
    assert parts
    assert set(parts) <= _OURS
