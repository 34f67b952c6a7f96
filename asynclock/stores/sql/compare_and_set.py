"""An op on PostgreSQL in two statements: read the row, decide, and write it if it is still the same version.

A transaction of an op is five statements, each of them a round trip, while it locks the row. This locks nothing between
the two: a version of a row is told by its place (ctid) and by the transaction that wrote it (xmin), and a statement
writes only over the version that was read. So a row that others change meanwhile, or have locked, is left as it is; the
op is a transaction then. The same is so for a row that is absent, or would be removed, and for a client that looks for
its notices.

The notices leave with the statement that writes: PostgreSQL sends them at its commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asynclock.rules.model import State
from asynclock.stores.sql.dialects import latest
from asynclock.stores.sql.errors import Meaning, ends_connection, is_answer, meaning
from asynclock.stores.sql.rows import (
    COLUMNS,
    Row,
    covered,
    looks_of,
    resource_name,
    row_of,
    state_of,
    tags_in,
    uncovered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from asynclock.rules.model import Notice
    from asynclock.stores.deciding import Change
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.transactional import Step

_VERSION = "CAST(tableoid AS text), CAST(ctid AS text), CAST(xmin AS text)"


@dataclass(frozen=True)
class Ended:
    """The step has raised an error, or the server has answered by one. Nothing was written."""

    error: Exception


class NotRead(Exception):
    """The connection has ended before anything was written."""


class CompareAndSet:
    """See the module. `messages` makes of notices the channels and the texts that a statement sends; None: it cannot
    send one of them."""

    def __init__(
        self,
        table: str,
        now: str,
        messages: Callable[[Sequence[Notice], Collection[str]], Sequence[tuple[str, str]] | None],
    ) -> None:
        self._messages = messages
        self._read = latest(table, ":name", f"{now}, {_VERSION}, {COLUMNS}")
        # It waits for no lock of a row: another session may have it for long.
        mine = (
            f"WITH mine AS MATERIALIZED (SELECT tableoid AS part, ctid AS at FROM {table} "  # noqa: S608
            "WHERE ctid = CAST(CAST(:at AS text) AS tid) AND tableoid = CAST(CAST(:part AS text) AS oid) "
            "AND xmin = CAST(CAST(:writer AS text) AS xid) AND resource_name = :resource_name FOR UPDATE SKIP LOCKED)"
        )
        pairs = list(zip(COLUMNS.split(", "), Row._fields, strict=True))[1:]
        changes = ", ".join(f"{column} = :{field}" for column, field in pairs)
        write = (
            f"UPDATE {table} AS l SET {changes}, update_time = :now FROM mine AS m "  # noqa: S608
            "WHERE l.ctid = m.at AND l.tableoid = m.part RETURNING 1"
        )
        self._write = f"{mine} {write}"
        self._write_and_notify = (
            f"{mine}, made AS ({write}) SELECT pg_notify(q.channel, q.message) FROM made CROSS JOIN "  # noqa: S608
            "unnest(CAST(:channels AS text[]), CAST(:messages AS text[])) AS q(channel, message)"
        )

    async def step(
        self, line: Line, key: str, step: Step, looking: Collection[str]
    ) -> tuple[Change, float] | Ended | None:
        """What the step has returned, and the time of the server. None: it needs a transaction; nothing was written.
        Raises NotRead, or the error with which the connection has ended while it wrote."""
        try:
            found = await _answered(line, self._read, {"name": resource_name(key)})
        except Exception as error:
            raise NotRead from error
        if isinstance(found, Ended) or not found:
            return None
        now, part, at, writer, *columns = found[0]
        row = Row(*columns)
        try:
            before = state_of(row)
            if not before.fence:  # the floor of the fences counts
                return None
            change = step([covered(before, float(now), 0)], float(now))
            looks = looks_of(row).union(looking)
        except Exception as error:  # of the rules, or of the row
            return Ended(error)
        new = uncovered(change.states[0], before)
        if new == before and not change.notices:
            return change, float(now)
        if new in (before, State()) or (messages := self._messages(change.notices, looks)) is None:
            return None
        params: dict[str, Any] = {
            **row_of(key, new, looks & tags_in(new))._asdict(),
            "now": float(now), "part": part, "at": at, "writer": writer,
        }  # fmt: skip
        if messages:
            params["channels"], params["messages"] = map(list, zip(*messages, strict=True))
        written = await _answered(line, self._write_and_notify if messages else self._write, params)
        if isinstance(written, Ended):
            return None if meaning(written.error) is Meaning.AGAIN else written
        return (change, float(now)) if written else None


async def _answered(line: Line, text: str, params: Mapping[str, Any]) -> Sequence[Any] | Ended:
    """The rows; or the error with which the server has answered. The connection is good after that."""
    try:
        return await line.fetch(text, params)
    except Exception as error:
        if ends_connection(error) or not is_answer(error):
            raise
        return Ended(error)
