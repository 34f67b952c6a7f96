"""`asynclock doctor` before real databases and ZooKeeper servers, that are set up well and wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from asyncio import sleep
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from asynclock import Redlock
from asynclock.cli.doctor import databases, zookeepers
from asynclock.cli.doctor.databases import database_facts
from asynclock.cli.doctor.standalone import VOTES, StoreFacts, ask_votes
from asynclock.stores import MemoryStore
from asynclock.stores.sql.engines import url_of as engine_url
from asynclock.stores.zookeeper.store import ZooKeeperStore
from tests.support.commands import answered, examined
from tests.support.host_names import HostNames
from tests.support.programs import DATABASES, run_python
from tests.support.proxy import TcpProxy
from tests.support.services import needs, program
from tests.support.services.mariadb import own_mariadb
from tests.support.services.postgresql import PostgreSQL, own_postgresql, pgbouncer, until
from tests.support.services.zookeeper import ZooKeeper, ZooKeepers, url_of
from tests.support.waiters import LIMIT

DURABLE = {"fsync": "on", "full_page_writes": "on"}
HARMLESS = {"notices", "ensemble", "ttl-nodes"}
"""Notes that say no more than what the store is."""


def doctor(url: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the findings but for the harmless ones."""
    code, found = examined((), *options, ASYNCLOCK_URLS=url)
    return code, {check: each for check, each in found.items() if check not in HARMLESS}


def use(url: str) -> None:
    """A client makes the table."""
    assert answered("health", ASYNCLOCK_URLS=url).returncode == 0


def sql(url: str, *statements: str) -> None:
    """As the user of the url."""

    async def run() -> None:
        engine = create_async_engine(engine_url(url), isolation_level="AUTOCOMMIT")
        try:
            async with engine.connect() as connection:
                for each in statements:
                    await connection.exec_driver_sql(each)
        finally:
            await engine.dispose()

    asyncio.run(run())


@pytest.fixture(scope="module")
def durable() -> Iterator[PostgreSQL]:
    """A PostgreSQL with the usual settings, and the table."""
    with own_postgresql(**DURABLE) as server:
        use(server.url)
        yield server


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


