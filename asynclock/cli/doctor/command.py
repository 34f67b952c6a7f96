"""The command `asynclock doctor`."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from asynclock._errors import ConfigError
from asynclock._options import ClientSettings, client_settings, node_timeout
from asynclock.cli.doctor.clusters import cluster_facts
from asynclock.cli.doctor.facts import facts_of
from asynclock.cli.doctor.findings import findings
from asynclock.cli.doctor.severity import Severity, Terms
from asynclock.cli.options import TRUST_RESTARTS, AsJson, MaxLease, Prefix, Urls, duration, named_urls, prefix_of
from asynclock.cli.output import count, length, plain, print_json, printable, table
from asynclock.stores import store_for
from asynclock.stores.redis.cluster.store import ClusterStore

if TYPE_CHECKING:
    from asynclock.cli.doctor.facts import NodeFacts
    from asynclock.cli.doctor.severity import Finding
    from asynclock.stores.redis.restarts import Dialer


def doctor(
    url: Urls = None,
    prefix: Prefix = None,
    lease: Annotated[
        float, typer.Option(parser=duration, metavar="DURATION", envvar="ASYNCLOCK_LEASE", help="The usual lease.")
    ] = 30.0,
    max_lease: MaxLease = None,
    node_timeouts: Annotated[
        float | None,
        typer.Option(
            "--node-timeout",
            parser=duration,
            metavar="DURATION",
            show_default=False,
            help="The node_timeout of the clients. Default: 50ms on a quorum, lease/10 on one server.",
        ),
    ] = None,
    trust_restarts: Annotated[
        bool, typer.Option("--trust-restarts", envvar=TRUST_RESTARTS, help="The clients have trust_restarts=True.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the servers for what could break locks, and say what to do. Changes no key.

    Exit code: 0 nothing found; 1 warnings; 2 errors.
    """
    urls = named_urls(url)
    options: dict[str, Any] = {"lease": lease, "node_timeout": node_timeouts, "trust_restarts": trust_restarts}
    options |= {} if max_lease is None else {"max_lease": max_lease}
    options |= {} if (known := prefix_of(prefix)) is None else {"prefix": known}
    settings = client_settings(options)
    facts = asyncio.run(_examine([_dialer(each) for each in urls], settings))
    terms = Terms(
        settings.prefix,
        settings.lock.lease,
        settings.max_lease,
        node_timeout(settings, settings.lock, len(urls)),
        settings.trust_restarts,
    )
    found = findings(facts, terms)
    worst = max((each.severity for each in found), default=Severity.OK)
    if as_json:
        shown = [{**plain(each), "severity": each.severity.name.lower()} for each in found]
        print_json({"severity": worst.name.lower(), "findings": shown, "nodes": facts})
    else:
        print(report(facts, found))
    raise typer.Exit(int(worst))


def _dialer(url: str) -> Dialer | ClusterStore:
    """The store of a url, which must be a server or a cluster that the doctor can connect to. Raises ConfigError."""
    store = store_for(url)
    if isinstance(store, ClusterStore):
        return store
    if not callable(getattr(store, "dial", None)):
        raise ConfigError(f"doctor examines Redis and Valkey servers, and {store.label} is none: name a server's url")
    return cast("Dialer", store)


async def _examine(stores: list[Dialer | ClusterStore], settings: ClientSettings) -> list[NodeFacts]:
    """Ask one server after the other: the measurements must not disturb each other. Of a cluster, ask its masters."""
    facts: list[NodeFacts] = []
    for store in stores:
        if isinstance(store, ClusterStore):
            facts += await cluster_facts(store, settings.prefix)
        else:
            facts.append(await facts_of(store, settings.prefix))
    return facts


def report(facts: list[NodeFacts], found: list[Finding]) -> str:
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
