"""The suite itself. A test that hangs fails, the tests after it run, and the report shows where it hung. The tests of a
group run in one worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.programs import PYTHONPATH

ROOT = Path(__file__).parents[2]

HANGS = """
import asyncio, contextlib, subprocess, time
import pytest

pytestmark = pytest.mark.both_loops("it is about both")

async def never_set():
    await asyncio.Event().wait()

async def test_coroutine():
    await never_set()

async def test_task():
    async with asyncio.TaskGroup() as group:
        group.create_task(never_set())

async def test_busy_loop():
    while True:
        await asyncio.sleep(0)

async def test_background_task():
    async def spin():
        while True:
            await asyncio.sleep(0)

    spinning = asyncio.create_task(spin())
    await never_set()

async def test_blocked_loop():
    time.sleep(1000)

def test_child_process():
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            child.wait()
        finally:
            child.kill()

def test_that_swallows_one_signal():
    with contextlib.suppress(BaseException):
        time.sleep(1000)
    time.sleep(1000)

@pytest.fixture
async def hanging():
    yield
    await never_set()

async def test_tear_down_after_a_failure(hanging):
    assert False, "it fails first"

@pytest.mark.timeout(60)
async def test_next():
    await asyncio.sleep(0)
"""


SLOW = """
import time
import pytest
from tests.support import limits

class Slow:
    def __repr__(self):
        time.sleep(1)
        return "slow"

@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(limits, "_AGAIN", 0.2)
    return Slow()

def test_whose_report_takes_long(slow):
    time.sleep(1000)

@pytest.mark.timeout(60)
def test_next():
    pass
"""

GROUPED = """
import os
from pathlib import Path
import pytest

pytestmark = pytest.mark.timeout(60)

@pytest.fixture
def shared_zookeeper():
    return None

@pytest.mark.parametrize("number", range(20))
def test_of_the_group(number, shared_zookeeper):
    Path(f"{os.getpid()}.worker").touch()
"""


def run(folder: Path, programs: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """pytest over these programs, with our conftest and settings. Each start of pytest costs two seconds of CPU."""
    folder.joinpath("conftest.py").write_text("from tests.conftest import *\n")
    for name, program in programs.items():
        folder.joinpath(f"test_{name}.py").write_text(program)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *options, str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.timeout(240)
def test_a_test_that_hangs_fails(tmp_path: Path) -> None:
    """On both loops; also where the loop is blocked, and in the tear-down of a test that failed. The next test runs.
    The report of a hang may take long, as on a busy machine: the next signal would interrupt pytest itself, and end the
    run of all tests."""
    ran = run(tmp_path, {"hanging": HANGS, "slow": SLOW}, "-o", "timeout=1.5")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    why = "tests.support.limits.Hung: Timeout (>1.5s)"
    for loop in ("asyncio", "uvloop"):
        for name in ("coroutine", "task", "busy_loop", "background_task", "blocked_loop"):
            assert f"FAILED test_hanging.py::test_{name}[{loop}] - {why}" in ran.stdout
        assert f"ERROR test_hanging.py::test_tear_down_after_a_failure[{loop}] - {why}" in ran.stdout
    for name in ("child_process", "that_swallows_one_signal"):
        assert f"FAILED test_hanging.py::test_{name} - {why}" in ran.stdout
    assert f"FAILED test_slow.py::test_whose_report_takes_long - {why}" in ran.stdout
    assert "15 failed, 3 passed" in ran.stdout
    assert re.search(r"1 wait here:\n.* in test_coroutine\n.* in never_set\n", ran.stdout)


@pytest.mark.timeout(240)
def test_workers(tmp_path: Path) -> None:
    """With xdist a worker lives on after a test that hangs. One worker has the tests of a group: the others need not
    start its servers, which would cost CPU while they idle."""
    options = ("-n", "2", "--dist", "loadgroup", "-o", "timeout=3", "-k", "coroutine or next or of_the_group")
    ran = run(tmp_path, {"hanging": HANGS, "grouped": GROUPED}, *options)
    assert "2 failed, 22 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "crashed" not in ran.stdout
    assert len(list(tmp_path.glob("*.worker"))) == 1


STUBBORN = """
import time

def test_that_swallows_the_signal():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
"""


@pytest.mark.timeout(240)
def test_a_test_that_swallows_the_signal_ends_with_its_process(tmp_path: Path) -> None:
    """Nothing else could end it. stderr shows the stack."""
    ran = run(tmp_path, {"stubborn": STUBBORN}, "-o", "timeout=3", "-o", "faulthandler_timeout=5")
    assert ran.returncode == 1
    assert "in test_that_swallows_the_signal" in ran.stderr
