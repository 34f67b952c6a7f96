"""The kind of lock that docs/extending.md adds: its diff is applied to a copy of the package, where the kind works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import PYTHONPATH

ROOT = Path(__file__).parents[2]
DIFF = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)

CLIENT = """
import asyncio, sys
from contextlib import aclosing
from asynclock import ConfigError, Redlock, Unsupported

async def main(url):
    inside, leave = asyncio.Barrier(4), asyncio.Event()

    async def passes(redlock):
        async with redlock.latch("schema") as lease:
            await inside.wait()
            await leave.wait()
            return lease.fence

    async with aclosing(Redlock(url, patience=30)) as redlock, asyncio.TaskGroup() as group:
        opener = redlock.opener("schema")
        preparing = await opener.acquire()
        assert await redlock.latch("schema").acquire(timeout=0) is None
        passing = [group.create_task(passes(redlock)) for _ in range(3)]
        while sum(waiter.tasks for waiter in (await redlock.inspect("schema")).waiters) < 3:
            await asyncio.sleep(0.01)
        assert (await redlock.inspect("schema")).kind == "latch"
        await preparing.release()
        await inside.wait()  # all three are in at once
        assert await opener.acquire(timeout=0) is None
        late = await redlock.latch("schema").acquire(timeout=0)
        try:
            await redlock("schema").acquire(timeout=0)
        except ConfigError as error:
            assert "in use as a latch" in str(error)
        else:
            raise AssertionError("a mutex of this name")
        late = await redlock.adopt(await late.detach())
        await late.release()
        leave.set()
        fences = [await each for each in passing]
        assert preparing.fence < min(fences)
        again = await opener.acquire(timeout=5)
        assert again.fence > max(fences)
        await again.release()
    print("opened once")

for url in sys.argv[1:]:
    asyncio.run(main(url))
try:
    Redlock("zookeeper://nowhere").latch("schema")
except Unsupported as error:
    print(error)
"""

AGREEMENT = """
from hypothesis import given, settings, strategies as st
from tests.support.shared_agreement import Ensemble
from tests.support.shared_directed import borrowed
from tests.support.shared_histories import steps, world
from tests.support.stage import staged

OPENERS, PASSING, MIXED = world("o."), world("p."), world("o. p. o. p. p. p. p. o. p.")

with staged() as stage:
    for where in OPENERS, PASSING, MIXED:
        for history in borrowed("latch").values():
            Ensemble(stage, where).play(history)

    @settings(max_examples=50, derandomize=True, database=None, deadline=None)
    @given(st.lists(steps(1), min_size=6, max_size=25))
    def histories(found):
        Ensemble(stage, MIXED).play(found)

    histories()
    print("agreed")
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package to which the diff is applied. Of the files that it does not change, Python
    uses the bytecode."""
    folder = tmp_path_factory.mktemp("extended")
    unfinished = shutil.ignore_patterns("*.pyc.*")  # other workers compile, too
    shutil.copytree(ROOT / "asynclock", folder / "asynclock", ignore=unfinished)
    # Inside a repository of its own, git would apply the diff to the files of that one.
    outside = {
        **os.environ,
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    subprocess.run(["git", "apply", "-"], input=DIFF[0], text=True, cwd=folder, env=outside, check=True)
    return folder


def run(program: str, extended: Path, *urls: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter that imports the copy."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *urls],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(extended), PYTHONPATH]),
            "ASYNCLOCK_EMBEDDED_DIR": str(extended),
        },
        cwd=extended,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_kind_touches_at_most_five_files_of_the_package() -> None:
    """Two of them are its own."""
    assert len(DIFF) == 1
    touched = re.findall(r"^diff --git a/(\S+)", DIFF[0], re.MULTILINE)
    assert len(touched) <= 5
    assert all(each.startswith("asynclock/") for each in touched)
    assert not any("latch" in path.read_text().lower() for path in (ROOT / "asynclock").rglob("*.py"))


@pytest.mark.usefixtures("wheel")
def test_the_new_kind_works(extended: Path) -> None:
    """On a server, in memory and in a file: closed, opened for all waiters, and not closed while they hold it.
    ZooKeeper has recipes of its own, and refuses it when it is made."""
    done = run(CLIENT, extended, "embedded:", "memory:", f"sqlite:///{extended}/latch.db")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["opened once"] * 3
    assert "cannot keep this (latch of 'schema'): its layouts" in done.stdout


def test_the_new_kind_works_in_databases(extended: Path, postgresql_url: str, mariadb_url: str) -> None:
    """The same over PostgreSQL and MariaDB."""
    urls = [f"{url}?asynclock_table=latch" for url in (postgresql_url, mariadb_url)]
    done = run(CLIENT, extended, *urls)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["opened once"] * 2


@pytest.mark.timeout(120)
def test_the_new_kinds_rule_and_script_agree(extended: Path) -> None:
    """Replies, full state and notices, over named and random histories."""
    done = run(AGREEMENT, extended)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "agreed\n"


@pytest.mark.parametrize(("part", "instead"), [("== 'pp'", "~= 'po'"), (" or last", "")])
def test_a_script_that_differs_from_the_rule_is_noticed(extended: Path, part: str, instead: str) -> None:
    """So the histories above reach both branches of the script."""
    script = extended / "asynclock" / "stores" / "redis" / "scripts" / "latch.lua"
    text = script.read_text()
    assert part in text
    script.write_text(text.replace(part, instead))
    try:
        done = run(AGREEMENT, extended)
    finally:
        script.write_text(text)
    assert "AssertionError" in done.stderr
