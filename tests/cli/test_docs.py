"""docs/cli.md: its examples run, and print what the page says."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asynclock.cli.doctor import (
    clusters,
    database_findings,
    findings,
    measures,
    sentinels,
    standalone,
    zookeepers,
)
from asynclock.cli.program import Code
from tests.support.commands import answered, environment, json_of
from tests.support.programs import COMMANDS, Program
from tests.support.servers import Server

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()
VARY = [
    (re.compile(r"\bweb-1:\d+"), "web-1:PID"),
    (re.compile(r"\bpid \d+"), "pid PID"),
    (re.compile(r"\b\d{16}\b"), "FENCE"),
    (re.compile(r"valkey \S+|redis \d\S+"), "VERSION"),
    (re.compile(r"[-+]?\b\d+(\.\d+)?(ms|m\d\ds| s|s)\b"), "TIME"),
    (re.compile(r"[ \t]+"), " "),
]


_DOCTOR = findings, clusters, sentinels, measures, standalone, database_findings, zookeepers


def examples() -> Iterator[tuple[str, str]]:
    """Each command of the page, and its output there."""
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for each in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = each.partition("\n")
            yield command, output


def steady(text: str) -> str:
    """Without what differs from run to run."""
    for pattern, instead in VARY:
        text = pattern.sub(instead, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


class Shell:
    """Runs the commands of the page as a shell does, but each `asynclock` as a Program: 0.1 s of CPU instead of 0.6.
    The first command in the background holds the lock before the next one runs; the second waits for it."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers
        self._code = 0
        self._seen = iter(("holders", "waiters"))
        self._background: list[Program] = []

    def prints(self, command: str) -> str:
        """What the command prints."""
        for number, server in enumerate(self._servers, 1):
            command = command.replace(f"redis://redis-{number}:6379", server.url)
        if command == "echo $?":
            return f"{self._code}\n"
        if command.endswith("&"):
            self._background.append(self._start(command.removesuffix("&"), stdout=subprocess.DEVNULL))
            seen = next(self._seen)
            while not json_of(answered("inspect", "report", "--json", on=self._servers))[seen]:
                time.sleep(0.1)  # the command takes 0.1 s of CPU
            return ""
        shown, *no_stderr = command.split("2> /dev/null")
        said = subprocess.DEVNULL if no_stderr else subprocess.STDOUT
        with self._start(shown, stdout=subprocess.PIPE, stderr=said) as process:
            printed: str = process.communicate(timeout=50)[0]
        self._code = process.returncode
        return printed

    def _start(self, command: str, **more: Any) -> Program:
        program, *words = shlex.split(command)
        assert program == "asynclock"
        given = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment(self._servers), **more}
        return Program(["-m", "asynclock", *words], COMMANDS, text=True, **given)

    def close(self) -> None:
        for each in self._background:
            each.kill()
            each.wait()


@pytest.mark.timeout(240)
def test_the_examples(five: list[Server]) -> None:
    """Each prints what the page says, but for times, processes and fencing tokens."""
    servers = five[:3]
    checked = 0
    with closing(Shell(servers)) as shell:
        for command, expected in examples():
            printed = shell.prints(command)
            for number, server in enumerate(servers, 1):  # before the host, which may be a part of the random path
                printed = printed.replace(f"unix://{server.path}", f"redis-{number}:6379")
            assert steady(printed.replace(socket.gethostname(), "web-1")) == steady(expected), command
            checked += 1
    assert checked > 10


def test_every_exit_code_is_in_the_table() -> None:
    """And every command has a heading."""
    from asynclock.cli import app

    table = " ".join(re.findall(r"^\| ([\d, ]+) \|", PAGE, re.M))
    for code in Code:
        assert re.search(rf"\b{code.value}\b", table), code
    names = {each.name or each.callback.__name__ for each in app.registered_commands}
    headings = {name for each in re.findall(r"^## (.*)", PAGE, re.M) for name in each.split(", ")}
    assert names <= headings


def test_every_check_of_the_doctor_is_in_its_table() -> None:
    """And no other."""
    source = "".join(Path(str(each.__file__)).read_text() for each in _DOCTOR)
    checks = {*re.findall(r'^ +"([a-z-]+)",$', source, re.M), *re.findall(r'Finding\(severity, "([a-z-]+)"', source)}
    rows = re.findall(r"^\| (`[a-z`, -]+`) \|", PAGE, re.M)
    shown = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert checks == {name for name in shown if not name.startswith("--")}


def test_the_rule_for_a_user_is_the_one_that_doctor_prints() -> None:
    """docs/connections.md has it in one line, to copy."""
    rule = findings.acl_rule("locks", "lock:").replace(" on ", " on >password ")
    assert f"\n{rule}\n" in (DOCS / "connections.md").read_text()
