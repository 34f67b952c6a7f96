"""`python -m benchmarks blocking`: one cycle of `asynclock.blocking` beside one of redis-py's sync Lock, in one thread
and in turns of random order, on one server."""

from __future__ import annotations

import random
import statistics
import time
from statistics import quantiles
from typing import Annotated

import redis
import typer

from asynclock.blocking import Redlock
from benchmarks import report
from benchmarks.goals import judge_ratio
from benchmarks.servers import running

CYCLES = 5
"""Of one turn. A turn is short, so that a busy moment of the machine falls on both sides."""

PAUSE = 0.001
"""Seconds before each turn, in which the loop thread of asynclock ends what it does for the turn before."""

ROUNDS = 10
"""Of a run. Each compares its own cycles."""

AT_MOST = 1.5

app = typer.Typer(add_completion=False)


@app.command()
def main(
    turns: Annotated[int, typer.Option(min=1, help="The number of turns of each side in each of ten rounds.")] = 80,
    url: Annotated[str, typer.Option(help="A server of your own; default: one on a unix socket.")] = "",
) -> None:
    """The wall time of acquire and release of a free lock."""
    if url:
        _measure(url, turns)
        return
    with running(1) as (server,):
        _measure(server.url, turns)


def _measure(url: str, turns: int) -> None:
    theirs = redis.Redis.from_url(url)
    with Redlock(url) as client:
        sides = (client("benchmark:ours"), theirs.lock("benchmark:theirs", timeout=30))
        for side in sides:
            _turn(side, 20 * CYCLES, [])
        rounds = [one_round(sides, turns) for _ in range(ROUNDS)]
    theirs.close()
    verdicts = []
    for percent in (10, 50):
        took = [[quantiles(side, n=100)[percent - 1] * 1e6 for side in each] for each in rounds]
        ours, others = (statistics.median(each) for each in zip(*took, strict=True))
        what = "the fastest tenth" if percent == 10 else "the median"
        verdicts.append(judge_ratio(f"wall time of a cycle, {what}", [a / b for a, b in took], AT_MOST, more=False))
        report.console.print(f"{what}: asynclock.blocking {ours:.0f} us, redis-py Lock {others:.0f} us")
    report.verdicts("asynclock.blocking / redis-py", verdicts)


def one_round(sides: tuple[object, ...], turns: int) -> list[list[float]]:
    """The seconds of each cycle, by side."""
    took: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for side, times in random.sample(list(zip(sides, took, strict=True)), len(sides)):
            time.sleep(PAUSE)
            _turn(side, CYCLES, times)
    return took


def _turn(side: object, cycles: int, times: list[float]) -> None:
    for _ in range(cycles):
        began = time.perf_counter()
        with side:  # type: ignore[attr-defined]
            pass
        times.append(time.perf_counter() - began)
