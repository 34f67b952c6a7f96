"""What `asynclock doctor` finds in a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock._errors import ConfigError
from asynclock.cli.doctor.facts import ClusterFacts, NodeFacts, facts_of
from asynclock.cli.doctor.severity import Finding, Severity, advice_for
from asynclock.cli.output import count, length
from asynclock.stores.redis.cluster.topology import uncovered, without_host_name
from asynclock.stores.redis.remedies import remedy_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asynclock.cli.doctor.severity import Terms
    from asynclock.stores.redis.cluster.store import ClusterStore

_VOTE = 1.5
"""Seconds that the vote on a failover takes, after the node timeout."""


async def cluster_facts(store: ClusterStore, prefix: str, connect: float) -> list[NodeFacts]:
    """Ask each master of a cluster. If no node of the url answers: its error. Never raises."""
    failed = NodeFacts(store.label)
    for seed in store.seeds:
        try:
            ranges = await store.ranges_at(seed, connect)
        except Exception as error:
            if not failed.error:
                failed.error, failed.misconfigured = str(error), isinstance(error, ConfigError)
            continue
        masters = dict.fromkeys(each.master for each in ranges if each.master is not None)
        nameless = [each for each in ranges if each.master is None]
        its = store.label, len(masters), uncovered(ranges)
        found = [await facts_of(store.dialer(each), prefix, ClusterFacts(*its), connect=connect) for each in masters]
        if nameless:
            found.append(NodeFacts(store.label, cluster=ClusterFacts(*its)))
            found[-1].failed(without_host_name(store.label, f"{nameless[0].first}-{nameless[0].last}"))
        return found or [NodeFacts(store.label, error=f"{store.label}: no node has a slot: give all slots to masters")]
    return [failed]


def independent(facts: Sequence[NodeFacts]) -> int:
    """The number of nodes that vote: the masters of a cluster are one."""
    return len({each.cluster.label if each.cluster is not None else id(each) for each in facts})


def cluster_findings(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    """What is wrong in the clusters among the servers."""
    by_label: dict[str, list[NodeFacts]] = {}
    for each in facts:
        if each.cluster is not None:
            by_label.setdefault(each.cluster.label, []).append(each)
    for label, masters in by_label.items():
        yield from _silent(masters)
        yield from _slots(label, masters)
        yield from _replicas(masters)
        yield from _coverage(label, masters)
        yield from _timeout(label, masters, terms)


def _silent(masters: Sequence[NodeFacts]) -> Iterator[Finding]:
    for each in masters:
        if each.error:
            yield Finding(
                Severity.ERROR,
                "reachable",
                (each.node,),
                each.error,
                "Names in its slots cannot be locked.",
                advice_for(
                    remedy_in(each.error),
                    misconfigured=each.misconfigured,
                    otherwise="Start it, or let a replica take its place.",
                ),
            )


def _slots(label: str, masters: Sequence[NodeFacts]) -> Iterator[Finding]:
    bare = max(each.cluster.uncovered for each in masters if each.cluster is not None)
    if bare:
        yield Finding(
            Severity.ERROR,
            "slots",
            (label,),
            f"In {label}, no master has {count(bare, 'slot')}.",
            "Names in these slots cannot be locked; by the usual setting of a cluster, no name can.",
            "Start the master that had them, or give them to another one: redis-cli --cluster fix. What was held there "
            "is lost.",
        )


def _replicas(masters: Sequence[NodeFacts]) -> Iterator[Finding]:
    for each in masters:
        if not each.error and not each.replicas and each.role:
            yield Finding(
                Severity.WARNING,
                "replicas",
                (each.node,),
                f"{each.node} has no replica.",
                "While it is down, names in its slots cannot be locked.",
                "Add a replica, or accept it: without replicas no failover can lose a lock.",
            )
    if 0 < len(masters) < 3 and any(each.replicas for each in masters):
        yield Finding(
            Severity.WARNING,
            "masters",
            tuple(each.node for each in masters),
            f"The cluster has {count(len(masters), 'master')}.",
            "A failover needs a majority of the masters: when one of them is down, no replica takes its place.",
            "Use at least three masters.",
        )


def _coverage(label: str, masters: Sequence[NodeFacts]) -> Iterator[Finding]:
    strict = [each.node for each in masters if each.cluster is not None and each.cluster.full_coverage == "yes"]
    if strict and len(masters) > 1:
        yield Finding(
            Severity.WARNING,
            "coverage",
            tuple(strict),
            f"{label} has cluster-require-full-coverage yes.",
            "While one master is down, all of them refuse commands, also for names of other masters.",
            "CONFIG SET cluster-require-full-coverage no on each node of the cluster.",
        )


def _timeout(label: str, masters: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    known = [each.cluster.node_timeout for each in masters if each.cluster is not None]
    timeout = max((each for each in known if each is not None), default=0.0)
    if timeout and timeout + _VOTE > terms.lease * 2 / 3:
        lost = timeout + _VOTE > terms.lease
        yield Finding(
            Severity.ERROR if lost else Severity.WARNING,
            "failover-time",
            (label,),
            f"{label} has cluster-node-timeout {length(timeout)}, and the lease is {length(terms.lease)}.",
            "A failover takes longer than that: "
            + ("leases" if lost else "leases that were due for renewal")
            + " at the master that failed are lost before its replica takes over.",
            "Lower cluster-node-timeout (5 s suit most networks), or use longer leases.",
        )
