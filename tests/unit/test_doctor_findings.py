"""What `asynclock doctor` makes of facts that no server of a test shows."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock.cli.doctor.facts import ClusterFacts, NodeFacts, is_derived, is_hold
from asynclock.cli.doctor.findings import acl_rule, findings
from asynclock.cli.doctor.severity import Severity, Terms
from asynclock.stores.redis.restarts import fields

TERMS = Terms(prefix="lock:", lease=30.0, max_lease=60.0, node_timeout=0.05)


def node(**facts: Any) -> NodeFacts:
    """A good master."""
    good = {"product": "redis", "version": "7.2.0", "role": "master", "append_only": True, "fsync": "always"}
    return NodeFacts(**({"node": "a:6379", "run_id": "1"} | good | facts))


def found(*facts: NodeFacts) -> list[tuple[str, Severity]]:
    return [(each.check, each.severity) for each in findings(facts, TERMS)]


def test_a_good_server() -> None:
    assert found(node()) == []


def test_a_version_that_is_no_number() -> None:
    """`str.isdigit` takes more signs than `int` does."""
    assert found(node(version="².0")) == found(node(version="x.0"))


@pytest.mark.parametrize(
    ("facts", "check", "severity"),
    [
        ({"replicas": 2}, "failover", Severity.WARNING),
        ({"mode": "cluster"}, "mode", Severity.WARNING),
        ({"mode": "cluster", "elsewhere": "MOVED 0 b:6379"}, "mode", Severity.ERROR),
        ({"mode": "", "elsewhere": "MOVED 0 b:6379"}, "mode", Severity.ERROR),  # INFO is forbidden
        ({"mode": "sentinel"}, "mode", Severity.ERROR),
        ({"loading": True}, "writes", Severity.ERROR),
        ({"snapshots_fail": True}, "writes", Severity.ERROR),
        ({"appends_fail": True}, "writes", Severity.ERROR),
        ({"no_write": "BUSY a script runs"}, "writes", Severity.ERROR),
        ({"no_write": "READONLY x", "role": "replica"}, "replica", Severity.ERROR),
        ({"offset": 3.0}, "clock", Severity.WARNING),
        ({"offset": -11.0}, "clock", Severity.ERROR),
        ({"version": "5.0.7"}, "version", Severity.WARNING),
        ({"latencies": (2.0,) * 3}, "latency", Severity.ERROR),
        ({"latencies": (0.001,) * 8 + (0.04,) * 2}, "latency", Severity.WARNING),
        ({"refused": ("publish",)}, "acl", Severity.WARNING),
        ({"refused": ("scan",)}, "acl", Severity.WARNING),
        ({"refused": ("set",)}, "acl", Severity.ERROR),
        ({"refused": ("info",)}, "acl", Severity.WARNING),
        ({"refused": ("info",), "min_replicas": 1, "role": ""}, "acl", Severity.ERROR),
        ({"refused": ("asking",)}, "acl", Severity.WARNING),
        ({"unknown": ("wait",), "min_replicas": 1, "role": ""}, "commands", Severity.ERROR),
    ],
)
def test_one_finding(facts: dict[str, Any], check: str, severity: Severity) -> None:
    """Each fact gives its finding, and no other."""
    assert found(node(**facts)) == [(check, severity)]


@pytest.mark.parametrize(
    "facts",
    [
        {"offset": 3.0, "offset_error": 2.5},  # the round trip took 5 s: the clocks may agree
        {"maxmemory": 0, "policy": "allkeys-lru"},
        {"maxmemory": 100, "policy": "noeviction", "used_memory": 50},
        {"append_only": None, "fsync": ""},  # the server does not say
        {"max_leases": {60.0: 9}},
        {"latencies": (0.001,) * 9 + (0.4,)},
        {"latencies": (0.02,)},
    ],
)
def test_no_finding(facts: dict[str, Any]) -> None:
    """What is good, or unknown."""
    assert found(node(**facts)) == []


def test_clocks_of_two_servers() -> None:
    """Their difference counts, not only that to this machine."""
    known = found(node(node="a", offset=0.8), node(node="b", run_id="2", offset=-0.8), node(node="c", run_id="3"))
    assert known == [("clock", Severity.WARNING)]


def test_different_versions() -> None:
    """A warning while an upgrade is under way."""
    known = found(node(), node(node="b", run_id="2", version="7.4.0"), node(node="c", run_id="3"))
    assert known == [("versions", Severity.WARNING)]


@pytest.mark.parametrize(
    ("count", "bad", "without_spare"),
    [
        (1, [], False),
        (3, [], False),
        (3, [{"error": "silent"}], True),
        (3, [{"role": "replica"}], True),
        (3, [{"refused": ("set",)}], True),
        (3, [{"refused": ("publish",)}], False),  # it votes
        (3, [{"replicas": 1}], False),
        (3, [{"error": "silent"}, {"error": "silent"}], False),  # no majority: that is said elsewhere
        (5, [{"error": "silent"}], False),
        (5, [{"error": "silent"}, {"loading": True}], True),
        (4, [{"error": "silent"}], True),
    ],
)
def test_no_node_to_spare(count: int, bad: list[dict[str, Any]], without_spare: bool) -> None:
    """Where some servers cast no vote, and a majority needs all others."""
    each = [*bad, *({} for _ in range(count - len(bad)))]
    facts = [node(node=str(number), run_id=str(number), **its) for number, its in enumerate(each)]
    told = [finding for finding in findings(facts, TERMS) if finding.check == "spare"]
    assert [finding.nodes for finding in told] == [tuple(map(str, range(len(bad))))] * without_spare
    assert all("ok, but no node to spare" in finding.what for finding in told)


def test_the_worst_comes_first() -> None:
    """And its number is the exit code."""
    assert [severity for _, severity in found(node(replicas=1, loading=True))] == [2, 1]


def test_the_acl_rule() -> None:
    """For the user of the url, and the keys of the prefix; braces move the derived keys out of it."""
    assert acl_rule("worker", "lock:").startswith("ACL SETUSER worker on ~lock:* &asynclock~* +command|info ")
    assert "~{a}* ~asynclock~* &" in acl_rule("worker", "{a}")
    assert acl_rule("default", "").startswith("ACL SETUSER NAME on >PASSWORD ~* ")


def test_reading() -> None:
    """Of INFO, and of what a key holds."""
    assert fields(b"# Server\r\nrun_id:1\r\n\r\nos:Linux: x\r\n") == {"run_id": "1", "os": "Linux: x"}
    one = "0123456789abcdef" * 2 + "|1|2|host|"
    assert [is_hold(each) for each in (one, f"+{one}", f"~{one}", "asynclock~done", "token")] == [True] * 4 + [False]
    assert is_derived("lock:asynclock~{lock:x}fence")
    assert not is_derived("lock:x")


# -- clusters ----------------------------------------------------------------------------------------------------------


def masters(number: int = 3, replicas: int = 0, **facts: Any) -> list[NodeFacts]:
    """The masters of a good cluster, except for these facts."""
    its: dict[str, Any] = {"uncovered": 0, "full_coverage": "no", "node_timeout": 5.0} | facts
    return [
        node(node=f"m{n}", run_id=str(n), replicas=replicas, mode="cluster", cluster=ClusterFacts("c", number, **its))
        for n in range(number)
    ]


@pytest.mark.parametrize(("silent", "severity"), [(1, Severity.WARNING), (2, Severity.ERROR)])
def test_a_cluster_is_a_node_of_the_quorum(silent: int, severity: Severity) -> None:
    """It votes beside two other servers: with one of them silent, two of three nodes are a majority."""
    others = [node(node=str(n), run_id=f"other {n}", error="silent" * (n < silent)) for n in range(2)]
    told = [each for each in findings([*masters(), *others], TERMS) if each.check == "reachable"]
    assert [each.severity for each in told] == [severity] * silent
    assert ("spare" in [check for check, _ in found(*masters(), *others)]) is (silent == 1)


def checks(facts: list[NodeFacts]) -> set[tuple[str, Severity]]:
    return set(found(*facts))


@pytest.mark.parametrize(
    ("facts", "also"),
    [
        (masters(), set()),
        (masters(uncovered=7), {("slots", Severity.ERROR)}),
        (masters(full_coverage="yes"), {("coverage", Severity.WARNING)}),
        (masters(1, full_coverage="yes"), set()),
        (masters(node_timeout=20.0), {("failover-time", Severity.WARNING)}),
        (masters(node_timeout=30.0), {("failover-time", Severity.ERROR)}),
        (masters(node_timeout=None), set()),
    ],
)
def test_a_cluster(facts: list[NodeFacts], also: set[tuple[str, Severity]]) -> None:
    """Its masters are one node, so three of them are no quorum, and cluster mode is no error."""
    assert checks(facts) == {("replicas", Severity.WARNING)} | also


def test_replicas_of_a_cluster() -> None:
    """A failover may lose locks; with two masters there is none."""
    assert checks(masters(replicas=1)) == {("failover", Severity.WARNING)}
    assert checks(masters(2, replicas=1)) == {("failover", Severity.WARNING), ("masters", Severity.WARNING)}


def test_a_silent_master_of_a_cluster() -> None:
    """Names in its slots cannot be locked."""
    facts = masters()
    facts[0] = NodeFacts("m0", error="m0 refused", cluster=facts[0].cluster)
    assert ("reachable", Severity.ERROR) in checks(facts)


NEW, OLD = 5.0, 900.0  # seconds since its start


@pytest.mark.parametrize(
    ("servers", "quarantined"),
    [
        ([("a", "a", OLD), ("b", "b", NEW)], ""),
        ([("a", "a", OLD), ("b", "a", NEW)], "b"),
        ([("a", "a", OLD), ("b", "", NEW)], "b"),
        ([("a", "", OLD), ("b", "", NEW)], "b"),  # nobody has used them, or the mark was deleted
        ([("a", "", NEW), ("b", "", NEW)], ""),  # a new deployment
        ([("a", "", NEW), ("b", "x", NEW)], "ab"),
        ([("a", "a", None), ("b", "", NEW)], "b"),  # one does not say when it started
        ([("a", "", NEW)], ""),  # one server has no quarantine
    ],
)
def test_the_quarantine_is_that_of_a_client(servers: list[tuple[str, str, float | None]], quarantined: str) -> None:
    """By run_id, mark of first use and uptime, as `judge` decides for a client that connects now."""
    facts = [node(node=name, run_id=name, mark=mark, uptime=uptime) for name, mark, uptime in servers]
    told = [each.nodes[0] for each in findings(facts, TERMS) if each.check == "quarantine"]
    assert "".join(told) == quarantined
