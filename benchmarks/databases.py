"""P11: `python -m benchmarks databases [URL...]`: locks of asynclock in a database, beside other ways to lock there.

A url is `postgresql://` or `mariadb://`; without one, a PostgreSQL and a MariaDB of `make services` are started. All
sides but one of asynclock use an engine of SQLAlchemy with a pool of 20 connections. The sides beside asynclock send
nothing that they can do without: no BEGIN and COMMIT around a single statement, and no ROLLBACK when a connection goes
back to the pool. Some sides hold a connection of the pool for as long as they hold the lock, so a cycle that does
nothing else favours them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Redlock
from asynclock.stores import SQLStore
from benchmarks import goals, report, runner
from benchmarks.runner import Contest
from benchmarks.servers import of_the_tests
from benchmarks.sides import blocks_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from sqlalchemy.ext.asyncio import AsyncEngine

    from benchmarks.servers import Server
    from benchmarks.sides import Cycle

ASYNCLOCK, ENGINE = "asynclock", "asynclock, user's engine"
ROW, ADVISORY, NAMED, TABLE = "SELECT ... FOR UPDATE, held", "advisory lock", "GET_LOCK", "ShedLock's table"
POOL = 20

app = typer.Typer(add_completion=False)


def _engine(url: str, **options: Any) -> AsyncEngine:
    driver = {"postgresql": "postgresql+asyncpg", "mysql": "mysql+asyncmy", "mariadb": "mariadb+asyncmy"}
    scheme, _, rest = url.partition("://")
    return create_async_engine(f"{driver.get(scheme, scheme)}://{rest}", pool_size=POOL, max_overflow=0, **options)


def _autocommit(url: str) -> AsyncEngine:
    """For statements that are transactions of their own."""
    return _engine(url, isolation_level="AUTOCOMMIT", skip_autocommit_rollback=True)


@contextlib.asynccontextmanager
async def asynclock(url: str, servers: Sequence[Server], own_engine: bool = False) -> AsyncIterator[Cycle]:
    """With watchdog and fencing token."""
    del servers
    engine = _engine(url) if own_engine else None
    async with Redlock(SQLStore(engine or url, table="asynclock_bench"), lease=30.0) as redlock:
        yield blocks_of(redlock)
    if engine is not None:
        await engine.dispose()


@contextlib.asynccontextmanager
async def row_lock(url: str, servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """A row for each name, locked in a transaction that stays open while the lock is held."""
    del servers
    engine = _engine(url, pool_reset_on_return=None)  # each transaction is ended by its own block
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS bench_rows (name VARCHAR(100) PRIMARY KEY)"))
        await connection.execute(text("DELETE FROM bench_rows"))
        await connection.execute(text("INSERT INTO bench_rows VALUES (:n)"), [{"n": f"row:{i}"} for i in range(64)])
    lock = text("SELECT name FROM bench_rows WHERE name = :name FOR UPDATE")

    async def cycle(i: int) -> None:
        async with engine.begin() as connection:
            (await connection.execute(lock, {"name": f"row:{i}"})).one()

    yield cycle
    await engine.dispose()


@contextlib.asynccontextmanager
async def session_lock(url: str, servers: Sequence[Server], take: str, give: str) -> AsyncIterator[Cycle]:
    """A lock of the server's session: the connection stays checked out while the lock is held. Both statements answer 1
    (or true)."""
    del servers
    engine = _autocommit(url)
    taking, giving = text(take), text(give)

    async def cycle(i: int) -> None:
        name: dict[str, Any] = {"name": i if "advisory" in take else f"lock:{i}"}
        async with engine.connect() as connection:
            taken = (await connection.execute(taking, name)).scalar_one()
            given = (await connection.execute(giving, name)).scalar_one()
        if taken != 1:
            raise RuntimeError(f"{take} answered {taken!r}: the lock was not taken")
        if given != 1:
            raise RuntimeError(f"{give} answered {given!r}: the lock was not given back")

    yield cycle
    await engine.dispose()


@contextlib.asynccontextmanager
async def shedlock(url: str, servers: Sequence[Server]) -> AsyncIterator[Cycle]:
    """The statements of ShedLock: INSERT once, then UPDATE ... WHERE lock_until <= now; release sets lock_until."""
    del servers
    engine = _autocommit(url)
    async with engine.connect() as connection:
        await connection.execute(text("DROP TABLE IF EXISTS bench_shedlock"))
        await connection.execute(
            text(
                "CREATE TABLE bench_shedlock (name VARCHAR(64) PRIMARY KEY, lock_until DOUBLE PRECISION NOT NULL, "
                "locked_at DOUBLE PRECISION NOT NULL, locked_by VARCHAR(255) NOT NULL)"
            )
        )
    insert = text("INSERT INTO bench_shedlock VALUES (:name, :until, :now, :who)")
    take = text(
        "UPDATE bench_shedlock SET lock_until = :until, locked_at = :now, locked_by = :who "
        "WHERE name = :name AND lock_until <= :now"
    )
    give = text("UPDATE bench_shedlock SET lock_until = :now WHERE name = :name AND locked_by = :who")
    known: set[int] = set()

    async def cycle(i: int) -> None:
        now, who = time.time(), secrets.token_hex(8)
        async with engine.connect() as connection:
            statement = take if i in known else insert
            row = {"name": f"job:{i}", "until": now + 30, "now": now, "who": who}
            taken = (await connection.execute(statement, row)).rowcount
        known.add(i)
        async with engine.connect() as connection:
            given = (await connection.execute(give, {"name": f"job:{i}", "now": time.time(), "who": who})).rowcount
        if (taken, given) != (1, 1):
            raise RuntimeError(f"job:{i} was free, and ShedLock's statements changed {taken} and {given} rows")

    yield cycle
    await engine.dispose()


def contest(url: str, tasks: int) -> Contest:
    """The sides of one database."""
    ours = {ASYNCLOCK: partial(asynclock, url), ENGINE: partial(asynclock, url, own_engine=True)}
    if url.startswith("postgresql"):
        take, give = (
            "SELECT 1 FROM pg_advisory_lock(CAST(:name AS bigint))",
            "SELECT pg_advisory_unlock(CAST(:name AS bigint))",
        )
        other = {ADVISORY: partial(session_lock, url, take=take, give=give)}
    else:
        take, give = "SELECT GET_LOCK(:name, 10)", "SELECT RELEASE_LOCK(:name)"
        other = {NAMED: partial(session_lock, url, take=take, give=give)}
    judged = tuple(goals.rate(ASYNCLOCK, rival, 1.0) for rival in (ROW, *other, TABLE))
    return Contest(
        f"{url.partition(':')[0]}, free lock, {tasks} task{'s' * (tasks > 1)}",
        servers=0,
        tasks=tasks,
        sides={**ours, ROW: partial(row_lock, url), **other, TABLE: partial(shedlock, url)},
        goals=judged,
    )


@app.command()
def main(
    urls: Annotated[list[str] | None, typer.Argument(metavar="URL...")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="The number of turns of each side.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long a turn takes.")] = 0.5,
) -> None:
    """Measure the sides in turn. Nothing is asserted: read the tables."""
    with contextlib.ExitStack() as stack:
        if not urls:
            urls = [url for name in ("PostgreSQL", "MariaDB") for url in of_the_tests()[name](stack)]
        for url in urls:
            for tasks in (1, 64):
                each = contest(url, tasks)
                runs = asyncio.run(runner.run(each, rounds, seconds))
                report.runs(each.title, runs)
                report.verdicts("P11", [goal(runs) for goal in each.goals])
