"""`asynclock run`: a command under a lock, in real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import HOLDS, Begin, answered, asynclock, environment, python
from tests.support.servers import Server, Servers


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], 128 + 9),
        (["no-such-command"], 127),
        (["/"], 126),
    ],
)
def test_the_exit_code_is_the_commands(server: Server, name: str, command: list[str], code: int) -> None:
    """As a shell would say it; and the name is free again."""
    done = asynclock("run", name, "--", *command, on=server)
    assert done.returncode == code, done.stderr
    assert server.cli().exists(name, f"lock:{name}") == 0


def test_the_command_knows_its_lock(server: Server, name: str) -> None:
    """By its environment; its stdin and stdout are those of asynclock."""
    program = "say(*(os.environ['ASYNCLOCK_' + each] for each in ('NAME', 'LEASE', 'URLS', 'PREFIX', 'FENCE')))"
    done = asynclock("run", "--lease", "20s", "--prefix", "app:", name, *python(program), on=server)
    *known, fence = done.stdout.split()
    assert known == [name, "20", server.url, "app:"]
    assert int(fence) > 0


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems refuse such names")
def test_a_command_whose_path_is_not_utf8(server: Server, name: str, tmp_path: Path) -> None:
    """It runs; those who look at the lock see the path with a replacement."""
    path = os.fsencode(tmp_path) + b"/caf\xe9"
    with open(path, "w") as file:
        file.write(f"#!/bin/sh\nexec {shlex.join([sys.executable, '-m', 'asynclock', 'inspect', name, '--json'])}\n")
    os.chmod(path, 0o755)
    done = asynclock("run", name, "--", os.fsdecode(path), on=server)
    assert done.returncode == 0, done.stderr
    (holder,) = json.loads(done.stdout)["holders"]
    assert holder["metadata"].endswith("/caf\ufffd")


def test_the_command_may_be_another_run(server: Server, name: str) -> None:
    """It has the same lease, and so it needs the same max_lease; the default one is a minute."""
    program = python("say(os.environ['ASYNCLOCK_MAX_LEASE'])")
    inner = [sys.executable, "-m", "asynclock", "run", f"{name}:inner", "--", *program]
    done = asynclock("run", name, "--lease", "2m", "--max-lease", "1200000", "--", *inner, on=server)
    assert (done.returncode, done.stdout) == (0, "1200000\n"), done.stderr


def test_the_command_inherits_open_files(server: Server, name: str) -> None:
    """Such as those that a shell hands down for <(...)."""
    command = ["bash", "-c", f"{sys.executable} -m asynclock run {name} -- cat <(echo through)"]
    done = subprocess.run(command, env=environment(server), capture_output=True, text=True, check=True)
    assert done.stdout == "through\n"


def test_options_may_follow_the_name(server: Server, name: str) -> None:
    """Up to `--`; all that follows it belongs to the command, another `--` too."""
    done = asynclock("run", name, "--lease", "20", "--", "echo", "--lease", "--", "-x", on=server)
    assert done.stdout == "--lease -- -x\n"


@pytest.mark.parametrize(("options", "code"), [([], 75), (["-E", "9"], 9), (["-x"], 0)])
def test_held_by_another(server: Server, name: str, begin: Begin, options: list[str], code: int) -> None:
    """The command does not run; the message says who holds the name."""
    holder = begin("run", name, "--", *HOLDS, on=server).holds()
    done = asynclock("run", name, "--wait", "0", *options, "--", "echo", "ran", on=server)
    assert (done.returncode, done.stdout) == (code, "")
    assert f"pid {holder.process.pid}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_waits(five: list[Server], name: str, begin: Begin) -> None:
    """Without --wait as long as it takes; on a quorum."""
    holder = begin("run", name, "--", *HOLDS, on=five).holds()
    waiter = begin("run", name, "--", *HOLDS, on=five)
    holder.let_go()
    assert holder.code() == 0
    waiter.holds().let_go()
    assert waiter.code() == 0


def test_no_quorum(server: Server, servers: Servers, name: str) -> None:
    """One server of three is up: 69, one line, and the command does not run."""
    urls = ",".join([server.url, *(f"unix://{servers.folder}/none{n}.sock" for n in (1, 2))])
    done = asynclock("run", name, "--wait", "0", "--", "echo", "ran", ASYNCLOCK_URLS=urls)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_an_error_as_json(server: Server, name: str) -> None:
    """It is an event, too, so that all lines of stderr are JSON."""
    server.cli().hset(f"lock:{name}", "total", "42")
    done = asynclock("run", name, "--json", "--", "true", on=server)
    error, ended = map(json.loads, done.stderr.splitlines())
    assert (error["event"], ended["event"], ended["code"], done.returncode) == ("error", "exit", 64, 64)
    assert "hash" in error["text"]


def test_held_by_another_program(server: Server, name: str) -> None:
    """The message says what to do: the key has no expiry, so the name never becomes free."""
    server.cli().set(f"lock:{name}", "of another program")
    done = asynclock("run", name, "--wait", "0", "--", "true", on=server)
    assert done.returncode == 75
    assert "without an expiry" in done.stderr
    assert "--foreign" in done.stderr


def test_shared_runs_exclude_exclusive_ones(server: Server, name: str, begin: Begin) -> None:
    """And are excluded by them; but two of them run together."""
    shared = begin("run", "--shared", name, *HOLDS, on=server).holds()
    also = begin("run", "--shared", name, *HOLDS, on=server).holds()
    assert asynclock("run", name, "--wait", "0", "--", "true", on=server).returncode == 75
    waiter = begin("run", name, "--", *HOLDS, on=server)
    for each in (shared, also):
        each.let_go()
    waiter.holds()
    assert asynclock("run", name, "--shared", "--wait", "0", "--", "true", on=server).returncode == 75


def test_a_key_that_is_no_lock(server: Server, name: str) -> None:
    """64: the name cannot become free. The message says what the key is."""
    server.cli().hset("app:" + name, "total", "42")
    done = asynclock("run", name, "--prefix", "app:", "--", "echo", "ran", on=server)
    assert (done.returncode, done.stdout) == (64, "")
    assert "hash" in done.stderr


def test_a_lock_of_a_third_kind(server: Server, name: str, begin: Begin) -> None:
    """64: a name is a semaphore or a mutex, not both."""
    begin("run", name, "--permits", "2", "--", *HOLDS, on=server).holds()
    done = asynclock("run", name, "--", "echo", "ran", on=server)
    assert (done.returncode, done.stdout) == (64, "")
    assert "semaphore" in done.stderr


def test_permits(server: Server, name: str, begin: Begin) -> None:
    """At most so many runs at a time."""
    for _ in range(2):
        begin("run", name, "--permits", "2", "--", *HOLDS, on=server).holds()
    done = asynclock("run", name, "--permits", "2", "--wait", "0", "--", "true", on=server)
    assert done.returncode == 75, done.stderr


def test_events_as_json(server: Server, name: str, begin: Begin) -> None:
    """Each is a line on stderr: stdout belongs to the command."""
    done = asynclock("run", name, "--json", "--", "sh", "-c", "echo mine; exit 3", on=server)
    assert done.stdout == "mine\n"
    started, *_, ended = map(json.loads, done.stderr.splitlines())
    assert (started["event"], started["name"]) == ("started", name)
    assert (ended["event"], ended["code"]) == ("exit", 3)
    begin("run", name, "--", *HOLDS, on=server).holds()
    done = asynclock("run", name, "--json", "--wait", "0", "--", "true", on=server)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()][-2:] == ["held", "exit"]


# -- once ------------------------------------------------------------------------------------------------------------


def once(name: str, *command: str) -> list[str]:
    return ["run", name, "--once", "--within", "1h", "--", *command]


def test_once_over_many_replicas(five: list[Server], name: str, begin: Begin, tmp_path: Path) -> None:
    """One replica runs the migration; the others wait for its end, and all exit 0. So does one that comes later."""
    log = tmp_path / "log"
    works = f"echo begins >> {log}; echo holds; cat; echo ends >> {log}"
    first = begin(*once(name, "sh", "-c", works), on=five).holds()
    others = [begin(*once(name, "sh", "-c", f"echo again >> {log}"), on=five) for _ in range(4)]
    late = asynclock("run", name, "--once", "--within", "1h", "--wait", "0", "--", "true", on=five)
    assert late.returncode == 75  # it is running elsewhere
    first.let_go()
    assert [each.code() for each in (first, *others)] == [0] * 5
    assert asynclock(*once(name, "sh", "-c", f"echo again >> {log}"), on=five).returncode == 0
    assert log.read_text() == "begins\nends\n"


def test_once_runs_again_after_a_failure(server: Server, name: str, begin: Begin) -> None:
    """A replica that waits takes over from one that failed."""
    first = begin(*once(name, "sh", "-c", "echo holds; cat; exit 4"), on=server).holds()
    second = begin(*once(name, *HOLDS), on=server)
    first.let_go()
    assert first.code() == 4
    second.holds().let_go()
    assert second.code() == 0


# -- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["run"],
        ["run", "order:42"],
        ["run", "", "--", "true"],
        ["run", "order:42", "--lease", "soon", "--", "true"],
        ["run", "order:42", "--lease", "0", "--", "true"],
        ["run", "order:42", "--once", "--", "true"],
        ["run", "order:42", "--once", "--within", "1h", "--url", "embedded:", "--", "true"],
        ["run", "order:42", "--url", "memory:", "--", "true"],
        ["run", "order:42", "--within", "1h", "--", "true"],
        ["run", "order:42", "--shared", "--permits", "2", "--", "true"],
        ["run", "order:42", "--wait", "0", "true"],
        ["run", "order:42", "--on-lost", "cry", "--", "true"],
        ["run", "order:42", "--url", "nonsense", "--", "true"],
        ["ls", "--nonsense"],
        ["nonsense"],
    ],
)
def test_wrong_usage(server: Server, args: list[str]) -> None:
    """64, and one line on stderr which names the command that shows how."""
    from typer.testing import CliRunner

    from asynclock.cli import app

    result = CliRunner().invoke(app, args, env={"ASYNCLOCK_URLS": server.url})
    assert result.exit_code == 64, result.output
    assert result.stderr.count("\n") == 1
    assert re.match(r"asynclock( \w+)?: ", result.stderr)


@pytest.mark.parametrize(
    "args",
    [
        ["doctor", "redis://:secret@127.0.0.1:1"],
        ["redis://:secret@127.0.0.1:1", "ls"],
        ["ls", "--redis://127.0.0.1:1?password=secret"],
        ["doctor", "--lease", "redis://:secret@127.0.0.1:1"],
        ["top", "--interval", "redis://:secret@127.0.0.1:1"],
    ],
)
def test_a_url_without_its_option(args: list[str]) -> None:
    """The error names the option, and does not repeat the password of the url."""
    done = answered(*args)
    assert done.returncode == 64
    assert "--url URL" in done.stderr
    assert "secret" not in done.stderr


def test_an_error_with_an_example_of_a_url() -> None:
    """It is shown: it repeats nothing of the command line."""
    done = answered("run", "order:42", "--url", "memory:", "--", "true")
    assert done.stderr.startswith("asynclock run: Invalid value: memory: locks within one process")
    assert "give --url redis://host:6379" in done.stderr


def test_without_a_command() -> None:
    """The help, as an error: a script that calls it so is wrong."""
    done = asynclock()
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("Usage: asynclock ")
    asked = asynclock("--help", COLUMNS="80")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "..." not in asked.stdout.partition("Commands:")[2]  # no sentence is cut


def test_a_warning_is_an_event(tmp_path: Path) -> None:
    """With --json each line of stderr is one; and an even number of servers is told once."""
    urls = ",".join(f"unix://{tmp_path}/{number}" for number in range(2))
    done = asynclock("run", "a", "--json", "--wait", "0", "--", "true", ASYNCLOCK_URLS=urls)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [each["event"] for each in events] == ["warning", "error", "exit"]
    assert "use an odd number of nodes" in events[0]["text"]


@pytest.mark.filterwarnings("default:.*odd number:UserWarning")
def test_a_warning_is_one_line(tmp_path: Path) -> None:
    """Of any command."""
    urls = ",".join(f"unix://{tmp_path}/{number}" for number in range(2))
    done = answered("health", ASYNCLOCK_URLS=urls)
    assert done.stderr.count("use an odd number of nodes") == 1
