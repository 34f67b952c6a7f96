"""A player of histories on a SQL database: what `decide` and `decide_all` make of each step, and what the store makes
of it, on a clock that stands still between steps and leaps with Pass. Vote, full state of each name, and all notices
are compared after each step.

The model has one rule more than `decide`: a name never forgets its counter (docs/stores/sql.md)."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

from asynclock.rules.decide import decide
from asynclock.rules.model import Kind, Notice, Op, Rule, State, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.rules.registry import FAMILIES, family_of
from asynclock.rules.several import decide_all
from asynclock.stores.deciding import Change, vote_of
from asynclock.stores.sql import SQLStore
from asynclock.stores.sql.compare_and_set import CompareAndSet, Ended, Pauses
from asynclock.stores.sql.database import Database
from asynclock.stores.sql.dialects import MySQL, SQLite
from asynclock.stores.sql.lines import Line
from asynclock.stores.sql.listening import message_of
from asynclock.stores.sql.mysql_single import MySQLClock, MySQLSingles
from asynclock.stores.sql.rows import Row, resource_name, row_of, state_of
from asynclock.stores.sql.sending import Asked
from asynclock.stores.sql.serving import Served
from asynclock.stores.sql.single import Singles
from asynclock.stores.sql.transactions import Transactions
from tests.support import histories
from tests.support.histories import Ask, Foreign, Listen, Pass, Permit
from tests.support.queued_releases import QueuedRelease
from tests.support.shared_histories import AT, NAMES, World, Write, kind_of, op_of

_prefixes = itertools.count()

_MANY = 20
"""Ops of which some need no transaction."""


class BothStatements(Singles):
    """It sends every second op by the statement of several ops."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._turns = itertools.cycle((False, True))

    def _statement(self, taken: Sequence[Asked]) -> tuple[str, dict[str, Any]]:
        return self._of_several(taken) if next(self._turns) else super()._statement(taken)


