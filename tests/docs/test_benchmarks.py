"""The benchmarks: with missing sides, and those that no other test would load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncmy
import asyncpg
import pytest
from redis import Redis
from sqlalchemy.engine import make_url
from typer.testing import CliRunner

from asynclock import Redlock
from benchmarks import blocking, compare, contender, databases, flood, holding, runner, sides, stores, waiting
from benchmarks.__main__ import app
from benchmarks.bare import bare
from benchmarks.bare_stores import bare_postgresql
from benchmarks.servers import Server, running
from tests.support.services.mariadb import MariaDB, own_mariadb
from tests.support.services.postgresql import own_postgresql

ROOT = Path(__file__).parents[2]
HIDDEN = ("pottery", "aioredlock", "uvloop")
OF_THE_TESTS = ("pytest", "asyncpg", "asyncmy", "aiosqlite", "kazoo")


def hidden(folder: Path, modules: Sequence[str] = HIDDEN) -> dict[str, str]:
    """The environment of a program without those modules and without Node.js."""
    folder.joinpath("sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": str(folder), "COLUMNS": "300"}


def run(folder: Path, *arguments: str, without: Sequence[str] = HIDDEN) -> subprocess.CompletedProcess[str]:
    """The benchmarks in that environment."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", arguments[0], "--rounds", "1", "--seconds", "0.02", *arguments[1:]],
        cwd=ROOT,
        env=os.environ | hidden(folder, without),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.timeout(180)
def test_a_side_that_is_not_installed_is_reported_and_the_others_run(tmp_path: Path) -> None:
    """P3 names it with its package. A comparison that needs it is not judged; the rest is."""
    ran = run(tmp_path, "P3")
    assert ran.returncode == 0, ran.stderr
    said = re.sub(r"[\s\u2500-\u257f]+", " ", ran.stdout)  # without the tables' lines
    assert "Traceback" not in ran.stdout + ran.stderr
    for side, module in ("pottery AIORedlock", "pottery"), ("aioredlock", "aioredlock"):
        assert f" {side} failed: ImportError: {module} is not installed: pip install" in said
    assert re.search(r" cycles/s, asynclock / aioredlock >= \d+ ImportError: .*? not judged ", said)
    row = re.search(r" cycles/s, asynclock / gather over redis-py >= \d+ (.*?) (yes|NO|not judged) ", said)
    assert row is not None, said
    assert "ImportError" not in row[1]  # a side may fail on a busy machine: its rounds are very short


@pytest.mark.timeout(180)
def test_a_contest_needs_nothing_that_only_the_tests_need(tmp_path: Path) -> None:
    """Where `.[bench]` is installed and `.[test]` is not, P10 runs: no other contest is shorter."""
    ran = run(tmp_path, "P10", without=(*OF_THE_TESTS, "sqlalchemy"))
    assert "import, asynclock / redis.asyncio" in ran.stdout, ran.stderr


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", [["stores", "Redis"], ["flood"], ["databases"]])
def test_servers_that_only_the_tests_can_start_say_what_to_install(tmp_path: Path, command: list[str]) -> None:
    """No traceback: the command and the way out."""
    ran = run(tmp_path, *command, "--seconds", "1", without=OF_THE_TESTS)
    assert ran.returncode == 2, ran.stderr
    assert "need pytest: pip install -e '.[bench,test]', or name urls of your own" in ran.stderr


