"""`asynclock doctor` before a Sentinel deployment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio.connection import Connection

from asynclock.cli.doctor.sentinels import SentinelFacts, ask_sentinels, remarks
from asynclock.stores.redis.sentinel.masters import Endpoint, Sentinels
from tests.support.commands import asynclock, json_of
from tests.support.lagging_sentinel import LaggingSentinel
from tests.support.services.sentinels import NAME, Deployment, wait


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """Its sentinels take no server for dead; the master has all that a doctor wants."""
    found = Deployment(down_after=5_000)
    for each in found.servers:
        with each.cli() as cli:
            cli.config_set("appendonly", "yes")
            cli.config_set("appendfsync", "always")
            cli.config_set("min-replicas-to-write", 1)
    yield found
    found.stop()


def examined(url: str, *options: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The exit code, the findings by the name of their check, and the facts of the node."""
    done = asynclock("doctor", "--json", "--url", url, *options)
    answer = json_of(done)
    return done.returncode, {each["check"]: each for each in answer["findings"]}, answer["nodes"][0]


def test_a_good_deployment(deployment: Deployment) -> None:
    """Its replicas are the one thing to know of it."""
    code, found, facts = examined(deployment.url)
    assert (code, [*found]) == (1, ["failover"])
    assert facts["min_replicas_to_write"] == 1
    for each in facts["sentinels"]:
        assert (each["known"], each["quorum"], each["replicas"], each["down_after"]) == (3, 2, 2, 5.0)


def test_a_short_lease(deployment: Deployment) -> None:
    """It would end in each failover."""
    code, found, _ = examined(deployment.url, "--lease", "6s")
    assert (code, [*found]) == (1, ["failover", "down-after"])


def test_too_few_replicas(deployment: Deployment) -> None:
    """For `min_replicas`."""
    code, found, _ = examined(f"{deployment.url}?min_replicas=3")
    assert (code, [*found]) == (2, ["replicas", "failover"])


def test_dead_replicas() -> None:
    """The sentinels count a dead replica still; the master knows that it is gone."""
    deployment = Deployment(replicas=1, down_after=60_000)
    try:
        (replica,), master = deployment.replicas, deployment.master
        replica.kill()
        with master.cli() as cli:
            wait(lambda: cli.info("replication")["connected_slaves"] == 0, "the master has no replica")  # type: ignore[index]
        code, found, facts = examined(f"{deployment.url}?min_replicas=1")
    finally:
        deployment.stop()
    assert {each["replicas"] for each in facts["sentinels"]} == {1}
    assert (code, found["replicas"]["severity"]) == (2, "error")


def test_an_unknown_name(deployment: Deployment) -> None:
    """It says what to correct, and has no traceback."""
    code, found, _ = examined(deployment.url.replace(NAME, "other"))
    assert code == 2
    assert "knows no master other" in found["reachable"]["what"]
    assert "knows no master other" in found["sentinel"]["what"]


async def test_numbers_that_a_sentinel_does_not_know() -> None:
    """A field that is no number is unknown, and the others count."""
    sentinel = await LaggingSentinel(6379).start()
    sentinel.more = {"num-other-sentinels": 2, "quorum": "odd", "num-slaves": "", "down-after-milliseconds": "1.5"}
    endpoint = Endpoint("a:26379", lambda: Connection(host="127.0.0.1", port=sentinel.own_port))
    try:
        (facts,) = await ask_sentinels(Sentinels("mymaster", [endpoint]))
    finally:
        await sentinel.stop()
    assert facts == SentinelFacts("a:26379", known=3)


GOOD: dict[str, Any] = {"known": 3, "quorum": 2, "replicas": 2, "down_after": 5.0}

BAD: dict[str, tuple[dict[str, Any], int | None, int, list[tuple[str, bool]]]] = {
    "none": ({}, 1, 0, []),
    "unknown": ({}, None, 0, []),
    "one sentinel": ({"known": 1, "quorum": 1}, 1, 0, [("sentinels", False)]),
    "a quorum of one": ({"quorum": 1}, 1, 0, [("sentinel-quorum", False)]),
    "a quorum that there never is": ({"quorum": 4}, 1, 0, [("sentinel-quorum", True)]),
    "no replica": ({"replicas": 0}, 1, 0, [("replicas", False)]),
    "fewer replicas than wanted": ({}, 1, 3, [("replicas", True)]),
    "no replica, and one is wanted": ({"replicas": 0}, 1, 1, [("replicas", True)]),
    "slow": ({"down_after": 30.0}, 1, 0, [("down-after", False)]),
    "writes without replicas": ({}, 0, 0, [("min-replicas-to-write", False)]),
    "confirmed by clients": ({}, 0, 1, []),
    "a dead sentinel": ({"error": "refused"}, 1, 0, [("sentinel", False)]),
}


@pytest.mark.parametrize(("facts", "to_write", "min_replicas", "checks"), BAD.values(), ids=BAD)
def test_remarks(
    facts: dict[str, Any], to_write: int | None, min_replicas: int, checks: list[tuple[str, bool]]
) -> None:
    """Each fault gives its finding, and no other."""
    said = remarks("node", [SentinelFacts("a:26379", **{**GOOD, **facts})], to_write, min_replicas, lease=30.0)
    assert [(each.check, each.is_error) for each in said] == checks
    assert all(each.what.endswith(".") and each.risk and each.advice for each in said)