class BothWays(CompareAndSet):
    """It leaves every second op to the transaction of several statements."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._turns = itertools.cycle((False, True))
        self.asked = self.answered = 0

    async def step(self, *arguments: Any) -> tuple[Change, float] | Ended | None:
        self.asked += 1
        found = await super().step(*arguments) if next(self._turns) else None
        self.answered += found is not None
        return found


class SQLStage:
    """A store whose server has our time, and which sends no notices but keeps them."""

    def __init__(self, store: SQLStore) -> None:
        self.store = store
        self.database: Database
        self.notices: list[Notice] = []
        self.now = 0.0
        self.served: Counter[bool] = Counter()  # releases that were one statement: whether somebody waited

    async def open(self) -> SQLStage:
        store = self.store
        self.database = store._databases[asyncio.get_running_loop()] = Database(store._settings, 5.0)
        await self.database.listen("none", lambda notice: None, lambda error: None)
        transactions = self.database.connected
        await self.database._prepared()
        self.database._has_written(transactions)  # so nothing else begins with the first op
        for background in (self.database.cleaning, self.database._watch):
            assert background is not None
            await background.aclose()
        transactions._send = self._keep
        if isinstance(self.database.dialect, SQLite):
            self.database.dialect.clock = lambda: self.now
            transactions._reader.time = self._read_clock  # type: ignore[method-assign]
        else:
            self._clock = f"stage_{os.getpid()}_{next(_prefixes)}"
            async with transactions.pool.line() as line:
                await line.run(f"CREATE TABLE {self._clock} (now DOUBLE PRECISION)")
                await line.run(f"INSERT INTO {self._clock} VALUES (0)")
            waited = ", 0" if isinstance(self.database.dialect, MySQL) else ""
            self.database.dialect.now = f"(SELECT now FROM {self._clock}){waited}"  # type: ignore[misc]
            transactions._reader.began = f"(SELECT now FROM {self._clock})"
        self._use_the_clock(transactions)
        return self

    def _use_the_clock(self, transactions: Transactions) -> None:
        """In the statements that are no transactions, too."""
        table, singles, pool = self.store._settings.table, self.database.singles, transactions.pool
        if isinstance(singles, MySQLSingles):
            clock = MySQLClock(f"(SELECT now FROM {self._clock})", "true")
            self.database.singles = MySQLSingles(self.store.label, table, pool, clock)
        elif singles is not None:
            self.database.singles = BothStatements(self.store.label, table, self.database.dialect.now, pool)
            transactions.compare_and_set = BothWays(table, self.database.dialect.now, self._keep_all)
            self.database._unserved = Pauses(0.0)
            self.database.served = self._keep_served  # type: ignore[method-assign]

    async def aclose(self) -> None:
        ways = self.database.connected.compare_and_set
        assert not isinstance(ways, BothWays) or ways.answered > 0 or ways.asked < _MANY
        await self.store.unlisten("none")

    async def _read_clock(self, line: Line) -> float:
        return self.now

    def _keep_served(self, op: Op, key: str, served: Served) -> int | None:
        notices = served.notices(op.name)
        self.notices += notices
        self.served[bool(notices)] += served.fence is not None
        return served.fence

    def _keep_all(self, notices: Sequence[Notice], looks: Collection[str]) -> list[tuple[str, str]]:
        """They leave with the statement: nobody changes the row meanwhile."""
        self.notices += notices
        return [("nobody", message_of(each)) for each in notices]

    async def _keep(
        self, line: Line, notice: Notice, now: float, looks: Collection[str], *, brief: bool = False
    ) -> None:
        self.notices.append(notice)

    async def set_time(self, now: float) -> None:
        self.now = now
        if not isinstance(self.database.dialect, SQLite):
            async with self.database.connected.pool.line() as line:
                await line.fetch(f"UPDATE {self._clock} SET now = :now", {"now": now})

    async def ask(self, prefix: str, op: Op) -> Any:
        """The vote of the store."""
        self.notices.clear()  # a file may be written to as soon as it is asked
        pending = self.store.decide(prefix, op, lambda vote: None)
        assert pending is not None
        await pending[0]
        return pending[1][0]

    async def read(self, keys: Sequence[str]) -> list[State]:
        """What the rows say; ends may have passed."""
        wanted = ", ".join(f":k{number}" for number in range(len(keys)))
        columns = "resource_name, owner, node_info, count, fence, expires_at, keep_until, state"
        async with self.database.connected.pool.line() as line:
            found = await line.fetch(
                f"SELECT {columns} FROM {self.store._settings.table} WHERE resource_name IN ({wanted})",
                {f"k{number}": resource_name(key) for number, key in enumerate(keys)},
            )
        rows = {each[0]: Row(*each) for each in found}
        return [state_of(row) if (row := rows.get(resource_name(key))) else State() for key in keys]

    async def write(self, key: str, state: State) -> None:
        dialect = self.database.dialect
        async with self.database.connected.pool.line() as line:
            await dialect.delete(line, resource_name(key))
            if state != State():
                await dialect.insert(line, row_of(key, state), self.now)


class SQLPlayer:
    """Names on the stage, and the model's states of them."""

    def __init__(self, stage: SQLStage, names: Sequence[str]) -> None:
        self.stage = stage
        self.names = names
        self.states = [State() for _ in names]
        self._prefix = f"{next(_prefixes)}:"
        self._us = 1_700_000_000_123_457
        self._turns = itertools.cycle((True, False))

    @property
    def now(self) -> float:
        return (self._us + 0.5) / 1_000_000

    async def play_mutex(self, kind: Kind, steps: Sequence[histories.Step]) -> None:
        """At the one name of histories.py."""
        await self.stage.set_time(self.now)
        for step in steps:
            match step:
                case Pass(ms):
                    await self._pass(ms)
                case Foreign():
                    await self._put(0, step.becomes(self.states[0].at(self.now), self.now))
                case Ask():
                    await self._ask(step.op(kind, self.states[0].at(self.now), self._us), (0,))
                case Listen() | Permit():
                    pass  # the store cannot know who listens

    async def play_world(self, world: World, steps: Sequence[Any]) -> None:
        """At the names of shared_histories.py."""
        await self.stage.set_time(self.now)
        for step in steps:
            match step:
                case Pass(ms):
                    await self._pass(ms)
                case Write():
                    kind = kind_of(world.modes[step.name][0])
                    _, state = step.does(AT[step.name], kind, self.states[step.name].at(self.now), self.now)
                    if all(family_of(each.id) == FAMILIES[kind.letter] for each in state.holds):
                        await self._put(step.name, state)  # else the store says that it is another kind
                case Ask():
                    op, names = op_of(step, world, [state.at(self.now) for state in self.states], self._us)
                    await self._ask(op, names)

    async def play_release(self, kind: Kind, release: QueuedRelease) -> None:
        """Of a name in that state."""
        await self.stage.set_time(self.now)
        await self._put(0, release.state(self.now))
        await self._ask(release.op(kind, self.now), (0,))

    async def _pass(self, ms: int) -> None:
        self._us += ms * 1000 + 1
        await self.stage.set_time(self.now)

    async def _put(self, index: int, state: State) -> None:
        self.states[index] = state
        await self.stage.write(self._prefix + self.names[index], state)

    async def _ask(self, op: Op, names: tuple[int, ...]) -> None:
        if op.verb is Verb.RELEASE and next(self._turns):  # as that of a hold for which others wait
            op.queueing, op.fence = replace(op.queueing, contended=True), op.fence or 1
        now, before = self.now, [self.states[index] for index in names]
        met = [_with_counter(state, now) for state in before]
        notices: Sequence[Notice]
        if op.kind.parts:
            reply, part, after, notices = decide_all(op.kind.parts, met, op, now, lambda tag: True)
        else:
            reply, part = decide(cast("Rule", op.kind), met[0], op, now), 0
            after, notices = [reply.state], reply.notices
        for index, old, new in zip(names, before, after, strict=True):
            self.states[index] = _stored(_with_end(new, old))
        vote = await self.stage.ask(self._prefix, op)
        assert vote == vote_of(reply, now, part), f"{op}: {vote}, not {vote_of(reply, now, part)}"
        assert self.stage.notices == list(notices), f"{op}: {self.stage.notices}, not {notices}"
        await self._compare(op)

    async def _compare(self, op: Op) -> None:
        found = await self.stage.read([self._prefix + name for name in self.names])
        for name, model, real in zip(self.names, self.states, found, strict=True):
            assert _alive(real, self.now) == _alive(model, self.now), f"{op} at {name}: {real}, not {model}"


def _with_counter(state: State, now: float) -> State:
    """As `decide` meets it: what has ended is gone, except for the counter."""
    ends = state.fence_ends if state.fence_ends > now else math.inf
    return replace(state.at(now), fence=state.fence, fence_ends=ends if state.fence else 0.0)


def _with_end(after: State, before: State) -> State:
    """A counter that was not written has its old end."""
    kept = after.fence_ends == math.inf and before.fence_ends < math.inf
    return replace(after, fence_ends=before.fence_ends) if kept else after


def _stored(state: State) -> State:
    """A row does not keep which waiters were notified."""
    return replace(state, queue=tuple(each._replace(notified=False) for each in state.queue))


def _alive(state: State, now: float) -> State:
    """Without what has ended, but with the counter and its end."""
    return replace(state.at(now), fence=state.fence, fence_ends=state.fence_ends if state.fence else 0.0)


MUTEX_NAMES = (histories.NAME,)
WORLD_NAMES = NAMES
__all__ = ["MUTEX", "MUTEX_NAMES", "WORLD_NAMES", "SQLPlayer", "SQLStage"]
