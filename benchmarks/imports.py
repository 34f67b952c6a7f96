"""P10: the time of `import asynclock` beside `import redis.asyncio`, in fresh interpreters, in turn."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import asynclock
from benchmarks.goals import Verdict, judge_ratio

OURS, THEIRS = "asynclock", "redis.asyncio"
AT_MOST = 1.1

_TIMED = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def run(rounds: int) -> tuple[dict[str, list[float]], Verdict]:
    """Seconds of each import, round by round, and their ratio. A first round, not recorded, writes the bytecode."""
    seconds: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for number in range(rounds + 1):
        for module in random.sample(list(seconds), len(seconds)):
            took = _import(module)
            if number:
                seconds[module].append(took)
    ratios = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[THEIRS], strict=True)]
    return seconds, judge_ratio(f"import, {OURS} / {THEIRS}", ratios, AT_MOST, more=False)


def _import(module: str) -> float:
    where = Path(asynclock.__file__).parents[1]  # a checkout need not be installed
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(module)], cwd=where, capture_output=True, text=True, check=True, timeout=60
    )
    return float(done.stdout)
