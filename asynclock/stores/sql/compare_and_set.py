"""An op on PostgreSQL in two statements: read the row, decide, and write it if it is still the same version.

A transaction of an op is five statements, each of them a round trip, while it locks the row. This locks nothing between
the two: a version of a row is identified by its place (ctid) and by the transaction that wrote it (xmin), and a
statement writes only over the version that was read. So a row that others change meanwhile, or have locked, is left as
it is; the op is a transaction then. An op of an absent row, of a row that it would remove, or with a notice for a
client that looks for its notices is a transaction, too.

The notices leave with the statement that writes: PostgreSQL sends them at its commit.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asynclock.rules.model import State
from asynclock.stores.sql.dialects import assignments, latest
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

IS_STANDBY = "pg_is_in_recovery()"

_VERSION = "CAST(tableoid AS text), CAST(ctid AS text), CAST(xmin AS text)"

_HOT = 0.1
"""Seconds for which a name is left to transactions after somebody else has changed its row meanwhile."""

_LOCKED = 1.0
"""Seconds for which all names are, after another session has locked the table: these statements wait longer for it than
a transaction does at first, and others need the connections."""

_REMEMBERED = 1000
"""Names, at most."""


@dataclass(frozen=True)
class Ended:
    """The server, or the rules, have answered by an error. Nothing was written, and the connection is good."""

    error: Exception


class NotRead(Exception):
    """The connection has ended before anything was written."""


class Pauses:
    """Names for which something is not tried for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[str, float] = {}  # by key

    def add(self, key: str) -> None:
        self._until.pop(key, None)
        self._until[key] = asyncio.get_running_loop().time() + self._seconds
        if len(self._until) > _REMEMBERED:
            del self._until[next(iter(self._until))]

    def __contains__(self, key: str) -> bool:
        return (until := self._until.get(key)) is not None and asyncio.get_running_loop().time() < until


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
        self._hot = Pauses(_HOT)  # left to transactions
        self._rests_until = -math.inf  # all are
        self._read = latest(table, ":name", f"{now}, {IS_STANDBY}, {_VERSION}, {COLUMNS}")
        # It waits for no lock of a row: another session may have it for long.
        mine = (
            f"WITH mine AS MATERIALIZED (SELECT tableoid AS part, ctid AS at FROM {table} "  # noqa: S608
            "WHERE ctid = CAST(CAST(:at AS text) AS tid) AND tableoid = CAST(CAST(:part AS text) AS oid) "
            "AND xmin = CAST(CAST(:writer AS text) AS xid) AND resource_name = :resource_name FOR UPDATE SKIP LOCKED)"
        )
        write = (
            f"UPDATE {table} AS l SET {assignments()} FROM mine AS m "  # noqa: S608
            "WHERE l.ctid = m.at AND l.tableoid = m.part RETURNING 1"
        )
        self._write = f"{mine} {write}"
        self._write_and_notify = (
            f"{mine}, made AS ({write}) SELECT pg_notify(q.channel, q.message) FROM made CROSS JOIN "  # noqa: S608
            "unnest(CAST(:channels AS text[]), CAST(:messages AS text[])) AS q(channel, message)"
        )

    def takes(self, key: str) -> bool:
        """Whether it is worth a try."""
        return not self.rests and key not in self._hot

    @property
    def rests(self) -> bool:
        """Whether another session has locked the table a moment ago."""
        return self._rests_until > asyncio.get_running_loop().time()

    def rest(self) -> None:
        """Another session has locked the table."""
        self._rests_until = asyncio.get_running_loop().time() + _LOCKED

    async def step(
        self, line: Line, key: str, step: Step, looking: Collection[str]
    ) -> tuple[Change, float] | Ended | None:
        """What the step has returned, and the time of the server. None: it needs a transaction; nothing was written.
        Raises NotRead, or the error with which the connection has ended while it wrote."""
        try:
            found = await _answered(line, self._read, {"name": resource_name(key)})
        except Exception as error:
            raise NotRead from error
        if isinstance(found, Ended):  # a transaction explains what is no lock
            return found if meaning(found.error) is Meaning.AGAIN else None
        if not found:
            return None
        time, is_standby, part, at, writer, *columns = found[0]
        if is_standby:  # it may be behind its primary; a transaction is refused there
            return None
        now, row = float(time), Row(*columns)
        try:
            before = state_of(row)
            if not before.fence:  # the floor of the fences counts
                return None
            change = step([covered(before, now, 0)], now)
            looks, new = looks_of(row).union(looking), uncovered(change.states[0], before)
            if new == before and not change.notices:
                return change, now
            if new in (before, State()) or (messages := self._messages(change.notices, looks)) is None:
                return None
            params: dict[str, Any] = row_of(key, new, looks & tags_in(new))._asdict()
        except Exception as error:  # of the rules, or of the row
            return Ended(error)
        params |= {"now": now, "part": part, "at": at, "writer": writer}
        written = await self._written(line, params, messages)
        if isinstance(written, Ended):
            return written
        if written:
            return change, now
        self._hot.add(key)
        return None

    async def _written(
        self, line: Line, params: Mapping[str, Any], messages: Sequence[tuple[str, str]]
    ) -> Sequence[Any] | Ended:
        """Write the row, and send the messages; (): it is another version by now, or locked."""
        if not messages:
            return await _answered(line, self._write, params)
        channels, texts = map(list, zip(*messages, strict=True))
        return await _answered(line, self._write_and_notify, {**params, "channels": channels, "messages": texts})


async def _answered(line: Line, text: str, params: Mapping[str, Any]) -> Sequence[Any] | Ended:
    """The rows; or the error with which the server has answered."""
    try:
        return await line.fetch(text, params)
    except Exception as error:
        if ends_connection(error) or not is_answer(error):
            raise
        return Ended(error)
