"""Two clients in step: they always try at the same time, and each is nearest to another of the two nodes that are up.

Only the pause that each client draws is random. In `quorum.py` the order of events is open, so some order always leads
out of a symmetry, and the explorer cannot see that the rule which breaks it is missing. The shipped `decide` carries
out the attempts.

The flaw:
    dead end   the clients split the votes for ever
"""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.decide import decide
from asynclock.rules.model import Op, State, Verb, Verdict
from asynclock.rules.mutex import MUTEX
from spec.explorer import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSES = (0, 1)
MAJORITY = 2  # of three nodes, of which one is down


class Rule(StrEnum):
    """The rule that can be taken out."""

    BACK_OFF = "after split votes the clients try again after a random pause"


BREAKS = {Rule.BACK_OFF: ("in step", "dead end")}
"""The scene that fails without it, and the flaw."""

SCENES = ("in step",)


class World(NamedTuple):
    """How long each client waits until it tries again, and which client has the name."""

    pauses: tuple[int, int] = (0, 0)
    holder: str = ""


class Split:
    """The model."""

    def __init__(self, without: Rule | None = None) -> None:
        self.pauses = (0,) if without is Rule.BACK_OFF else PAUSES

    def start(self) -> World:
        return World()

    def good(self, world: World) -> bool:
        return bool(world.holder)

    def wrong(self, world: World) -> str | None:
        del world
        return None

    def steps(self, world: World) -> Iterator[Step[World]]:
        if world.holder:
            return
        now = min(world.pauses)
        trying = [who for who, pause in zip("AB", world.pauses, strict=True) if pause == now]
        winner = next((who for who, votes in _votes(trying).items() if votes >= MAJORITY), "")
        who = " and ".join(trying)
        if winner:
            yield Step(who, "tries and holds", World(holder=winner))
            return
        for pauses in product(self.pauses, repeat=2):
            did = f"try, split the votes, undo them, and pause for {pauses[0]} and {pauses[1]}"
            yield Step(who, did, World((pauses[0], pauses[1])))


def _votes(trying: list[str]) -> dict[str, int]:
    """How many of the two nodes grant each client: node 0 reads A's command first, node 1 reads B's first."""
    votes = dict.fromkeys(trying, 0)
    for order in (sorted(trying), sorted(trying, reverse=True)):
        node = State()
        for who in order:
            reply = decide(MUTEX, node, Op(Verb.ACQUIRE, MUTEX, "name", who, 1, 0, inf), 0)
            node = reply.state
            votes[who] += reply.verdict is Verdict.YES
    return votes


def scene(name: str, without: Rule | None = None) -> Split:
    del name
    return Split(without)
