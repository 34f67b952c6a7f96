"""Runs the sides of a contest in short slices, in turn, in one process and one run: so a drift concerns all sides.

A ratio is taken within each round, and the result is the median over the rounds. The absolute figures of one run say
little about another run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from array import array
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING, TypeVar

from benchmarks.servers import running

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from benchmarks.goals import Goal
    from benchmarks.servers import Server
    from benchmarks.sides import Cycle, Side

T = TypeVar("T")

HANG = 30.0
"""A slice that takes this many seconds more than planned has hung."""


@dataclass(frozen=True, slots=True)
class Contest:
    """The sides, the number of servers and tasks, and the targets."""

    title: str
    servers: int
    tasks: int
    sides: Mapping[str, Side]
    goals: Sequence[Goal]
    apart: bool = False  # each side has servers of its own

    def share(self, servers: Sequence[Server], index: int) -> Sequence[Server]:
        """The servers of one side."""
        return servers[index * self.servers : (index + 1) * self.servers] if self.apart else servers


@dataclass(frozen=True, slots=True)
class Slice:
    """One side's turn in one round."""

    wall: float
    cpu: float  # of this process
    server_cpu: float  # of all its servers together
    times: array[float]  # of each cycle, in seconds

    @property
    def rate(self) -> float:
        return len(self.times) / self.wall

    @property
    def p50(self) -> float:
        return median(self.times)

    @property
    def cpu_per_cycle(self) -> float:
        return self.cpu / len(self.times)

    @property
    def server_cpu_per_cycle(self) -> float:
        return self.server_cpu / len(self.times)


@dataclass(slots=True)
class Runs:
    """All turns of one side, or its error."""

    slices: list[Slice] = field(default_factory=list)
    error: str = ""

    def p(self, percent: int) -> float:
        """A percentile of the cycles of all rounds, in seconds."""
        times = array("d")
        for each in self.slices:
            times.extend(each.times)
        return quantiles(times, n=100, method="inclusive")[percent - 1]

    def median_of(self, measure: Callable[[Slice], float]) -> float:
        return median(map(measure, self.slices))


def in_turn(sides: Collection[T], rounds: int) -> Iterator[tuple[T, bool]]:
    """Each of them in each round, in random order, and whether the turn is recorded: the first round warms up."""
    for number in range(rounds + 1):
        for side in random.sample(list(sides), len(sides)):
            yield side, number > 0


async def run(contest: Contest, rounds: int, seconds: float) -> dict[str, Runs]:
    """Give each side a turn in each round, in random order. The first round warms up and is not recorded."""
    runs = {name: Runs() for name in contest.sides}
    count = contest.servers * (len(contest.sides) if contest.apart else 1)
    with running(count) as servers:
        async with contextlib.AsyncExitStack() as stack:
            shares = {name: contest.share(servers, index) for index, name in enumerate(contest.sides)}
            cycles = await _enter(contest, shares, stack, runs)
            for name, recorded in in_turn(cycles, rounds):
                if runs[name].error:
                    continue
                try:
                    turn = await _slice(cycles[name], shares[name], contest.tasks, seconds)
                except Exception as error:  # a side may fail in any way: report it, and go on with the others
                    runs[name].error = _in_one_line(error)
                    continue
                if recorded:
                    runs[name].slices.append(turn)
    return runs


async def _enter(
    contest: Contest, shares: Mapping[str, Sequence[Server]], stack: contextlib.AsyncExitStack, runs: Mapping[str, Runs]
) -> dict[str, Cycle]:
    cycles = {}
    for name, side in contest.sides.items():
        entered = side(shares[name])
        try:
            cycles[name] = await entered.__aenter__()
        except Exception as error:  # the side is not installed, or does not work on this Python
            runs[name].error = _in_one_line(error)
        else:
            stack.push_async_callback(_leave, entered, runs[name])
    return cycles


async def _leave(entered: AbstractAsyncContextManager[Cycle], its: Runs) -> None:
    """Close a side. If that fails, report the error and go on with the other sides."""
    try:
        await entered.__aexit__(None, None, None)
    except Exception as error:  # as above
        its.error = its.error or f"closing: {_in_one_line(error)}"


async def _slice(cycle: Cycle, servers: Sequence[Server], tasks: int, seconds: float) -> Slice:
    """Run cycles with `tasks` tasks for `seconds` seconds."""
    gc.collect()  # each side pays for its own garbage
    await asyncio.sleep(0.01)  # the last replies to the side before arrive in this time
    clock, times = time.perf_counter, array("d")
    server_cpu, cpu, began = _cpu_of(servers), time.process_time(), clock()
    end = began + seconds

    async def work(i: int) -> None:
        start = clock()
        while True:  # once at least: the turn may be over before the first task begins
            await cycle(i)
            ended = clock()
            times.append(ended - start)
            if (start := ended) >= end:
                return

    async with asyncio.timeout(seconds + HANG), asyncio.TaskGroup() as group:
        for i in range(tasks):
            group.create_task(work(i))
    return Slice(clock() - began, time.process_time() - cpu, _cpu_of(servers) - server_cpu, times)


def _cpu_of(servers: Sequence[Server]) -> float:
    return sum(server.cpu() for server in servers)


def _in_one_line(error: BaseException) -> str:
    """The error in one line; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {str(error) or 'no answer'}".splitlines()[0]
