"""`python -m benchmarks stores [NAME[=URL] ...]`: the same work over several stores, in turn, in one run.

A NAME may stand before several urls, separated by commas, for a quorum. The server of a NAME of `services.py` is
started here; without arguments all of them are, and measured beside each other. Beside a store that has one in
`bare_stores.py`, a bare program over the same driver has its turn in the same round.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from asynclock import Redlock
from asynclock.stores.urls import urls_of
from benchmarks import report
from benchmarks.bare_stores import RELAYS, TASKS, bare_of
from benchmarks.servers import of_the_tests
from benchmarks.sides import blocks_of
from benchmarks.waiting import TENURE, Failed, handed_over, seen_by

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from benchmarks.sides import Cycle

    Side = Callable[[], AbstractAsyncContextManager[Cycle]]

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
    bare_alone: list[float] = field(default_factory=list)  # of the bare driver, as `alone`; empty: there is none
    bare_crowd: list[float] = field(default_factory=list)  # the same, as `crowd`
    bare_hand_over: list[float] = field(default_factory=list)  # the same, as `hand_over`, where the driver has push
    bare_error: str = ""  # why the bare driver is not measured
    error: str = ""

    @property
    def ratios(self) -> tuple[list[float], list[float]]:
        """Of each round: the rate beside that of the bare driver, with one task and with 64."""
        alone = [bare / ours for ours, bare in zip(self.alone, self.bare_alone, strict=True)]
        return alone, [ours / bare for ours, bare in zip(self.crowd, self.bare_crowd, strict=True)]

    @property
    def slower_hand_over(self) -> list[float]:
        """Of each round: the time of a hand-over beside that of the bare driver."""
        return [ours / bare for ours, bare in zip(self.hand_over, self.bare_hand_over, strict=True)]


@app.command()
def main(
    stores: Annotated[list[str] | None, typer.Argument(metavar="NAME[=URL]...")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="The number of turns of each store.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long a turn takes.")] = 1.0,
) -> None:
    """Measure stores beside each other. Nothing is asserted: read the table."""
    with chosen(stores or ()) as urls_by_name:
        seen = [Store(name, urls) for name, urls in urls_by_name.items()]
        for number in range(rounds):
            for store in random.sample(seen, len(seen)):
                if not store.error:
                    _turn(store, seconds)
            report.console.print(f"round {number + 1} of {rounds}")
        report.stores(f"Medians of {rounds} rounds of {seconds:g} s", seen)
        report.beside_bare("Free names, beside a bare program over the same driver", seen)


@contextlib.contextmanager
def chosen(stores: Sequence[str]) -> Iterator[dict[str, Sequence[str]]]:
    """The urls of each store by its name. A store is "NAME=URL", or a name of `services.STORES`: that server is
    started, or left out, with a line that says so, if it is not installed. Without any, all of them are."""
    found = {name: urls_of(urls) for name, _, urls in (each.partition("=") for each in stores) if urls}
    with contextlib.ExitStack() as stack:
        if len(found) < len(stores) or not stores:
            known = of_the_tests()
            for name in [each for each in stores if "=" not in each] or known:
                if name not in known:
                    raise typer.BadParameter(f"{name!r} is neither NAME=URL nor one of {', '.join(known)}")
                try:
                    found[name] = known[name](stack)
                except BaseException as error:
                    if type(error).__name__ != "Skipped":  # pytest's, of a service that is not installed
                        raise
                    report.console.print(f"{name}: {error}")
        yield found


def _turn(store: Store, seconds: float) -> None:
    try:
        _free(store, seconds)
        hand_overs(store, seconds)
        seen = _contest(["ours"] * PROCESSES, EACH, store.urls, seconds)
        waits = [wait for each in seen for wait in each["waits"]]
        store.hot.append(len(waits) / seconds)
        store.longest = max(store.longest, *waits)
    except Exception as error:  # a store may fail in any way: report it, and go on with the others
        store.error = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, Failed):
            store.error = str(error)


def hand_overs(store: Store, seconds: float) -> None:
    """Hand-overs by the store and by the push of its bare driver, in random order."""
    sides: list[tuple[Sequence[str], list[float]]] = [(("ours", "ours"), store.hand_over)]
    if store.bare_alone and (relay := RELAYS.get(store.urls[0].partition(":")[0])):
        sides.append((relay, store.bare_hand_over))
    for names, took in random.sample(sides, len(sides)):
        commands = [f"{name}@{TENURE}" for name in names]
        took.append(handed_over(_contest(commands, 1, store.urls, seconds)))


def _free(store: Store, seconds: float) -> None:
    """Free names, over the store and over its bare driver, in random order."""
    bare = [partial(side, store.urls[0]) for side in ([] if store.bare_error else bare_of(store.urls))]
    sides: list[Side] = [partial(_locks, store.urls), *bare]
    alone, crowd = dict[int, float](), dict[int, float]()
    for tasks in (1, TASKS):
        for number in random.sample(range(len(sides)), len(sides)):
            try:
                times, wall = asyncio.run(_cycles(sides[number], tasks, seconds))
            except Exception as error:  # behind a pooler asyncpg loses the statements that it has prepared
                if number == 0:
                    raise
                store.bare_error = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if tasks == 1:
                alone[number] = median(times)
            else:
                crowd[number] = len(times) / wall
    store.alone.append(alone.pop(0))
    store.crowd.append(crowd.pop(0))
    if bare and not store.bare_error:
        store.bare_alone.append(min(alone.values()))
        store.bare_crowd.append(max(crowd.values()))


@contextlib.asynccontextmanager
async def _locks(urls: Sequence[str]) -> AsyncIterator[Cycle]:
    async with Redlock(*urls, lease=30.0) as client:
        yield blocks_of(client, "order")


async def _cycles(side: Side, tasks: int, seconds: float) -> tuple[list[float], float]:
    """How long each acquire and release of a free lock took, and all together."""
    times, began = list[float](), 0.0
    async with side() as cycle:

        async def work(i: int, until: float) -> None:
            while (start := time.perf_counter()) < until:
                await cycle(i)
                times.append(time.perf_counter() - start)

        for length in (WARM_UP, seconds):
            times.clear()
            began = time.perf_counter()
            await asyncio.gather(*(work(i, began + length) for i in range(tasks)))
        return times, time.perf_counter() - began


def _contest(sides: Sequence[str], tasks: int, urls: Sequence[str], seconds: float) -> list[dict[str, list[float]]]:
    """What a process of each side saw."""
    return seen_by([[sys.executable, "-m", "benchmarks.contender", side, str(tasks), *urls] for side in sides], seconds)
