"""`python -m benchmarks [P1 P3 ...]`: run the contests and print the ratios beside their targets."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

import typer

from benchmarks import crowd, imports, report, runner, sides
from benchmarks.cases import ASYNCLOCK, CONTESTS, CROWDS, NAMES, REDIS_PY
from benchmarks.goals import Verdict

T = TypeVar("T")

app = typer.Typer(add_completion=False)


@app.command()
def main(
    cases: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(NAMES)}; all, if none is named")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side has its turn.")] = 12,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long a turn takes.")] = 0.4,
    uvloop: Annotated[bool, typer.Option("--uvloop", help="Run on uvloop instead of asyncio's own loop.")] = False,
) -> None:
    """Measure asynclock beside others, in turn, on real servers. Nothing is asserted: read the tables."""
    chosen = [name.upper() for name in cases or NAMES]
    for name in chosen:
        if name not in NAMES:
            raise typer.BadParameter(f"{name}: there are {', '.join(NAMES)}")
    loop = "uvloop" if uvloop else "asyncio"
    report.console.print(f"Python {platform.python_version()}, {loop}, {rounds} rounds of {seconds:g} s a side")
    judged: list[Verdict] = []
    for name in chosen:
        judged += _case(name, rounds, seconds, uvloop)
    report.verdicts("All targets (ratios: median of the rounds, least to greatest)", judged)


def _case(name: str, rounds: int, seconds: float, uvloop: bool) -> list[Verdict]:
    if name == "P10":
        took, verdict = imports.run(rounds)
        report.imports("P10  import time, fresh interpreters", took)
        return [_named(name, verdict)]
    if name == "P9":
        return [_named(name, verdict) for verdict in _crowds(uvloop)]
    verdicts = []
    for contest in CONTESTS[name]:
        runs = _run(runner.run(contest, rounds, seconds), uvloop)
        report.runs(f"{name}  {contest.title}", runs)
        where = f"{name}  {contest.tasks} task{'s' * (contest.tasks > 1)}:"
        verdicts += [_named(where, goal(runs)) for goal in contest.goals]
    return verdicts


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
    app(prog_name="python -m benchmarks")
