"""What `asynclock doctor` asks the sentinels of a server's url, and what their answers mean."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError
from asynclock._untrusted import number_of
from asynclock.cli.doctor.severity import advice_for
from asynclock.stores.redis.remedies import remedy_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock.stores.redis.sentinel.masters import Endpoint, Sentinels


_ELECTION = 2.0  # seconds from the detection to the new master


@dataclass(slots=True)
class SentinelFacts:
    """One sentinel of the url. 0: unknown."""

    sentinel: str
    error: str = ""
    """Why it does not answer; "" if it does."""
    misconfigured: bool = False
    """Only the user can solve that."""
    known: int = 0
    """The sentinels that it knows, with itself."""
    quorum: int = 0
    """So many sentinels must take the master for dead before a failover begins."""
    replicas: int = 0
    """Those that it knows, also dead ones."""
    down_after: float = 0.0
    """Seconds of silence after which it takes the master for dead."""
    epoch: int = 0
    """The config epoch: the number of the last failover."""


async def ask_sentinels(sentinels: Sentinels) -> tuple[SentinelFacts, ...]:
    """Ask all of them. Never raises for what they say or do."""
    return tuple(await asyncio.gather(*(_ask(sentinels, each) for each in sentinels.endpoints)))


async def _ask(sentinels: Sentinels, endpoint: Endpoint) -> SentinelFacts:
    facts = SentinelFacts(endpoint.label)
    try:
        said = await sentinels.state(endpoint)
    except Exception as error:  # whatever it is, the report shows it
        facts.error, facts.misconfigured = str(error) or repr(error), isinstance(error, ConfigError)
        return facts
    facts.known = 1 + _number(said, "num-other-sentinels")
    facts.quorum = _number(said, "quorum")
    facts.replicas = _number(said, "num-slaves")
    facts.down_after = _number(said, "down-after-milliseconds") / 1000
    facts.epoch = _number(said, "config-epoch")
    return facts


def _number(said: Mapping[str, str], field: str) -> int:
    return number_of(said.get(field, "")) or 0


@dataclass(frozen=True, slots=True)
class Remark:
    """A finding about a Sentinel deployment."""

    check: str
    is_error: bool
    what: str
    risk: str
    advice: str


def remarks(
    node: str,
    found: Sequence[SentinelFacts],
    min_replicas_to_write: int | None,
    min_replicas: int,
    lease: float,
    connected: int | None = None,
) -> list[Remark]:
    """What is wrong with a deployment. `connected`: the replicas that the master has now; None: it does not tell. Then
    those that the sentinels know count. Pure."""
    answered = [each for each in found if not each.error]
    said = [_silent(each) for each in found if each.error]
    if answered:
        known, quorum = max(each.known for each in answered), max(each.quorum for each in answered)
        down_after = max(each.down_after for each in answered)
        replicas = max(each.replicas for each in answered) if connected is None else connected
        said += _sentinels(node, known, quorum) + _replicas(node, replicas, min_replicas)
        said += _down_after(node, down_after, lease)
    if min_replicas_to_write == 0 and not min_replicas:
        said.append(
            Remark(
                "min-replicas-to-write",
                False,
                f"The master of {node} accepts writes without a replica (min-replicas-to-write 0).",
                "An old master that is cut off from the sentinels goes on granting locks, which the new master grants "
                "to others.",
                "CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 10 on all servers, or give the clients "
                "min_replicas=1.",
            )
        )
    return said


def _silent(sentinel: SentinelFacts) -> Remark:
    return Remark(
        "sentinel",
        False,
        f"The sentinel {sentinel.sentinel} does not name the master: {sentinel.error}.",
        "Clients learn of a failover from the others. A failover needs a majority of the sentinels.",
        advice_for(remedy_in(sentinel.error), misconfigured=sentinel.misconfigured),
    )


def _sentinels(node: str, known: int, quorum: int) -> list[Remark]:
    said = []
    if known < 3:
        said.append(
            Remark(
                "sentinels",
                False,
                f"{node} has {known} sentinel{'s' * (known > 1)}.",
                "If one fails, the others are no majority, and there is no failover.",
                "Run three or five sentinels on different machines.",
            )
        )
    if quorum > known:
        said.append(
            Remark(
                "sentinel-quorum",
                True,
                f"The quorum of {node} is {quorum}, and there are {known} sentinels.",
                "There is never a failover.",
                f"SENTINEL SET <name> quorum {known // 2 + 1} on each sentinel.",
            )
        )
    elif known > 1 and quorum <= known // 2:
        said.append(
            Remark(
                "sentinel-quorum",
                False,
                f"The quorum of {node} is {quorum} of {known} sentinels.",
                "A minority that is cut off takes a healthy master for dead. Each failover may lose locks.",
                f"SENTINEL SET <name> quorum {known // 2 + 1} on each sentinel.",
            )
        )
    return said


def _replicas(node: str, replicas: int, min_replicas: int) -> list[Remark]:
    if replicas < min_replicas:
        return [too_few_replicas(f"The master of {node}", replicas, min_replicas)]
    if not replicas:
        return [
            Remark(
                "replicas",
                False,
                f"The master of {node} has no replica.",
                "If it fails, there is no failover.",
                "Run two or more replicas.",
            )
        ]
    return []


def too_few_replicas(master: str, replicas: int, min_replicas: int) -> Remark:
    """The remark about a master that cannot confirm a hold."""
    return Remark(
        "replicas",
        True,
        f"{master} has fewer replicas ({replicas}) than min_replicas ({min_replicas}).",
        "No lock can be acquired.",
        "Start the replicas, run more of them, or give the clients a lower min_replicas.",
    )


def _down_after(node: str, down_after: float, lease: float) -> list[Remark]:
    """A renewal leaves two thirds of the lease. The election of a new master takes a second or two."""
    if down_after + _ELECTION <= lease * 2 / 3:
        return []
    return [
        Remark(
            "down-after",
            False,
            f"The sentinels of {node} take a master for dead after {down_after:g} s; the lease is {lease:g} s.",
            "A failover takes longer than a lease lasts without a renewal, so it ends the leases that are held.",
            f"Use leases of {(down_after + _ELECTION) * 1.5:.0f} s or more, or lower down-after-milliseconds.",
        )
    ]
