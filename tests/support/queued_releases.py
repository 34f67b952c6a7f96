"""Releases of a mutex with a queue: states that a row may have, and the op that finds it. Times are in ms from now."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from asynclock.rules.model import Entry, Kind, Op, Queueing, Serve, State, Ticket, Verb
from tests.support.histories import NAME

HOLDER = f"{'a' * 32}||12|web-1"
WAITERS = (
    *(f"{each * 32}||7|web-{each}|task" for each in "bcd"),
    f"{'e' * 32}|",
    f"{'f' * 32}|||no pid",
    f"{'1' * 32}!|8|without notices",
    f"{'2' * 32}||9|with \\ and \N{SNOWMAN}",
    f"{'3' * 32}||10|{'long' * 80}",
    f"{'4' * 32}||11|Infinity",
    "of another program",
)


@dataclass(frozen=True)
class Waiting:
    """A ticket."""

    who: str
    fresh: int
    ends: int
    span: int
    number: int

    def at(self, now: float, place: int) -> Ticket:
        order = int(now * 1_000_000) + place
        return Ticket(order, self.who, self.number, now + self.fresh / 1000, now + self.ends / 1000, self.span)


@dataclass(frozen=True)
class QueuedRelease:
    """A release by HOLDER that finds this state."""

    holds: tuple[tuple[str, int | None], ...]
    queue: tuple[Waiting, ...]
    undone: tuple[tuple[str, int], ...]
    marked: bool
    fence: int | None  # us ahead of now; None: 0
    fence_ends: int | None  # None: never
    token: int  # beside that
    memory: int

    def state(self, now: float) -> State:
        holds = tuple(Entry(each, None if ends is None else now + ends / 1000) for each, ends in self.holds)
        queue = tuple(each.at(now, place) for place, each in enumerate(self.queue))
        fence_ends = math.inf if self.fence_ends is None else now + self.fence_ends / 1000
        undone = tuple(Entry(each, now + ends / 1000) for each, ends in self.undone)
        ends = max((each.ends for each in queue), default=0.0)
        return State(holds, self._fence(now), fence_ends, undone, queue, ends, self.marked)

    def op(self, kind: Kind, now: float) -> Op:
        queueing = Queueing(Serve.GRANT, contended=True)
        token = max(1, self._fence(now) + self.token)
        return Op(Verb.RELEASE, kind, NAME, HOLDER, 10.0, token, self.memory / 1000, queueing=queueing)

    def _fence(self, now: float) -> int:
        return 0 if self.fence is None else int(now * 1_000_000) + self.fence


_LATER = st.sampled_from([5_000, 20_000, 77])
_ENDS = _LATER | st.sampled_from([1, 0, -77])
_CLEAN = st.sampled_from(WAITERS[:5])
_ANY = _CLEAN | st.sampled_from((HOLDER, *WAITERS))
_SPANS = st.sampled_from([1, 16, 64])
_FENCES = st.sampled_from([0, -1_000_000, 7_000_000])
_MINE = st.tuples(st.just(HOLDER), _LATER)


def _tickets(tickets: st.SearchStrategy[Waiting], least: int = 0) -> st.SearchStrategy[tuple[Waiting, ...]]:
    return st.lists(tickets, min_size=least, max_size=4, unique_by=lambda each: each.who).map(tuple)


def _releases(
    holds: st.SearchStrategy[tuple[tuple[str, int | None], ...]],
    queue: st.SearchStrategy[tuple[Waiting, ...]],
    ids: st.SearchStrategy[str],
    fence_ends: st.SearchStrategy[int | None],
    fences: st.SearchStrategy[int | None] = _FENCES,
) -> st.SearchStrategy[QueuedRelease]:
    return st.builds(
        QueuedRelease,
        holds,
        queue,
        st.just(()) | st.lists(st.tuples(ids, _ENDS | st.just(90_000)), max_size=2).map(tuple),
        st.booleans(),
        fences,
        fence_ends,
        st.sampled_from([0, 0, -5, 63]),
        st.sampled_from([60_000, 1_000]),
    )


_NUMBERS = st.integers(1, 3)
_FRESH = st.builds(Waiting, _CLEAN, _LATER, _LATER, _SPANS, _NUMBERS)
_TICKETS = st.builds(Waiting, _ANY, _ENDS, _ENDS, _SPANS | st.just(0), _NUMBERS)
_HOLDS = st.one_of(
    st.tuples(_MINE),
    st.tuples(_MINE, st.tuples(_ANY, _ENDS)),
    st.lists(st.tuples(_ANY, _ENDS | st.none()), max_size=1).map(tuple),
)
_KEPT = st.sampled_from([60_000, 1_000, 0, -77])
COMMON = _releases(st.tuples(_MINE), st.just(()) | _tickets(_FRESH, 1), _CLEAN, _KEPT)
"""Those that need no rules of other cases."""

_RARE_TICKETS = st.one_of(
    st.builds(Waiting, st.sampled_from(WAITERS[5:]), _LATER, _LATER, _SPANS, _NUMBERS),
    st.builds(Waiting, st.just(HOLDER), _LATER, _LATER, _SPANS, _NUMBERS),
    st.builds(Waiting, _CLEAN, st.sampled_from([0, -77]), _LATER, _SPANS, _NUMBERS),
    st.builds(Waiting, _CLEAN, _LATER, _LATER, st.just(0), _NUMBERS),
)
_FRESH_QUEUE = _tickets(_FRESH, 1)
_RARE_QUEUE = (
    st.tuples(_RARE_TICKETS, _FRESH_QUEUE, st.booleans())
    .map(lambda found: (found[0], *found[1]) if found[2] else (*found[1], found[0]))
    .filter(lambda queue: len({each.who for each in queue}) == len(queue))
)
RARE = st.one_of(
    _releases(st.tuples(_MINE), _RARE_QUEUE, _CLEAN, _KEPT),
    _releases(st.tuples(st.tuples(st.just(HOLDER), st.sampled_from([0, -77]))), _FRESH_QUEUE, _CLEAN, _KEPT),
    _releases(st.tuples(_MINE), _FRESH_QUEUE, _CLEAN, _KEPT, st.none()),
    _releases(st.tuples(_MINE), _FRESH_QUEUE, _CLEAN, st.none()),
)
"""Those that differ from these in one thing."""

_ALL = _releases(_HOLDS, _tickets(_TICKETS), _ANY, _KEPT | st.none())
QUEUED_RELEASES = st.sampled_from([COMMON, RARE, RARE, _ALL]).flatmap(lambda some: some)
"""Also any others."""
