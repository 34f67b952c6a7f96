"""Which changes of the shipped decisions (`simulation/mutants.py`) does nobody notice: neither the tests that need no
server, nor the walks, nor the simulation?

    python -m tests.support.suite_mutants --jobs 0               all of them, one process for each core: hours
    python -m tests.support.suite_mutants --only hold.py         those of one file
    python -m tests.support.suite_mutants --only hold.py --lines 90-120 tests/unit/test_holds.py    after a new test

It collects the tests once and runs each once, to learn which lines of `protocol/`, `quorum/` and `rules/` it reaches. A
mutant is then tried in copies of that process: in the tests that reach its line, until one fails; then in walks; then
in the simulation. Tests that have noticed a change of the same file come first, and then the fastest.

`equivalent_mutants.txt` has those that change nothing anybody could see, each with the reason. They are tried as well.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from simulation.mutants import CPU, PACKAGE, Mutant, fails_in_simulation, fails_in_walks, is_noticed, mutants
from simulation.mutants import FOLDERS as CHANGED
from tests.support.deployments import deployment_of

FOLDERS = [
    *("tests/unit", "tests/waiting", "tests/locks", "tests/failures", "tests/testing", "tests/monitoring"),
    *("tests/stores/test_waiting_ops.py", "tests/stores/test_untrusted_data.py", "tests/stores/test_user_store.py"),
]

SLOW = 2.0
"""Seconds: a test that takes longer is not run for each mutant."""

HANGS = 8.0
"""Seconds of one test with a mutant: then its process ends, since what a test leaves behind may hang as well."""

MODULE = 0
"""In place of a line: a test that reaches any line of the file is tried with another constant of the module."""

_NONE = b"\xff" * 4

_REAL = {
    *("shared_urls", "servers", "server", "five", "shared_cluster", "shared_zookeeper", "sentinel_deployment"),
    *("postgresql_url", "mariadb_url", "wheel", "host_names"),
}
"""Fixtures of servers."""

_EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
"""A mutant without its line number, as it is printed; the reason follows in indented lines."""

_FOLDERS = tuple(str(PACKAGE / each) for each in CHANGED)


class Trials:
    """A plugin of pytest that tries mutants in place of one run of the tests."""

    def __init__(self, chosen: list[Mutant], seeds: int, jobs: int) -> None:
        self._chosen, self._seeds, self._jobs = chosen, range(seeds), jobs
        self._reached = defaultdict[tuple[str, int], list[pytest.Item]](list)  # the tests by the line
        self._time = dict[pytest.Item, float]()
        self._noticed = Counter[tuple[str, pytest.Item]]()  # so many changes of a file, by the test that failed
        self._failed = mmap.mmap(-1, 4)  # which of the tests of a mutant has failed in its process

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if deployment_of(item) in ("", "memory") and not _REAL & {*_names(item)}]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._learn(item)
        print(f"{len(self._time)} of {len(session.items)} tests; {len(self._chosen)} mutants", flush=True)
        copies = list[int]()
        for job in range(self._jobs):
            if copy := os.fork():
                copies.append(copy)
            else:
                self._failed = mmap.mmap(-1, 4)
                try:
                    self._try(self._chosen[job :: self._jobs], f"process {job + 1}")
                finally:
                    os._exit(0)
        for copy in copies:
            os.waitpid(copy, 0)
        return True

    def _try(self, chosen: list[Mutant], name: str) -> None:
        by = Counter[str]()
        for done, mutant in enumerate(chosen, 1):
            by[self._noticed_by(mutant)] += 1
            if done % 25 == 0 or done == len(chosen):
                print(f"{name}: {dict(by)}", flush=True)

    def _learn(self, item: pytest.Item) -> None:
        """Run it as it is, and note which lines it reaches."""
        lines = set[tuple[str, int]]()

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            del event, argument
            if not frame.f_code.co_filename.startswith(_FOLDERS):
                return None
            lines.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
            return line

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        began = time.monotonic()
        sys.settrace(trace)
        try:
            passed = _passes(item, within=60.0)
        finally:
            sys.settrace(None)
        took = time.monotonic() - began
        if passed and took < SLOW:
            self._time[item] = took
            for each in lines | {(path, MODULE) for path, _ in lines}:
                self._reached[each].append(item)

    def _noticed_by(self, mutant: Mutant) -> str:
        path = str(mutant.path)
        tests = self._reached[path, mutant.line if mutant.in_function else MODULE]
        tests.sort(key=lambda test: (-self._noticed[path, test], self._time[test]))
        cpu = CPU + 3 * sum(map(self._time.__getitem__, tests))
        self._failed[:] = _NONE
        try:
            if is_noticed(mutant, lambda: self._one_fails(tests), cpu):
                if self._failed[:] != _NONE:
                    self._noticed[path, tests[int.from_bytes(self._failed[:], "big")]] += 1
                return "tests"
            if self._seeds and is_noticed(mutant, fails_in_walks):
                return "walks"
            if self._seeds and is_noticed(mutant, lambda: fails_in_simulation(self._seeds)):
                return "simulation"
        except LookupError as error:
            print(error, flush=True)
            return "not tried"
        if without_line(str(mutant)) in _equivalent():
            return "changes nothing"
        print(f"not noticed ({len(tests)} tests): {mutant}", flush=True)
        return "nobody"

    def _one_fails(self, tests: list[pytest.Item]) -> bool:
        for number, test in enumerate(tests):
            if not _passes(test):
                self._failed[:] = number.to_bytes(4, "big")
                return True
        return False


def without_line(mutant: str) -> str:
    """A mutant as it is printed, without the number of its line, which changes with each edit of its file."""
    path, _, rest = mutant.partition(":")
    return f"{path}  {rest.partition('  ')[2]}"


def _equivalent() -> set[str]:
    return {line for line in _EQUIVALENT.read_text().splitlines() if line and not line.startswith((" ", "#"))}


def _names(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def _passes(item: pytest.Item, within: float = HANGS) -> bool:
    """Ends this process if it takes longer."""
    limit = threading.Timer(within, os._exit, (1,))
    limit.daemon = True
    limit.start()
    reports = runtestprotocol(item, nextitem=None, log=False)
    limit.cancel()
    return all(each.passed for each in reports)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.suite_mutants", description=__doc__)
    parser.add_argument("--sample", type=int, help="so many, drawn at random; without it: all")
    parser.add_argument("--draw", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--seeds", type=int, default=1, help="of the simulation, for each mutant; 0: tests alone")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes; 0: one for each core")
    parser.add_argument("--only", default="", help="those of files whose path ends so, or so: a.py,b.py")
    parser.add_argument("--lines", default="1-100000", help="those of these lines")
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="in place of all tests that need no server")
    given = parser.parse_args()
    low, high = map(int, given.lines.split("-"))
    files = tuple(given.only.split(","))
    found = [each for each in mutants() if str(each.path).endswith(files) and low <= each.line <= high]
    if given.sample is not None:
        found = Random(given.draw).sample(found, min(given.sample, len(found)))
    trials = Trials(found, given.seeds, given.jobs or os.cpu_count() or 1)
    options = ["-q", "-p", "no:cacheprovider", "-n0", "--timeout=0"]
    sys.exit(pytest.main([*options, *given.tests], plugins=[trials]))


if __name__ == "__main__":
    main()
