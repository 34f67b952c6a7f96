"""`python -m benchmarks flood [NAME[=URL] ...]`: a few tasks and very many in turn, while leases are held.

A flood is more tasks than a store can serve within their timeout. Each task has a name of its own, and begins again at
once when it has failed. It shows what the tasks that fail cost the others, and whether the leases that are held
meanwhile are kept. The urls are those of `python -m benchmarks stores`, and so are the servers without arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from asynclock import LockError, Redlock
from benchmarks import report
from benchmarks.stores import chosen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock import Lease

FEW = 64

TIMEOUT = 2.0
"""Seconds for which a task waits for its lock."""

HELD, LEASE = 30, 6.0
"""So many leases of so many seconds are held meanwhile, by the same client."""

SETTLED = 2 * TIMEOUT
"""Seconds before a turn counts: the first tasks of a flood come all at once, and fail all at once."""

app = typer.Typer(add_completion=False)


@dataclass
class Flooded:
    """One store, and what was measured in each round."""

    name: str
    urls: Sequence[str]
    few: list[float] = field(default_factory=list)  # cycles per second of FEW tasks
    many: list[float] = field(default_factory=list)  # the same, of the flood
    kept: list[int] = field(default_factory=list)  # of the HELD leases, beside the flood
    few_errors: Counter[str] = field(default_factory=Counter)  # of all rounds
    errors: Counter[str] = field(default_factory=Counter)  # the same, of the flood
    error: str = ""

    @property
    def ratios(self) -> list[float]:
        """Of each round: the rate of the flood beside that of the few."""
        return [many / few for few, many in zip(self.few, self.many, strict=True)]


@app.command()
def main(
    stores: Annotated[list[str] | None, typer.Argument(metavar="NAME[=URL]...")] = None,
    tasks: Annotated[int, typer.Option(min=FEW, help="The tasks of the flood.")] = 4000,
    rounds: Annotated[int, typer.Option(min=1, help="The number of turns of each store.")] = 3,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long a turn takes.")] = 12.0,
) -> None:
    """Measure a flood over each store. Nothing is asserted: read the table."""
    with chosen(stores or ()) as urls_by_name:
        seen = [Flooded(name, urls) for name, urls in urls_by_name.items()]
        for number in range(rounds):
            for store in random.sample(seen, len(seen)):
                if not store.error:
                    _turn(store, tasks, seconds)
            report.console.print(f"round {number + 1} of {rounds}")
        report.floods(f"{FEW} tasks and {tasks:,}, medians of {rounds} rounds of {seconds:g} s", seen)


def _turn(store: Flooded, tasks: int, seconds: float) -> None:
    try:
        few, _ = asyncio.run(_cycles(store.urls, FEW, seconds, store.few_errors))
        many, kept = asyncio.run(_cycles(store.urls, tasks, seconds, store.errors))
    except Exception as error:  # a store may fail in any way: report it, and go on with the others
        store.error = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        store.few.append(few)
        store.many.append(many)
        store.kept.append(kept)


async def _cycles(urls: Sequence[str], tasks: int, seconds: float, errors: Counter[str]) -> tuple[float, int]:
    """Cycles per second of so many tasks, and how many of the leases were kept. Raises what ended a task, but for a
    LockError, which is counted."""
    ended, counts = 0, False

    async def work(i: int) -> None:
        nonlocal ended
        while True:
            try:
                async with client(f"order:{i}", timeout=TIMEOUT):
                    pass
            except LockError as error:
                errors[type(error).__name__] += counts
            else:
                ended += counts

    async with Redlock(*urls, lease=30.0) as client:
        lease = 30.0 if urls[0].startswith("zookeeper") else LEASE  # there it is that of the session
        leases: list[Lease] = [await client(f"held:{i}", lease=lease).acquire() for i in range(HELD)]
        working = [asyncio.ensure_future(work(i)) for i in range(tasks)]
        try:
            await asyncio.sleep(SETTLED)
            counts, began = True, time.perf_counter()
            await asyncio.sleep(seconds)
            rate, kept = ended / (time.perf_counter() - began), sum(lease.held for lease in leases)
        finally:
            for task in working:
                task.cancel()
            results = await asyncio.gather(*working, return_exceptions=True)
            for lease in leases:
                with contextlib.suppress(LockError):
                    await lease.release()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return rate, kept
