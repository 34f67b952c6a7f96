"""The table of a SQL store while new names come without end: rows are removed as fast as they end."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asynclock import Redlock
from asynclock.stores.sql import SQLStore, cleaning
from asynclock.stores.sql.lines import Line
from asynclock.stores.sql.rows import Row
from tests.support.operators import Operated
from tests.support.sql_states import database_of, read_rows

PAGE = 100
NEW = 64
"""Names of a turn. With the real page of 10,000 rows, and 6.4 s from turn to turn, they are 1,000 a second."""

KEPT = 10
"""Turns for which a name is kept: `fence_memory`."""

TURNS = 60

MOST = 2000
"""Rows. 640 are kept, and the others have ended and wait for their turn."""

ORDERS: dict[str, Callable[[int, random.Random], str]] = {
    "random": lambda number, chance: f"{chance.randrange(10**9):09d}-{number}",  # never one that is there already
    "rising": lambda number, _: f"{number:09d}",
    "falling": lambda number, _: f"{10**9 - number:09d}",
}


@pytest.fixture(params=["postgresql", "mariadb"])
def operated(request: pytest.FixtureRequest) -> Operated:
    """A table on each server."""
    found: Operated = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("order", ORDERS)
async def test_f8_the_table_does_not_grow_for_ever(
    tmp_path: Path, order: str, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the names are, and beside rows of names that are held or remembered for longer."""
    monkeypatch.setattr(cleaning, "ROWS", PAGE)
    store, now, made = SQLStore(f"sqlite:///{tmp_path}/locks.db"), 1e9, 0
    async with Redlock(store):
        database = database_of(store)
        await database.cleaning.aclose()  # the test takes the turns
        database.dialect.clock = lambda: now

        async def lock(names: list[str], kept: float, line: Line) -> None:
            for name in names:
                row = Row(name, fence=int(now * 1_000_000), keep_until=now + kept)
                await database.dialect.insert(line, row, now)

        await database.connected.repeated(partial(lock, [f"{each:09d}x" for each in range(0, 10**9, 10**8)], 1e9))
        for _ in range(TURNS):
            now += 6.4
            names = [ORDERS[order](made + each, chance) for each in range(NEW)]
            made += NEW
            await database.connected.repeated(partial(lock, names, KEPT * 6.4))
            await database.cleaning.turn()
        rows, _ = await read_rows(store)
        assert len(rows) < MOST
        assert NEW * TURNS > 1.5 * MOST  # they were removed


async def test_f8_a_locked_row_keeps_no_other_from_being_removed(
    operated: Operated, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another session has locked one of ten rows that have ended. The other nine are removed, without a wait."""
    monkeypatch.setattr(cleaning, "TURN", 0.0)
    store, names = SQLStore(operated.url), [f"{name}:{each}" for each in range(10)]

    async def write(line: Line) -> None:
        for each in names:
            await database.dialect.insert(line, Row(each, fence=1, keep_until=1.0), 1.0)

    async with Redlock(store) as client, client(name):
        database = database_of(store)
        await database.cleaning.aclose()  # the test takes the turns
        await database.connected.repeated(write)
        await operated.run("BEGIN")
        await operated.run(f"SELECT count FROM {operated.table} WHERE resource_name = '{names[4]}' FOR UPDATE")
        removed = [await database.cleaning.turn() for _ in range(2)]
        await operated.run("ROLLBACK")
        assert removed == [0, 9]
        rows, _ = await read_rows(store)
        assert [each for each in rows if each in names] == [names[4]]
