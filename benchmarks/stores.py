"""`python -m benchmarks stores NAME=URL ...`: the same work over several stores, in turn, in one run.

A NAME may stand before several urls, separated by commas, for a quorum. Without arguments it starts each server that
`make services` installs, and measures all stores beside each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from asynclock import Redlock
from asynclock.stores.urls import urls_of
from benchmarks import report
from benchmarks.waiting import TENURE, Failed, handed_over, started

if TYPE_CHECKING:
    from collections.abc import Sequence

TASKS = 64
PROCESSES, EACH = 2, 8
"""Of one hot name: the processes, and the tasks of each."""

WARM_UP = 0.2
"""Seconds of work before the first turn that counts."""

app = typer.Typer(add_completion=False)


@dataclass
class Store:
    """One store, and what was measured in each round."""

    name: str
    urls: Sequence[str]
    alone: list[float] = field(default_factory=list)  # seconds of one acquire and release, median
    crowd: list[float] = field(default_factory=list)  # cycles per second, of 64 tasks
    hand_over: list[float] = field(default_factory=list)  # seconds from one process to another, median
    hot: list[float] = field(default_factory=list)  # acquisitions per second of one name
    longest: float = 0.0  # seconds that one of them waited, at most
    error: str = ""


@app.command()
def main(
    stores: Annotated[list[str] | None, typer.Argument(metavar="NAME=URL...")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="The number of turns of each store.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long a turn takes.")] = 1.0,
) -> None:
    """Measure stores beside each other. Nothing is asserted: read the table."""
    with contextlib.ExitStack() as stack:
        if stores:
            named = [each.partition("=") for each in stores]
            seen = [Store(name, urls_of(urls)) for name, _, urls in named]
        else:
            from benchmarks.services import every_store

            seen = [Store(name, urls) for name, urls in stack.enter_context(every_store()).items()]
        for number in range(rounds):
            for store in random.sample(seen, len(seen)):
                if not store.error:
                    _turn(store, seconds)
            report.console.print(f"round {number + 1} of {rounds}")
        report.stores(f"Medians of {rounds} rounds of {seconds:g} s", seen)


def _turn(store: Store, seconds: float) -> None:
    try:
        times, _ = asyncio.run(_cycles(store.urls, 1, seconds))
        store.alone.append(median(times))
        times, wall = asyncio.run(_cycles(store.urls, TASKS, seconds))
        store.crowd.append(len(times) / wall)
        store.hand_over.append(handed_over(_contest(f"ours@{TENURE}", 2, 1, store.urls, seconds)))
        waits = [wait for each in _contest("ours", PROCESSES, EACH, store.urls, seconds) for wait in each["waits"]]
        store.hot.append(len(waits) / seconds)
        store.longest = max(store.longest, *waits)
    except Exception as error:  # a store may fail in any way: report it, and go on with the others
        store.error = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, Failed):
            store.error = str(error)


async def _cycles(urls: Sequence[str], tasks: int, seconds: float) -> tuple[list[float], float]:
    """How long each acquire and release of a free lock took, and all together."""
    times, began = list[float](), 0.0
    async with Redlock(*urls, lease=30.0) as client:

        async def work(i: int, until: float) -> None:
            while (start := time.perf_counter()) < until:
                async with client(f"order:{i}"):
                    pass
                times.append(time.perf_counter() - start)

        for length in (WARM_UP, seconds):
            times.clear()
            began = time.perf_counter()
            await asyncio.gather(*(work(i, began + length) for i in range(tasks)))
        return times, time.perf_counter() - began


def _contest(
    side: str, processes: int, tasks: int, urls: Sequence[str], seconds: float
) -> list[dict[str, list[float]]]:
    command = [sys.executable, "-m", "benchmarks.contender", side, str(tasks), *urls]
    with started([command] * processes) as all_of_them:
        for process in all_of_them:
            process.go()
        for process in all_of_them:
            process.hear()
        time.sleep(seconds)
        for process in all_of_them:
            process.go()
        return [json.loads(process.hear()) for process in all_of_them]
