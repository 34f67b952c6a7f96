"""docs/cli.md: its examples run, and print what the page says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
from tests.support.commands import environment
from tests.support.servers import Server

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()
MARK = "%%%"
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


def script(commands: list[str], urls: list[str]) -> str:
    """A shell script that prints a mark after each, and keeps $?. The first command in the background holds the lock
    before the script goes on; the second waits for it."""
    lines = [f'asynclock() {{ {sys.executable} -m asynclock "$@"; }}']
    seen = iter(("holders", "waiters"))
    for shown in commands:
        command = shown
        for number, url in enumerate(urls, 1):
            command = command.replace(f"redis://redis-{number}:6379", url)
        if command.endswith("&"):
            lines.append(f"{command[:-1]} > {os.devnull} 2>&1 &")
            lines.append(f"until asynclock inspect report --json | grep -q '\"{next(seen)}\": \\[{{'; do :; done")
        else:
            lines.append(command)
        lines.append(f"code=$?; echo; echo {MARK}; (exit $code)")
    return "\n".join(lines)


@pytest.mark.timeout(240)
def test_the_examples(five: list[Server]) -> None:
    """Each prints what the page says, but for times, processes and fencing tokens."""
    commands, outputs = zip(*examples(), strict=True)
    servers = five[:3]
    done = subprocess.run(
        ["sh", "-c", script(list(commands), [server.url for server in servers])],
        env=environment(servers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    printed = done.stdout
    for number, server in enumerate(servers, 1):  # before the host, whose name may be a part of the random path
        printed = printed.replace(f"unix://{server.path}", f"redis-{number}:6379")
    printed = printed.replace(socket.gethostname(), "web-1")
    for command, expected, found in zip(commands, outputs, printed.split(MARK), strict=False):
        assert steady(found) == steady(expected), command
    assert printed.count(MARK) == len(commands) > 10


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
