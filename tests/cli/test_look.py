"""The commands that look at locks, and `break`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from asynclock import LockLost, Redlock
from asynclock.cli.watching import look
from tests.support.commands import HOLDS, Begin, Terminal, answered, asynclock, json_of
from tests.support.proxy import RewritingProxy
from tests.support.servers import Server
from tests.support.still_clock import turns
from tests.support.waiters import LIMIT, LONG


def wait_for_waiters(servers: list[Server], count: int) -> None:
    """Until so many tickets, and a hold, are at each server: a command runs as soon as a majority has its hold."""
    for server in servers:
        with server.cli() as cli:
            while sum(cli.zcard(key) for key in cli.keys("*queue")) < count or not cli.keys("lock:*"):
                time.sleep(0.01)


def test_version() -> None:
    """Of the package."""
    done = asynclock("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"asynclock \d+\.\d+.*\n", done.stdout)


def test_help_names_all_stores() -> None:
    """Not only Redis."""
    said = answered("--help").stdout
    assert all(store in said for store in ("Redis", "Sentinel", "cluster", "database", "ZooKeeper"))


def test_ls(five: list[Server], name: str, begin: Begin) -> None:
    """All holds, or those with a prefix; as text and as JSON."""
    holder = begin("run", name, "--", *HOLDS, on=five).holds()
    begin("run", f"other{name}", "--permits", "3", "--", *HOLDS, on=five).holds()
    listed = json_of(answered("ls", "--json", on=five))
    assert {each["name"] for each in listed} == {name, f"other{name}"}
    (mine,) = json_of(answered("ls", name, "--json", on=five))
    assert (mine["name"], mine["pid"], mine["metadata"]) == (name, holder.process.pid, "sh")
    assert 0 < mine["remaining"] <= 30
    done = answered("ls", name, on=five)
    assert done.returncode == 0
    head, row = done.stdout.splitlines()
    assert head.split() == ["NAME", "HOLDER", "SINCE", "LEFT", "NOTE"]
    assert f":{holder.process.pid}" in row


async def test_marks_of_once_do_not_bury_the_holds(server: Server, name: str) -> None:
    """`ls` counts them, and lists them with --all in a table of their own. They do not use up the names of `top`."""
    async with Redlock(server.url) as redlock:

        @redlock.once(f"{name}{{n}}", within=600)
        async def done(n: int) -> None: ...

        for n in range(9):
            await done(n)
        async with redlock(f"{name}held"), redlock(f"{name}rests", lease=60.0, min_hold=60.0):
            pass
        async with redlock(f"{name}held"):
            head, row, empty, said = answered("ls", name, on=server).stdout.splitlines()
            assert row.startswith(f"{name}held ")
            assert said == "10 names taken by --once or min_hold, and held by nobody: see ls --all"
            every = answered("ls", name, "--all", on=server).stdout.splitlines()
            assert (every[0].split(), every[1].split()[:2], every[2]) == (head.split(), row.split()[:2], empty)
            assert every[3].split() == ["TAKEN", "LEFT", "WHY"]
            assert sum(each.endswith("a --once run has succeeded") for each in every) == 9
            assert sum(each.endswith("it rests after a release (min_hold)") for each in every) == 1
            assert len(json_of(answered("ls", name, "--json", on=server))) == 11
            seen = json_of(answered("top", name, "--json", "--iterations", "1", "--limit", "1", on=server))
            assert ([each["name"] for each in seen["locks"]], seen["more"]) == ([f"{name}held"], False)


def test_ls_of_nothing(server: Server) -> None:
    """An empty list is no error."""
    assert json_of(answered("ls", "--json", on=server)) == []


def test_inspect(five: list[Server], name: str, begin: Begin) -> None:
    """Holders, waiters, and what each server says."""
    holder = begin("run", name, "--", *HOLDS, on=five).holds()
    waiter = begin("run", name, "--", *HOLDS, on=five)
    wait_for_waiters(five, 1)
    info = json_of(answered("inspect", name, "--json", on=five))
    assert info["kind"] == "mutex"
    assert [each["pid"] for each in info["holders"]] == [holder.process.pid]
    assert [each["pid"] for each in info["waiters"]] == [waiter.process.pid]
    assert len(info["nodes"]) == 5
    for says in info["nodes"].values():
        assert re.fullmatch(
            rf"held by .*:{holder.process.pid}, \d\d\.\d s left; 1 waiting; fence {info['fence']}", says
        )
    assert info["waiters"][0]["tasks"] == 1
    text = answered("inspect", name, on=five).stdout
    assert f":{holder.process.pid}" in text
    assert f":{waiter.process.pid}" in text
    assert json_of(answered("inspect", "free", "--json", on=five))["holders"] == []


async def test_a_name_cannot_do_anything_to_the_terminal(server: Server, name: str) -> None:
    """Control characters are shown, not sent."""
    async with Redlock(server.url) as redlock, redlock(f"{name}\x1b[31m\n", metadata="\x07"):
        done = answered("ls", on=server)
        assert "\x1b" not in done.stdout
        assert "\x07" not in done.stdout
        assert done.stdout.count("\n") == 2
        assert "\\x1b[31m\\n" in done.stdout


@pytest.mark.parametrize(("said", "shown"), [(b"\x1b[2J", r"\x1b[2J"), (b"l\xffst", "l\ufffdst")])
async def test_a_kind_cannot_do_anything_to_the_terminal(
    server: Server, name: str, tmp_path: Path, said: bytes, shown: str
) -> None:
    """The kind of a key of another program is the server's reply to TYPE: any bytes."""
    server.cli().rpush(f"lock:{name}", "of another program")
    async with RewritingProxy(tmp_path / "odd", server.path, (b"list", said)) as proxy:
        done = await asyncio.to_thread(answered, "inspect", name, ASYNCLOCK_URLS=proxy.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{name}: {shown}, ")


def test_break(server: Server, name: str, begin: Begin) -> None:
    """0: it is free; 1: nobody held it."""
    begin("run", name, "--on-lost", "ignore", "--", *HOLDS, on=server).holds()
    done = answered("break", name, "--yes", "--json", on=server)
    assert (done.returncode, json_of(done)) == (0, {"name": name, "broken": True})
    done = answered("break", name, "--yes", on=server)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nobody held" in done.stderr


async def test_the_holder_learns_who_broke_its_lock(server: Server, name: str) -> None:
    """The host and the process of the command, and its user."""
    async with Redlock(server.url) as redlock:
        lease = await redlock(name).acquire(timeout=None)
        done = await asyncio.to_thread(asynclock, "break", name, "--yes", on=server)
        assert done.returncode == 0
        assert await lease.wait_lost()
        with pytest.raises(LockLost) as caught:
            lease.ensure_held()
    who = rf"{re.escape(socket.gethostname())}, pid \d+ \('asynclock break, .+'\)"
    assert re.search(rf"{who} broke it", str(caught.value))


def test_break_asks(server: Server, name: str, begin: Begin) -> None:
    """Without a terminal it refuses; the lock is still held."""
    begin("run", name, "--", *HOLDS, on=server).holds()
    done = answered("break", name, on=server)
    assert done.returncode == 64
    assert "--yes" in done.stderr
    assert asynclock("run", name, "--wait", "0", "--", "true", on=server).returncode == 75


def test_break_of_another_programs_key(server: Server, name: str) -> None:
    """It is deleted only with --foreign."""
    server.cli().set(f"lock:{name}", "of another program")
    done = answered("break", name, "--yes", on=server)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.count("\n") == 1
    assert "--foreign deletes it" in done.stderr
    assert answered("break", name, "--yes", "--foreign", on=server).returncode == 0
    assert not server.cli().exists(f"lock:{name}")


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 0), ("n", 1, 1)])
def test_break_asks_on_a_terminal(server: Server, name: str, begin: Begin, answer: str, code: int, left: int) -> None:
    """It says who holds the lock, and breaks it only after a yes."""
    holder = begin("run", name, "--on-lost", "ignore", "--", *HOLDS, on=server).holds()
    terminal = Terminal(server, "break", name)
    terminal.shows(f":{holder.process.pid}. Break it? [y/N]")
    terminal.types(f"{answer}\n")
    assert os.waitstatus_to_exitcode(terminal.state()) == code
    assert server.cli().exists(name, f"lock:{name}") == left
    terminal.end()


