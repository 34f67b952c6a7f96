"""One statement for an op, on MariaDB, as `single.py` has for PostgreSQL.

MariaDB has no RETURNING for such statements. LAST_INSERT_ID(fence) leaves the fence in the answer to the statement; 0
says that the row is not plain, or not free. A trigger of the table may hide the fence. Then an acquire and an extend
are decided in a transaction, which finds the hold as its own.

An acquire of a name that has a row, as far as is known, is an UPDATE, which costs the server half of what an INSERT
does. A session prepares each statement once: to parse it takes longer than to carry it out.

Ops that are ready at the same time leave in one packet, as one transaction, which the server commits once. Each has a
statement of its own. If the server stops at one of them, the transaction is rolled back. That op goes its own way, and
the others are sent again.

The clock is that of a transaction (see `MySQL` in `dialects.py`). No statement waits for its row, so two packets cannot
wait for each other. A fence of 0 (a lock without fencing) says nothing, so such an op is a transaction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock.rules.model import CLOCK_SKEW
from asynclock.stores.sql.dialects import WRITABLE
from asynclock.stores.sql.errors import Delayed, Meaning, ends_connection, is_answer, meaning
from asynclock.stores.sql.limits import LIMIT
from asynclock.stores.sql.lines import HIDDEN, AsyncmyLine, Stopped
from asynclock.stores.sql.pool import Overdue
from asynclock.stores.sql.rows import FLOOR
from asynclock.stores.sql.sending import Asked, Known, Sending, Single, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock.stores.jobs import Left
    from asynclock.stores.sql.lines import Change, Line
    from asynclock.stores.sql.pool import Pool


class MySQLClock(NamedTuple):
    """How a statement reads the clock of the server."""

    now: str = (  # Unix time in seconds
        "((TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) "
        "+ TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))) / 1e6)"
    )
    runs: str = "TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) BETWEEN 0 AND 60000000"
    """False once SET timestamp has stopped the clock of the session for longer."""
    begin: str = ""
    """The time at which the statement began. "" here and below: `now` is read once, or always the same."""
    end: str = ""
    """`now`, and no later than a minute after `begin`. A statement that mentions SYSDATE several times may see that
    the zone of the server changes in between: then this is at most a minute late, and never early."""


_BEGIN = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"

CLOCK = MySQLClock(
    begin=f"({_BEGIN} / 1e6)",
    end=f"(({_BEGIN} + least(greatest(TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)), 0), 60000000)) / 1e6)",
)

TOGETHER = 64
"""Ops of one packet, at most."""

_TRIES = 4
"""How often a packet is sent, without the ops that stopped it before."""

_AT_ONCE = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
"""A statement fails at once where a transaction has locked its row. It would keep its connection for that time, and a
few such rows would delay all other names."""


def statement(table: str, group: str, clock: MySQLClock = CLOCK) -> str:
    """The text of a statement. The columns that a condition reads are assigned last, so it does not matter whether the
    server assigns them one after the other."""
    (now, runs, *_), (verb, _, span) = clock, group.partition(" ")
    if verb == "acquire":
        free = "state IS NULL AND (count = 0 OR expires_at <= VALUES(update_time))"
        first = _first("now")
        floor = f"coalesce((SELECT f.fence FROM {table} AS f WHERE f.resource_name = :floor), 0)"  # noqa: S608
        taken = ("owner", "node_info", "keep_until", "update_time", "expires_at")
        changes = ", ".join(f"{column} = IF({free}, VALUES({column}), {column})" for column in taken)
        return f"""{_AT_ONCE}
            INSERT INTO {table} (resource_name, owner, node_info, count, fence, expires_at, keep_until, create_time,
                update_time)
            SELECT :name, :owner, :info, 1,
                LAST_INSERT_ID(greatest({floor} + 1, {first}) + {int(span)} - 1),
                now + :lease, now + :memory, now, now
            FROM (SELECT {now} AS now) AS c WHERE {runs} AND {WRITABLE}
            ON DUPLICATE KEY UPDATE
                fence = IF({free}, LAST_INSERT_ID(greatest(fence + {int(span)}, VALUES(fence))),
                    fence + 0 * LAST_INSERT_ID(0)),
                {changes}, count = IF({free}, 1, count)"""  # noqa: S608
    if verb == "reacquire":
        return _retake(table, int(span), clock)
    changes = {
        "release": "keep_until = IF(fence < :number, {now} + :memory, keep_until), owner = '', node_info = '', "
        "fence = LAST_INSERT_ID(greatest(fence, :number)), count = 0, expires_at = 0, update_time = {now}",
        "extend": "keep_until = IF(:number > 0, {now} + :memory, keep_until), "
        "fence = LAST_INSERT_ID(greatest(fence, :number)), "
        "expires_at = IF(:lease > 0, greatest(expires_at, {now} + :lease), expires_at), update_time = {now}",
    }[verb].replace("{now}", now)
    return (
        f"{_AT_ONCE}UPDATE {table} SET {changes} WHERE resource_name = :name AND state IS NULL "  # noqa: S608
        f"AND owner = :owner AND expires_at > {now} AND greatest(fence, :number) > 0 AND {runs} AND {WRITABLE}"
    )


def _retake(table: str, span: int, clock: MySQLClock) -> str:
    """An acquire of a name that has a row. A hold has ended at `begin`, and the new one counts from `end`."""
    begin, end = clock.begin or clock.now, clock.end or clock.now
    return f"""{_AT_ONCE}
        UPDATE {table} SET owner = :owner, node_info = :info, count = 1,
            fence = LAST_INSERT_ID(greatest(fence + {span}, {_first(end)} + {span} - 1)),
            keep_until = {end} + :memory, update_time = {end}, expires_at = {end} + :lease
        WHERE resource_name = :name AND state IS NULL AND fence > 0
            AND (count = 0 OR expires_at <= {begin}) AND {clock.runs} AND {WRITABLE}"""  # noqa: S608


def _first(now: str) -> str:
    """The least fence of a grant."""
    least, most = (f"CAST(truncate(({now} {sign} {CLOCK_SKEW}) * 1000000, 0) AS SIGNED)" for sign in "-+")
    return f"least(greatest(:number, {least}), {most})"


class _Asked(Asked):
    """An op that waits for its statement."""

    __slots__ = ("again", "change", "outcome")

    def __init__(
        self, group: str, values: Single, told: Callable[[int | None, Exception | None], Left], text: str
    ) -> None:
        super().__init__(group, values, told)
        self.change: Change = (text, {**values._asdict(), "floor": FLOOR})
        # It may be carried out twice. A release would not find its hold, and an acquire may arrive after its undo.
        self.again = group == "extend"
        self.outcome: int | Exception | None = None  # the fence, 0, HIDDEN, or its error

    def tell(self) -> None:
        """Give it its outcome."""
        if isinstance(self.outcome, Exception):
            self.answer(None, self.outcome)
        else:
            self.answer(self.outcome)


class MySQLSingles(Sending[_Asked]):
    """The statements of one event loop, over connections of asyncmy."""

    def __init__(self, label: str, table: str, pool: Pool, clock: MySQLClock = CLOCK) -> None:
        super().__init__(label, pool)
        self._table = table
        self._clock = clock
        self._texts: dict[str, str] = {}  # by group
        self._known = Known()
        self._waiting: deque[_Asked] = deque()

    def add(self, group: str, values: Single, told: Callable[[Any, Exception | None], Left]) -> Asked:
        group = self._known.group(group, values.name)
        if (text := self._texts.get(group)) is None:
            text = self._texts[group] = statement(self._table, group, self._clock)

        def answered(fence: int | None, error: Exception | None) -> Left:
            if fence == HIDDEN and group == "release":  # a transaction would not find it; nobody needs the fence
                fence = max(values.number, 1)
            if fence is None or fence <= 0:
                return told(None, error)
            self._known.add(values.name)
            return told(fence, None)

        asked = _Asked(group, values, answered, text)
        self.begin(asked)
        return asked

    def put(self, asked: _Asked) -> None:
        self._waiting.append(asked)

    def take(self) -> Sequence[_Asked]:
        taken = list[_Asked]()
        while self._waiting and len(taken) < TOGETHER:
            if not (asked := self._waiting.popleft()).is_over:  # else its caller has gone
                taken.append(asked)
        return taken

    async def send(self, taken: Sequence[_Asked], line: Line) -> Callable[[], object]:
        await _sent(line, taken)
        return partial(self._sent, taken) if len(taken) > 1 else taken[0].tell

    def _sent(self, taken: Sequence[_Asked]) -> None:
        if left := [each for each in taken if each.outcome is None]:  # the server stopped at one of them
            self.send_again(left)
        _tell(taken)

    async def send_in_task(self, taken: Sequence[_Asked], error: Exception | None) -> None:
        until, stale = asyncio.get_running_loop().time() + LIMIT, True
        for _ in range(_TRIES):
            asked = [each for each in taken if each.outcome is None and not each.is_over]
            try:
                if error is not None:
                    failed, error = error, None
                    raise failed
                if not asked:
                    break
                async with self._pool.line(until) as line:
                    await _sent(line, asked)
            except Overdue as failed:
                said = f"{self._label} did not end a statement within {LIMIT:g} s"
                overdue: Exception = Delayed(said) if failed.ended else TimeoutError(said)
                overdue.__cause__ = failed
                _fail(asked, overdue)
            except Exception as failed:
                resent = stale and meaning(failed) is Meaning.LOST
                _fail([each for each in asked if not (resent and each.again)], failed)
                stale = False
                if resent:
                    self._pool.drop_idle()
        _settle(taken, [0] * len(taken))  # each that is left is decided in a transaction of its own
        _tell(taken)


async def _sent(line: Line, asked: Sequence[_Asked]) -> None:
    """Some may be left without an outcome: they were not carried out. Raises an error that concerns all of them."""
    if not isinstance(line, AsyncmyLine):
        raise TypeError(f"{type(line).__name__} is no connection of asyncmy")
    if len(asked) == 1:
        await _sent_alone(line, asked)
        return
    try:
        _settle(asked, await line.change_all([each.change for each in asked]))
    except Stopped as stopped:
        concerned = asked if stopped.at is None else asked[stopped.at : stopped.at + 1]
        if not stopped.begun:
            _settle(asked, [0] * len(asked))  # one of them may be the reason: each is a transaction of its own
            raise stopped.error from None
        if meaning(stopped.error) is Meaning.AGAIN:
            _settle(concerned, [0] * len(concerned))
        elif stopped.at is None:
            raise stopped.error from None
        else:
            _fail(concerned, stopped.error)


async def _sent_alone(line: AsyncmyLine, asked: Sequence[_Asked]) -> None:
    try:
        fence = await line.change(*asked[0].change)
    except Exception as error:
        if meaning(error) is not Meaning.AGAIN:
            if ends_connection(error) or not is_answer(error):
                raise
            _fail(asked, error)
            return
        fence = 0  # a lock was not free, and the server has undone the statement: the connection is good
    _settle(asked, [fence])


def _settle(asked: Sequence[_Asked], fences: Sequence[int]) -> None:
    """Of the first of them, if there are fewer fences."""
    for each, fence in zip(asked, fences, strict=False):
        if each.outcome is None:
            each.outcome = fence


def _fail(asked: Sequence[_Asked], error: Exception) -> None:
    for each in asked:
        if each.outcome is None:
            each.outcome = error


def _tell(asked: Sequence[_Asked]) -> None:
    """Give those their answers that have one."""
    tell(
        (each, None, each.outcome) if isinstance(each.outcome, Exception) else (each, each.outcome, None)
        for each in asked
        if each.outcome is not None
    )
