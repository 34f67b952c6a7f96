"""`asynclock doctor` and an address that leads to several servers."""

from __future__ import annotations

import asyncio

import pytest

from asynclock.cli.doctor import addresses
from asynclock.cli.doctor.facts import NodeFacts, facts_of
from asynclock.cli.doctor.findings import HIDDEN, findings, led_to_one
from asynclock.cli.doctor.severity import Finding, Severity, Terms
from asynclock.stores.redis.store import RedisStore
from tests.support.balancer import Balancer
from tests.support.commands import answered
from tests.support.servers import Servers
from tests.support.waiters import LIMIT

TERMS = Terms("lock:", 30.0, 60.0, 3.0)


def found_at(facts: NodeFacts) -> list[Finding]:
    return [each for each in findings([facts], TERMS) if each.check == "several-servers"]


@pytest.mark.parametrize("info", [True, False], ids=["by run_id", "by a key"])
async def test_f21_doctor_finds_two_servers_behind_one_address(servers: Servers, info: bool) -> None:
    """Also where INFO is forbidden: a key that is written on one connection is not found on another."""
    two = servers.start_together(2)
    for each in two:
        each.user(*([] if info else ["-info"]))
    async with Balancer(servers.folder / "lb", two) as balancer:
        store = RedisStore(balancer.url.replace("unix://", "unix://worker:secret@"))
        (found,) = found_at(await facts_of(store, "lock:", connect=5.0))
        assert found.severity is Severity.ERROR
        assert "8 connections" in found.what
        assert ("2 servers (run_id" in found.what) is info
        balancer.servers = two[:1]
        facts = await facts_of(store, "lock:", connect=5.0)
    assert facts.servers is not None
    assert len(facts.servers) == 1
    assert found_at(facts) == []
    assert [each.dbsize() for each in (two[0].cli(), two[1].cli())] == [0, 0]


async def test_a_server_that_pauses_during_the_comparison(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than 2 s: the key is still there."""
    monkeypatch.setattr(addresses, "_LIMIT", LIMIT)
    server = servers.start()
    server.user("-info")
    async with Pausing(servers.folder / "pauses", [server]) as proxy:
        store = RedisStore(proxy.url.replace("unix://", "unix://worker:secret@"))
        facts = await facts_of(store, "lock:", connect=5.0)
        assert proxy.paused
    assert facts.servers == ("?",)


class Pausing(Balancer):
    """The first look at the key arrives late."""

    paused = False

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if b"GET\r\n" in data and b"doctor~" in data and not self.paused:
                self.paused = True
                await asyncio.sleep(2.5)
            writer.write(data)


def test_doctor_says_what_it_cannot_see(servers: Servers) -> None:
    """A balancer by the address of the client."""
    assert HIDDEN in answered("doctor", on=servers.start()).stdout
    assert not led_to_one([NodeFacts("a:6379")])
    assert not led_to_one([NodeFacts("a:6379", servers=("1", "2")), NodeFacts("b:6379", servers=("3",))])