@pytest.mark.timeout(180)
def test_a_contender_that_is_not_installed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where each side has processes of its own."""
    for variable, value in hidden(tmp_path).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(waiting, "PROCESSES", 1)
    monkeypatch.setitem(waiting.HOT, 1, (waiting.OURS, waiting.REDIS_PY, waiting.NODE))  # not the other variants
    monkeypatch.setitem(waiting.HOT, 5, (waiting.OURS, "pottery"))
    one, five = waiting.p6(1, 1, 0.02), waiting.p6(5, 1, 0.02)
    (_, missing, (verdict, *_)) = one
    assert missing[waiting.NODE] == "it is not installed: get Node.js and run npm install --prefix benchmarks/node"
    assert "ImportError" not in verdict.measured
    (_, missing, (verdict, *_)) = five
    assert missing["pottery"].startswith("ImportError: pottery is not installed: pip install")
    assert (verdict.measured, verdict.reached) == (missing["pottery"], None)


def test_uvloop_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    ran = CliRunner().invoke(app, ["P10", "--uvloop"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert ran.exit_code == 2
    assert "uvloop is not installed" in ran.stderr
    assert ran.stdout == ""


@pytest.mark.timeout(180)
def test_many_held_leases_are_measured() -> None:
    """Each phase has turns, and each target a verdict; this test does not check the times."""
    seen = holding.run(1, 100, lease=10.0, seconds=0.1)
    assert seen.kept == 100
    assert all(turns.count and turns.cpu > 0 and 0 < turns.took < 60 for turns in seen.phases.values())
    assert len(seen.verdicts()) == 3 + len(holding.JUDGED)


@pytest.mark.timeout(180)
def test_two_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each figure of a case, in both kinds of measurement. Of each version two processes contend, not four:
    each one costs half a second of CPU to start."""
    contended = compare.contended
    monkeypatch.setattr(compare, "contended", lambda commands, *rest: contended(commands[:2], *rest))
    versions = [compare.Version(name, sys.executable) for name in ("old", "new")]
    rows = compare.measured(versions, ["P2, 1 node, 1 task", "P6, 1 node"], 1, 0.1)
    assert [(row.case.split(",")[0], row.figure) for row in rows] == [
        ("P2", "client CPU per cycle"),
        ("P2", "servers' CPU per cycle"),
        ("P2", "time per cycle"),
        ("P6", "time per acquisition"),
        ("P6", "wait, p99"),
    ]
    assert all(len(row.pairs) == 1 and all(old > 0 < new for old, new in row.pairs) for row in rows)
    table = compare.table_of(versions, rows, 1).splitlines()
    assert {line.count("|") for line in table[2:]} == {9}
    assert len(table[2:]) == 2 + len(rows)


VARYING = r"[0-9a-f]{32}|\d{16}|asynclock:0|bare_lock:0"


def commands_until(monitor: Any, last: str) -> Iterator[str]:
    """The commands of clients that a server gets, up to that one."""
    while (seen := monitor.next_command())["command"] != last:
        if seen["client_type"] != "lua":
            yield seen["command"]


async def commands_of(side: sides.Side, servers: list[Server]) -> list[str]:
    """What the clients of a side send to the first server in two cycles, without what differs from cycle to cycle. A
    majority of the servers ends a cycle, so the first one may get its command later."""
    with Redis(unix_socket_path=str(servers[0].path)) as cli, cli.monitor() as monitor:
        async with side(servers) as cycle:
            await cycle(0)
            await cycle(0)
        cycles = (re.sub(VARYING, "*", command) for command in commands_until(monitor, "") if "lock:0" in command)
        return list(itertools.islice(cycles, 4))


@pytest.mark.parametrize("nodes", [1, 5])
async def test_the_bare_protocol_sends_what_asynclock_sends(nodes: int) -> None:
    """The same commands with the same arguments, but for the name, the id and the clock."""
    with running(nodes) as servers:
        assert await commands_of(bare, servers) == await commands_of(sides.asynclock, servers)


def test_the_round_trip_of_p5_is_that_of_the_bare_protocol() -> None:
    """A client around the command would make the hand-over look shorter, in round trips."""
    with running(1) as servers, Redis(unix_socket_path=str(servers[0].path)) as cli, cli.monitor() as monitor:
        assert 0 < waiting.round_trip(servers) < 60
        cli.echo("end")
        sent = [command.split()[0] for command in commands_until(monitor, "ECHO end")]
    assert set(sent) - {"HELLO", "CLIENT"} == {"SCRIPT", "EVALSHA"}  # HELLO and CLIENT are those of `cli`


