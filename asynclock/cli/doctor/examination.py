"""What `asynclock doctor` does: it asks the servers, and reports what it found."""

from __future__ import annotations

from contextlib import aclosing
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from asynclock._errors import ConfigError
from asynclock._untrusted import printable
from asynclock.cli.doctor.clusters import cluster_facts
from asynclock.cli.doctor.facts import NodeFacts, facts_of
from asynclock.cli.doctor.findings import HIDDEN, findings, led_to_one
from asynclock.cli.doctor.severity import Severity
from asynclock.cli.doctor.standalone import StoreFacts, ask_votes
from asynclock.cli.output import count, length, plain, print_json, table, write
from asynclock.client import Redlock
from asynclock.stores import store_for
from asynclock.stores.port import is_standalone
from asynclock.stores.redis.cluster.store import ClusterStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._options import ClientOptions
    from asynclock.cli.doctor.severity import Finding, Terms
    from asynclock.stores.port import Store
    from asynclock.stores.redis.restarts import Dialer
    from asynclock.stores.zookeeper.store import ZooKeeperStore


class Shown(Protocol):
    """A server in the table."""

    @property
    def node(self) -> str: ...
    @property
    def product(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def latencies(self) -> tuple[float, ...]: ...
    @property
    def offset(self) -> float | None: ...


class Examined(NamedTuple):
    """What was learnt, and what it means."""

    facts: Sequence[NodeFacts | StoreFacts]
    rows: Sequence[Shown]
    found: list[Finding]


async def examine(urls: Sequence[str], options: ClientOptions, terms: Terms) -> Examined:
    """Ask the servers. Raises ConfigError for a url that has none."""
    stores = [store_for(each) for each in urls]
    alone = next((each for each in stores if is_standalone(each)), None)
    if alone is None:
        facts = await _servers([_dialer(each) for each in stores], terms)
        return Examined(facts, facts, findings(facts, terms))
    if len(stores) > 1:
        raise ConfigError(f"{alone.label} is always the only node of a client: examine each store with its own doctor")
    if urls[0].partition(":")[0].lower() == "zookeeper":
        return await _ensemble(cast("ZooKeeperStore", alone), Redlock(alone, **options), terms)
    return await _database(urls[0], Redlock(alone, **options), terms)


async def _servers(stores: Sequence[Dialer | ClusterStore], terms: Terms) -> list[NodeFacts]:
    """Ask one server after the other: the measurements must not disturb each other. Of a cluster, ask its masters."""
    facts: list[NodeFacts] = []
    for store in stores:
        if isinstance(store, ClusterStore):
            facts += await cluster_facts(store, terms.prefix, terms.connect_timeout)
        else:
            facts.append(await facts_of(store, terms.prefix, connect=terms.connect_timeout))
    return facts


def _dialer(store: Store) -> Dialer | ClusterStore:
    """The store, which must be a server or a cluster that the doctor can connect to. Raises ConfigError."""
    if isinstance(store, ClusterStore):
        return store
    if not callable(getattr(store, "dial", None)):
        raise ConfigError(f"{store.label} has no server that doctor could examine: name the url of a server")
    return cast("Dialer", store)


async def _database(url: str, client: Redlock, terms: Terms) -> Examined:
    # Its packages are optional, and slow to import.
    from asynclock.cli.doctor.database_findings import database_findings
    from asynclock.cli.doctor.databases import database_facts

    facts = await database_facts(url, connect=terms.connect_timeout)
    async with aclosing(client):
        if facts.has_table and not facts.error:  # else the client would make the table
            await ask_votes(facts, client)
    return Examined([facts], [facts], database_findings(facts, terms))


async def _ensemble(store: ZooKeeperStore, client: Redlock, terms: Terms) -> Examined:
    from asynclock.cli.doctor.zookeepers import zookeeper_facts, zookeeper_findings

    facts = await zookeeper_facts(store, terms.connect_timeout)
    async with aclosing(client):
        if not facts.error:
            await ask_votes(facts, client)
    return Examined([facts], [facts, *facts.servers], zookeeper_findings(facts, terms))


def show(examined: Examined, as_json: bool) -> Severity:
    """Print what was found. Returns the worst of it."""
    facts, rows, found = examined
    worst = max((each.severity for each in found), default=Severity.OK)
    if as_json:
        shown = [{**plain(each), "severity": each.severity.name.lower()} for each in found]
        print_json({"severity": worst.name.lower(), "findings": shown, "nodes": facts})
    else:
        places = [each.place for each in facts if isinstance(each, StoreFacts) and not each.error]
        nodes = [each for each in facts if isinstance(each, NodeFacts)]
        write(report(rows, found, places, [HIDDEN] if led_to_one(nodes) else []))
    return worst


def report(
    facts: Sequence[Shown], found: Sequence[Finding], places: Sequence[str] = (), remarks: Sequence[str] = ()
) -> str:
    """What people read. Pure."""
    rows = [
        (
            each.node,
            f"{each.product} {each.version}".strip() or "?",
            each.role or "?",
            length(median(each.latencies)) if each.latencies else "?",
            "?" if each.offset is None else f"{each.offset:+.3f}s",
        )
        for each in facts
    ]
    lines = [table(("SERVER", "VERSION", "ROLE", "LATENCY", "CLOCK"), rows)]
    lines += [f"The locks are in: {printable(each)}" for each in places]
    lines += remarks
    for each in found:
        lines += [
            "",
            f"{each.severity.name if each.severity else 'NOTE'} {each.check}: {printable(each.what)}",
            f"  could happen: {printable(each.risk)}",
            f"  what to do:   {printable(each.advice)}",
        ]
    errors, warnings = (sum(each.severity is of for each in found) for of in (Severity.ERROR, Severity.WARNING))
    lines += ["", f"{count(errors, 'error')}, {count(warnings, 'warning')}"]
    return "\n".join(lines)
