"""Connections whose state is unknown: they are abandoned, and leave no lock behind."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock.stores.sql.engines import EngineSource
from asynclock.stores.sql.limits import CLOSING, rest
from asynclock.stores.sql.lines import CoreLine
from tests.support.waiters import LIMIT


async def test_an_abandoned_connection_of_aiosqlite_unlocks_the_file(tmp_path: Path) -> None:
    """Its thread is busy while SQLAlchemy closes it, and something still refers to the connection of sqlite3."""
    path = tmp_path / "locks.db"
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", isolation_level="AUTOCOMMIT")
    connection = await engine.connect()
    driver = (await connection.get_raw_connection()).driver_connection
    assert driver is not None
    kept = driver._connection  # noqa: SLF001 - as a traceback would
    line = CoreLine(connection, driver)
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> int:
        entered.set()
        go_on.wait(LIMIT)
        return 0

    await driver.create_function("hold", 0, hold)
    await line.run("BEGIN IMMEDIATE")
    holding = asyncio.create_task(line.fetch("SELECT hold()"))
    assert await asyncio.to_thread(entered.wait, LIMIT)
    line.abandon()
    await rest(CLOSING)
    go_on.set()
    await asyncio.wait({holding}, timeout=LIMIT)
    holding.cancelled() or holding.exception()

    def lock() -> None:
        with closing(sqlite3.connect(path, timeout=LIMIT)) as file:
            file.execute("BEGIN IMMEDIATE")

    await asyncio.to_thread(lock)
    assert kept is not None
    await engine.dispose()


@pytest.mark.parametrize("own", [True, False])
def test_a_slow_file_is_closed_before_the_event_loop(own: bool, tmp_path: Path) -> None:
    """Else the thread of aiosqlite reports to a closed event loop, and prints a traceback. It is busy here until
    something waits for its end."""
    go_on, said = threading.Event(), list[threading.ExceptHookArgs]()

    async def main() -> threading.Thread:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'locks.db'}")
        source = EngineSource(engine, LIMIT, own=own)
        line = await source.connect()
        assert isinstance(line, CoreLine)
        thread, join = line.driver._thread, line.driver._thread.join  # noqa: SLF001 - no other name

        def joined(timeout: float | None = None) -> None:
            go_on.set()
            join(timeout)

        thread.join = joined
        line.driver._tx.put_nowait((None, lambda: go_on.wait(LIMIT)))  # noqa: SLF001 - no other name
        line.abandon()
        await source.aclose()
        return thread

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading, "excepthook", said.append)
        thread = asyncio.run(main())
        go_on.set()
        thread.join()
    assert not said
