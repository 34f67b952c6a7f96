"""What an error of a database means for the store. Pure."""

from __future__ import annotations

import re
import sqlite3
import ssl
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from sqlalchemy.exc import ArgumentError

from asynclock._errors import ConfigError
from asynclock._untrusted import said
from asynclock.stores.port import Unfit
from asynclock.stores.sql.remedies import remedy

if TYPE_CHECKING:
    from collections.abc import Iterator


class Meaning(Enum):
    """What to do after an error."""

    AGAIN = "again"  # nothing was done; the transaction may be repeated
    LOST = "lost"  # the connection cannot be used any more
    REFUSED = "refused"  # only the user can solve it
    READ_ONLY = "read-only"  # a standby, which may become master, or no master any more: ask another connection
    UNSAID = "unsaid"  # a text has a character that the database, the table or the connection does not have
    ABSENT = "absent"  # the table does not exist
    FAILED = "failed"  # anything else


class Demoted(Exception):
    """A MariaDB or MySQL has `read_only`. It does not refuse the writes of a user with SUPER or READ ONLY ADMIN."""

    def __init__(self) -> None:
        super().__init__("it has read_only=ON")


class Unconfirmed(Exception):
    """A transaction is committed, and nothing is known of whether the server was still the primary by then. The cause
    says why. It must not be repeated."""


class NotWritten(Exception):
    """An UPDATE has changed no row, although its transaction has the row."""

    def __str__(self) -> str:
        return "an UPDATE has changed no row: a trigger or a rule of the table leaves it out; remove that"


class Conflict(Exception):
    """Another client has inserted the row. The transaction is repeated."""

    def __str__(self) -> str:
        return "the row is there, and cannot be seen: another client inserts it, or a policy (RLS) hides it"


_AGAIN = {"40001", "40P01", "55P03", "57014", 1213, 1205, 1020, 3572, 1317, 1969, 3024}
_LOST = {"57P01", "57P02", "57P03", "57P05", "25P03", "25P04", 1053, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031}
_REFUSED = {"28000", "28P01", "3D000", "42501", "3F000", 1044, 1045, 1049, 1129, 1130, 1142, 1143, 1227, 1665}
_READ_ONLY = {"25006", 1290, 1792, 1836}
_ABSENT = {"42P01", 1146}
_UNSAID = {"22P05", "22021", 1300, 1366, 3854}
_LOCK_WAITS = {"55P03", 1205, 3572}
_OF_VALUES = {"22", "23", "44", "54", "P0"}  # classes of SQLSTATE
_BROKEN = ("InterfaceError", "InternalClientError", "ConnectionDoesNotExistError")
"""Of asyncpg: the connection is closed, or closes just now."""

_CODES = (
    (_AGAIN, Meaning.AGAIN),
    (_LOST, Meaning.LOST),
    (_REFUSED, Meaning.REFUSED),
    (_READ_ONLY, Meaning.READ_ONLY),
    (_ABSENT, Meaning.ABSENT),
    (_UNSAID, Meaning.UNSAID),
)
"""SQLSTATE of PostgreSQL, and the numbers of MySQL and MariaDB."""

_UNPREPARED = {1243, 1295, 1461, "26000"}
"""Of MariaDB: the session does not know the statement, the statement cannot be prepared, the server keeps no more. Of
PostgreSQL: the session does not know it."""

_CROWDED = {"53300", 1040, 1203, 1226}
"""A server, or a limit of its user, allows no more connections. 1226 names other limits as well."""

_OF_CONNECTIONS = ("ConnectionTimeout", "OperationalError")
_OF_PSYCOPG = (
    (re.compile(r"FATAL: .*(too many (clients|connections)|remaining connection slots)"), "53300"),
    (
        re.compile(r"FATAL: .*(authentication failed|no pg_hba\.conf entry|does not exist|denied|not permitted)"),
        "28000",
    ),
    (re.compile(""), "08006"),
)
"""The SQLSTATE for what a server says to psycopg, which has none for the error of a connection."""

