"""Steps of histories, and random histories.

A step is described relative to the state that it meets ("the present holder", "a token 3 above F", "in its old place"),
so that a history shrinks, and plays on a mutant as well."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from hypothesis import strategies as st

from asynclock.rules.model import (
    ANY,
    DONE,
    ID_LENGTH,
    MARK,
    MARKS_FREE,
    RESTING,
    TAG_LENGTH,
    Entry,
    Kind,
    Op,
    Queueing,
    Serve,
    State,
    Ticket,
    Verb,
)
from asynclock.stores.redis.keys import keys

NAME = "agreed"

ELDER, YOUNGER, THIRD, FOURTH, MUTE = range(5)
"""Indices of IDS. FOURTH is of ELDER's client, MUTE of one that does not listen."""

IDS = tuple(
    f"{tag * TAG_LENGTH}{random * (ID_LENGTH - TAG_LENGTH)}{bar}17|host:1|"
    for tag, random, bar in [("a", "1", "|"), ("b", "2", "|"), ("c", "3", "|"), ("a", "4", "|"), ("e", "5", "!")]
)
TAGS = tuple(each[:TAG_LENGTH] for each in IDS)

OWNER = -1
"""Instead of an index of IDS: the one that holds the name."""

NOBODY = -2
"""The empty id."""

HEAD = -3
"""The first in the queue."""

ANYBODY = -5
"""The id of a break that removes foreign holds, too."""

AT = keys("", NAME)


@dataclass(frozen=True)
class Ask:
    """One op. `token` is relative to F (None: none); `clock` and `order` are a client's, in us ahead of the node's."""

    verb: Verb
    who: int = ELDER
    lease: int = 10_000
    token: int | None = None
    clock: int = 0
    memory: int = 60_000
    rest: int = 0
    plain: bool = False
    tombstone: bool = False
    serve: Serve = Serve.NOBODY
    fair: bool = False  # so are all of a fair kind
    span: int = 1
    waiter: int | None = None  # None: the id's own ticket
    number: int = 0
    fresh: int = 5_000  # no longer than the lease, as clients have it
    order: int | None = None  # None: the node's own clock says
    keeps: bool = False  # the order of its ticket, where there is one
    contended: bool = False
    done: int = False
    tasks: int = 1

    def op(self, kind: Kind, state: State, now_us: int) -> Op:
        fence = now_us + self.clock if self.verb in (Verb.ACQUIRE, Verb.ADOPT) else self._token(state)
        lease, memory, rest = self.lease / 1000, self.memory / 1000, self.rest / 1000
        who, queueing = _id(self.who, state), self._queueing(kind, state, now_us)
        return Op(
            self.verb, kind, NAME, who, lease, fence, memory, rest, self.plain, self.tombstone, queueing, self.done
        )  # fmt: skip

    def _queueing(self, kind: Kind, state: State, now_us: int) -> Queueing:
        waiter = "" if self.waiter is None else _id(self.waiter, state)
        orders = {ticket.id: ticket.order for ticket in state.queue} if self.keeps else {}
        order = orders.get(waiter or _id(self.who, state), 0 if self.order is None else now_us + self.order)
        fresh, fair = min(self.fresh, self.lease) / 1000, self.fair or kind.fair
        return Queueing(self.serve, fair, self.span, waiter, self.number, fresh, order, self.contended, self.tasks)

    def _token(self, state: State) -> int:
        return 0 if self.token is None else max(1, state.fence + self.token)


def _id(who: int, state: State) -> str:
    if who == OWNER:
        holder = state.holds[0].id if state.holds else ""
        return holder if holder in IDS else IDS[0]
    if who == HEAD:
        return state.queue[0].id if state.queue else IDS[0]
    return "" if who == NOBODY else ANY if who == ANYBODY else IDS[who]


@dataclass(frozen=True)
class Foreign:
    """A write by another program: the command, and its effect on the state."""

    command: tuple[str, ...]
    becomes: Callable[[State, float], State] = field(repr=False)


@dataclass(frozen=True)
class Pass:
    """Time passes, in ms."""

    ms: int


@dataclass(frozen=True)
class Listen:
    """The client of an id begins to listen, or stops. At first all but MUTE's do."""

    who: int
    listens: bool = True