def test_health(five: list[Server]) -> None:
    """0 while a majority would vote, 69 after that. It says when no other server may fail."""
    done = answered("health", "--json", on=five)
    assert (done.returncode, json_of(done)["ok"]) == (0, True)
    for server, head in zip(five[:2], ("ok\n", "ok, but no node to spare\n"), strict=True):
        server.kill()
        done = answered("health", on=five)
        assert (done.returncode, done.stdout.partition("\n")[0] + "\n") == (0, head)
    assert json_of(answered("health", "--json", on=five))["spare"] == 0
    five[2].kill()
    done = answered("health", "--json", on=five)
    assert (done.returncode, json_of(done)["ok"]) == (69, False)
    text = answered("health", on=five)
    assert text.returncode == 69
    assert text.stdout.startswith("NOT OK")
    assert "Traceback" not in text.stderr


async def test_restarted_servers_vote_as_in_a_program(five: list[Server], name: str) -> None:
    """With its max_lease and trust_restarts, from the environment."""
    async with Redlock(*(server.url for server in five)) as redlock, redlock(name):
        pass
    for server in five[:3]:
        server.restart()
    done = answered("health", "--json", on=five, ASYNCLOCK_MAX_LEASE="600")
    assert done.returncode == 69
    left = re.findall(r"for another (\d+)", done.stdout)
    assert left
    assert min(map(int, left)) > 61
    short = {"ASYNCLOCK_MAX_LEASE": "5", "ASYNCLOCK_NODE_TIMEOUT": "1"}  # a longer one needs a longer lease
    assert answered("health", on=five, **short, ASYNCLOCK_TRUST_RESTARTS="1").returncode == 0
    assert answered("ls", on=five, ASYNCLOCK_TRUST_RESTARTS="1").returncode == 0


