"""`python -m simulation.stack`: a run of each deployment for each seed. A failure prints the seed, the command that
repeats it, and a shorter schedule that fails in the same way, as a trace; the exit code is then 1."""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from typing import TYPE_CHECKING

from simulation.cli import Hour, in_order, summary
from simulation.shrink import SECONDS, shrink
from simulation.stack.plan import DEPLOYMENTS, plan_of
from simulation.stack.world import simulate

if TYPE_CHECKING:
    from simulation.checks import Flaw
    from simulation.plan import Fault, Job

LINES = 100
"""Of a trace: the last ones."""


def runs_of(seed: int, only: int | None = None) -> Hour:
    """All runs of a seed; `only`: that one."""
    done = Hour(seed)
    for run in range(len(DEPLOYMENTS)) if only is None else (only,):
        found = simulate(plan_of(seed, run))
        done = Hour(
            seed, run if found.flaw is not None else -1, found.flaw, done.calls + found.calls,
            done.faults + found.faults, done.seconds + found.seconds, done.cpu + found.cpu,
            done.histories + found.histories, done.undecided + found.undecided,
        )  # fmt: skip
        if found.flaw is not None:
            break
    return done


def explain(seed: int, run: int, flaw: Flaw, shrinking: float) -> str:
    """What to read of a failure. `shrinking`: seconds of CPU to find a shorter one."""
    plan = plan_of(seed, run)
    shorter = shrink(plan, flaw.what, shrinking, simulate)
    trace = simulate(shorter, tracing=True).trace
    both: list[Job | Fault] = [*shorter.jobs, *shorter.faults]
    left_out = [f"... {len(trace) - LINES} earlier lines"] if len(trace) > LINES else []
    return "\n".join(
        [
            f"seed {seed}, run {run}: {flaw}",
            f"again: python -m simulation.stack --base {seed} --run {run}",
            f"left: {len(shorter.jobs)} of {len(plan.jobs)} jobs, {len(shorter.faults)} of {len(plan.faults)} faults",
            (
                f"deployment: {plan.deployment}, {len(plan.clients)} clients, {plan.options}; "
                f"{'what' if plan.safe else 'not all that'} docs/safety.md assumes holds"
            ),
            *(f"{each.at:12.6f}  {each}" for each in sorted(both, key=lambda each: each.at)),
            "",
            *left_out,
            *trace[-LINES:],
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.stack", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds")
    parser.add_argument("--base", type=int, help="the first seed; without it, a new one")
    parser.add_argument("--run", type=int, help=f"only this one of the runs of each seed: {', '.join(DEPLOYMENTS)}")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes; 0: one for each core")
    parser.add_argument("--within", type=float, help="stop after so many seconds")
    parser.add_argument("--shrink", type=float, default=SECONDS, help="seconds of CPU to shorten a failure")
    given = parser.parse_args(arguments)
    base = given.base if given.base is not None else random.SystemRandom().randrange(10**9)
    began, done, failed = time.monotonic(), list[Hour](), list[Hour]()
    print(f"seeds from {base}", flush=True)
    for each in in_order(partial(runs_of, only=given.run), range(base, base + given.seeds), given.jobs):
        done.append(each)
        if each.flaw is not None:
            failed.append(each)
            print(explain(each.seed, each.run, each.flaw, given.shrink), flush=True)
        if given.within is not None and time.monotonic() - began > given.within:
            break
    print(summary(done, failed))
    return 1 if failed else 0
