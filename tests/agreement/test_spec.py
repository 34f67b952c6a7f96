"""The protocol's models hold, and each of their rules is needed: without it a walk finds the failure that the rule
prevents."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from simulation.ablations import without
from spec import __main__ as command
from spec import one_node, walks
from spec.explorer import DEAD_END, LIVELOCK, Report, Step, explore
from spec.machine import NO_PROGRESS

MODULES = command.MODULES

SCENES = [pytest.param(each, scene, id=f"{_name}-{scene}".replace(" ", "-"))
          for each in MODULES for _name in [each.__name__.removeprefix("spec.")] for scene in each.SCENES]  # fmt: skip
RULES = [pytest.param(each, rule, id=rule.name) for each in MODULES for rule in each.Rule]


def walk(model: Any, cycles: bool = False) -> Report:
    """Without garbage collections: a walk keeps a million tuples and makes no cycles, so they would find nothing."""
    gc.disable()
    try:
        return explore(model, cycles=cycles)
    finally:
        gc.enable()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("module", "scene"), SCENES)
def test_model_holds(module: ModuleType, scene: str) -> None:
    """In whatever order the events come."""
    report = walk(module.scene(scene), getattr(module, "CYCLES", False))
    assert report.flaw is None, f"\n{report.flaw}"


@pytest.mark.parametrize(("module", "rule"), RULES)
def test_rule_is_needed(module: ModuleType, rule: Any) -> None:
    """Without it the walk fails, with the failure that its module names."""
    scene, what = module.BREAKS[rule]
    flaw = walk(module.scene(scene, rule)).flaw
    assert flaw is not None
    assert flaw.what == what, f"\n{flaw}"


def test_all_rules_are_listed() -> None:
    """The table of spec/README.md names every switch, and has a row for each rule, and no other."""
    readme = (Path(one_node.__file__).parent / "README.md").read_text()
    listed = [line.split("|")[3].strip(" `") for line in readme.splitlines() if line.startswith("| ") and "`" in line]
    assert sorted(listed) == sorted(rule.name for module in MODULES for rule in module.Rule)


def test_all_scenes_can_be_explored(capsys: pytest.CaptureFixture[str]) -> None:
    """By one command, also some of them; it names those that there are."""
    assert command.main(["split", "quorum:held"]) == 0
    said = capsys.readouterr().out
    assert {line.rpartition(":")[0] for line in said.splitlines()} == {
        *(place for place in command.places() if place.startswith("split:")),
        "quorum:held",
    }
    with pytest.raises(SystemExit):
        command.main(["machine:nowhere"])
    assert "machine:reentrant" in capsys.readouterr().err


# -- walks drawn at random ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, _ in walks.scenes()])
def test_a_walk_finds_nothing(name: str) -> None:
    """Through each scene. `make explore` draws many more of them."""
    flaw = walks.walk(dict(walks.scenes())[name], 0).flaw
    assert flaw is None, f"\n{flaw}"


def test_a_walk_is_repeated_by_its_seed() -> None:
    """Step by step: also one that finds a flaw."""
    scene = dict(walks.scenes())["mutex, cut, 1"]
    with without("LEAVE"):
        found = [walks.walk(scene, 0) for _ in range(2)]
    assert found[0].flaw is not None
    assert found[0] == found[1]


WALKS = {
    "NUMBERED_VALIDITY": ("reentrant, calm, 1", 4, "a token did not rise"),
    "OWN_ID_MOVES_END": ("read-write, gives up, 1", 1, "no majority has it"),
    "FREER_SERVES": ("mutex, calm, 1", 0, "a free name"),
    "ONLY_FREER_SERVES": ("mutex, forgets, 1", 0, "a token did not rise"),
    "LEAVING_TAKES_TICKET": ("mutex, calm, 1", 0, "an orphan"),
    "ONLY_OWN_HOLD": ("mutex, calm, 1", 0, "a token did not rise"),
    "TOMBSTONE": ("mutex, closes, 1", 0, "an orphan"),
    "NEVER_AFTER_UNDO": ("reentrant, forgets, 3", 0, "an orphan"),
    "UNDO_FIRST": ("plain, gives up, 1", 0, "an orphan"),
    "UNDO": ("plain, gives up, 1", 0, "an orphan"),
    "ORDER_KEY": ("fair, calm, 3", 0, "no progress"),
    "TICKET_NEEDS_MAJORITY": ("plain, closes, 1", 0, "an orphan"),
    "STAYS_IN_SPAN": ("local, calm, 1", 0, "a token did not rise"),
    "LEAVE": ("mutex, gives up, 1", 0, "an orphan"),
    "RAISE": ("mutex, restart, 3", 0, "no progress"),
    "WITHDRAW": ("mutex, calm, 1", 0, "something is left"),
    "OTHERS_STAY": ("mutex, calm, 1", 0, "a token did not rise"),
    "ADOPT_ONCE": ("mutex, gives up, 1", 0, "an orphan"),
    "WAKING_UNDO": ("mutex, gives up, 3", 83, "a free name"),
    "IN_ORDER": ("fair, calm, 1", 0, "overtaken"),
    "OWN_ORDER": ("fair, gives up, 1", 1, "a place changed"),
    "BATCHES": ("read-write, calm, 1", 0, "a free place"),
    "PLACES": ("multi in order, calm, 1", 2, "no progress"),
    "LEAVING_SERVES": ("multi of kinds, calm, 1", 0, "a free place"),
    "ONE_TOKEN": ("multi in order, calm, 1", 0, "a token did not rise"),
}
"""For each rule: a scene and a seed that fail without it, and the flaw."""


@pytest.mark.parametrize("rule", WALKS)
def test_a_walk_finds_a_missing_rule(rule: str) -> None:
    """The rule is taken out of the shipped code."""
    name, seed, what = WALKS[rule]
    scene = dict(walks.scenes())[name]
    with without(rule):
        flaw = walks.walk(scene, seed).flaw
    assert flaw is not None
    assert flaw.what == what, f"\n{flaw}"
    assert walks.walk(scene, seed).flaw is None


def test_a_walk_without_timers_is_judged_to_its_end() -> None:
    """Waiters that keep each other out for ever wait for a timer, too. That no more may fire is no excuse for them."""
    scene = dict(walks.scenes())["multi in order, calm, 1"]._replace(timers=0)
    with without("PLACES"):
        flaw = walks.walk(scene, 2).flaw
    assert flaw is not None
    assert flaw.what == NO_PROGRESS, f"\n{flaw}"
    assert walks.walk(scene, 2).flaw is None


# -- the explorer ------------------------------------------------------------------------------------------------------


class Stairs:
    """Up by one or two steps, from 0 to `top`; a whim leads home from everywhere."""

    def __init__(self, top: int, bad: int | None = None, missing: int | None = None) -> None:
        self.top, self.bad, self.missing = top, bad, missing

    def start(self) -> int:
        return 0

    def good(self, stair: int) -> bool:
        return stair == self.top

    def wrong(self, stair: int) -> str | None:
        return "stumbles" if stair == self.bad else None

    def steps(self, stair: int) -> Iterator[Step[int]]:
        for by in (1, 2):
            if stair != self.missing and stair + by <= self.top:
                yield Step("walker", f"climbs {by}", stair + by)
        yield Step("walker", "flies home", self.top, whim=True)


def test_explorer_finds_nothing() -> None:
    """It sees every state once."""
    report = explore(Stairs(7))
    assert (report.states, report.flaw) == (8, None)


def test_explorer_reports_the_shortest_way() -> None:
    """One line for each step: the actor and the action."""
    assert str(explore(Stairs(7, bad=3)).flaw) == (
        "  1. walker  climbs 1\n"
        "  2. walker  climbs 2\n"
        "  => stumbles"
    )  # fmt: skip


def test_explorer_trusts_no_whim() -> None:
    """Where only a whim leads on is a dead end."""
    flaw = explore(Stairs(7, missing=6)).flaw
    assert flaw is not None
    assert (flaw.what, len(flaw.trace)) == (DEAD_END, 3)


class Turns:
    """Between 0 and 1, for ever, but for a way out to 2: from 0, or from both."""

    def __init__(self, exits: tuple[int, ...]) -> None:
        self.exits = exits

    def start(self) -> int:
        return 0

    def good(self, place: int) -> bool:
        return place == 2

    def wrong(self, place: int) -> None: ...

    def steps(self, place: int) -> Iterator[Step[int]]:
        if place < 2:
            yield Step("walker", "turns", 1 - place)
        if place in self.exits:
            yield Step("walker", "leaves", 2)


@pytest.mark.parametrize(("exits", "flaw"), [((0,), LIVELOCK), ((0, 1), None), ((), DEAD_END)])
def test_explorer_finds_a_livelock(exits: tuple[int, ...], flaw: str | None) -> None:
    """A way out that is not always there may be missed for ever. One that is always there is taken at some time."""
    found = explore(Turns(exits), cycles=True).flaw
    assert (found and found.what) == flaw


def test_explorer_raises_where_a_model_is_too_large() -> None:
    """A model that is too large is not taken for one that holds."""
    with pytest.raises(OverflowError, match="more than 5 states"):
        explore(Stairs(7), limit=5)
