"""`make calm`: whether the suite is ever red by chance. It runs the whole suite ten times in a row, three times of them
beside two busy loops, and prints the time and the outcome of each run. The exit code is 1 if a run was red.

    python -m tests.support.calm [--runs 10] [--busy 3] -- COMMAND...
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOGS = Path("build/calm")
_BUSY = ["sh", "-c", "while :; do :; done"]


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """So many processes that use as much CPU as they get."""
    loops = [subprocess.Popen(_BUSY) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(number: int, beside: int, command: list[str]) -> bool:
    """Run the suite once, and print a line about it. Whether it was green."""
    log = LOGS / f"{number}.log"
    began = time.monotonic()
    with busy_loops(beside), log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    lines = log.read_text(errors="replace").splitlines()
    summary = next((line.strip("= ") for line in reversed(lines) if re.search(r"\d+ passed", line)), "no summary")
    load = f"beside {beside} busy loops" if beside else "alone"
    print(f"run {number:2} {load:20} {minutes}:{seconds:02} {'red' if code else 'green'}: {summary}", flush=True)
    for line in lines if code else ():
        if line.startswith(("FAILED ", "ERROR ")):
            print(f"       {line[:200]}", flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="calm", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="so many runs")
    parser.add_argument("--busy", type=int, default=3, help="so many of them, the last ones, beside two busy loops")
    parser.add_argument("command", nargs="+", help="what runs the suite")
    given = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    alone = given.runs - given.busy
    green = [run(number + 1, 0 if number < alone else 2, given.command) for number in range(given.runs)]
    print(f"{sum(green)} of {len(green)} runs were green; the output of each is in {LOGS}/")
    sys.exit(not all(green))


if __name__ == "__main__":
    main()