def test_a_long_node_timeout_of_the_deployment(server: Server) -> None:
    """Programs of this environment have longer leases than the default, which is too short for it."""
    deployment = {"ASYNCLOCK_NODE_TIMEOUT": "15", "ASYNCLOCK_LEASE": "60"}
    assert answered("health", on=server, **deployment).returncode == 0
    assert answered("ls", on=server, **deployment).returncode == 0
    short = answered("health", on=server, ASYNCLOCK_NODE_TIMEOUT="15", ASYNCLOCK_MAX_LEASE="20")
    assert short.returncode == 64  # no program can have it either
    assert "at least 45 s" in short.stderr


@pytest.mark.parametrize("command", [["ls"], ["inspect", "x"], ["break", "x", "--yes"]])
def test_no_quorum(server: Server, command: list[str]) -> None:
    """69, and one line."""
    server.kill()
    done = answered(*command, on=server)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["ls"], ["health"], ["doctor"], ["top"], ["run", "x", "--", "true"]])
def test_no_servers_are_named(command: list[str]) -> None:
    """64, and the line says what to do."""
    done = answered(*command, ASYNCLOCK_URLS="")
    assert (done.returncode, done.stdout) == (64, "")
    assert "--url" in done.stderr


def test_urls_are_repeated_or_separated(five: list[Server]) -> None:
    """Both name a quorum, and win over the environment."""
    first, *others = (server.url for server in five)
    done = answered("health", "--json", "--url", first, "--url", ",".join(others), ASYNCLOCK_URLS="redis://nowhere")
    assert len(json_of(done)["nodes"]) == 5


def test_the_prefix(server: Server, name: str, begin: Begin) -> None:
    """By option or by environment."""
    begin("run", name, "--prefix", "app:", "--", *HOLDS, on=server).holds()
    assert server.cli().exists(f"app:{name}")
    assert len(json_of(answered("ls", "--json", on=server, ASYNCLOCK_PREFIX="app:"))) == 1
    assert json_of(answered("ls", "--json", "--prefix", "other:", on=server, ASYNCLOCK_PREFIX="app:")) == []


# -- top -------------------------------------------------------------------------------------------------------------


def test_top(five: list[Server], name: str, begin: Begin) -> None:
    """A line for each look with --json, and a table without."""
    holder = begin("run", name, "--", *HOLDS, on=five).holds()
    waiter = begin("run", name, "--", *HOLDS, on=five)
    wait_for_waiters(five, 1)
    done = answered("top", "--json", "--iterations", "2", "--interval", "10ms", on=five)
    looks: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(looks)) == (0, 2)
    for each in looks:
        assert (each["ok"], each["holders"], each["waiters"], each["lost_total"]) == (True, 1, 1, 0)
        assert each["locks"][0]["holders"][0]["pid"] == holder.process.pid
        assert each["locks"][0]["waiters"][0]["pid"] == waiter.process.pid
    text = answered("top", "--iterations", "1", on=five)
    assert text.stdout.startswith("ok: 5 of 5 servers; 1 hold, 1 waiter, 0 lost\n")
    assert f":{holder.process.pid}" in text.stdout