def test_a_good_postgresql(durable: PostgreSQL) -> None:
    """Nothing is found; the text shows version, table, latency and clock; no secret is shown."""
    done = answered("doctor", ASYNCLOCK_URLS=durable.url.replace("postgres@", "postgres:secret@"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "postgresql 15" in done.stdout or "postgresql " in done.stdout
    assert "primary" in done.stdout
    assert "The locks are in: table asynclock" in done.stdout
    assert "secret" not in done.stdout
    assert "NOTE" not in done.stdout
    assert done.stdout.endswith("0 errors, 0 warnings\n")


def test_postgresql_that_may_lose_commits(postgresql_url: str) -> None:
    """With fsync=off a power failure forgets locks."""
    use(postgresql_url)
    code, found = doctor(postgresql_url)
    assert (code, [*found]) == (2, ["durability"])


def test_asynchronous_commits_of_one_user(durable: PostgreSQL) -> None:
    """The setting of the user of the clients counts, not that of the server."""
    sql(durable.url, "CREATE USER hasty", "ALTER USER hasty SET synchronous_commit = off")
    sql(durable.url, "GRANT SELECT, INSERT, UPDATE, DELETE ON asynclock TO hasty")
    code, found = doctor(durable.url.replace("postgres@", "hasty@"))
    assert (code, [*found]) == (2, ["durability"])
    assert "synchronous_commit=off" in found["durability"]["what"]


def test_missing_rights(durable: PostgreSQL) -> None:
    """On the table, and to make it."""
    sql(durable.url, "CREATE USER guest", "GRANT SELECT, INSERT, UPDATE ON asynclock TO guest")
    url = durable.url.replace("postgres@", "guest@")
    code, found = doctor(url)
    assert (code, [*found]) == (2, ["rights"])
    assert "DELETE" in found["rights"]["what"]
    assert "INSERT" not in found["rights"]["what"]
    code, found = doctor(f"{url}?asynclock_table=other")
    assert (code, [*found]) == (2, ["table"])
    assert "other" in found["table"]["what"]


async def test_what_keeps_old_versions_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open transaction and a prepared one of another session, which may go on for longer than a test; a session that
    is idle keeps nothing."""
    with own_postgresql(max_prepared_transactions="2") as server:
        open_one, prepared, idle = [await asyncpg.connect(server.url) for _ in range(3)]
        try:
            await open_one.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
            await prepared.execute("BEGIN; CREATE TABLE made (); PREPARE TRANSACTION 'left behind'")
            await idle.execute("BEGIN")
            assert (await database_facts(server.url, connect=4.0)).keepers == ()
            monkeypatch.setattr(databases, "OLD", 0.0)
            facts = await database_facts(server.url, connect=4.0)
        finally:
            pid = open_one.get_server_pid()
            for each in (open_one, prepared, idle):
                each.terminate()
    assert [each[:3] for each in facts.keepers] == [
        ("session", str(pid), "postgres, idle in transaction"),
        ("prepared", "left behind", "postgres"),
    ]
    assert not {"open transactions", "prepared transactions", "replication slots"} & {*facts.hidden}


def test_a_table_that_is_absent_is_not_made(durable: PostgreSQL) -> None:
    """The first client makes it, not the doctor."""
    for _ in range(2):
        code, found = doctor(f"{durable.url}?asynclock_table=absent")
        assert (code, [*found]) == (0, ["table"])
        assert "no table absent" in found["table"]["what"]


def test_an_unlogged_table(durable: PostgreSQL) -> None:
    """A crash empties it."""
    use(f"{durable.url}?asynclock_table=light")
    sql(durable.url, "ALTER TABLE light SET UNLOGGED")
    code, found = doctor(f"{durable.url}?asynclock_table=light")
    assert (code, [*found]) == (2, ["table"])
    assert "UNLOGGED" in found["table"]["what"]


def test_a_pooler(durable: PostgreSQL) -> None:
    """Holds are granted, and no notices arrive: a note."""
    with pgbouncer(durable.url) as url:
        assert answered("health", ASYNCLOCK_URLS=url).returncode == 0
        code, found = examined((), ASYNCLOCK_URLS=url)
    assert (code, [*found]) == (0, ["notices"])
    assert "pooler" in found["notices"]["what"]


def test_a_pooler_that_takes_no_transactions(durable: PostgreSQL) -> None:
    """No client can use it, also where there is no table yet."""
    with pgbouncer(durable.url, "statement") as url:
        code, found = doctor(f"{url}?asynclock_table=absent")
    assert code == 2
    assert any("pool_mode = transaction (or session)" in str(each) for each in found.values())


def test_a_replica_of_postgresql() -> None:
    """A failover may lose locks, unless commits wait for the replica; the replica itself refuses writes."""
    folder = Path(tempfile.mkdtemp(prefix="asynclock-pg-"))
    standby: PostgreSQL | None = None
    with own_postgresql(**DURABLE) as primary:
        use(primary.url)
        try:
            standby = primary.copy(folder).start()
            until(lambda: "failover" in doctor(primary.url)[1], "the replica does not connect")
            code, found = doctor(primary.url)
            assert (code, [*found]) == (1, ["failover"])
            code, found = doctor(standby.url)
            assert code == 2
            assert "replica" in found
            assert "vote" not in found
            sql(primary.url, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
            until(lambda: not doctor(primary.url)[1], "the setting does not come")
        finally:
            if standby is not None:
                standby.stop()
            shutil.rmtree(folder, ignore_errors=True)


def test_a_subscriber_of_postgresql_is_no_replica() -> None:
    """No failover promotes a subscriber of logical replication, such as one that copies changes to a queue. A user
    without rights sees that, too."""
    (subscriber,) = needs("PostgreSQL", program("pg_recvlogical", "/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin"))
    with own_postgresql(**DURABLE, wal_level="logical") as server:
        use(server.url)
        sql(server.url, "CREATE USER guest", "GRANT SELECT, INSERT, UPDATE, DELETE ON asynclock TO guest")
        server.ask("SELECT pg_create_logical_replication_slot('changes', 'test_decoding')")
        where = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres", "-d", "postgres"]
        command = [str(subscriber), *where, "--slot", "changes", "--start", "-f", os.devnull]
        reading = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            connected = "SELECT count(*) FROM pg_stat_replication JOIN pg_replication_slots ON active_pid = pid"
            until(lambda: server.ask(connected) == "1", "the subscriber does not connect")
            assert doctor(server.url) == (0, {})
            assert "failover" not in doctor(server.url.replace("postgres@", "guest@"))[1]
        finally:
            reading.kill()
            reading.wait()


def test_a_database_that_is_down(durable: PostgreSQL) -> None:
    """It is to be started. The url of a database that does not exist is to be corrected, and no lock is there."""
    code, found = doctor("postgresql://user:secret@127.0.0.1:1/db")
    assert (code, [*found]) == (2, ["reachable"])
    assert "secret" not in str(found)
    assert found["reachable"]["advice"].startswith("Start it")
    absent = durable.url.replace("/postgres", "/absent")
    code, found = doctor(absent)
    assert (code, [*found]) == (2, ["reachable"])
    assert found["reachable"]["advice"].startswith("Correct its url")
    assert "ConfigError" in found["reachable"]["risk"]
    assert "The locks are in" not in answered("doctor", ASYNCLOCK_URLS=absent).stdout


def test_a_slow_database(durable: PostgreSQL) -> None:
    """Slower than node_timeout."""
    code, found = doctor(durable.url, "--node-timeout", "0.001ms")
    assert code == 2
    assert "latency" in found


# -- MariaDB -----------------------------------------------------------------------------------------------------------


def test_mariadb() -> None:
    """With the settings that it should have; for a user who may not ask for replicas; with another engine; and as
    read-only."""
    good = "--innodb-flush-log-at-trx-commit=1", "--idle-transaction-timeout=3", "--log-bin"
    with own_mariadb(*good) as server:
        use(server.url)
        for flush in (3, 1):  # both flush the log at each commit
            sql(server.url, f"SET GLOBAL innodb_flush_log_at_trx_commit = {flush}")
            assert doctor(server.url) == (0, {})
        sql(server.url, "CREATE USER guest@127.0.0.1")
        sql(server.url, "GRANT SELECT, INSERT, UPDATE, DELETE ON locks.asynclock TO guest@127.0.0.1")
        code, found = doctor(server.url.replace("asynclock@", "guest@"))
        assert (code, [*found]) == (0, ["unchecked"])
        assert "replicas" in found["unchecked"]["risk"]
        sql(server.url, "ALTER TABLE asynclock ENGINE=Aria")
        code, found = doctor(server.url)
        assert (code, [*found]) == (2, ["table"])
        sql(server.url, "ALTER TABLE asynclock ENGINE=InnoDB", "SET GLOBAL read_only = ON")
        code, found = doctor(server.url)
        assert (code, [*found]) == (2, ["replica"])
        assert "refuses" not in found["replica"]["risk"]  # not this user, who has all rights
        code, found = doctor(server.url.replace("asynclock@", "guest@"))
        assert found["replica"]["risk"].startswith("It refuses writes")


def test_mariadb_that_may_lose_commits(mariadb_url: str) -> None:
    """innodb_flush_log_at_trx_commit=0; and no limit for idle transactions."""
    use(mariadb_url)
    code, found = doctor(mariadb_url)
    assert (code, [*found]) == (2, ["durability", "idle"])


def test_missing_rights_at_mariadb(mariadb_url: str) -> None:
    """On the table."""
    use(mariadb_url)
    sql(
        mariadb_url,
        "CREATE OR REPLACE USER guest@127.0.0.1",
        "GRANT SELECT, INSERT ON locks.asynclock TO guest@127.0.0.1",
    )
    code, found = doctor(mariadb_url.replace("asynclock@", "guest@"))
    assert code == 2
    assert "UPDATE, DELETE" in found["rights"]["what"]
    assert "vote" not in found


# -- SQLite ------------------------------------------------------------------------------------------------------------


def test_sqlite(tmp_path: Path) -> None:
    """A file that does not exist is not made. Once it exists, nothing is found."""
    path = tmp_path / "locks.db"
    code, found = doctor(f"sqlite:///{path}")
    assert (code, [*found]) == (0, ["file"])
    assert not path.exists()
    use(f"sqlite:///{path}")
    assert doctor(f"sqlite:///{path}") == (0, {})
    code, found = doctor(f"sqlite:///{tmp_path}/absent/locks.db")
    assert (code, [*found]) == (2, ["file"])


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """An error that names it."""
    path = tmp_path / "locks.db"
    path.write_text("no database, but long enough to be taken for one" * 100)
    code, found = doctor(f"sqlite:///{path}")
    assert code == 2
    assert "not a database" in str(found)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_is_read_only(tmp_path: Path) -> None:
    """Of another user."""
    path = tmp_path / "locks.db"
    sqlite3.connect(path).close()
    path.chmod(0o400)
    assert [*doctor(f"sqlite:///{path}")[1]] == ["file"]


FOUND = """
    import asyncio, os, sys
    from asynclock.cli.doctor.database_findings import database_findings
    from asynclock.cli.doctor.databases import database_facts
    from asynclock.cli.doctor.severity import Terms

    if os.geteuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    facts = asyncio.run(database_facts(sys.argv[1]))
    for each in database_findings(facts, Terms("", 30.0, 60.0, 3.0)):
        print(each.severity.name, each.check, each.what)
"""
"""A process of another user than root: what doctor finds."""


@pytest.mark.xdist_group("database-programs")
@pytest.mark.parametrize("file", ["locks.db", "inner/locks.db"])
def test_a_folder_that_the_user_may_not_enter(file: str) -> None:
    """Of the file, or above that of the file: whether the file is there cannot be seen."""
    folder = Path(tempfile.mkdtemp(prefix="asynclock-sqlite-"))
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    sqlite3.connect(path).close()
    folder.chmod(0o600)
    try:
        found = run_python(FOUND, f"sqlite:///{path}", preload=DATABASES)
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)
    assert found.startswith(f"ERROR file This user cannot write {path}, or the folder of it.")


# -- ZooKeeper ---------------------------------------------------------------------------------------------------------


def test_a_good_zookeeper(shared_zookeeper: ZooKeeper) -> None:
    """Notes only; the text shows the server, its mode and the path."""
    done = answered("doctor", ASYNCLOCK_URLS=shared_zookeeper.url("/doctor"))
    assert done.returncode == 0, done.stdout
    assert "standalone" in done.stdout
    assert "path /doctor, layout kazoo" in done.stdout
    assert "NOTE ensemble" in done.stdout
    assert "NOTE ttl-nodes" in done.stdout
    url = shared_zookeeper.url("/doctor", ttl_nodes="true")
    assert [*examined((), ASYNCLOCK_URLS=url)[1]] == ["ensemble"]


def test_the_session_of_zookeeper(shared_zookeeper: ZooKeeper) -> None:
    """It is the lease; and the servers limit it."""
    code, found = doctor(shared_zookeeper.url(session_timeout=10))
    assert (code, [*found]) == (2, ["lease"])
    assert doctor(shared_zookeeper.url(session_timeout=10), "--lease", "10s") == (0, {})
    code, found = doctor(shared_zookeeper.url(session_timeout=90), "--lease", "90s", "--max-lease", "90s")
    assert (code, [*found]) == (2, ["session"])


class KeepsConfig(TcpProxy):
    """It passes no look at the list of the servers on, and nothing that follows it."""

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"/zookeeper/config" not in (data := await reader.read(65536)) and data:
            writer.write(data)
        while await reader.read(65536):
            pass


async def test_a_zookeeper_that_is_silent_about_its_servers(
    shared_zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives a session, so locks can be acquired: only the number of the servers is unknown."""
    monkeypatch.setattr(zookeepers, "_ANSWER", 3.0)
    async with KeepsConfig(shared_zookeeper.port) as proxy:
        facts = await zookeepers.zookeeper_facts(ZooKeeperStore(f"zookeeper://127.0.0.1:{proxy.port}/locks"), LIMIT)
    assert (facts.error, facts.hidden, facts.voters) == ("", ("/zookeeper/config",), None)
    assert facts.given


def test_doctor_waits_as_long_as_the_clients() -> None:
    """For a connect: so long as $ASYNCLOCK_CONNECT_TIMEOUT says."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/locks"
        code, found = examined((), ASYNCLOCK_URLS=url, ASYNCLOCK_CONNECT_TIMEOUT="0.3")
    assert (code, [*found]) == (2, ["reachable"])
    assert "within 0.3 s" in found["reachable"]["what"]


async def test_a_store_that_is_slow_once_votes() -> None:
    """On a busy machine one answer may come after the time that `health` waits."""
    async with Redlock(MemoryStore()) as client:
        answers = [await client.health()] * 20
        slow = (replace(answers[0].nodes[0], ok=False, latency=None, error="it did not answer"),)
        answers[3] = replace(answers[3], nodes=slow)
        client.health = lambda: sleep(0, answers.pop(0))  # type: ignore[method-assign,assignment]
        facts = StoreFacts("memory")
        await ask_votes(facts, client)
    assert facts.no_vote == ""
    assert len(facts.latencies) == VOTES


def test_an_ensemble() -> None:
    """Of three servers, all, one and two of them are named; then one is down."""
    pool = ZooKeepers()

    def one_is_down() -> bool:
        code, found = doctor(url_of(servers))  # before there is a new leader, "reachable" is an error
        return (code, [*found]) == (1, ["reachable"])

    try:
        servers = pool.ensemble()
        assert doctor(url_of(servers)) == (0, {})
        code, found = doctor(url_of(servers[:2]))
        assert (code, [*found]) == (1, ["named"])
        servers[2].kill()
        until(one_is_down, "there is no new leader", within=40.0)
        servers[1].kill()
        until(lambda: doctor(url_of(servers))[0] == 2, "the majority is still there")
    finally:
        pool.stop()


def test_an_ensemble_behind_one_name(host_names: HostNames) -> None:
    """Each address of the name is a server, as behind a headless service of Kubernetes: each is asked, and counts."""
    pool = ZooKeepers()
    try:
        servers = pool.ensemble(one_port=True)
        url = f"zookeeper://zk.test:{servers[0].port}/locks?ttl_nodes=true"
        host_names.give("zk.test", *(each.host for each in servers))
        assert doctor(url) == (0, {})
        shown = answered("doctor", ASYNCLOCK_URLS=url).stdout
        assert all(f"\n{each.address} " in shown for each in servers)
        host_names.give("zk.test", *(each.host for each in servers[:2]))
        code, found = doctor(url)
        assert (code, [*found]) == (1, ["named"])
        assert "names 2 servers of 3" in found["named"]["what"]
    finally:
        pool.stop()


def test_a_zookeeper_with_addresses_of_two_families(shared_zookeeper: ZooKeeper, host_names: HostNames) -> None:
    """It is one server, and answers at one of them."""
    host_names.give("zk.test", "::1", shared_zookeeper.host)
    url = f"zookeeper://zk.test:{shared_zookeeper.port}/locks"
    assert doctor(url) == (0, {})
    assert f"\nzk.test:{shared_zookeeper.port} " in answered("doctor", ASYNCLOCK_URLS=url).stdout


def test_ttl_nodes_that_the_servers_do_not_have() -> None:
    """Each acquire would be refused."""
    pool = ZooKeepers()
    try:
        server = pool.start(ttl=False)
        code, found = doctor(server.url(ttl_nodes="true"))
    finally:
        pool.stop()
    assert (code, [*found]) == (2, ["vote"])
    assert "TTL" in found["vote"]["what"]


# -- urls --------------------------------------------------------------------------------------------------------------


def test_what_it_does_not_examine(tmp_path: Path) -> None:
    """A store without a server, a database beside another one, and a prefix, which it has not."""
    url = f"sqlite:///{tmp_path}/locks.db"
    for options in (["--url", "memory:"], ["--url", url, "--url", "redis://a"], ["--url", url, "--prefix", "x:"]):
        done = answered("doctor", *options)
        assert (done.returncode, done.stdout) == (64, "")
        assert done.stderr.count("\n") == 1
