"""Whether a history of concurrent calls could have happened one after the other.

A history is a list of `Call`s: what was asked and answered, when it began, and when the answer came. It is
linearizable if there is an order of the calls in which each one takes effect at one moment between its begin and its
end, and in which a `Spec` allows each of them. `sequential.py` has the specs of the locks.

The search is that of Wing and Gong (Testing and Verifying Concurrent Objects, 1993) with the pruning of Lowe (Testing
for Linearizability, 2017): two ways that have taken the same calls to the same state go on in the same way, so only the
first is followed. Names are independent of each other, so each one is checked by itself (Herlihy and Wing, 1990,
theorem 1); the caller splits the history.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

MOST = 2_000_000
"""The number of steps after which a search gives up: it has found neither an order, nor that there is none."""


class Call(NamedTuple):
    """One call, or one part of a call that takes effect at a moment of its own."""

    who: str
    what: str  # what a Spec knows, for example "acquire"
    value: int = 0  # what was answered: a fencing token
    began: float = 0.0
    ended: float = math.inf  # math.inf: no answer came
    certain: bool = True  # False: it may have had no effect, so an order may leave it out; it has no end then

    def __str__(self) -> str:
        end = "open" if self.ended == math.inf else f"{self.ended:.6f}"
        value = f" {self.value}" if self.value else ""
        return f"{self.began:.6f} .. {end}  {self.who} {self.what}{value}" + ("" if self.certain else " (or not)")


class Spec(Protocol[S]):
    """What may happen one after the other."""

    def start(self) -> S: ...

    def after(self, state: S, call: Call) -> S | None:
        """The next state; None: the call cannot happen in this state."""


@dataclass(frozen=True)
class Violation:
    """No order of the calls is allowed."""

    done: tuple[Call, ...]  # the longest order that was found
    state: str  # the state after it
    stuck: tuple[Call, ...]  # the calls that were under way then, none of which may be the next one

    def __str__(self) -> str:
        last = self.done[-12:]
        lines = [f"no order of the calls is allowed; this one goes farthest ({len(self.done)} calls, the last ones):"]
        lines += [f"    {each}" for each in last]
        lines += [f"  then the state is {self.state}, and none of these can be next:"]
        lines += [f"    {each}" for each in self.stuck]
        return "\n".join(lines)


class Undecided(Exception):
    """The search took more than MOST steps."""


def check(spec: Spec[S], history: Iterable[Call], most: int = MOST) -> Violation | None:
    """None: the history is linearizable. Raises Undecided."""
    calls = (call if call.certain else call._replace(ended=math.inf) for call in history)
    search = _Search(spec, sorted(calls, key=lambda call: call.began))
    while not search.is_done:
        if search.steps > most:
            raise Undecided(f"{len(search.calls)} calls took more than {most} steps: check a shorter history")
        if not search.advance() and not search.go_back():
            return search.violation()
    return None


class _Search(Generic[S]):
    """A walk through the orders, the earliest calls first, with a way back."""

    def __init__(self, spec: Spec[S], calls: list[Call]) -> None:
        self.spec = spec
        self.calls = calls
        self.steps = 0
        self._state = spec.start()
        self._taken = 0  # a bit for each call
        self._first = 0  # all calls before this one are taken
        self._left = sum(call.certain for call in calls)  # so many must still be taken
        self._path: list[tuple[int, S]] = []  # the calls taken, each with the state before it
        self._next = 0  # the first call to try here
        self._seen = {(0, self._state)}
        self._farthest: tuple[list[int], S, int] = ([], self._state, 0)

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def advance(self) -> bool:
        """Take the next call that may be next. Whether there was one."""
        last = self._last_begin()
        for number in range(max(self._next, self._first), len(self.calls)):
            call = self.calls[number]
            if call.began > last:
                break
            if self._taken >> number & 1:
                continue
            self.steps += 1
            state = self.spec.after(self._state, call)
            if state is not None and (after := (self._taken | 1 << number, state)) not in self._seen:
                self._seen.add(after)
                self._take(number, state)
                return True
        return False

    def _last_begin(self) -> float:
        """A call that begins after another one has ended cannot be before that one."""
        ends = math.inf
        for number in range(self._first, len(self.calls)):
            call = self.calls[number]
            if call.began > ends:
                break
            if not self._taken >> number & 1 and call.certain:
                ends = min(ends, call.ended)
        return ends

    def _take(self, number: int, state: S) -> None:
        self._path.append((number, self._state))
        self._state, self._taken, self._next = state, self._taken | 1 << number, 0
        self._left -= self.calls[number].certain
        while self._taken >> self._first & 1:
            self._first += 1
        if len(self._path) > len(self._farthest[0]):
            self._farthest = [each for each, _ in self._path], state, self._taken

    def go_back(self) -> bool:
        """Undo the last call, and try the ones after it. Whether there was one."""
        if not self._path:
            return False
        number, self._state = self._path.pop()
        self._taken &= ~(1 << number)
        self._left += self.calls[number].certain
        self._first = min(self._first, number)
        self._next = number + 1
        return True

    def violation(self) -> Violation:
        path, state, taken = self._farthest
        rest = [call for number, call in enumerate(self.calls) if not taken >> number & 1]
        ends = min((call.ended for call in rest if call.certain), default=math.inf)
        stuck = tuple(call for call in rest if call.began <= ends)
        return Violation(tuple(self.calls[number] for number in path), repr(state), stuck)
