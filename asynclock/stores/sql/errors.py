"""What an error of a database means for the store. Pure."""

from __future__ import annotations

import sqlite3
from enum import Enum
from typing import TYPE_CHECKING

from sqlalchemy.exc import ArgumentError

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Meaning(Enum):
    """What to do after an error."""

    AGAIN = "again"  # nothing was done; the transaction may be repeated
    LOST = "lost"  # the connection cannot be used any more
    REFUSED = "refused"  # only the user can solve it
    ABSENT = "absent"  # the table does not exist
    FAILED = "failed"  # anything else


class Conflict(Exception):
    """Another client has inserted the row. The transaction is repeated."""


_AGAIN = {"40001", "40P01", "55P03", 1213, 1205, 1020, 3572}
_LOST = {"57P01", "57P02", "57P03", "25P03", 1053, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031}
_REFUSED = {"28000", "28P01", "3D000", "42501", "3F000", 1044, 1045, 1049, 1142, 1143, 1227}
_ABSENT = {"42P01", 1146}
_BROKEN = ("InterfaceError", "InternalClientError", "ConnectionDoesNotExistError")
"""Of asyncpg: the connection is closed, or closes just now."""

_CODES = ((_AGAIN, Meaning.AGAIN), (_LOST, Meaning.LOST), (_REFUSED, Meaning.REFUSED), (_ABSENT, Meaning.ABSENT))
"""SQLSTATE of PostgreSQL, and the numbers of MySQL and MariaDB."""


def meaning(error: BaseException) -> Meaning:
    """Of an error of a driver, of SQLAlchemy, or of the network."""
    if isinstance(error, Conflict):
        return Meaning.AGAIN
    if getattr(error, "connection_invalidated", False):  # SQLAlchemy
        return Meaning.LOST
    for each in _chain(error):
        state, code = getattr(each, "sqlstate", None), each.args[0] if each.args else None
        for codes, found in _CODES:
            if state in codes or (isinstance(code, int) and code in codes):
                return found
        if isinstance(state, str) and state.startswith("08"):
            return Meaning.LOST
        if isinstance(each, sqlite3.Error):
            return _of_sqlite(str(each))
        if isinstance(each, OSError | TimeoutError | EOFError):
            return Meaning.LOST
        if type(each).__module__.startswith("asyncpg") and type(each).__name__.endswith(_BROKEN):
            return Meaning.LOST
    return Meaning.FAILED


def _of_sqlite(text: str) -> Meaning:
    if "locked" in text or "busy" in text:
        return Meaning.AGAIN
    if "no such table" in text:
        return Meaning.ABSENT
    refused = ("readonly", "unable to open", "not a database", "malformed", "permission")
    return Meaning.REFUSED if any(word in text for word in refused) else Meaning.FAILED


def is_duplicate(error: BaseException) -> bool:
    """Whether an INSERT met a row of the same key."""
    return any(getattr(each, "sqlstate", None) == "23505" or each.args[:1] == (1062,) for each in _chain(error))


def is_of_options(error: BaseException) -> bool:
    """Whether a driver cannot connect with its arguments, whatever the server does."""
    chain = list(_chain(error))
    if any(isinstance(each, OSError) for each in chain):  # a certificate that is refused is a ValueError, too
        return False
    if any(isinstance(each, TypeError | ValueError | ArgumentError) for each in chain):
        return True
    return any(type(each).__name__ == "ProgrammingError" and getattr(each, "sqlstate", "") is None for each in chain)


def was_not_sent(error: BaseException) -> bool:
    """Whether the connection was closed before the statement was sent."""
    return any("cannot switch to state" in str(each) or "connection is closed" in str(each) for each in _chain(error))


def refusal(label: str, error: BaseException) -> ConfigError:
    """For an error that only the user can solve."""
    return ConfigError(f"{label} refuses: {reason(error)}")


def reason(error: BaseException) -> str:
    """What the driver says, without the statement that SQLAlchemy adds."""
    inner = getattr(error, "orig", None) or error
    return (str(inner) or repr(inner))[:300]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        orig = getattr(error, "orig", None)
        error = orig if isinstance(orig, BaseException) else error.__cause__