_STALE = re.compile(r"cached (statement )?plan")
"""Of PostgreSQL, after ALTER TABLE. The driver prepares the statement again when it repeats it."""

_STATEMENTS = 1665
"""Of `_REFUSED`: the binary log takes statements only."""

_OF_TABLE = {
    # No such column, no unique index for ON CONFLICT, another type, no such operator, a value that does not fit.
    *("42703", "42P10", "42804", "42809", "42883", "22001", "22003", "23502", "23514", "428C9"),
    # The same of MySQL and MariaDB; and a table that was changed (1412, 1615).
    *(1048, 1054, 1136, 1264, 1265, 1267, 1364, 1366, 1406, 1412, 1615, 1690, 1932),
}
"""An op may fail so because of the table, whatever its error means for the op."""

_OF_TABLE_IN_SQLITE = ("no such column", "no column named", "ON CONFLICT", "NOT NULL", "mismatch", "schema has changed")

_RIGHTS = {"42501", 1044, 1142, 1143}
"""Of `_REFUSED`: a right is missing."""


_NO_TRANSACTIONS = "statement pooling mode"
"""What PgBouncer says with pool_mode=statement, before it closes the connection."""

_SYNTAX = {"42601", 1064}


class Delayed(Exception):
    """The database answers, but has not carried out an op in time: another session has a lock, or a standby is gone. It
    is not down."""


class Unserved(Exception):
    """The server serves no connection now, and says why. Its meaning is that of its cause."""


class UsedUp(Exception):
    """All connections of an engine are in use by its program. The database knows nothing of it."""


