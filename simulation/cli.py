"""`python -m simulation`: an hour for each seed. A failure prints the seed, the command that repeats it, and a shorter
schedule that fails in the same way, as a trace; the exit code is then 1."""

from __future__ import annotations

import argparse
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from simulation.plan import HARD_RUNS, LONG_RUNS, RUNS, plan_of
from simulation.shrink import shrink
from simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from simulation.checks import Flaw
    from simulation.plan import Fault, Job

_In = TypeVar("_In")
_Out = TypeVar("_Out")

LINES = 60
"""Of a trace: the last ones."""

CALLS, FAULTS = 1000, 30
"""An hour with less than these would not count."""


class Hour(NamedTuple):
    """The runs of one seed, up to the first flaw."""

    seed: int
    run: int = -1  # that has the flaw
    flaw: Flaw | None = None
    calls: int = 0
    faults: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    histories: int = 0
    undecided: int = 0

    @property
    def counts(self) -> bool:
        """Whether enough happened in it."""
        return self.flaw is not None or (self.calls >= CALLS and self.faults >= FAULTS)


def hour_of(seed: int, runs: Sequence[int] = range(RUNS)) -> Hour:
    """These runs of a seed."""
    hour = Hour(seed)
    for run in runs:
        found = simulate(plan_of(seed, run))
        hour = Hour(
            seed, run if found.flaw is not None else -1, found.flaw, hour.calls + found.calls,
            hour.faults + found.faults, hour.seconds + found.seconds, hour.cpu + found.cpu,
            hour.histories + found.histories, hour.undecided + found.undecided,
        )  # fmt: skip
        if found.flaw is not None:
            break
    return hour


def explain(seed: int, run: int, flaw: Flaw) -> str:
    """What to read of a failure."""
    plan = plan_of(seed, run)
    shorter = shrink(plan, flaw.what)
    trace = simulate(shorter, tracing=True).trace
    both: list[Job | Fault] = [*shorter.jobs, *shorter.faults]
    steps = sorted(both, key=lambda each: each.at)
    left_out = [f"... {len(trace) - LINES} earlier lines"] if len(trace) > LINES else []
    deployment = (
        f"{len(plan.nodes)} nodes, {len(plan.clients)} clients, lease {plan.settings.lock.lease:g} s, "
        f"max_lease {plan.settings.max_lease:g} s; "
        f"{'what' if plan.safe else 'not all that'} docs/safety.md assumes holds"
    )
    return "\n".join(
        [
            f"seed {seed}, run {run}: {flaw}",
            f"again: python -m simulation --base {seed} --run {run}",
            f"left: {len(shorter.jobs)} of {len(plan.jobs)} jobs, {len(shorter.faults)} of {len(plan.faults)} faults",
            deployment,
            *(f"{each.at:12.6f}  {each}" for each in steps),
            "",
            *left_out,
            *trace[-LINES:],
        ]
    )


def in_order(run: Callable[[_In], _Out], works: Iterable[_In], jobs: int) -> Iterator[_Out]:
    """The result of each work, in so many processes (0: one for each core)."""
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield from map(run, works)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, works)


def summary(done: Sequence[Hour], failed: Sequence[Hour]) -> str:
    """The last line."""
    histories = sum(each.histories for each in done)
    checked = f"{histories:,} histories, {sum(each.undecided for each in done):,} undecided; " if histories else ""
    return (
        f"{len(done)} seeds: {sum(each.calls for each in done):,} operations, "
        f"{sum(each.faults for each in done):,} faults, "
        f"{sum(each.seconds for each in done) / 3600:.2f} simulated hours, "
        f"{sum(each.cpu for each in done):.1f} s of CPU; "
        + checked
        + (f"violations in {len(failed)} seeds" if failed else "no violation found")
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="so many hours")
    parser.add_argument("--base", type=int, help="the first seed; without it, a new one")
    parser.add_argument("--run", type=int, help=f"only this one of the {HARD_RUNS.stop} runs of each seed")
    parser.add_argument(
        "--long",
        action="store_true",
        help="the runs of a quarter of an hour, and the hard one",
    )
    parser.add_argument("--jobs", type=int, default=1, help="so many processes; 0: one for each core")
    parser.add_argument("--within", type=float, help="stop after so many seconds")
    given = parser.parse_args(arguments)
    base = given.base if given.base is not None else random.SystemRandom().randrange(10**9)
    runs = (given.run,) if given.run is not None else (*LONG_RUNS, *HARD_RUNS) if given.long else range(RUNS)
    began, done, failed = time.monotonic(), list[Hour](), list[Hour]()
    print(f"seeds from {base}", flush=True)
    for hour in in_order(partial(hour_of, runs=runs), range(base, base + given.seeds), given.jobs):
        done.append(hour)
        if hour.flaw is not None:
            failed.append(hour)
            print(explain(hour.seed, hour.run, hour.flaw), flush=True)
        if given.within is not None and time.monotonic() - began > given.within:
            break
    thin = [hour.seed for hour in done if given.run is None and not hour.counts]
    print(summary(done, failed))
    if thin:
        print(f"less than {CALLS} operations or {FAULTS} faults: {thin}")
    return 1 if failed or thin else 0
