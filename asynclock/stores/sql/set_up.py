"""What a database must allow before its locks can work. A mistake that would show later, as an outage or as a row that
nobody finds, is a ConfigError. Sessions are checked once for each connect, policies with the table."""

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

CHARSET = "utf8mb4"
"""Of all sessions there: SQLAlchemy sets that of the driver. With another one the server would give `?` for a character
that it lacks, and a client that writes back what it has read would take the lock of its owner away."""

_WAYS = ("client", "connection", "results")
"""Of a text, between a client and the server."""

_TRIED = f"{RESERVED}tried:"
"""The begin of the name of a row that is never committed."""


async def check_session(line: Line, label: str) -> None:
    """The session of an engine of the user, on MySQL and MariaDB. Its other settings are set up. Raises ConfigError."""
    ((*charsets,),) = await line.fetch(f"SELECT {', '.join(f'@@character_set_{each}' for each in _WAYS)}")
    if narrow := [str(each) for each in charsets if str(each) != CHARSET]:
        raise ConfigError(
            f"{label}: the character set of the sessions of the engine is {narrow[0]}, in which an owner of a lock may "
            f"be read as ?: connect with charset={CHARSET}, or give the url in place of the engine"
        )


async def hiding_policy(line: Line, dialect: Dialect, label: str) -> ConfigError | None:
    """On PostgreSQL: the error for a policy (row level security) that hides rows from this user; None: there is none. A
    row that is hidden from UPDATE or DELETE is no error of the server: nobody could take or release its name. Proves it
    by a transaction that is rolled back. What the server refuses with an error, the ops tell."""
    if not (await line.fetch(f"SELECT row_security_active('{dialect.table}')"))[0][0]:
        return None
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
    if not hidden:
        return None
    table = dialect.table
    return ConfigError(
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