class Queued(TimeoutError):
    """A pooler has accepted the login, and has no connection of the server for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it has accepted the login, and carries out no statement within {seconds:g} s")


class ReadOnly(Exception):
    """The server does not write at present. That may end, as after a failover, so it counts as an outage."""


def meaning(error: BaseException) -> Meaning:
    """Of an error of a driver, of SQLAlchemy, or of the network."""
    if isinstance(error, Unconfirmed):
        return Meaning.LOST if error.__cause__ is not None and ends_connection(error.__cause__) else Meaning.FAILED
    return Meaning.REFUSED if _NO_TRANSACTIONS in all_said(error) else _meaning(error)


def _meaning(error: BaseException) -> Meaning:
    if getattr(error, "connection_invalidated", False):  # SQLAlchemy
        return Meaning.LOST
    for each in _chain(error):
        if (known := _of_class(each)) is not None:
            return known
        state, code = _code(each)
        for codes, found in _CODES:
            if state in codes or (isinstance(code, int) and code in codes):
                return found
        if isinstance(state, str) and state.startswith("08"):
            return Meaning.LOST
        if isinstance(each, sqlite3.Error):
            return _of_sqlite(str(each))
        if isinstance(each, OSError | TimeoutError | EOFError):
            return Meaning.LOST
        if state == "0A000" and _STALE.search(str(each)):
            return Meaning.AGAIN
        if type(each).__module__.startswith("asyncpg") and type(each).__name__.endswith(_BROKEN):
            return Meaning.LOST
    return Meaning.FAILED


def _of_class(error: BaseException) -> Meaning | None:
    """Of those that no server sends."""
    if isinstance(error, Conflict):
        return Meaning.AGAIN
    if isinstance(error, Delayed | UsedUp | NotWritten):
        return Meaning.FAILED
    if isinstance(error, Demoted):
        return Meaning.READ_ONLY
    return Meaning.UNSAID if isinstance(error, UnicodeEncodeError) else None


def ends_connection(error: BaseException) -> bool:
    """Whether the connection of a failed transaction is of no use any more. One of SQLite whose -wal was deleted fails
    with an I/O error until it is closed."""
    found = meaning(error)
    return found in (Meaning.LOST, Meaning.READ_ONLY) or "disk I/O error" in all_said(error)


def is_crowded(error: BaseException) -> bool:
    """Whether the database, or a pooler, allows no further connection, although the open ones work."""
    return any(isinstance(each, UsedUp | Queued) or not _CROWDED.isdisjoint(_codes(each)) for each in _chain(error))


def _code(error: BaseException) -> tuple[object, object]:
    """The SQLSTATE, and the number of MySQL."""
    state = getattr(error, "sqlstate", None)
    kind = type(error)
    if state is None and kind.__module__.startswith("psycopg") and kind.__name__ in _OF_CONNECTIONS:
        state = next(each for said, each in _OF_PSYCOPG if said.search(str(error)))
    return state, error.args[0] if error.args else None


def _codes(error: BaseException) -> set[str | int]:
    return {each for each in _code(error) if isinstance(each, str | int)}


def _of_sqlite(text: str) -> Meaning:
    if "no such table" in text:  # first: its name may have any of the words below
        return Meaning.ABSENT
    if "locked" in text or "busy" in text:
        return Meaning.AGAIN
    refused = ("readonly", "unable to open", "not a database", "malformed", "permission")
    return Meaning.REFUSED if any(word in text for word in refused) else Meaning.FAILED


def is_answer(error: BaseException) -> bool:
    """Whether the server has sent it: then the statement has ended."""
    return any(isinstance(getattr(each, "sqlstate", None), str) or _is_of_mysql(each) for each in _chain(error))


def _is_of_mysql(error: BaseException) -> bool:
    """Its numbers from 2000 to 2999 are those of clients."""
    code = error.args[0] if error.args and not isinstance(error, OSError) else None
    return isinstance(code, int) and (1000 <= code < 2000 or code >= 3000)


def is_of_one(error: BaseException) -> bool:
    """Whether PostgreSQL has refused a statement for what one of several ops writes: a value, a trigger, a policy."""
    states = [str(getattr(each, "sqlstate", None) or "") for each in _chain(error)]
    return any(state[:2] in _OF_VALUES or state == "42501" for state in states)


def is_lock_wait(error: BaseException) -> bool:
    """Whether the lock of a row, or of the table, was not there in time."""
    return any(_LOCK_WAITS & {each for each in _code(link) if isinstance(each, str | int)} for link in _chain(error))


def is_duplicate(error: BaseException) -> bool:
    """Whether an INSERT met a row of the same key."""
    return any(getattr(each, "sqlstate", None) == "23505" or each.args[:1] == (1062,) for each in _chain(error))


def is_syntax(error: BaseException) -> bool:
    """Whether the statement cannot be read, as with a table whose name is a reserved word."""
    return any(not _SYNTAX.isdisjoint(_codes(each)) for each in _chain(error)) or "syntax error" in all_said(error)


def all_said(error: BaseException) -> str:
    """The texts of an error and of its causes. Without the statement that SQLAlchemy adds: a lock may have any name."""
    return " ".join(str(getattr(each, "orig", None) or each) for each in _chain(error))


def is_of_table(error: BaseException) -> bool:
    """Whether the table may be the reason: it may have been changed, or hide rows."""
    for each in _chain(error):
        if isinstance(each, Conflict) or not _OF_TABLE.isdisjoint(_codes(each)):
            return True
        if isinstance(each, sqlite3.Error) and any(words in str(each) for words in _OF_TABLE_IN_SQLITE):
            return True
    return bool(_STALE.search(all_said(error)))


def is_unprepared(error: BaseException) -> bool:
    """Whether a statement was not prepared in this session, or cannot be."""
    return any(not _UNPREPARED.isdisjoint(_codes(each)) for each in _chain(error))


def is_of_options(error: BaseException) -> bool:
    """Whether a driver cannot connect with its arguments, whatever the server does."""
    chain = list(_chain(error))
    if any(isinstance(each, OSError) for each in chain):  # a certificate that is refused is a ValueError, too
        return False
    if any(isinstance(each, TypeError | ValueError | ArgumentError) for each in chain):
        return True
    return any(type(each).__name__ == "ProgrammingError" and getattr(each, "sqlstate", "") is None for each in chain)


def is_of_files(error: BaseException) -> bool:
    """Whether the program could not open a file, or a socket of this machine."""
    return any(isinstance(each, FileNotFoundError | PermissionError) for each in _chain(error))


def is_of_certificates(error: BaseException) -> bool:
    """Whether a file is not the certificate, or the key, that it should be. No server has a part in that."""
    found = [each for each in _chain(error) if isinstance(each, ssl.SSLError)]
    return any(each.library in ("X509", "PEM") or "PEM lib" in str(each) for each in found)


def was_not_sent(error: BaseException) -> bool:
    """Whether the connection was closed before the statement was sent."""
    texts = all_said(error)
    return "cannot switch to state" in texts or "connection is closed" in texts


def refusal(label: str, error: BaseException) -> ConfigError:
    """For an error that only the user can solve."""
    need = ""
    for each in _chain(error):
        if "row-level security" in str(each):
            need = ": CREATE POLICY asynclock ON the table TO the user USING (true) WITH CHECK (true)"
        elif not _RIGHTS.isdisjoint(_codes(each)):
            need = ": its user needs SELECT, INSERT, UPDATE and DELETE on the table"
        elif _STATEMENTS in _code(each):
            need = ": SET GLOBAL binlog_format = MIXED (or ROW), and in the configuration of the server; then reconnect"
        elif isinstance(each, sqlite3.Error) and "readonly" in str(each):
            need = ": the user of the program needs write rights on the file, and on its folder for -wal and -shm"
            need += "; or its file system is read-only"
    return ConfigError(f"{label} refuses: {remedied(error)}{need}")


@contextmanager
def explained(label: str) -> Iterator[None]:
    """For an op: raise ConfigError, or ReadOnly, where the error of the database means that. A ConfigError stays as it
    is: it says what to do already, and may contain the name of a lock, which may look like the error of a database."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        found = meaning(error)
        if found is Meaning.REFUSED:
            raise refusal(label, error) from error
        if found is Meaning.READ_ONLY:
            raise read_only(label, error) from error
        if found is Meaning.UNSAID:
            raise unsaid(label, reason(error)) from error
        if remedy(reason(error)):
            raise Unserved(f"{label}: {remedied(error)}") from error
        raise


