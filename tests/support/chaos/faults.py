"""Which faults there are, and when each begins and ends: drawn from a seed, before the run begins. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LINKS = ("request lost", "reply lost", "cut", "reset", "30 % lost")
"""Of the link between one client host and one node. "request lost": no packet of the client reaches the node. "reply
lost": none of the node reaches the client, so requests are carried out. "cut": both. "reset": the node's host answers
each packet with a reset."""

KILLED = "killed"
NODES = ("frozen", KILLED)
LOSSY = LINKS[-1]

_LINK_FAULTS = 0.25  # per second, of each link
_FREEZES, _KILLS = 0.06, 0.025  # per second, of each of several nodes
_FREEZES_OF_ONE, _KILLS_OF_ONE = 0.2, 0.1  # per second, of a single node
_OUTAGES = 0.15  # per second: several nodes fail together, for one client host or for all
_SHORTEST, _LONGEST = 0.1, 2.0  # seconds that a fault lasts, but for one in eight
_VERY_LONG = 7.0  # longer than the lease


class Fault(NamedTuple):
    """`host`: the number of the client host, -1 for a fault of the node itself. Times count from the begin."""

    at: float
    until: float
    kind: str
    host: int
    node: int


def schedule(seed: int, seconds: float, hosts: int, nodes: int) -> list[Fault]:
    """The faults of a run, in order: each kind at least once. The last one ends with it."""
    chance = random.Random(seed)
    first = [*_one_of_each(chance, seconds, hosts, nodes)]
    drawn = [*_of_links(chance, seconds, hosts, nodes), *_of_nodes(chance, seconds, nodes)]
    if nodes > 1:
        drawn += _outages(chance, seconds, hosts, nodes)
    return sorted(_one_at_a_time(each._replace(until=min(each.until, seconds)) for each in first + sorted(drawn)))


def _one_of_each(chance: random.Random, seconds: float, hosts: int, nodes: int) -> Iterator[Fault]:
    """Those of a node have a part of the run each, since a node has one at a time."""
    for kind in LINKS:
        at = chance.uniform(0.0, seconds)
        yield Fault(at, at + _duration(chance), kind, chance.randrange(hosts), chance.randrange(nodes))
    part = seconds / len(NODES)
    for number, kind in enumerate(NODES):
        at = part * (number + chance.uniform(0.0, 0.9))
        yield Fault(at, min(at + _duration(chance), part * (number + 0.99)), kind, -1, chance.randrange(nodes))


def _of_links(chance: random.Random, seconds: float, hosts: int, nodes: int) -> Iterator[Fault]:
    for host in range(hosts):
        for node in range(nodes):
            for at in _moments(chance, _LINK_FAULTS, seconds):
                yield Fault(at, at + _duration(chance), chance.choice(LINKS), host, node)


def _of_nodes(chance: random.Random, seconds: float, nodes: int) -> Iterator[Fault]:
    rates = (_FREEZES, _KILLS) if nodes > 1 else (_FREEZES_OF_ONE, _KILLS_OF_ONE)
    for node in range(nodes):
        for kind, rate in zip(NODES, rates, strict=True):
            for at in _moments(chance, rate, seconds):
                yield Fault(at, at + _duration(chance), kind, -1, node)


def _outages(chance: random.Random, seconds: float, hosts: int, nodes: int) -> Iterator[Fault]:
    """A majority, or all nodes, fail together."""
    for at in _moments(chance, _OUTAGES, seconds):
        until = at + _duration(chance)
        failed = chance.sample(range(nodes), chance.randint(nodes // 2 + 1, nodes))
        kind = chance.choice([*LINKS[:-1], *LINKS[:-1], *NODES])
        cut = [-1] if kind in NODES else chance.choice([[chance.randrange(hosts)], list(range(hosts))])
        yield from (Fault(at, until, kind, host, node) for host in cut for node in failed)


def _moments(chance: random.Random, rate: float, seconds: float) -> Iterator[float]:
    at = chance.expovariate(rate)
    while at < seconds:
        yield at
        at += chance.expovariate(rate)


def _duration(chance: random.Random) -> float:
    return chance.uniform(_LONGEST, _VERY_LONG) if chance.random() < 1 / 8 else chance.uniform(_SHORTEST, _LONGEST)


def _one_at_a_time(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Without those of a node that overlap an earlier one in this list. Faults of a link may overlap."""
    kept: list[Fault] = []
    for each in faults:
        if each.host < 0:
            if any(other.node == each.node and other.at <= each.until and each.at <= other.until for other in kept):
                continue
            kept.append(each)
        yield each