async def test_the_bare_relay_sends_the_sha_of_its_script() -> None:
    """As asynclock does: the server need not read the script again at each hand-over."""
    with running(1) as servers, Redis(unix_socket_path=str(servers[0].path)) as cli, cli.monitor() as monitor:
        urls = [servers[0].url]
        async with contender.relay(urls, "a") as first, contender.relay(urls, "b") as second:
            cli.echo("begin")
            for take in (first, second, first, second):  # when the last one begins, three commands have arrived
                async with take():
                    pass
        list(commands_until(monitor, "ECHO begin"))
        cli.echo("end")
        sent = [command.split()[0] for command in commands_until(monitor, "ECHO end")]
    assert set(sent) == {"EVALSHA"}


async def test_the_bare_postgresql_program_keeps_its_row(postgresql_url: str) -> None:
    """It releases as asynclock does: the row stays, and the next acquire updates it."""
    connection = await asyncpg.connect(postgresql_url)
    await connection.execute("DROP TABLE IF EXISTS bare")
    async with bare_postgresql(postgresql_url) as cycle:
        await cycle(0)
        await cycle(0)
    rows = await connection.fetch("SELECT owner, fence, expires_at FROM bare")
    await connection.close()
    assert [tuple(row) for row in rows] == [("", 2, 0)]


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    """One whose questions nobody else counts."""
    with own_mariadb() as server:
        yield server


@contextlib.asynccontextmanager
async def cursor_of(server: MariaDB) -> AsyncIterator[Any]:
    """Of another session."""
    where = make_url(server.url)
    async with (
        asyncmy.connect(
            host=where.host, port=where.port, user=where.username, db=where.database, autocommit=True
        ) as connection,
        connection.cursor() as cursor,
    ):
        yield cursor


async def questions(server: MariaDB, side: str) -> float:
    """What the server is asked in a cycle of that side."""
    async with (
        cursor_of(server) as cursor,
        databases.contest(server.url, 1).sides[side](()) as cycle,
    ):
        await cycle(0)
        counts = []
        for cycles in (0, 10):
            for _ in range(cycles):
                await cycle(0)
            await cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            counts.append(int((await cursor.fetchone())[1]))
    return (counts[1] - counts[0] - 1) / 10  # without the count itself


@pytest.mark.filterwarnings("ignore:Unknown table")
@pytest.mark.parametrize("side", [databases.ROW, databases.NAMED, databases.TABLE])
async def test_a_side_beside_asynclock_takes_two_round_trips_on_mariadb(mariadb: MariaDB, side: str) -> None:
    """SELECT and COMMIT, or two statements that are transactions of their own."""
    assert await questions(mariadb, side) == 2


def test_the_statements_of_shedlock_are_transactions_of_their_own() -> None:
    """On PostgreSQL there is no BEGIN and no COMMIT around them."""

    async def two_cycles(url: str) -> None:
        async with databases.shedlock(url, ()) as cycle:
            await cycle(0)
            await cycle(0)

    with own_postgresql(log_statement="all") as server:
        asyncio.run(two_cycles(server.url))
        log = (server.folder / "log").read_text()
    assert re.findall("(?:statement|execute [^:]*): (INSERT|UPDATE|BEGIN|COMMIT)", log) == ["INSERT", *3 * ["UPDATE"]]


async def test_a_cycle_of_get_lock_without_the_lock_is_an_error(mariadb: MariaDB) -> None:
    """GET_LOCK answers 0 for a name that another session holds."""
    take, give = "SELECT GET_LOCK(:name, 0)", "SELECT RELEASE_LOCK(:name)"
    async with cursor_of(mariadb) as cursor, databases.session_lock(mariadb.url, (), take, give) as cycle:
        await cycle(0)
        await cursor.execute("SELECT GET_LOCK('lock:0', 0)")
        with pytest.raises(RuntimeError, match="was not taken"):
            await cycle(0)