def read_only(label: str, error: BaseException) -> ReadOnly:
    set_so, unset = "", "make this server writable"
    if getattr(error, "sqlstate", None) == "25006":
        set_so = ", or default_transaction_read_only is set"
        unset = "set default_transaction_read_only = off (ALTER ROLE, ALTER DATABASE or ALTER SYSTEM)"
    return ReadOnly(
        f"{label} is read-only ({reason(error)}): it is a standby, or a primary that was demoted{set_so}; let the url "
        f"name the primary, or {unset}"
    )


def unsaid(label: str, why: str) -> Unfit:
    """For a name or a label that cannot be written there."""
    return Unfit(
        f"{label} cannot write this name, or the label of this lock ({why}): take other characters, or a database with "
        "the encoding UTF8, or a table and a connection with the character set utf8mb4"
    )


def reason(error: BaseException) -> str:
    """What the driver says, without the statement that SQLAlchemy adds."""
    inner = getattr(error, "orig", None) or error
    return said(inner)[:300]


def remedied(error: BaseException) -> str:
    """The same, with what to do about it, if that is known."""
    why = reason(error)
    return f"{why}; {do}" if (do := remedy(why)) else why


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        orig = getattr(error, "orig", None)
        error = orig if isinstance(orig, BaseException) else error.__cause__
