"""What a database must allow before its locks can work, checked once for each connect. A mistake that would show later,
as an outage or as a row that nobody finds, is a ConfigError at once."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError
from asynclock._options import RESERVED
from asynclock.stores.sql.errors import Meaning, meaning
from asynclock.stores.sql.rows import Row

if TYPE_CHECKING:
    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line

SQL_MODE = "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION"
"""Of our sessions on MySQL and MariaDB: a value that does not fit is an error."""

_TRIED = f"{RESERVED}tried:"
"""The begin of the name of a row that is never committed."""


async def check_session(line: Line, label: str) -> None:
    """The session of an engine of the user, on MySQL and MariaDB. Those of our own engines are set up. Raises
    ConfigError."""
    ((mode, completion),) = await line.fetch("SELECT @@sql_mode, @@completion_type")
    wrong = []
    if "EMPTY_STRING_IS_NULL" in str(mode):
        wrong.append("sql_mode has EMPTY_STRING_IS_NULL, and a free name has the owner ''")
    if str(completion) not in ("NO_CHAIN", "0"):
        wrong.append(f"completion_type is {completion}, so a commit does more than to end a transaction")
    if wrong:
        command = f"SET SESSION completion_type = 0, sql_mode = '{SQL_MODE}'"
        raise ConfigError(
            f"{label}: {'; '.join(wrong)}: set up the sessions of the engine, for example with "
            f"connect_args={{'init_command': \"{command}\"}}, or give the url in place of the engine"
        )


async def check_policies(line: Line, dialect: Dialect, label: str) -> None:
    """On PostgreSQL: no policy (row level security) hides rows from this user. A row that is hidden from UPDATE or
    DELETE is no error of the server: nobody could take or release its name. Proves it by a transaction that is rolled
    back. What the server refuses with an error, the ops tell. Raises ConfigError."""
    if not (await line.fetch(f"SELECT row_security_active('{dialect.table}')"))[0][0]:
        return
    hidden = ""
    await line.run(dialect.begin)
    try:
        hidden = await _hidden(line, dialect, Row(f"{_TRIED}{secrets.token_hex(8)}"))
    except Exception as error:
        if meaning(error) not in (Meaning.REFUSED, Meaning.READ_ONLY):
            raise
    finally:
        with contextlib.suppress(Exception):  # the connection is gone: another error says so
            await line.run("ROLLBACK")
    if hidden:
        table = dialect.table
        raise ConfigError(
            f"{label}: a policy (row level security) hides rows of {table} from {hidden} by its user: CREATE POLICY "
            f"asynclock ON {table} TO the user USING (true) WITH CHECK (true), or ALTER TABLE {table} DISABLE ROW "
            "LEVEL SECURITY"
        )


async def _hidden(line: Line, dialect: Dialect, row: Row) -> str:
    """The statement that does not find a row; "": each does. A read for an op needs the policy of UPDATE as well."""
    name = row.resource_name
    await dialect.insert(line, row, 0.0)
    if name not in (await dialect.read(line, [name])).rows:
        return "UPDATE"
    await dialect.update(line, row._replace(fence=1), 0.0)
    await dialect.delete(line, name)
    return "DELETE" if name in (await dialect.read(line, [name])).rows else ""
