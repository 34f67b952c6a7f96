"""Explores all states of a model, the nearest first, and gives the shortest way to a flaw.

A model has a start, the next steps of each state, and a check for wrong states. There are two flaws:

    a wrong state   `wrong(state)` says what is wrong
    a dead end      no steps that must happen lead from this state to a state that is `good`

A step of the protocol must happen. A *whim* may happen or not: a cancellation, a crash, a lost message. A whim does not
lead out of a dead end, because no waiter may depend on it.

For some models there is a third flaw, which is stronger than a dead end:

    a livelock      steps can go round for ever, and are fair: a step that is possible all the time is done at some time
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

DEAD_END = "dead end"
LIVELOCK = "livelock"


class Step(NamedTuple, Generic[S]):
    """A possible next step: the actor `who` does `what`."""

    who: str
    what: str
    after: S
    whim: bool = False


class Model(Protocol[S]):
    """A model of a protocol."""

    def start(self) -> S: ...

    def steps(self, state: S) -> Iterator[Step[S]]: ...

    def wrong(self, state: S) -> str | None:
        """The flaw of this state; None: it has none."""

    def good(self, state: S) -> bool:
        """Whether every client has got what it wanted."""


@dataclass(frozen=True)
class Flaw:
    """A flaw, and the steps that lead to it."""

    what: str
    trace: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        width = max((len(who) for who, _ in self.trace), default=0)
        lines = [f"{i:3}. {who:<{width}}  {what}" for i, (who, what) in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"  => {self.what}"])


@dataclass(frozen=True)
class Report:
    """The result of a walk."""

    states: int
    flaw: Flaw | None


class Link(NamedTuple):
    """How a state was first reached."""

    before: int
    who: str
    what: str


def explore(model: Model[S], limit: int = 500_000, *, cycles: bool = False) -> Report:
    """Visit every state, or stop at the first flaw. Raises OverflowError beyond `limit` states. With `cycles` it looks
    for livelocks, too."""
    states = [model.start()]  # in the order of their distance
    numbers = {states[0]: 0}
    links = [Link(0, "", "")]
    before: list[list[int]] = [[]]  # by steps that must happen
    after_: list[dict[tuple[str, str], int]] = []  # the same steps, with their actors
    for number, state in enumerate(states):  # the list grows during the loop
        if (what := model.wrong(state)) is not None:
            return Report(len(states), Flaw(what, _trace(links, number)))
        after_.append({})
        for who, does, after, whim in model.steps(state):
            next_ = numbers.setdefault(after, len(states))
            if next_ == len(states):
                states.append(after)
                links.append(Link(number, who, does))
                before.append([])
            if not whim:
                before[next_].append(number)
                if cycles:
                    after_[number][who, does] = next_
        if len(states) > limit:
            raise OverflowError(f"more than {limit} states")
    saved = _leads_to([number for number, state in enumerate(states) if model.good(state)], before)
    lost = next((number for number in range(len(states)) if number not in saved), None)
    if lost is not None:
        return Report(len(states), Flaw(DEAD_END, _trace(links, lost)))
    lost = _fair_cycle(after_, before) if cycles else None
    return Report(len(states), None if lost is None else Flaw(LIVELOCK, _trace(links, lost)))


def _fair_cycle(after: list[dict[tuple[str, str], int]], before: list[list[int]]) -> int | None:
    """A state of a cycle that is fair to all. No state of a model that ends comes again after a step that serves
    somebody, so a cycle serves nobody."""
    for cycle in _components(after, before):
        always = set.intersection(*({*after[number]} for number in cycle))
        inside = {step for number in cycle for step, next_ in after[number].items() if next_ in cycle}
        if inside and always <= inside:
            return min(cycle)
    return None


def _components(after: list[dict[tuple[str, str], int]], before: list[list[int]]) -> Iterator[set[int]]:
    """The sets of states of which each leads to each other (Kosaraju and Sharir)."""
    ended, seen = list[int](), set[int]()
    for start in range(len(after)):
        todo = [(start, False)]
        while todo:
            number, is_end = todo.pop()
            if is_end:
                ended.append(number)
            elif number not in seen:
                seen.add(number)
                todo += [(number, True), *((next_, False) for next_ in after[number].values())]
    while ended:
        if (start := ended.pop()) in seen:
            found, left = {start}, [start]
            while left:
                new = {each for each in before[left.pop()] if each in seen} - found
                found |= new
                left += new
            seen -= found
            yield found


def _leads_to(ends: list[int], before: list[list[int]]) -> set[int]:
    """All states from which one of `ends` can be reached."""
    found, todo = set(ends), list(ends)
    while todo:
        for number in before[todo.pop()]:
            if number not in found:
                found.add(number)
                todo.append(number)
    return found


def _trace(links: list[Link], number: int) -> tuple[tuple[str, str], ...]:
    """The steps from the start to this state."""
    steps = []
    while number:
        number, who, what = links[number]
        steps.append((who, what))
    return tuple(reversed(steps))
