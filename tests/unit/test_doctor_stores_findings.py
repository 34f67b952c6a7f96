"""What `asynclock doctor` makes of facts about databases and ZooKeeper that no server of a test shows."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock.cli.doctor.database_findings import database_findings
from asynclock.cli.doctor.databases import DatabaseFacts, Keeper
from asynclock.cli.doctor.severity import Severity, Terms
from asynclock.cli.doctor.zookeepers import ServerFacts, ZooKeeperFacts, read_srvr, voters_of, zookeeper_findings

TERMS = Terms(prefix="lock:", lease=30.0, max_lease=60.0, node_timeout=3.0)
LOCAL = {"synchronous_standby_names": "*", "synchronous_commit": "local"}
MIXED = ServerFacts("a", version="3.8.0"), ServerFacts("b", version="3.9.1")
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.OK


def postgresql(**facts: Any) -> DatabaseFacts:
    """A good one."""
    settings = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "synchronous_standby_names": ""}
    settings |= facts.pop("settings", {})
    good = {"backend": "postgresql", "table": "asynclock", "has_table": True, "kept": "p", "pushes": True}
    return DatabaseFacts("db", settings=settings, **(good | facts))


def mysql(**facts: Any) -> DatabaseFacts:
    """A good MySQL, which has no push messages."""
    settings = {"innodb_flush_log_at_trx_commit": "1", "read_only": "OFF"} | facts.pop("settings", {})
    good = {"backend": "mysql", "table": "asynclock", "has_table": True, "kept": "InnoDB"}
    return DatabaseFacts("db", settings=settings, **(good | facts))


def sqlite(**facts: Any) -> DatabaseFacts:
    good = {"backend": "sqlite", "table": "asynclock", "has_table": True, "file": "/locks.db", "free": 10**9}
    return DatabaseFacts("file", **(good | facts))


def zookeeper(**facts: Any) -> ZooKeeperFacts:
    """A good ensemble of three."""
    servers = tuple(ServerFacts(f"zk{number}", version="3.8.0", role="follower") for number in range(3))
    good = {"servers": servers, "voters": 3, "asked": 30.0, "given": 30.0, "ttl_nodes": True}
    return ZooKeeperFacts("zk", **(good | facts))


def found(facts: DatabaseFacts | ZooKeeperFacts) -> list[tuple[str, Severity]]:
    if isinstance(facts, ZooKeeperFacts):
        return [(each.check, each.severity) for each in zookeeper_findings(facts, TERMS)]
    every = [(each.check, each.severity) for each in database_findings(facts, TERMS)]
    return [each for each in every if each != ("notices", NOTE)] if facts.backend != "postgresql" else every


def test_good_stores() -> None:
    assert [found(each) for each in (postgresql(), mysql(), sqlite(), zookeeper())] == [[]] * 4


@pytest.mark.parametrize(
    ("facts", "check", "severity"),
    [
        (postgresql(settings={"fsync": "off"}), "durability", ERROR),
        (postgresql(settings={"synchronous_commit": "off"}), "durability", ERROR),
        (postgresql(settings={"full_page_writes": "off"}), "durability", WARNING),
        (postgresql(replicas=1), "failover", WARNING),
        (postgresql(replicas=1, settings=LOCAL), "failover", WARNING),
        (postgresql(standby=True, no_vote="refused"), "replica", ERROR),
        (postgresql(missing=("DELETE",)), "rights", ERROR),
        (postgresql(has_table=False, may_create=True), "table", NOTE),
        (postgresql(has_table=False, may_create=False), "table", ERROR),
        (postgresql(has_table=False), "table", NOTE),
        (postgresql(kept="u"), "table", ERROR),
        (postgresql(is_ordered=False), "collation", WARNING),
        (postgresql(offset=3.0), "clock", WARNING),
        (postgresql(offset=-60.0), "clock", WARNING),
        (postgresql(latencies=(2.0,) * 3), "latency", WARNING),
        (postgresql(latencies=(4.0,) * 3), "latency", ERROR),
        (postgresql(no_vote="refused"), "vote", ERROR),
        (postgresql(error="silent", no_vote="refused"), "reachable", ERROR),
        (postgresql(pushes=False), "notices", NOTE),
        (postgresql(pushes=None), "notices", NOTE),
        (postgresql(hidden=("replicas",)), "unchecked", NOTE),
        (postgresql(keepers=(Keeper("session", "812", "app, idle", 600.0),)), "old-versions", WARNING),
        (postgresql(keepers=(Keeper("prepared", "left", "app", 600.0),)), "old-versions", WARNING),
        (postgresql(keepers=(Keeper("slot", "gone", "not in use", 5e6),)), "old-versions", WARNING),
        (mysql(settings={"innodb_flush_log_at_trx_commit": "2"}), "durability", WARNING),
        (mysql(settings={"innodb_flush_log_at_trx_commit": "0"}), "durability", ERROR),
        (mysql(settings={"super_read_only": "ON"}), "replica", ERROR),
        (mysql(settings={"idle_transaction_timeout": "0"}), "idle", WARNING),
        (mysql(settings={"log_bin": "ON", "binlog_format": "STATEMENT"}), "log", ERROR),
        (mysql(replicas=2), "failover", WARNING),
        (mysql(fault="the table has no key", mend="add one"), "table", ERROR),
        (mysql(triggers=("audit",)), "triggers", WARNING),
        (sqlite(free=50_000_000), "disk", WARNING),
        (sqlite(free=1000, no_vote="disk full"), "disk", ERROR),
        (sqlite(writable=False), "file", ERROR),
        (sqlite(exists=False, has_table=False), "file", NOTE),
        (sqlite(has_folder=False, exists=False, writable=False, has_table=False), "file", ERROR),
        (zookeeper(voters=1), "ensemble", NOTE),
        (zookeeper(voters=2), "even", WARNING),
        (zookeeper(voters=5), "named", WARNING),
        (zookeeper(given=10.0), "session", ERROR),
        (zookeeper(given=40.0), "session", NOTE),
        (zookeeper(asked=10.0, given=10.0), "lease", ERROR),
        (zookeeper(ttl_nodes=False), "ttl-nodes", NOTE),
        (zookeeper(servers=(ServerFacts("a", role="not serving"),), voters=None), "serving", WARNING),
        (zookeeper(servers=(ServerFacts("a", error="silent"),), voters=None), "reachable", WARNING),
        (zookeeper(servers=MIXED, voters=None), "versions", WARNING),
        (zookeeper(hidden=("srvr",)), "unchecked", NOTE),
    ],
)
def test_one_finding(facts: DatabaseFacts | ZooKeeperFacts, check: str, severity: Severity) -> None:
    """Each fact gives its finding, and no other."""
    assert found(facts) == [(check, severity)]


@pytest.mark.parametrize(
    "facts",
    [
        postgresql(replicas=1, settings={"synchronous_standby_names": "*"}),
        postgresql(offset=3.0, offset_error=2.5),  # the round trip took 5 s: the clocks may agree
        postgresql(settings={"synchronous_commit": "remote_apply"}),
        mysql(replicas=2, settings={"rpl_semi_sync_source_enabled": "ON"}),
        mysql(settings={"idle_transaction_timeout": "3"}),
        mysql(settings={"innodb_flush_log_at_trx_commit": "3"}),
        zookeeper(voters=None, given=0.0),
        zookeeper(servers=(ServerFacts("a", forbidden=True),), voters=None),  # "unchecked" tells it
    ],
)
def test_no_finding(facts: DatabaseFacts | ZooKeeperFacts) -> None:
    """What is right, or is not known."""
    assert found(facts) == []


@pytest.mark.parametrize(
    ("said", "version", "role", "forbidden"),
    [
        (
            "Zookeeper version: 3.8.0-5a02a05, built\nMode: leader\nNode count: 5\n",
            "3.8.0",
            "leader",
            False,
        ),
        ("srvr is not executed because it is not in the whitelist.\n", "", "", True),
        ("This ZooKeeper instance is not currently serving requests\n", "", "not serving", False),
        ("", "", "", True),
    ],
)
def test_answers_to_srvr(said: str, version: str, role: str, forbidden: bool) -> None:
    """A server that says nothing of itself is taken for one that forbids the question."""
    facts = ServerFacts("a")
    read_srvr(facts, said)
    assert (facts.version, facts.role, facts.forbidden) == (version, role, forbidden)


def test_voters() -> None:
    """An observer does not vote; a server that is alone names none."""
    lines = [f"server.{number}=a:2888:3888:participant;0.0.0.0:2181" for number in range(3)]
    assert voters_of("\n".join([*lines, "server.4=a:2888:3888:observer;2181", "version=0"])) == 3
    assert voters_of("") == 1
