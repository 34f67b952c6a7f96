"""Programs as users write them, under mypy --strict and pyright strict: right ones pass, and mistakes are reported.

typed/ok_*.py pass both. In typed/bad_*.py both find an error in each line marked `# E:`, and in no other."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TYPED = Path(__file__).parent / "typed"
OK = sorted(TYPED.glob("ok_*.py"))
BAD = sorted(TYPED.glob("bad_*.py"))

pytestmark = [
    pytest.mark.timeout(180),  # the first test of each checker waits for it
    pytest.mark.xdist_group("type-checkers"),  # else each worker waits for it
]

Found = dict[str, dict[int, str]]  # file -> line -> what is wrong there


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: it found errors; more: it failed itself
    return done.stdout


def mypy() -> Found:
    """Its cache is that of `make lint`, which runs before the tests: 5 s of CPU less."""
    cache = f"--cache-dir={REPO / '.mypy_cache'}"
    options = ["--strict", "--config-file=", "--output=json", cache, "--python-version=3.11"]
    found: Found = defaultdict(dict)
    for line in run("mypy", *options, *map(str, OK + BAD)).splitlines():
        if line.startswith("{") and (said := json.loads(line))["severity"] == "error":
            found[Path(said["file"]).name][said["line"]] = said["message"]
    return found


def pyright(folder: Path) -> Found:
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(REPO)]}
    config |= {"include": [str(path) for path in OK + BAD]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    report = json.loads(run("basedpyright", "--project", str(folder), "--pythonpath", sys.executable, "--outputjson"))
    assert report["summary"]["filesAnalyzed"] == len(OK + BAD)
    found: Found = defaultdict(dict)
    for said in report["generalDiagnostics"]:
        if said["severity"] == "error":
            found[Path(said["file"]).name][said["range"]["start"]["line"] + 1] = said["message"]
    return found


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The errors that one checker finds. It runs once for all files and all workers of pytest-xdist: where the tests of
    a group are not kept together, the first worker runs it, and the others wait for its report."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # each worker has a folder of its own in that of the run
    folder = shared / f"type-checks-{request.param}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = folder / "report.json"
        if not report.exists():
            errors = mypy() if request.param == "mypy" else pyright(folder)
            report.write_text(json.dumps([[name, list(lines.items())] for name, lines in errors.items()]))
    return {name: dict(lines) for name, lines in json.loads(report.read_text())}


@pytest.mark.parametrize("path", OK, ids=lambda path: path.stem)
def test_right_programs_pass(found: Found, path: Path) -> None:
    """No line of a right program is an error."""
    assert dict(found.get(path.name, {})) == {}


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_mistakes_are_reported(found: Found, path: Path) -> None:
    """Each marked line is an error, and no other."""
    lines = path.read_text("utf-8").splitlines()
    marked = {number for number, line in enumerate(lines, 1) if re.search(r"# E:", line)}
    wrong = found.get(path.name, {})
    assert marked
    missed = {number: lines[number - 1] for number in marked - set(wrong)}
    assert (missed, {number: wrong[number] for number in set(wrong) - marked}) == ({}, {})


def test_none_is_left_out() -> None:
    """A folder that moved would pass everything."""
    assert len(OK) >= 18
    assert len(BAD) == 5
