"""Transactions: one for each op, repeated where the database asks for that."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from asynclock.rules.model import State
from asynclock.stores.jobs import leave_place
from asynclock.stores.sql.compare_and_set import CompareAndSet, Ended, NotRead
from asynclock.stores.sql.delays import CONNECT
from asynclock.stores.sql.errors import (
    Delayed,
    Meaning,
    Unconfirmed,
    ends_connection,
    is_lock_wait,
    meaning,
    remedied,
)
from asynclock.stores.sql.file_lines import FileLine
from asynclock.stores.sql.limits import LIMIT
from asynclock.stores.sql.pool import Overdue, Pool
from asynclock.stores.sql.reading import reader_of
from asynclock.stores.sql.rows import (
    common_begin,
    covered,
    key_of,
    looks_of,
    ordered,
    resource_name,
    row_of,
    state_of,
    tags_in,
    uncovered,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from asynclock.rules.model import Notice
    from asynclock.stores.deciding import Change
    from asynclock.stores.sql.delays import Delays
    from asynclock.stores.sql.dialects import Dialect
    from asynclock.stores.sql.lines import Line
    from asynclock.stores.sql.rows import Row
    from asynclock.stores.transactional import Step

PAGE = 500
"""Rows that are read at a time."""

_PAUSE = (0.0005, 0.02)  # seconds between two tries of a transaction; doubled after each


_SEVERAL = 1.0
"""Seconds for which an op of several names asks again where another session has locked a row, in place of LIMIT: the
renewals of all its names wait for it. On MySQL it reads with NOWAIT, so it locks no row while it waits for another."""


@dataclass(slots=True)
class _Way:
    """How a transaction runs."""

    waits: bool  # its lock was not free a moment ago: it waits longer, beside few others
    checked: bool
    reads: bool = False  # it locks no row and writes nothing
    began: bool = False


async def _is_rolled_back(line: Line) -> bool:
    """Roll back. False: that failed, and the connection must be closed. SQLite, for one, ends the transaction itself
    when the disk is full."""
    try:
        await line.run("ROLLBACK")
    except Exception:  # what made it necessary says more
        return False
    return True


class Send(Protocol):
    """Stores or sends a notice within a transaction, for another client. `brief`: see `Dialect.insert`."""

    async def __call__(
        self, line: Line, notice: Notice, now: float, looks: Collection[str], *, brief: bool
    ) -> None: ...


class Transactions:
    """Over a pool. `send` stores or sends a notice within a transaction, for another client."""

    def __init__(
        self,
        label: str,
        dialect: Dialect,
        pool: Pool,
        send: Send,
        delays: Delays,
    ) -> None:
        self._label = label
        self._delays = delays
        self._dialect = dialect
        self._reader = reader_of(dialect)
        self._send = send
        self.pool = pool
        self.compare_and_set: CompareAndSet | None = None  # None: each op is a transaction of several statements

    async def step(
        self, keys: Sequence[str], step: Step, looking: Collection[str], *, checked: bool = True, locks: bool = False
    ) -> tuple[Change, float]:
        """Carry out a step; what it returned, and the time of the server. `looking`: the tags of the clients of this
        loop that look for their notices. `checked`: see `repeated`; a step with notices, which may grant, always is.
        `locks`: a statement for it has met another session: lock the row at once."""

        several = len(keys) > 1
        first = True  # this try waits for no row: only some connections may do that at the same time

        async def run(line: Line) -> tuple[Change, float]:
            nonlocal first
            brief, first = first or several, False
            return await self.decide(line, keys, step, looking, brief=brief)

        until = asyncio.get_running_loop().time() + LIMIT
        try:
            ways = None if locks or len(keys) != 1 else self.compare_and_set
            if ways is not None and ways.takes(keys[0]):
                done = await self._compared(ways, keys[0], step, looking, until)
                if done is not None:
                    return done
            result: tuple[Change, float] = await self.repeated(
                run, checked=checked, keys=keys, until=until, locked_for=_SEVERAL if several else LIMIT
            )
        finally:
            self._delays.ended(keys)
        return result

    async def _compared(
        self, compare_and_set: CompareAndSet, key: str, step: Step, looking: Collection[str], until: float
    ) -> tuple[Change, float] | None:
        """A step in two statements, without a lock. None: it needs a transaction, and nothing was done."""
        began = False

        def answered(states: Sequence[State], now: float) -> Change:
            self._delays.answered()
            return step(states, now)

        try:
            async with self.pool.line(until) as line:
                began = True
                if not compare_and_set.takes(key):  # another op has found that out meanwhile
                    return None
                done = await compare_and_set.step(line, key, answered, looking)
        except Overdue as error:
            raise self._overdue(error, None) from error
        except Exception as error:
            if began and not isinstance(error, NotRead):
                raise
            if meaning(error) is Meaning.LOST:
                self.pool.drop_idle()
            return None
        if not isinstance(done, Ended):
            return done
        if meaning(done.error) is not Meaning.AGAIN:
            raise done.error
        self._delays.repeated((key,), done.error)
        if is_lock_wait(done.error):
            compare_and_set.rest()
        return None

    async def brief_step(self, keys: Sequence[str], step: Step, looking: Collection[str]) -> tuple[Change, float]:
        """The same for a release that failed before. It waits a moment only for what other transactions have locked,
        and is not repeated: its caller sends it again."""

        async def run(line: Line) -> tuple[Change, float]:
            return await self.decide(line, keys, step, looking, brief=True)

        way = _Way(waits=False, checked=False)
        try:
            async with self.pool.line() as line:
                result = await self._in_transaction(line, run, way)
        except Overdue as error:
            raise self._overdue(error, None) from error
        except Exception as error:
            if not way.began and meaning(error) is Meaning.LOST:
                self.pool.drop_idle()
            raise
        if isinstance(result, Ended):
            raise result.error
        done: tuple[Change, float] = result
        return done

    async def repeated(
        self,
        run: Callable[[Line], Awaitable[Any]],
        *,
        checked: bool = True,
        keys: Sequence[str] = (),
        reads: bool = False,
        until: float | None = None,
        locked_for: float = LIMIT,
    ) -> Any:
        """Run it in a transaction; again if the database asks for that, or if an idle connection was closed. All of it
        ends at `until`, on the clock of the loop (None: LIMIT from now): then its connection is closed. If the server
        does not answer either, the database counts as down. `checked`: the file of SQLite must be the one at its path.
        Raises Delayed where that is not so, and else the error of the database. `keys`: what it is about, for messages.
        `reads`: it only reads. `locked_for`: seconds after which a lock that is not free is its error."""
        now = asyncio.get_running_loop().time
        began, until = now(), now() + LIMIT if until is None else until
        pause, stale = _PAUSE[0], True
        locked: Exception | None = None
        while True:
            way = _Way(locked is not None, checked, reads)
            try:
                async with self.pool.line(until, waits=way.waits) as line:
                    result = await self._in_transaction(line, run, way)
            except Overdue as error:
                raise self._overdue(error, locked) from error
            except Exception as error:
                if not way.began and meaning(error) is Meaning.AGAIN:  # a file that is locked
                    self._delays.repeated(keys, error)
                    await asyncio.sleep(pause)
                    continue
                if way.began or not stale or meaning(error) is not Meaning.LOST:
                    raise
                stale = False
                self.pool.drop_idle()
                continue
            if not isinstance(result, Ended):
                return result
            if meaning(result.error) is not Meaning.AGAIN:
                raise result.error
            locked = result.error if is_lock_wait(result.error) else None
            if locked is not None and now() - began >= locked_for:
                raise self._locked(locked, locked_for) from locked
            self._delays.repeated(keys, result.error)
            if locked is not None:
                leave_place()
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
            pause = min(2 * pause, _PAUSE[1])

    def _locked(self, locked: Exception, seconds: float) -> Exception:
        """For an op that met the lock of another session. `locked`: what the database has said."""
        return Delayed(f"{self._label} did not end a transaction within {seconds:g} s: {remedied(locked)}")

    def _overdue(self, error: Overdue, locked: Exception | None) -> Exception:
        """For an op whose time is over. `locked`: the last answer of the database, if it said so."""
        if locked is not None:
            return self._locked(locked, LIMIT)
        said = f"{self._label} did not end a transaction within {LIMIT:g} s"
        return Delayed(said) if error.ended else TimeoutError(said)

    async def _in_transaction(self, line: Line, run: Callable[[Line], Awaitable[Any]], way: _Way) -> Any:
        if isinstance(line, FileLine):
            return await line.whole(lambda inside: self._in_transaction(inside, run, way))
        try:
            statements = self._reader if way.reads else self._dialect
            await line.run(statements.begin_waiting if way.waits else statements.begin)
            way.began = True
            self._delays.answered()
            if way.checked:
                await statements.check(line)
            result = await run(line)
            await statements.commit(line)
        except Exception as error:  # of the step, too
            if ends_connection(error) or isinstance(error, Unconfirmed):
                raise
            # BEGIN of PostgreSQL has settings behind it: it may have begun although it failed.
            if (way.began or self._dialect.name == "postgresql") and not await _is_rolled_back(line):
                raise
            return Ended(error)
        return result

    async def decide(
        self, line: Line, keys: Sequence[str], step: Step, looking: Collection[str], *, brief: bool = False
    ) -> tuple[Change, float]:
        """The part of `step` inside the transaction. It writes nothing before the step has returned."""
        now, floor, rows = await self._dialect.read(line, ordered(keys), brief=brief)
        found = [rows.get(resource_name(key)) for key in keys]
        before = [State() if row is None else state_of(row) for row in found]
        change = step([covered(state, now, floor) for state in before], now)
        if change.notices:
            await self._dialect.check(line)
        looks: set[str] = set()
        for index in sorted(range(len(keys)), key=lambda each: resource_name(keys[each]).encode()):
            row, old = found[index], before[index]
            new = uncovered(change.states[index], old)
            looks |= await self._write(line, keys[index], row, old, new, now, looking, brief=brief)
        for notice in change.notices:
            await self._send(line, notice, now, looks, brief=brief)
        return change, now

    async def _write(
        self,
        line: Line,
        key: str,
        row: Row | None,
        old: State,
        new: State,
        now: float,
        looking: Collection[str],
        *,
        brief: bool,
    ) -> frozenset[str]:
        """Store a state, if it is another one. The tags of its clients that look for their notices."""
        looks = looks_of(row) if row is not None else frozenset[str]()
        if new == old:
            return looks
        if new == State():
            if row is not None:
                await self._dialect.delete(line, row.resource_name)
            return looks
        after = looks.union(looking) & tags_in(new) if self._dialect.mixes else ()
        if row is None:
            await self._dialect.insert(line, row_of(key, new, after), now, brief=brief)
        else:
            await self._dialect.update(line, row_of(key, new, after), now)
        return looks.union(looking)

    async def read(self, keys: Sequence[str], step: Step) -> bool:
        """Carry out a step that changes nothing. Whether a standby has answered."""

        async def run(line: Line) -> bool:
            seen = await self._reader.read(line, [resource_name(key) for key in keys])
            states = [State() if (row := seen.rows.get(resource_name(key))) is None else state_of(row) for key in keys]
            step([covered(state, seen.now, seen.floor) for state in states], seen.now)
            return seen.is_replica

        return bool(await self._read(run, keys))

    async def names(self, begin: str, after: str) -> tuple[str, list[str]]:
        """Keys that begin with `begin` and are held, after the row `after`; and the last row that was read, "" at the
        end."""
        shared = common_begin(begin)

        async def run(line: Line) -> Sequence[Row]:
            return await self._dialect.page(
                line,
                after,
                PAGE,
                "AND resource_name >= :begin AND count > 0 AND (expires_at IS NULL OR expires_at > :now)",
                begin=shared,
                now=await self._reader.time(line),
            )

        rows: Sequence[Row] = await self._read(run, ())
        # Not only the first ones: with a collation other than "C" rows of other names may be between them.
        found = [row for row in rows if row.resource_name.startswith(shared)]
        keys = [key for row in found if (key := key_of(row)) is not None and key.startswith(begin)]
        return (rows[-1].resource_name if len(rows) == PAGE else ""), keys

    async def has_table(self, exists: Callable[[Line], Awaitable[bool]]) -> bool:
        """Whether the table exists. Waits while another session has locked it, and notes that."""
        return bool(await self._read(exists, CONNECT))

    async def _read(self, run: Callable[[Line], Awaitable[Any]], keys: Sequence[str]) -> Any:
        try:
            return await self.repeated(run, keys=keys, reads=True)
        finally:
            self._delays.ended(keys)
