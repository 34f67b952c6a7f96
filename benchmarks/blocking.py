"""`python -m benchmarks blocking`: one cycle of `asynclock.blocking` beside one of redis-py's sync Lock, in one thread
and in turns, on one server."""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import redis
import typer

from asynclock.blocking import Redlock
from benchmarks import report
from benchmarks.goals import judge_ratio
from benchmarks.servers import running

CYCLES = 20
"""Of one turn. A turn is short, so that a busy moment of the machine falls on both sides."""

AT_MOST = 1.5

app = typer.Typer(add_completion=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1, help="The number of turns of each side.")] = 200,
    url: Annotated[str, typer.Option(help="A server of your own; default: one on a unix socket.")] = "",
) -> None:
    """The wall time of acquire and release of a free lock."""
    if url:
        _measure(url, rounds)
        return
    with running(1) as (server,):
        _measure(server.url, rounds)


def _measure(url: str, rounds: int) -> None:
    theirs = redis.Redis.from_url(url)
    with Redlock(url) as client:
        sides = (client("benchmark:ours"), theirs.lock("benchmark:theirs", timeout=30))
        for side in sides:
            _turn(side, 5 * CYCLES)
        took = [tuple(_turn(side, CYCLES) for side in sides) for _ in range(rounds)]
    theirs.close()
    ours, others = (statistics.median(each) * 1e6 for each in zip(*took, strict=True))
    verdict = judge_ratio("wall time of a cycle", [a / b for a, b in took], AT_MOST, more=False)
    report.console.print(f"asynclock.blocking {ours:.0f} us, redis-py Lock {others:.0f} us (medians)")
    report.verdicts("asynclock.blocking / redis-py", [verdict])


def _turn(side: object, cycles: int) -> float:
    began = time.perf_counter()
    for _ in range(cycles):
        with side:  # type: ignore[attr-defined]
            pass
    return (time.perf_counter() - began) / cycles