def test_top_counts_losses(server: Server, name: str, begin: Begin) -> None:
    """Of a holder that was killed; not of one that releases."""
    dies = begin("run", name, "--lease", "9", "--on-lost", "ignore", "--", *HOLDS, on=server).holds()
    ends = begin("run", f"{name}2", "--", *HOLDS, on=server).holds()
    top = begin("top", "--json", "--interval", "100ms", on=server)
    while json.loads(top.line())["holders"] != 2:  # a look may fail on a busy machine
        pass
    ends.let_go()
    dies.process.kill()
    while not (shown := json.loads(top.line()))["lost_total"]:
        pass
    assert [each["name"] for each in shown["lost"]] == [name]
    while (shown := json.loads(top.line()))["holders"]:
        pass
    assert shown["lost_total"] == 1


async def test_a_look_begins_before_the_servers_are_asked(server: Server) -> None:
    """What is left of a lease was read after that, so a lease that ended during a slow look was lost."""
    async with Redlock(server.url, node_timeout=LIMIT, lease=LONG) as client:
        server.freeze()
        try:
            looking = asyncio.create_task(look(client, "", 10))
            await turns()
            asked = time.time()
        finally:
            server.thaw()
        moment = await looking
    assert moment.began <= asked <= moment.at


def test_top_gives_the_terminal_back(server: Server) -> None:
    """After SIGTERM, too: the cursor and the other screen are back."""
    terminal = Terminal(server, "top", script='TERM=xterm exec "$@"')
    terminal.shows("1 of 1 server")
    os.kill(terminal.pid, signal.SIGTERM)
    shown = terminal.rest()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h")
    assert os.waitstatus_to_exitcode(terminal.state()) == 128 + signal.SIGTERM
    terminal.end()


@pytest.mark.usefixtures("no_looks")
async def test_a_look_takes_no_hold(server: Server, name: str) -> None:
    """A connection tries once whether it may lock. A look only reads: it writes nothing, and a user who may not write
    sees that the server answers."""

    def writes() -> int:
        known: Any = server.cli().info("commandstats")
        counts = [known.get(f"cmdstat_{each}", {}) for each in ("set", "del", "zadd", "publish")]
        return sum(found.get(what, 0) for found in counts for what in ("calls", "rejected_calls", "failed_calls"))

    async with Redlock(server.url) as holder, holder(name):
        for url in (server.url, server.user("-@write")):
            async with aclosing(Redlock(url, node_timeout=LIMIT, lease=LONG)) as client:
                await look(client, name, 10)
                before = writes()
                for _ in range(3):
                    moment = await look(client, name, 10)
                    assert (moment.health.ok, len(moment.holders), moment.error) == (True, 1, "")
                assert writes() == before


def test_top_of_a_minority(five: list[Server]) -> None:
    """It says how many servers answer, and why one does not."""
    five[0].kill()
    done = answered("top", "--iterations", "1", on=five[:3])
    assert done.returncode == 0
    assert done.stdout.startswith("ok: 2 of 3 servers; 0 holds")
    assert str(five[0].path) in done.stdout


def test_top_in_an_outage(server: Server, begin: Begin) -> None:
    """It goes on; the last look decides the exit code."""
    top = begin("top", "--json", "--interval", "10ms", on=server)
    while not json.loads(top.line())["ok"]:  # a first connect may take long
        pass
    server.kill()
    while json.loads(top.line())["ok"]:
        pass
    server.restart()
    while not json.loads(top.line())["ok"]:
        pass
    top.process.send_signal(signal.SIGINT)
    assert top.code() == 0
    server.kill()
    assert answered("top", "--iterations", "1", on=server).returncode == 69


def test_ctrl_c_in_an_outage(server: Server, begin: Begin) -> None:
    """Ctrl-C is the usual end of `top`. The last look decides the exit code, as it does with --iterations."""
    top = begin("top", "--json", "--interval", "10ms", on=server)
    server.kill()
    while json.loads(top.line())["ok"]:
        pass
    top.process.send_signal(signal.SIGINT)
    assert top.code() == 69
