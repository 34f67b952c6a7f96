"""docker-compose.yml describes five nodes that fail separately and keep their data. tests/compose starts them."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

FILE = Path(__file__).parents[2] / "docker-compose.yml"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, parsed, with the defaults of its variables."""
    parsed: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILE.read_text()))
    return parsed


@pytest.fixture(scope="module")
def nodes(compose: dict[str, Any]) -> list[dict[str, Any]]:
    """Its services."""
    return list(compose["services"].values())


def options(node: dict[str, Any]) -> dict[str, str]:
    """The options of its server: --name value, ..."""
    words: list[str] = node["command"]
    return {word: value for word, value in pairwise(words) if word.startswith("--")}


def test_five_nodes(nodes: list[dict[str, Any]]) -> None:
    """A quorum of three, and two may fail. Their image is that of the tests, where one is set."""
    assert len(nodes) == 5
    assert {node["image"] for node in nodes} == {"redis:7-alpine"}
    assert "image: ${ASYNCLOCK_TEST_IMAGE:-redis:7-alpine}" in FILE.read_text()


def test_each_has_a_port_of_its_own_on_this_machine_only(nodes: list[dict[str, Any]]) -> None:
    """7001 to 7005, and none reachable from outside: the nodes ask for no password."""
    assert [node["ports"] for node in nodes] == [[f"127.0.0.1:{port}:6379"] for port in range(7001, 7006)]


def test_each_port_can_be_another_one() -> None:
    """Where another program has it, as the head of the file says."""
    text = FILE.read_text()
    assert re.findall(r"\$\{ASYNCLOCK_PORT_(\d):-(\d+)\}", text) == [(str(n), str(7000 + n)) for n in range(1, 6)]
    assert "ASYNCLOCK_PORT_1=" in text.partition("services:")[0]


def test_each_has_a_volume_of_its_own(compose: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
    """Two servers on one volume would be one node."""
    volumes = [volume.split(":") for node in nodes for volume in node["volumes"]]
    assert [folder for _, folder in volumes] == ["/data"] * 5
    assert len({name for name, _ in volumes}) == 5
    assert {name for name, _ in volumes} == set(compose["volumes"])


def test_each_is_independent(nodes: list[dict[str, Any]]) -> None:
    """No replica, no cluster: data that one node loses is lost on no other."""
    for node in nodes:
        assert not {"--replicaof", "--slaveof", "--cluster-enabled"} & set(options(node))


def test_each_keeps_its_data(nodes: list[dict[str, Any]]) -> None:
    """Every write is on disk before its reply. A node that is full evicts no hold, and is not killed by the kernel."""
    for node in nodes:
        assert node["command"][0] == "redis-server"
        given = options(node)
        assert given["--appendonly"] == "yes"  # a str: an unquoted yes is a bool, which compose refuses
        assert given["--appendfsync"] == "always"
        assert given["--maxmemory-policy"] == "noeviction"
        assert given["--maxmemory"] == "256mb"


def test_each_has_a_health_check(nodes: list[dict[str, Any]]) -> None:
    """`docker compose up --wait` waits for these."""
    for node in nodes:
        assert node["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]


def test_the_urls_in_its_head_are_its_nodes(nodes: list[dict[str, Any]]) -> None:
    """The line to copy names all five."""
    line = next(line for line in FILE.read_text().splitlines() if "ASYNCLOCK_URLS=" in line)
    urls = line.partition("ASYNCLOCK_URLS=")[2].split(",")
    assert urls == [f"redis://{node['ports'][0].removesuffix(':6379')}" for node in nodes]