@dataclass(frozen=True)
class Permit:
    """Whether the client that asks may publish from now on. At first it may."""

    may: bool = True


Step = Ask | Foreign | Pass | Listen | Permit


def take(token: str, ms: int) -> Foreign:
    """Another Redlock library takes the name if it is free; 0 ms: for ever."""

    def becomes(state: State, now: float) -> State:
        if state.holds:
            return state
        holder = Entry(token.removeprefix(MARK), now + ms / 1000 if ms else None)
        return replace(state, holds=(holder,), marked=token.startswith(MARK))

    return Foreign(("SET", AT.hold, token, "NX", *(("PX", str(ms)) if ms else ())), becomes)


def set_fence(text: str, ms: int) -> Foreign:
    """Another program, or an old dump, puts this into the fence key; a value that is no number counts as 0."""

    def becomes(state: State, now: float) -> State:
        return replace(state, fence=number(text), fence_ends=now + ms / 1000 if ms else math.inf)

    return Foreign(("SET", AT.fence, text, *(("PX", str(ms)) if ms else ())), becomes)


def number(text: str) -> int:
    """The result of Lua's tonumber for a fence, of those that histories write."""
    return int(text) if re.fullmatch(r"-?\d+", text) else 0


def native_release(command: tuple[str, ...], who: int = ELDER) -> Foreign:
    """The server's own compare-and-delete, as `encoding.py` sends it for a release with nothing else to do."""

    def becomes(state: State, _: float) -> State:
        gone = bool(state.holds) and state.holds[0].id == IDS[who] and not state.marked
        return replace(state, holds=()) if gone else state

    return Foreign((command[0], AT.hold, *command[1:], IDS[who]), becomes)


BREAK = Foreign(("DEL", AT.hold), lambda state, _: replace(state, holds=(), marked=False))
PERSIST = Foreign(
    ("PERSIST", AT.hold), lambda state, _: replace(state, holds=tuple(Entry(each.id, None) for each in state.holds))
)
LOSE_FENCE = Foreign(("DEL", AT.fence), lambda state, _: replace(state, fence=0, fence_ends=0.0))
LOSE_QUEUE = Foreign(("DEL", AT.queue, AT.tickets), lambda state, _: replace(state, queue=(), queue_ends=0.0))
KEEP_FENCE = Foreign(
    ("PERSIST", AT.fence), lambda state, _: replace(state, fence_ends=math.inf) if state.fence else state
)
FLUSH = Foreign(("FLUSHALL",), lambda _, __: State())

# Two for directed histories, where there is a queue: a waiter without a ticket in the hash, which no op of ours leaves.
LOSE_TICKETS = Foreign(
    ("DEL", AT.tickets),
    lambda state, _: replace(state, queue=tuple(Ticket(each.order, each.id, 0, 0, 0, 0) for each in state.queue)),
)


def crowd(size: int) -> Foreign:
    """So many tickets before all others, none of them fresh."""
    tickets = tuple(Ticket(place, f"{place:0{ID_LENGTH}x}|17|", 0, 0, 0, 0) for place in range(1, size + 1))
    pairs = [word for each in tickets for word in (str(each.order), each.id)]
    return Foreign(("ZADD", AT.queue, *pairs), lambda state, _: replace(state, queue=(*tickets, *state.queue)))


# -- random ones -------------------------------------------------------------------------------------------------------

HUGE = 2**53 - 5_000  # what a history adds to F keeps it below 2^53
SKEW = 10_000_000

STRANGERS = (
    *("another's", "", RESTING, DONE, "0f" * 16, "0F" * 16 + "|17|", "0f" * 16 + "!17|", "0f" * 15 + "|17|"),
    *("+another's", MARK + IDS[THIRD], "+"),
)
"""Holders from outside: redis-py's tokens, unknown clients of this library, and values that look like them."""

