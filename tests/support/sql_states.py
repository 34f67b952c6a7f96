"""What a SQLStore keeps, read without its node."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from asynclock.rules.model import State
from asynclock.stores.sql import SQLStore
from asynclock.stores.sql.dialects import SQLite
from asynclock.stores.sql.machine_clock import clock_with
from asynclock.stores.sql.pool import Pool
from asynclock.stores.sql.rows import CLOCK, Row, resource_name, state_of

_threads = ThreadPoolExecutor(1)


def sql_state(store: SQLStore, key: str) -> State:
    """The state of a key now. It is read in another thread, with a connection of its own."""
    return _threads.submit(asyncio.run, read_state(store, key)).result()


async def read_state(store: SQLStore, key: str) -> State:
    """The same, in this loop."""
    rows, now = await read_rows(store, [key])
    found = rows.get(resource_name(key))
    return State() if found is None else state_of(found).at(now)


async def read_rows(store: SQLStore, keys: list[str] | None = None) -> tuple[dict[str, Row], float]:
    """The rows of these keys (None: all), and the time of the server."""
    settings, dialect = store._settings, store._settings.dialect()
    pool = Pool(settings.new_source(5.0, pooler=True), size=1, pooler=True)
    try:
        async with pool.line() as line:
            rows = {row.resource_name: row for row in await dialect.page(line, "", 1_000_000)}
            if isinstance(dialect, SQLite):
                dialect.clock = clock_with(rows[CLOCK].expires_at or 0.0)
            now = await dialect.time(line)
    finally:
        await pool.aclose()
    wanted = None if keys is None else {resource_name(key) for key in keys}
    return {name: row for name, row in rows.items() if wanted is None or name in wanted}, now


async def change_state(store: SQLStore, key: str, **changes: Any) -> None:
    """Change a state that is there."""
    rows, _ = await read_rows(store, [key])
    await write_state(store, key, replace(state_of(rows[resource_name(key)]), **changes))


async def write_state(store: SQLStore, key: str, state: State) -> None:
    """Put a state in place of what is there."""
    from asynclock.stores.sql.rows import row_of

    settings, dialect = store._settings, store._settings.dialect()
    pool = Pool(settings.new_source(5.0, pooler=True), size=1, pooler=True)
    try:
        async with pool.line() as line:
            await line.run("BEGIN")
            await dialect.delete(line, resource_name(key))
            if state != State():
                await dialect.insert(line, row_of(key, state), 0.0)
            await line.run("COMMIT")
    finally:
        await pool.aclose()
