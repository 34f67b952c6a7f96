"""`python -m benchmarks [P1 P3 ...]`: runs the contests and prints the ratios beside their targets. `python -m
benchmarks compare REV` and the others of `COMMANDS` measure something else."""

from __future__ import annotations

import asyncio
import importlib
import platform
import sys
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from benchmarks import crowd, holding, imports, report, runner, sides, waiting
from benchmarks.cases import ASYNCLOCK, CONTESTS, CROWDS, NAMES, REDIS_PY
from benchmarks.goals import Verdict
from benchmarks.plot import draw

T = TypeVar("T")

COMMANDS = ("blocking", "compare", "databases", "flood", "stores")
"""Each is a module with an app of its own. They are imported when they are called, because some need more packages."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    cases: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(NAMES)}; all, if none is named")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="The number of turns of each side.")] = 12,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long a turn takes.")] = 0.4,
    plot: Annotated[Path | None, typer.Option(help="Draw the waiting times of P6's one node as an SVG here.")] = None,
    held: Annotated[int, typer.Option(min=5, help="P8's leases on one node; a fifth over five.")] = holding.HELD,
    uvloop: Annotated[bool, typer.Option("--uvloop", help="Run on uvloop instead of asyncio's own loop.")] = False,
) -> None:
    """Measure asynclock beside other libraries, in turn, on real servers. Nothing is asserted: read the tables."""
    chosen = [name.upper() for name in cases or NAMES]
    for name in chosen:
        if name not in NAMES:
            raise typer.BadParameter(f"{name}: there are {', '.join(NAMES)}")
    if uvloop and find_spec("uvloop") is None:
        raise typer.BadParameter("uvloop is not installed: pip install uvloop")
    loop = "uvloop" if uvloop else "asyncio"
    report.console.print(f"Python {platform.python_version()}, {loop}, {rounds} rounds of {seconds:g} s a side")
    judged: list[Verdict] = []
    for name in chosen:
        if name == "P8":
            judged += [_named(name, verdict) for verdict in _holding(min(rounds, holding.LEASES), held)]
        else:
            judged += _case(name, rounds, seconds, uvloop, plot)
    report.verdicts("All targets (ratios: median of the rounds, least to greatest)", judged)


def _case(name: str, rounds: int, seconds: float, uvloop: bool, plot: Path | None) -> list[Verdict]:
    if name == "P10":
        took, verdict = imports.run(rounds)
        report.imports("P10  import time, fresh interpreters", took)
        return [_named(name, verdict)]
    if name in ("P5", "P6", "P7"):
        return [_named(name, verdict) for verdict in _waiting(name, rounds, seconds, plot)]
    if name == "P9":
        return [_named(name, verdict) for verdict in _crowds(uvloop)]
    verdicts = []
    for contest in CONTESTS[name]:
        runs = _run(runner.run(contest, rounds, seconds), uvloop)
        report.runs(f"{name}  {contest.title}", runs)
        where = f"{name}  {contest.tasks} task{'s' * (contest.tasks > 1)}:"
        verdicts += [_named(where, goal(runs)) for goal in contest.goals]
    return verdicts


def _waiting(name: str, rounds: int, seconds: float, plot: Path | None) -> list[Verdict]:
    """P5 to P7. They run processes instead of tasks, so a turn takes longer, and there are fewer turns."""
    if name == "P7":
        costs, judged = waiting.p7()
        report.costs("P7  the cost of a release, by the number of waiters", costs)
        return judged
    rounds, seconds = max(1, rounds // 3), 5 * seconds
    if name == "P5":
        times, failed, judged = waiting.p5(rounds, seconds)
        report.imports("P5  from the release in one process to the hold in another", times, failed)
        return judged
    judged = []
    for nodes in waiting.HOT:
        turns, failed, verdicts = waiting.p6(nodes, rounds, seconds)
        report.hot(f"P6  one hot name, {nodes} node{'s' * (nodes > 1)}, 4 processes of 8 tasks", turns, failed)
        judged += verdicts
        if plot is not None and nodes == 1:
            waits = {side: [wait for turn in its for wait in turn.waits] for side, its in turns.items()}
            draw(plot, "Waiting for one hot name: 4 processes of 8 tasks, 1 node", waits)
    return judged


def _holding(times: int, leases: int) -> list[Verdict]:
    """A process for each deployment, which holds so many leases for so many times their length."""
    seen, judged = [], []
    for nodes, part in holding.OVER.items():
        count = leases // part
        try:
            seen.append(holding.run(nodes, count, seconds=holding.LEASE * times))
            judged += seen[-1].verdicts()
        except waiting.Failed as error:
            judged.append(Verdict(f"{count:,} leases, {nodes} node{'s' * (nodes > 1)}", "all", str(error), None))
    report.held(f"P8  many leases of {holding.LEASE:g} s in one process, on asyncio's own loop", seen)
    return judged


def _crowds(uvloop: bool) -> list[Verdict]:
    seen = [_run(crowd.run(ASYNCLOCK, sides.asynclock, nodes, tasks), uvloop) for nodes, tasks in CROWDS]
    beside = [_run(crowd.run(REDIS_PY, sides.redis_py, 1, tasks), uvloop) for nodes, tasks in CROWDS if nodes == 1]
    report.crowds("P9  all tasks at once", [*seen, *beside])
    return [verdict for one in seen for verdict in one.verdicts()]


def _run(work: Coroutine[Any, Any, T], uvloop: bool) -> T:
    factory = None
    if uvloop:
        import uvloop as fast  # an extra

        factory = fast.new_event_loop
    with asyncio.Runner(loop_factory=factory) as loop:
        return loop.run(work)


def _named(name: str, verdict: Verdict) -> Verdict:
    return Verdict(f"{name} {verdict.what}", verdict.target, verdict.measured, verdict.reached)


if __name__ == "__main__":
    if (command := "".join(sys.argv[1:2])) in COMMANDS:
        importlib.import_module(f"benchmarks.{command}").app(sys.argv[2:], prog_name=f"python -m benchmarks {command}")
    app(prog_name="python -m benchmarks")