any_id = st.sampled_from([OWNER, OWNER, OWNER, HEAD, HEAD, *range(len(IDS))])
tokens = st.one_of(st.none(), st.sampled_from([-1, 0, 1]), st.integers(-50, 50))
clocks = st.one_of(
    st.sampled_from([0, -SKEW - 1, -SKEW, 1 - SKEW, SKEW - 1, SKEW, SKEW + 1]), st.integers(-3 * SKEW, 3 * SKEW)
)
seconds = st.sampled_from([-30, -3, -2, -1, 1, 2, 3, 30]).map(lambda each: each * 1_000_000)
"""Orders that no two clocks a few us apart could see the other way round."""
fences = st.sampled_from(["garbage", "", "0", "7", "12x", str(HUGE)])  # F is never negative


def histories(
    lengths: st.SearchStrategy[int],
    memories: st.SearchStrategy[int],
    passes: st.SearchStrategy[int],
    orders: st.SearchStrategy[int],
    most: int,
) -> st.SearchStrategy[list[Step]]:
    """Lists of at most `most` steps, with leases, fence memories and pauses of those lengths, in ms."""
    or_none = st.one_of(st.just(0), lengths)
    queueing = {
        "serve": st.sampled_from(Serve),
        "fair": st.booleans(),
        "span": st.sampled_from([1, 1, 1, 16, 0]),
        "waiter": st.one_of(st.none(), st.none(), any_id),
        "fresh": lengths,
        "order": st.one_of(st.none(), orders),
        "keeps": st.booleans(),
        "contended": st.booleans(),
        "tasks": st.integers(1, 100),
    }
    ask = partial(st.builds, Ask, memory=memories, lease=lengths, who=any_id, **queueing)
    numbers = st.sampled_from([0, 1, 1, 2, 3])
    plain = st.sampled_from([False, False, False, True])
    acquires = ask(st.just(Verb.ACQUIRE), clock=clocks, plain=plain, number=numbers)
    waits = ask(st.just(Verb.WAIT), number=numbers)
    extends = st.builds(Ask, st.just(Verb.EXTEND), any_id, or_none, tokens, memory=memories, tombstone=st.booleans())
    back = st.sampled_from([0, 0, 0, 1, 2])
    dones = st.sampled_from([0, 0, 1, MARKS_FREE])
    releases = ask(st.just(Verb.RELEASE), token=tokens, rest=or_none, done=dones, tombstone=st.booleans(), number=back)
    looks = st.just(Ask(Verb.EXTEND, NOBODY, lease=0))
    adopts = st.builds(Ask, st.just(Verb.ADOPT), any_id, lengths, clock=clocks, memory=memories, waiter=any_id)
    breakers = st.sampled_from([NOBODY, ANYBODY])
    tellers = st.none() | any_id  # the text that names the breaker
    breaks = st.builds(
        Ask, st.just(Verb.BREAK), breakers, memory=memories, serve=st.sampled_from(Serve), waiter=tellers
    )
    peeks = st.builds(Ask, st.just(Verb.PEEK), any_id, st.just(0), fair=st.booleans())
    foreign = st.one_of(
        st.builds(take, st.sampled_from(STRANGERS), or_none),
        st.builds(set_fence, fences, or_none),
        st.sampled_from([BREAK, BREAK, PERSIST, LOSE_FENCE, LOSE_QUEUE, KEEP_FENCE, FLUSH]),
    )
    listening = st.one_of(
        st.builds(Listen, st.integers(0, len(IDS) - 1), st.booleans()),
        st.builds(Permit, st.booleans()),
    )
    asks = acquires, acquires, acquires, waits, waits, extends, releases, releases, looks, adopts, breaks, peeks
    steps = st.one_of(*asks, foreign, listening, st.builds(Pass, passes))
    return st.lists(steps, min_size=1, max_size=most)


STILL = histories(
    lengths=st.one_of(st.sampled_from([1, 2, 1_000, 10_000]), st.integers(1, 60_000)),
    memories=st.one_of(st.sampled_from([1_000, 60_000, 3_600_000]), st.integers(1, 120_000)),
    passes=st.one_of(st.sampled_from([1, 999, 1_000, 10_000]), st.integers(1, 60_000), st.integers(1, 4 * 3_600_000)),
    orders=clocks,
    most=25,
)
LIVE = histories(st.integers(30, 120), st.integers(30, 240), st.integers(1, 120), seconds, most=8)