async def test_a_cycle_of_an_advisory_lock_that_is_not_given_back_is_an_error(postgresql_url: str) -> None:
    """pg_advisory_unlock answers false for a lock that the session does not hold."""
    take, give = (
        "SELECT 1 FROM pg_advisory_lock(CAST(:name AS bigint))",
        "SELECT pg_advisory_unlock(1 + CAST(:name AS bigint))",
    )
    async with databases.session_lock(postgresql_url, (), take, give) as cycle:
        with pytest.raises(RuntimeError, match="not given back"):
            await cycle(1 << 40)


@pytest.mark.filterwarnings("ignore:Unknown table")
async def test_a_cycle_of_shedlock_without_the_lock_is_an_error(mariadb: MariaDB) -> None:
    """Its UPDATE changes no row that is locked for longer."""
    async with cursor_of(mariadb) as cursor, databases.shedlock(mariadb.url, ()) as cycle:
        await cycle(0)
        await cursor.execute("UPDATE bench_shedlock SET lock_until = lock_until + 3600")
        with pytest.raises(RuntimeError, match="changed 0 and 0 rows"):
            await cycle(0)


@pytest.mark.timeout(180)
def test_a_task_that_never_gets_the_lock_fails_its_side() -> None:
    """Its wait is not among those that were measured, so the longest wait would look shorter than it is."""
    with running(1) as servers, waiting.contenders(["hold"], 1, servers):
        with pytest.raises(waiting.Failed, match="2 of the tasks did not get the lock"):
            waiting.seen_by([waiting.command_of(waiting.OURS, 2, servers)], 0.1)


def flooded(monkeypatch: pytest.MonkeyPatch, server: Server) -> str:
    """The table of the shortest flood over that server, without its lines."""
    for limit, short in ("SETTLED", 0.2), ("TIMEOUT", 0.2):
        monkeypatch.setattr(flood, limit, short)
    arguments = [f"mine={server.url}", "--tasks", "64", "--rounds", "1", "--seconds", "2"]
    ran = CliRunner().invoke(flood.app, arguments)
    assert ran.exit_code == 0, ran.output
    return re.sub(r"[\s\u2500-\u257f]+", " ", ran.output)


@pytest.mark.timeout(180)
def test_the_errors_of_the_few_are_shown_beside_those_of_the_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that another program holds is an error of both."""
    with running(1) as servers, Redis(unix_socket_path=str(servers[0].path)) as cli:
        cli.set("lock:order:0", "another program")
        assert flooded(monkeypatch, servers[0]).count(" LockTimeout") == 2


@pytest.mark.timeout(180)
def test_a_task_of_a_flood_that_ends_by_another_error_fails_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would have less to do, and nothing would say so."""

    class Broken(Redlock):
        def __call__(self, name: str, **options: Any) -> Any:
            if name == "order:7":
                raise ZeroDivisionError("broken")
            return super().__call__(name, **options)

    monkeypatch.setattr(flood, "Redlock", Broken)
    with running(1) as servers:
        assert " mine failed: ZeroDivisionError: broken " in flooded(monkeypatch, servers[0])


