"""The picture of a state: the same for the same state, and another one for another state."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest

from asynclock.protocol.fingerprint import fingerprint
from asynclock.quorum.ballot import Ballot
from asynclock.rules.model import Op, Verb
from asynclock.rules.mutex import MUTEX
from spec.machine import Scene, World

STEPS = (
    ("a0", "acquires"), ("b1", "acquires"), ("a", "node 0 reads"), ("b", "node 0 reads"), ("b", "reads of node 0"),
)  # fmt: skip


def world(*steps: tuple[str, str]) -> World:
    made = World(Scene(cuts=1, timers=1))
    for who, what in steps:
        made.do(who, what)
    return made


def test_the_same_steps_give_the_same_picture() -> None:
    """Although each object has another address; and each step another one."""
    pictures = [world(*STEPS[:number]).fingerprint() for number in range(len(STEPS) + 1)]
    assert pictures == [world(*STEPS[:number]).fingerprint() for number in range(len(STEPS) + 1)]
    assert len({*pictures}) == len(pictures)


def test_steps_that_do_not_meet_give_one_state() -> None:
    """In either order: so an explorer visits it once."""
    one, two = STEPS[2:4]
    before = STEPS[:2]
    meet = world(*before, one, two).fingerprint(), world(*before, two, one).fingerprint()
    assert meet[0] != meet[1]  # the node decides in the order in which it reads
    reads = ("a", "reads of node 0"), ("b", "reads of node 0")
    assert world(*STEPS[:4], *reads).fingerprint() == world(*STEPS[:4], *reversed(reads)).fingerprint()


class Pair:
    def __init__(self, one: object, two: object) -> None:
        self.one = one
        self.two = two


def asked(id: str) -> Ballot:
    return Ballot(Op(Verb.ACQUIRE, MUTEX, "x", id, 9.0), 1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Pair([], []), Pair(*[[]] * 2)),  # two objects, or one
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # the order in which they came
        (OrderedDict(a=1), OrderedDict(a=2)),
        (partial(print, 1), partial(print, 2)),
        (partial(print, 1), partial(print, end=1)),
        ([Pair(1, 2).__init__], [Pair(1, 3).__init__]),  # type: ignore[misc]
        ([lambda: 1], [lambda: 2, 2]),
        (ValueError("a"), ValueError("b")),
        (1.0, 1.1),
        (Verb.ACQUIRE, Verb.RELEASE),
        (asked("1"), asked("2")),
    ],
)
def test_what_counts(one: Any, other: Any) -> None:
    """Values, identity, order, and what a function has bound."""
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


def test_what_does_not_count() -> None:
    """Roundings, and what is outside."""
    assert fingerprint([0.1 + 0.2]) == fingerprint([0.3])
    inner, outer = Pair(1, 2), Pair(1, 3)
    assert fingerprint([inner], [inner]) == fingerprint([outer], [outer])


def test_a_set_has_no_picture() -> None:
    """Its order may differ from run to run."""
    with pytest.raises(TypeError, match="the order of a set"):
        fingerprint({1, 2})
