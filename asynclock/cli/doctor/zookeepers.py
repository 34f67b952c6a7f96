"""What `asynclock doctor` asks the servers of a ZooKeeper ensemble, and what their answers mean.

Each server of the url answers the four letter word srvr, which the whitelist of ZooKeeper 3.8 cannot forbid. A session
of its own shows the session timeout that the servers give, and reads the list of the servers of the ensemble.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kazoo.hosts import collect_hosts

from asynclock._errors import ConfigError
from asynclock.cli.doctor.measures import version_findings
from asynclock.cli.doctor.severity import Finding, Severity
from asynclock.cli.doctor.standalone import StoreFacts, general_findings, sorted_findings
from asynclock.cli.output import count, length
from asynclock.stores.dialing import dial
from asynclock.stores.lookups import addresses_of, lookup_under_way
from asynclock.stores.zookeeper.connection import Connection, SessionState
from asynclock.stores.zookeeper.errors import error_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asynclock.cli.doctor.severity import Terms
    from asynclock.stores.zookeeper.store import ZooKeeperStore

_ANSWER = 5.0  # seconds for one answer
_CONFIG = "/zookeeper/config"  # from ZooKeeper 3.5 on; everybody may read it, unless its ACL was changed

_NEEDS = {
    "srvr": "which servers serve, and in which version",
    _CONFIG: "how many servers the ensemble has",
}


@dataclass(slots=True)
class ServerFacts:
    """One server that the url names. Empty or None: unknown."""

    node: str
    error: str = ""
    product: str = ""
    version: str = ""
    role: str = ""
    """Its mode: standalone, leader, follower, observer or read-only; "not serving" if it is in no majority."""
    latencies: tuple[float, ...] = ()
    offset: float | None = None
    forbidden: bool = False
    """It does not answer srvr."""


@dataclass(slots=True)
class ZooKeeperFacts(StoreFacts):
    """One ensemble."""

    servers: tuple[ServerFacts, ...] = ()
    """Those of the url."""
    voters: int | None = None
    """The servers of the ensemble that vote; None: unknown."""
    asked: float = 0.0
    """The session timeout of the url, in seconds."""
    given: float = 0.0
    """The one that the servers give; 0: no session."""
    ttl_nodes: bool = False
    """The option of the url."""


async def zookeeper_facts(store: ZooKeeperStore, connect: float) -> ZooKeeperFacts:
    """Ask the ensemble. `connect`: the connect_timeout of the clients. Never raises for what the servers say or do."""
    place = f"path {store.root}, layout {store.layout}"
    facts = ZooKeeperFacts(store.label, place, asked=store.session_timeout, ttl_nodes=store.ttl_nodes)
    hosts, _ = collect_hosts(store.address.hosts)
    found = await asyncio.gather(*(_servers_of(host, port, connect) for host, port in hosts))
    named = dict.fromkeys(each for some in found for each in some)
    facts.servers = tuple(await asyncio.gather(*(_server(host, port, connect) for host, port in named)))
    if any(each.forbidden for each in facts.servers):
        facts.hidden += ("srvr",)
    facts.product = "zookeeper"
    facts.version = next((each.version for each in facts.servers if each.version), "")
    await _ask_session(store, facts, connect)
    facts.role = "" if facts.voters is None else f"{count(facts.voters, 'voter')}"
    return facts


async def _servers_of(host: str, port: int, connect: float) -> list[tuple[str, int]]:
    """The servers that a host of the url stands for. One name may lead to all of them, as that of a headless service of
    Kubernetes does: then each address is a server. The addresses of one server may be of two families, so those of the
    family that has more count."""
    try:
        async with asyncio.timeout(connect):
            found = await addresses_of(host, port)
    except OSError:  # `_server` says why
        return [(host, port)]
    families: dict[int, dict[str, None]] = {}
    for family, _, _, _, (address, *_) in found:
        families.setdefault(family, {})[address] = None
    most = max(families.values(), key=len)
    return [(address, port) for address in most] if len(most) > 1 else [(host, port)]


async def _server(host: str, port: int, connect: float) -> ServerFacts:
    facts = ServerFacts(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        async with asyncio.timeout(connect):
            reader, writer = await asyncio.open_connection(sock=await dial(host, port, connect))
        try:
            began = time.perf_counter()
            writer.write(b"srvr")
            async with asyncio.timeout(_ANSWER):
                said = (await reader.read(-1)).decode(errors="replace")
            facts.latencies = (time.perf_counter() - began,)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    except TimeoutError:
        facts.error = f"{facts.node} did not answer in time{lookup_under_way(host)}"
    except OSError as error:
        facts.error = f"{facts.node}: {error}"
    else:
        read_srvr(facts, said)
    return facts


def read_srvr(facts: ServerFacts, said: str) -> None:
    """Read the answer to srvr. Pure but for `facts`."""
    facts.product = "zookeeper"
    lines = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    facts.version = lines.get("Zookeeper version", "").strip().split("-")[0].split(",")[0]
    facts.role = lines.get("Mode", "").strip()
    if "not in the whitelist" in said or "not currently serving" in said or not said:
        facts.forbidden = "not currently serving" not in said
        facts.role = "" if facts.forbidden else "not serving"


async def _ask_session(store: ZooKeeperStore, facts: ZooKeeperFacts, connect: float) -> None:
    connected = asyncio.Event()

    def changed(state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            connected.set()

    connection = Connection(store.address, connect, changed, lambda: None)
    connection.start()
    try:
        async with asyncio.timeout(_ANSWER):
            await connected.wait()
            facts.given = connection.timeout
            data, _ = await connection.data(_CONFIG)
        facts.voters = None if data is None else voters_of(data.decode(errors="replace"))
    except Exception as error:  # any failure of kazoo
        if facts.given:
            facts.hidden += (_CONFIG,)
        elif isinstance(error, TimeoutError):
            why = f" ({connection.trouble})" if connection.trouble is not None else ""
            facts.error = f"{store.label} gives no session{why}"
        else:
            explained = error_of(store.label, error)
            facts.error, facts.misconfigured = str(explained), isinstance(explained, ConfigError)
    finally:
        await connection.close()


def voters_of(config: str) -> int:
    """The servers that vote, after the text of /zookeeper/config, which names none if the server is alone. Pure."""
    servers = [line for line in config.splitlines() if line.startswith("server.")]
    return sum(":observer" not in line for line in servers) if servers else 1


# -- findings; pure ----------------------------------------------------------------------------------------------------


def zookeeper_findings(facts: ZooKeeperFacts, terms: Terms) -> list[Finding]:
    """All findings, the worst first."""
    found = [*general_findings(facts, terms, _NEEDS)]
    for check in (_servers, _ensemble, _versions, _session):
        found += check(facts, terms)
    return sorted_findings(found)


def _servers(facts: ZooKeeperFacts, terms: Terms) -> Iterator[Finding]:
    """Of an ensemble without a majority, "reachable" tells all."""
    del terms
    for each in facts.servers if not facts.error else ():
        if each.error:
            yield Finding(
                Severity.WARNING,
                "reachable",
                (each.node,),
                each.error,
                "Fewer servers may fail before no lock can be acquired.",
                "Start it, or correct the url.",
            )
        elif each.role in ("not serving", "read-only"):
            yield Finding(
                Severity.WARNING,
                "serving",
                (each.node,),
                f"{each.node} is {each.role}: it does not reach a majority of the ensemble.",
                "Fewer servers may fail before no lock can be acquired.",
                "See its log, and its connections to the other servers.",
            )


def _ensemble(facts: ZooKeeperFacts, terms: Terms) -> Iterator[Finding]:
    del terms
    voters, named = facts.voters, len(facts.servers)
    if voters is None:
        return
    if voters == 1:
        yield Finding(
            Severity.OK,
            "ensemble",
            (facts.node,),
            "The ensemble has one server.",
            "While it is down, no lock can be acquired or renewed.",
            "Nothing, if that is acceptable. Else use three or five servers.",
        )
    elif voters % 2 == 0:
        yield Finding(
            Severity.WARNING,
            "even",
            (facts.node,),
            f"There are {voters} servers that vote.",
            f"They survive no more failures than {count(voters - 1, 'server')}.",
            "Use an odd number.",
        )
    if named < voters:
        yield Finding(
            Severity.WARNING,
            "named",
            (facts.node,),
            f"The url names {count(named, 'server')} of {voters}.",
            "When those of the url are down, clients do not find the others.",
            "Name all servers in one url, separated by commas.",
        )


def _versions(facts: ZooKeeperFacts, terms: Terms) -> Iterator[Finding]:
    del terms
    known = {each.node: each.version for each in facts.servers if each.version}
    yield from version_findings(known)


def _session(facts: ZooKeeperFacts, terms: Terms) -> Iterator[Finding]:
    asked, given = facts.asked, facts.given
    if abs(terms.lease - asked) > 0.001:
        yield Finding(
            Severity.ERROR,
            "lease",
            (facts.node,),
            f"The session timeout of the url is {length(asked)}, and the lease is {length(terms.lease)}.",
            "The session is the lease, so every lock raises Unsupported.",
            f"Give lease={asked:g} to the clients and --lease {asked:g} to this command, or "
            f"?session_timeout={terms.lease:g} in the url.",
        )
    if given and given < asked - 0.001:
        yield Finding(
            Severity.ERROR,
            "session",
            (facts.node,),
            f"The servers give sessions of {length(given)}, and the url asks for {length(asked)}.",
            "Every acquire raises ConfigError.",
            f"Use ?session_timeout={given:g} in the url and lease={given:g}, or raise maxSessionTimeout.",
        )
    elif given > asked + 0.001:
        yield Finding(
            Severity.OK,
            "session",
            (facts.node,),
            f"The servers give sessions of {length(given)}, and the url asks for {length(asked)}.",
            f"The name of a client that dies is free {length(given)} later, not {length(asked)}.",
            "Nothing, if that is soon enough. Else lower minSessionTimeout of the servers.",
        )
    if not facts.ttl_nodes and not facts.error:
        yield Finding(
            Severity.OK,
            "ttl-nodes",
            (facts.node,),
            "The url does not say that the servers have TTL nodes.",
            "once() raises Unsupported. All other locks work.",
            "Nothing, if no program uses once(). Else start the servers with zookeeper.extendedTypesEnabled=true, and "
            "add ttl_nodes=true to the url.",
        )