def by_round(turns: Sequence[str], sides: int) -> set[tuple[str, ...]]:
    """The orders of the sides in the rounds."""
    return {tuple(turns[first : first + sides]) for first in range(0, len(turns), sides)}


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sides that had a turn, in order. Nothing is measured: only the order counts."""
    seen: list[str] = []

    def hot(side: str, *_: object) -> waiting.Hot:
        seen.append(side)
        return waiting.Hot(1.0, [1.0], 1.0)

    def hand_over(names: Sequence[str], servers: Sequence[Server], *_: object) -> float:
        seen.append(f"{names} {len(servers)}")
        return 1.0

    def contest(names: Sequence[str], *_: object) -> list[dict[str, list[float]]]:
        seen.append(f"{names}")
        return [{"took": [0.0], "gave": [2.0], "waits": [0.0]}, {"took": [3.0], "gave": [4.0], "waits": [2.0]}]

    def trip(_: Sequence[Server]) -> float:
        seen.append("trip")
        return 1.0

    monkeypatch.setattr(waiting, "hot", hot)
    monkeypatch.setattr(waiting, "hand_over", hand_over)
    monkeypatch.setattr(waiting, "round_trip", trip)
    monkeypatch.setattr(stores, "_contest", contest)
    monkeypatch.setattr(blocking, "_turn", lambda side, *_: seen.append(side))
    return seen


def test_the_sides_of_p5_have_turns_in_random_order_after_a_warm_up(turns: list[str]) -> None:
    """In forty rounds not all orders are the same, and one round more than the recorded ones was run."""
    found, _, _ = waiting.p5(40, 0.1)
    assert len(by_round(turns, 4)) > 1
    assert {len(turns) // 4} == {len(each) + 1 for each in found.values()}


def test_the_sides_of_p6_have_turns_in_random_order_after_a_warm_up(turns: list[str]) -> None:
    """The same."""
    found, _, _ = waiting.p6(1, 40, 0.1)
    assert len(by_round(turns, 5)) > 1
    assert {len(turns) // 5} == {len(each) + 1 for each in found.values()}


def test_a_store_and_its_bare_driver_hand_over_in_random_order(turns: list[str]) -> None:
    """In forty rounds each of the two orders comes."""
    store = stores.Store("PostgreSQL", ["postgresql://host"], bare_alone=[1.0])
    for _ in range(40):
        stores.hand_overs(store, 0.1)
    assert len(by_round(turns, 2)) == 2


def test_blocking_and_redis_py_have_turns_in_random_order(turns: list[str]) -> None:
    """The same."""
    blocking.one_round(("ours", "theirs"), 40)
    assert len(by_round(turns, 2)) == 2


def test_idle_waiters_are_compared_with_tickets_of_the_same_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter ticket is renewed more often."""

    def lined_up(waiters: int, server: Server, lease: float) -> dict[str, float]:
        return {"commands": 1.0, "messages": 1.0, "us": 1.0, "idle": lease}

    monkeypatch.setattr(waiting, "lined_up", lined_up)
    costs, _ = waiting.p7()
    assert {its["idle"] for its in costs.values()} == {waiting.SHORT}


def test_a_side_of_p5_that_fails_is_not_judged(turns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are: a contender that hangs ends no run."""

    def trip(_: object) -> float:
        raise waiting.Failed("it hangs")

    monkeypatch.setattr(waiting, "round_trip", trip)
    found, failed, (one, five) = waiting.p5(2, 0.1)
    assert failed == {"bare round trip, 5 nodes": "it hangs"}
    assert (len(found), one.reached, five.measured, five.reached) == (3, True, "it hangs", None)


def test_p7_that_fails_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its targets say why."""

    def lined_up(*_: object) -> dict[str, float]:
        raise waiting.Failed("it hangs")

    monkeypatch.setattr(waiting, "lined_up", lined_up)
    costs, judged = waiting.p7()
    assert (costs, {(each.measured, each.reached) for each in judged}) == ({}, {("it hangs", None)})


@pytest.mark.timeout(180)
def test_a_process_of_p8_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its targets are not judged, and the run goes on."""
    monkeypatch.setattr(holding, "HANG", -59.5)
    with pytest.raises(waiting.Failed, match=r"the process did not end within 0\.5 s"):
        holding.run(1, 5, lease=10.0, seconds=60.0)


@contextlib.asynccontextmanager
async def idle(_: Sequence[Server]) -> AsyncIterator[sides.Cycle]:
    """A side whose cycles do nothing."""

    async def cycle(_: int) -> None:
        await asyncio.sleep(0)

    yield cycle


async def test_a_side_with_servers_of_its_own_pays_for_these_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In P4 the CPU of the servers is that of five, not of ten."""
    read: list[tuple[Server, ...]] = []

    def cpu_of(servers: Sequence[Server]) -> float:
        read.append(tuple(servers))
        return 0.0

    monkeypatch.setattr(runner, "_cpu_of", cpu_of)
    contest = runner.Contest("", servers=1, tasks=1, sides={"one": idle, "other": idle}, goals=(), apart=True)
    await runner.run(contest, 1, 0.01)
    assert {len(each) for each in read} == {1}
    assert len({each[0].path for each in read}) == 2
