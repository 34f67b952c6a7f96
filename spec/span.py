"""Fencing tokens over three nodes, each with a counter F of its own. The counters differ, lag, and are lost.

A hold comes with a span of tokens, for the tenures to which one process passes it on. `quorum.py` checks that only one
client holds at a time. Here an attempt is a few steps in a row, and the model varies which nodes it reaches, which
client clock it carries, and what a node still knows afterwards. The nodes are the shipped `decide`, always asked at
time 0. The clients' clocks count on from there, in a unit in which no client can try more often than a span is long.

The flaw:
    a token did not rise   the token of a tenure is not above the tokens of all tenures before it
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from itertools import combinations
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.decide import decide
from asynclock.rules.model import Op, Queueing, State, Verb
from asynclock.rules.mutex import MUTEX
from spec.explorer import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 3
MAJORITY = NODES // 2 + 1
SPAN = 2
SKEW = 3  # the difference between two clients' clocks
LEASE = 6  # a restarted node casts no vote for this time; it is longer than SKEW


class Rule(StrEnum):
    """The rules that can be taken out."""

    WITNESSES = "a hold counts once a majority of nodes have F at its token or above while they hold it"
    WHOLE_SPAN = "... at the last token of its span"
    STAYS_IN_SPAN = "no tenure leaves its span"
    CLOCK_SEEDS = "a new hold's token is not below its client's clock"


BREAKS = dict.fromkeys(Rule, ("span", "a token did not rise"))
"""For each rule: the scene that fails without it, and the flaw."""

SCENES = ("span",)


class World(NamedTuple):
    """The whole state. The nodes are interchangeable, so they are kept sorted."""

    nodes: tuple[State, ...] = (State(),) * NODES
    time: int = 0
    tries: int = 4
    rewinds: int = 1
    away: int = 0  # the number of restarted nodes that cast no vote; they come first
    fence: int = 0  # the token of the tenure; 0: there is none
    last: int = 0  # the last token of its span
    top: int = 0  # the highest token of any tenure
    flaw: str = ""


class Span:
    """The model."""

    def __init__(self, without: Rule | None = None) -> None:
        self.without = without

    def start(self) -> World:
        return World()

    def good(self, world: World) -> bool:
        return not world.tries and not world.fence

    def wrong(self, world: World) -> str | None:
        return world.flaw or None

    def steps(self, world: World) -> Iterator[Step[World]]:
        if world.fence:
            yield from self._tenure(world)
        elif world.tries:
            yield from self._tries(world._replace(tries=world.tries - 1, time=world.time + SPAN))
        if world.rewinds:
            for n in range(NODES):
                yield from self._rewound(world, n)
        if world.away and not world.fence:
            after = world._replace(away=0, time=world.time + LEASE, nodes=_sorted(world.nodes))
            yield Step("node", "has waited for long enough, and votes again", after)

    def _tries(self, world: World) -> Iterator[Step[World]]:
        """An attempt. It reaches some of the nodes that vote."""
        up = range(world.away, NODES)
        for clock in (world.time, world.time + SKEW):
            for count in range(1, len(up) + 1):
                for reached in combinations(up, count):
                    seed = 0 if self.without is Rule.CLOCK_SEEDS else clock
                    nodes = _asked(world.nodes, reached, Verb.ACQUIRE, seed)
                    did = f"tries with the clock at {clock}; granted with F = {_fences(nodes, reached)}"
                    yield from self._granted(world, nodes, reached, did)

    def _granted(self, world: World, nodes: Nodes, reached: tuple[int, ...], did: str) -> Iterator[Step[World]]:
        """It becomes a lease if a majority are witnesses. If not, the client raises F at some of them."""
        last = max(nodes[n].fence for n in reached)
        token = last - SPAN + 1 if self.without is Rule.WHOLE_SPAN else last
        if len(reached) < MAJORITY:
            given_back = _asked(nodes, reached, Verb.RELEASE, 0)
            yield Step("client", f"{did}: no majority, undone", _with(world, given_back))
        elif self.without is Rule.WITNESSES or _witnesses(nodes, reached, token) >= MAJORITY:
            yield Step("client", f"{did}: holds", _begun(world, nodes, last))
        else:
            for raising in (some for count in range(len(reached) + 1) for some in combinations(reached, count)):
                raised = _asked(nodes, raising, Verb.EXTEND, token)
                if _witnesses(raised, raising, token) >= MAJORITY:
                    yield Step(
                        "client", f"{did}: raises F at {len(raising)} of them, holds", _begun(world, raised, last)
                    )
                else:
                    given_back = _asked(raised, reached, Verb.RELEASE, 0)
                    text = f"{did}: raises F at {len(raising)} of them, not enough, undone"
                    yield Step("client", text, _with(world, given_back))

    def _tenure(self, world: World) -> Iterator[Step[World]]:
        if world.fence < world.last + (self.without is Rule.STAYS_IN_SPAN):
            yield Step("holder", f"passes it on, with fence {world.fence + 1}", _tenured(world, world.fence + 1))
        holding = tuple(n for n in range(NODES) if world.nodes[n].holds)
        over = world._replace(fence=0, last=0)
        released = _asked(world.nodes, holding, Verb.RELEASE, world.last)
        yield Step("holder", "releases", _with(over, released))
        lapsed = _asked(world.nodes, holding, Verb.RELEASE, 0)  # the same as an expiry: no command carries the token
        yield Step("holder", "lets its lease run out", _with(over, lapsed), whim=True)

    def _rewound(self, world: World, n: int) -> Iterator[Step[World]]:
        """A node restarts with an older dump, or with none."""
        others = world.nodes[:n] + world.nodes[n + 1 :]
        for fence in {0, world.nodes[n].fence // 2}:
            nodes = (State(fence=fence, fence_ends=inf if fence else 0.0), *others)
            did = f"restarts: its F goes from {world.nodes[n].fence} to {fence}"
            yield Step("node", did, world._replace(nodes=nodes, rewinds=world.rewinds - 1, away=1), whim=True)


Nodes = tuple[State, ...]


@cache
def _decided(state: State, verb: Verb, fence: int) -> State:
    lease = 0 if verb is Verb.EXTEND else LEASE
    op = Op(verb, MUTEX, "name", "A", lease, fence, inf, queueing=Queueing(span=SPAN))
    return decide(MUTEX, state, op, 0).state


def _asked(nodes: Nodes, reached: tuple[int, ...], verb: Verb, fence: int) -> Nodes:
    return tuple(_decided(node, verb, fence) if n in reached else node for n, node in enumerate(nodes))


def _witnesses(nodes: Nodes, reached: tuple[int, ...], token: int) -> int:
    return sum(nodes[n].fence >= token for n in reached)


def _fences(nodes: Nodes, reached: tuple[int, ...]) -> str:
    return ", ".join(str(nodes[n].fence) for n in reached)


def _begun(world: World, nodes: Nodes, last: int) -> World:
    return _tenured(_with(world, nodes)._replace(last=last), last - SPAN + 1)


def _tenured(world: World, fence: int) -> World:
    flaw = "" if fence > world.top else "a token did not rise"
    return world._replace(fence=fence, top=max(fence, world.top), flaw=flaw)


def _with(world: World, nodes: Nodes) -> World:
    return world._replace(nodes=nodes[: world.away] + _sorted(nodes[world.away :]))


def _sorted(nodes: Nodes) -> Nodes:
    return tuple(sorted(nodes, key=lambda node: (node.fence, node.holds)))


def scene(name: str, without: Rule | None = None) -> Span:
    del name
    return Span(without)
