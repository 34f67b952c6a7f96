"""What the facts of `asynclock doctor` mean. Pure: no server, no clock."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

from asynclock._options import RESERVED
from asynclock._untrusted import number_of, printable
from asynclock.cli.doctor.addresses import CONNECTIONS
from asynclock.cli.doctor.clusters import cluster_findings, independent
from asynclock.cli.doctor.measures import clock_findings, latency_findings, version_findings
from asynclock.cli.doctor.sentinels import remarks, too_few_replicas
from asynclock.cli.doctor.severity import Finding, Severity, advice_for
from asynclock.cli.output import NO_SPARE, count, length
from asynclock.quorum.quarantine import judge
from asynclock.stores.port import Facts
from asynclock.stores.redis.remedies import remedy_in
from asynclock.stores.redis.replies import ACL_COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asynclock.cli.doctor.facts import NodeFacts
    from asynclock.cli.doctor.sentinels import Remark
    from asynclock.cli.doctor.severity import Terms

_FULL = 0.9  # of maxmemory
_OLDEST = (6, 2)
_NOTICES = {"publish", "subscribe", "hello|3"}
_OPERATORS = {"type", "getrange", "scan", "ping", "info", "command|info", "script|load"}
"""Without these commands locks work; the look of operators at them does not, or each op takes longer."""
_CONFIRMS = {"publish", "info"}
"""`min_replicas` needs these, too, to ask whether the replicas have a grant."""
_MOVES = {"asking"}
"""Without it locks in a cluster work. While a slot is moved, a server takes commands with one key after ASKING. Those
with several keys wait for the end of the move."""

HIDDEN = (
    f"Each address was connected to {CONNECTIONS} times, and led to one server. A balancer that chooses the server by "
    "the address of the client stays hidden from this check."
)
"""What the report says where no address leads to several servers."""

_NO_VOTE = {
    **dict.fromkeys(("reachable", "quarantine"), Severity.WARNING),
    **dict.fromkeys(("mode", "replica", "memory", "writes", "acl", "commands"), Severity.ERROR),
}
"""The findings about a server that casts no vote, by check: those of this severity or a worse one."""

_NEEDS = {
    "INFO": "the role, the version, the memory and the persistence of the server, and whether it is named twice",
    "CONFIG GET": "how often the server writes to disk",
    "CLIENT LIST": "the max_lease of the clients",
    "SCAN": "whether other keys have the prefix",
}
"""What the doctor learns from the commands that only it needs."""


def findings(facts: Sequence[NodeFacts], terms: Terms) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for check in _CHECKS for finding in check(facts, terms)]
    found += _spare(facts, found)
    return sorted(found, key=lambda each: -each.severity)


def led_to_one(facts: Sequence[NodeFacts]) -> bool:
    """Whether addresses were compared, and each led to one server."""
    compared = [len(each.servers) for each in facts if each.servers is not None]
    return bool(compared) and set(compared) == {1}


def _reachable(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    silent = [each for each in facts if each.cluster is None and each.error]
    nodes = independent(facts)  # the masters of a cluster are one node, with findings of its own
    majority = nodes // 2 + 1
    if not silent:
        return
    if nodes - len(silent) >= majority:
        severity, risk = Severity.WARNING, "Fewer servers may fail before no lock can be acquired."
    else:
        hopeless = sum(each.misconfigured for each in silent) >= majority
        raised = "ConfigError" if hopeless else "QuorumUnavailable"
        severity, risk = Severity.ERROR, f"No lock can be acquired: every acquire raises {raised}."
    for each in silent:
        advice = advice_for(remedy_in(each.error), misconfigured=each.misconfigured)
        yield Finding(severity, "reachable", (each.node,), each.error, risk, advice)


def _spare(facts: Sequence[NodeFacts], found: Sequence[Finding]) -> Iterator[Finding]:
    """Some servers cast no vote, and the others are just a majority. The masters of a cluster are one node, which votes
    for some names at least."""
    refused = {node for each in found if each.severity >= _NO_VOTE.get(each.check, math.inf) for node in each.nodes}
    silent = [each.node for each in facts if each.cluster is None and each.node in refused]
    nodes = independent(facts)
    if silent and nodes - len(silent) == nodes // 2 + 1:
        yield Finding(
            Severity.WARNING,
            "spare",
            tuple(silent),
            f"{nodes - len(silent)} of {nodes} nodes vote: {NO_SPARE}.",
            "When one more of them fails, no lock can be acquired.",
            "Restart no other server until these vote again; the findings about them say what to do.",
        )


def _addresses(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    for each in facts:
        if each.servers is None or len(each.servers) < 2:
            continue
        known = "?" not in each.servers
        how = f" (run_id {', '.join(run_id[:8] for run_id in each.servers)})" if known else ""
        number = count(len(each.servers), "server") if known else "several servers"
        yield Finding(
            Severity.ERROR,
            "several-servers",
            (each.node,),
            f"{CONNECTIONS} connections to {each.node} reached {number}{how}.",
            "Each of them grants the same locks: two owners work at the same time, and fencing tokens do not rise.",
            "Let the address lead to one server, or name each server by its own address, as a quorum of three or five.",
        )


def _quorum(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    for run_id, group in groupby(sorted(facts, key=lambda each: each.run_id), lambda each: each.run_id):
        same = tuple(each.node for each in group)
        if run_id and len(same) > 1:
            yield Finding(
                Severity.ERROR,
                "same-server",
                same,
                f"{' and '.join(same)} are the same server.",
                "It would have two votes: its failure would free locks that are held. Clients refuse to start.",
                "Name each server once.",
            )
    nodes = independent(facts)
    if nodes > 1 and nodes % 2 == 0:
        yield Finding(
            Severity.WARNING,
            "even",
            (),
            f"There are {nodes} servers.",
            f"They survive no more failures than {count(nodes - 1, 'server')}.",
            "Use an odd number.",
        )


def _mode(facts: NodeFacts) -> Finding | None:
    """A server that does not stand alone."""
    if facts.mode == "sentinel" or facts.elsewhere:
        return Finding(
            Severity.ERROR,
            "mode",
            (facts.node,),
            f"{facts.node} runs in {'sentinel' if facts.mode == 'sentinel' else 'cluster'} mode.",
            "It cannot keep locks by itself.",
            "Name independent servers, the master behind the Sentinels, or the cluster (redis+cluster://).",
        )
    if facts.mode == "cluster" and facts.cluster is None:
        return Finding(
            Severity.WARNING,
            "mode",
            (facts.node,),
            f"{facts.node} runs in cluster mode, and has all slots that locks need.",
            "When one of them moves to another node, names in it cannot be locked.",
            "Name the cluster (redis+cluster://).",
        )
    return None


def _role(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    for each in facts:
        mode = _mode(each)
        if mode is not None:
            yield mode
            if mode.severity is Severity.ERROR:  # then its role does not matter
                continue
        if each.role == "replica":
            yield Finding(
                Severity.ERROR,
                "replica",
                (each.node,),
                f"{each.node} is a replica.",
                "It refuses writes, so it casts no vote.",
                "Name its master.",
            )
        elif each.replicas:
            yield Finding(
                Severity.WARNING,
                "failover",
                (each.node,),
                f"{each.node} has {each.replicas} replica{'s' * (each.replicas > 1)}.",
                "Replication is asynchronous: a replica that is promoted may not know a lock that is held, and grants "
                "it again.",
                "Fence what the lock protects, or use three or five independent servers without replicas.",
            )


def _restarts(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    known = [each for each in facts if not each.error]
    if independent(facts) > 1 and not terms.trust_restarts:
        for each, left in zip(known, _quarantine(known, terms), strict=True):
            if left > 0:
                yield Finding(
                    Severity.WARNING,
                    "quarantine",
                    (each.node,),
                    f"{each.node} restarted {length(each.uptime or 0.0)} ago.",
                    f"It casts no vote for another {length(left)}, because older locks may still be held.",
                    "Wait, and restart the next server only after that.",
                )
    for each in known:
        durable = each.append_only and each.fsync == "always"
        if each.append_only is None or durable or (independent(facts) > 1 and not terms.trust_restarts):
            continue
        how = f"appends to a file, fsync {each.fsync or 'unknown'}" if each.append_only else "does not append to a file"
        how += "" if each.save is None else f", {'takes snapshots' if each.save else 'takes no snapshots'}"
        yield Finding(
            Severity.ERROR if terms.trust_restarts else Severity.WARNING,
            "persistence",
            (each.node,),
            f"{each.node} {how}.",
            f"A restart within the lease ({length(terms.lease)}) forgets locks that are held, and another owner gets "
            "them. Fencing tokens may fall behind.",
            "Set appendonly yes and appendfsync always, or use three or five independent servers"
            + (" without trust_restarts." if terms.trust_restarts else "."),
        )


def _quarantine(known: Sequence[NodeFacts], terms: Terms) -> tuple[float, ...]:
    """The seconds for which each server casts no vote, as a new client judges it."""
    said = [Facts(each.run_id, each.mark, -math.inf if each.uptime is None else -each.uptime) for each in known]
    return judge(said, 0.0, terms.max_lease + 1.0, complete=True).until


def _memory(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    for each in facts:
        if each.maxmemory and each.policy not in ("", "noeviction"):
            yield Finding(
                Severity.ERROR,
                "eviction",
                (each.node,),
                f"{each.node} has maxmemory-policy {each.policy}.",
                "When its memory is full, it deletes locks that are held, because they have an expiry. Then another "
                "owner gets them.",
                "CONFIG SET maxmemory-policy noeviction, or keep locks and caches on different servers.",
            )
        elif each.maxmemory and each.used_memory > _FULL * each.maxmemory:
            full = _is_full(each)
            yield Finding(
                Severity.ERROR if full else Severity.WARNING,
                "memory",
                (each.node,),
                f"{each.node} uses {each.used_memory / each.maxmemory:.0%} of maxmemory.",
                ("It" if full else "When it is full, it")
                + " refuses to acquire locks. Those that are held can be renewed and released.",
                "Raise maxmemory, or delete what is not needed.",
            )


def _writes(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    """Servers that refuse writes. Replicas and full servers have findings of their own."""
    del terms
    for each in facts:
        why, advice = "", "Free disk space, or see its log."
        if each.loading:
            why, advice = "loads its data", "Wait."
        elif each.no_write:
            why, advice = f"refuses writes: {each.no_write.rstrip('.')}", "Remove the cause that it names."
        elif each.snapshots_fail or each.appends_fail:
            failed = "snapshot" if each.snapshots_fail else "write to its append-only file"
            why = f"refuses writes, because its last {failed} failed (MISCONF)"
        told = each.role == "replica" or (each.no_write.startswith("OOM") and _is_full(each))
        if why and not told:
            yield Finding(
                Severity.ERROR,
                "writes",
                (each.node,),
                f"{each.node} {why}.",
                "It casts no vote.",
                advice,
            )


def _is_full(facts: NodeFacts) -> bool:
    return bool(facts.maxmemory) and facts.policy in ("", "noeviction") and facts.used_memory >= (facts.maxmemory or 0)


def _clocks(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    return clock_findings(facts)


def _max_leases(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    counted: Counter[float] = Counter()
    for each in facts:
        for max_lease, clients in each.max_leases.items():
            counted[max_lease] = max(counted[max_lease], clients)
    if set(counted) <= {terms.max_lease}:
        return
    said = ", ".join(f"{count} with {length(max_lease)}" for max_lease, count in sorted(counted.items()))
    alone = independent(facts) == 1
    yield Finding(
        Severity.WARNING,  # a server does not say which prefix a client has
        "max-lease",
        (),
        f"The connected clients have these max_lease: {said}; this command was told {length(terms.max_lease)}.",
        "A restarted server votes again after the max_lease of the client that asks: where others have longer leases, "
        "it may grant a lock that is held."
        + (" One server alone has no quarantine, but a second may come." if alone else ""),
        f"Give all clients with the prefix {terms.prefix!r} the same max_lease, the longest; give it to this command "
        "as --max-lease. Clients with another prefix have locks of their own: their max_lease does not matter.",
    )


def _versions(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    known = {each.node: f"{each.product} {each.version}" for each in facts if each.version}
    yield from version_findings(known)
    for each in facts:
        if each.product == "redis" and each.version and _numbers(each.version) < _OLDEST:
            yield Finding(
                Severity.WARNING,
                "version",
                (each.node,),
                f"{each.node} is Redis {each.version}.",
                "asynclock is not tested with it; before Redis 6 it sends no notices, so that waiters poll.",
                "Use Redis 6.2 or later, or Valkey.",
            )


def _permissions(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    for each in facts:
        if each.refused:
            refused = set(each.refused)
            vital = _vital(refused, each)
            yield Finding(
                Severity.ERROR if vital else Severity.WARNING,
                "acl",
                (each.node,),
                f"{each.node} forbids {_listed(each.refused)} to the user {printable(each.user) or 'of the url'}.",
                "Locks cannot be acquired, renewed or released." if vital else _less(refused),
                acl_rule(each.user, terms.prefix, *_more_commands(each)),
            )
        if each.unknown and each.mode != "sentinel":
            unknown = set(each.unknown)
            vital = _vital(unknown, each)
            yield Finding(
                Severity.ERROR if vital else Severity.WARNING,
                "commands",
                (each.node,),
                f"{each.node} does not know {_listed(each.unknown)}.",
                "Operations that need them fail." if vital else _less(unknown),
                "Let the server have these commands under their own names (rename-command)."
                + (" HELLO 3 needs Redis 6 or later, and a proxy that passes it on." if "hello|3" in unknown else ""),
            )


def _unchecked(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    del terms
    for each in facts:
        if each.hidden and each.mode != "sentinel":
            yield Finding(
                Severity.OK,
                "unchecked",
                (each.node,),
                f"{each.node} does not answer {', '.join(each.hidden)}.",
                "Some checks were left out: " + "; ".join(_NEEDS[command] for command in each.hidden) + ".",
                "Run doctor as a user who may send these commands.",
            )


def _vital(commands: set[str], facts: NodeFacts) -> set[str]:
    """Those of the commands without which a server keeps no locks."""
    spared = _NOTICES | _OPERATORS | _MOVES
    return commands - (spared - _CONFIRMS if facts.min_replicas else spared)


def _less(commands: set[str]) -> str:
    """What does not work without these commands, if locks do."""
    if commands & _MOVES:
        return "While a slot is moved to another master, names in it cannot be acquired with fencing=False."
    return "Waiters are not notified, and poll." if commands & _NOTICES else "Some commands of operators fail."


def _more_commands(facts: NodeFacts) -> list[str]:
    """What a user needs beside the rule of every server."""
    more = ["wait"] if facts.min_replicas else []
    if facts.cluster is not None:
        more += ["cluster|slots", "asking"]
        if facts.product == "valkey" or _numbers(facts.version) >= (7, 0):  # an older one refuses a rule with these
            more += ["ssubscribe", "spublish", "pubsub|shardnumsub"]
    return more


def acl_rule(user: str, prefix: str, *more: str) -> str:
    """The command that gives a user what locks need, and `more` commands."""
    keys = f"~{prefix}*" if "{" not in prefix else f"~{prefix}* ~{RESERVED}*"
    who = f"{user} on" if user and user != "default" else "NAME on >PASSWORD"
    return f"ACL SETUSER {who} {keys} &{RESERVED}* {' '.join(f'+{each}' for each in (*ACL_COMMANDS, *more))}"


def _prefix(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    """One finding: the servers of a quorum have the same keys, and those of a cluster share them."""
    found = [each for each in facts if each.foreign]
    if not found:
        return
    foreign: Counter[str] = Counter()
    for each in found:
        foreign.update(each.foreign)
    said = ", ".join(f"{count} {kind}" for kind, count in sorted(foreign.items()))
    only_locks = set(foreign) == {"string with expiry"}
    yield Finding(
        Severity.OK if only_locks else Severity.WARNING,
        "prefix",
        tuple(each.node for each in found),
        f"Of {sum(each.keys for each in found)} keys with the prefix {terms.prefix!r}, {foreign.total()} are not of "
        f"asynclock ({said}), such as {printable(found[0].example[:80])!r}.",
        "They may be locks of another library, which is fine with prefix=''."
        if only_locks
        else "A lock whose name is that of such a key is busy for ever, or a ConfigError.",
        "Give locks a prefix of their own." if terms.prefix == "" else "Give locks a prefix that no other key has.",
    )


def _sentinels(facts: Sequence[NodeFacts], terms: Terms) -> Iterator[Finding]:
    for each in facts:
        for said in _remarks(each, terms):
            severity = Severity.ERROR if said.is_error else Severity.WARNING
            yield Finding(severity, said.check, (each.node,), said.what, said.risk, said.advice)


def _remarks(each: NodeFacts, terms: Terms) -> list[Remark]:
    replicas = each.replicas if each.role == "master" else None
    if each.sentinels:
        to_write, least = each.min_replicas_to_write, each.min_replicas
        return remarks(each.node, each.sentinels, to_write, least, terms.lease, replicas)
    if replicas is not None and replicas < each.min_replicas:
        return [too_few_replicas(each.node, replicas, each.min_replicas)]
    return []


_CHECKS: tuple[Callable[[Sequence[NodeFacts], Terms], Iterator[Finding]], ...] = (
    _reachable, _addresses, _quorum, _role, _sentinels, _restarts, _memory, _writes, _clocks, latency_findings,
    _max_leases, _versions, _permissions, _prefix, _unchecked, cluster_findings,
)  # fmt: skip


def _listed(commands: Sequence[str]) -> str:
    return ", ".join(each.upper().replace("|", " ") for each in commands)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(number for part in version.split(".")[:2] if (number := number_of(part)) is not None)
