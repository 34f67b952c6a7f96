"""Steps on names of mixed kinds, some of them on several names at once, and random histories of them.

They are those of `histories.py`, but an op has the name it is at, and a world has the mode of each id there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from hypothesis import strategies as st

from asynclock.locks.multi import Multi
from asynclock.rules.model import (
    ANY,
    ID_LENGTH,
    MARK,
    RESTING_MARK,
    TAG_LENGTH,
    Entry,
    Op,
    Part,
    Queueing,
    Rule,
    Serve,
    State,
    Ticket,
    Verb,
)
from asynclock.rules.mutex import FAIR
from asynclock.rules.registry import FAMILIES, rule_of
from asynclock.rules.semaphore import Semaphore, wants
from asynclock.stores.redis.keys import Keys, keys
from tests.support import histories
from tests.support.histories import (
    ANYBODY,
    HEAD,
    MUTE,
    NOBODY,
    OWNER,
    THIRD,
    YOUNGER,
    Ask,
    Listen,
    Pass,
    Permit,
    clocks,
    number,
    tokens,
)

NAMES = ("agreed 1", "agreed 2", "agreed 3")
AT = tuple(keys("", each) for each in NAMES)

FIFTH, SECOND_TRY, THIRD_TRY, YOUNGER_TRY = range(MUTE + 1, MUTE + 5)
"""More indices of IDS: one of a client of its own, and attempts whose tickets are others'."""

IDS = (
    *histories.IDS,
    *(
        f"{tag * TAG_LENGTH}{random * (ID_LENGTH - TAG_LENGTH)}|17|host:1|"
        for tag, random in [("d", "6"), ("b", "7"), ("c", "8"), ("b", "9")]
    ),
)
TAGS = tuple(each[:TAG_LENGTH] for each in IDS)
WAITS_AS = {SECOND_TRY: YOUNGER, THIRD_TRY: THIRD, YOUNGER_TRY: YOUNGER}

TICKET = -4
"""Instead of a waiter: whose ticket an attempt is under, its own if it is no such attempt."""


FAMILY = {letter: [each for each, its in FAMILIES.items() if its == family] for letter, family in FAMILIES.items()}
"""Which letters stand beside that of an id."""


@cache
def kind_of(mode: str) -> Rule:
    """The kind of a mode; f is a mutex in order of arrival."""
    if mode == "f":
        return FAIR
    if mode[:1] == "s":
        permits, slot = wants("x" * (ID_LENGTH + 1) + mode)
        return Semaphore(permits, slot)
    return rule_of(mode)


@dataclass(frozen=True)
class World:
    """Of each name, the mode that each id has there."""

    modes: tuple[tuple[str, ...], ...]

    def part(self, name: int, who: int) -> Part:
        return Part(NAMES[name], kind_of(self.modes[name][max(who, 0)]))


def world(*modes: str) -> World:
    """One where the ids have these modes at each name, with spaces between; the last is of all that are left."""
    padded = []
    for each in modes:
        words = ["" if word == "m" else word for word in each.split()]
        padded.append((*words, *[words[-1]] * (len(IDS) - len(words))))
    return World(tuple(padded))


@dataclass(frozen=True)
class Act(Ask):
    """One op at one name, or at several together."""

    name: int = 0
    names: tuple[int, ...] = ()


def index_of(id: str) -> int | None:
    """Which of IDS it is, with a mode or without."""
    return next((i for i, each in enumerate(IDS) if each[: ID_LENGTH + 1] == id[: ID_LENGTH + 1]), None)


def whose(who: int, state: State) -> int:
    """The index of IDS, or NOBODY."""
    if who == OWNER:
        known = [found for each in state.holds if (found := index_of(each.id)) is not None]
        return known[0] if known else 0
    if who == HEAD:
        return (index_of(state.queue[0].id) if state.queue else 0) or 0
    return who


def op_of(ask: Ask, world: World, states: Sequence[State], us: int) -> tuple[Op, tuple[int, ...]]:
    """The op as it meets these states, and at which names."""
    several = ask.names if isinstance(ask, Act) else ()
    names = several or (ask.name if isinstance(ask, Act) else 0,)
    met = [states[name] for name in names]
    who = whose(ask.who, met[0])
    who = WAITS_AS.get(who, who) if ask.verb is Verb.WAIT and ask.waiter is None else who
    parts = [world.part(name, who) for name in names]
    fence = us + ask.clock
    if ask.verb not in (Verb.ACQUIRE, Verb.ADOPT):
        fence = 0 if ask.token is None else max(1, max(state.fence for state in met) + ask.token)
    queueing = _queueing(ask, world, parts, met, who, us)
    rest = 0 if any(_rests(each, who) for each in met) else ask.rest
    kind = Multi(parts) if several else parts[0].kind
    whole = {NOBODY: "", ANYBODY: ANY}.get(who)
    if whole is None:
        whole = IDS[who] if several else parts[0].named(IDS[who])
    name, lease, memory = "several" if several else parts[0].name, ask.lease / 1000, ask.memory / 1000
    op = Op(ask.verb, kind, name, whole, lease, fence, memory, rest / 1000, False, ask.tombstone, queueing)
    return op, tuple(sorted(names))


def _queueing(ask: Ask, world: World, parts: Sequence[Part], met: Sequence[State], who: int, us: int) -> Queueing:
    several = isinstance(ask, Act) and bool(ask.names)
    waits = WAITS_AS.get(who) if ask.waiter == TICKET else ask.waiter
    if waits is not None:
        waits = whose(waits, met[0])
    if ask.verb is Verb.ADOPT and waits is not None and parts[0].kind != _kind_at(ask, world, waits):
        waits = who  # a handle has the kind: no reader's hold becomes a writer's
    number, kind = ask.number, parts[0].kind
    if waits is None and any("/." not in part.kind.mode for part in parts if part.kind.slots):
        number = 0  # a ticket is for no one slot
    waiter = "" if waits is None else IDS[waits]
    if waiter and not several:
        part = parts[0]._replace(kind=_kind_at(ask, world, waits or 0))
        waiter = part.named(waiter, waits=ask.verb is not Verb.ADOPT)
    order = 0 if ask.order is None else us + ask.order
    if ask.keeps:
        random = (waiter or (IDS[who] if who >= 0 else ""))[:ID_LENGTH]
        order = next((each.order for state in met for each in state.queue if each.id.startswith(random)), order)
    asks = ask.fair and ask.serve != Serve.NOBODY if several else ask.fair and kind.mode in ("", "r.")
    fair = asks or (kind.fair and not several)  # no other op asks to be fair
    fresh = min(ask.fresh, ask.lease) / 1000
    return Queueing(ask.serve, fair, ask.span, waiter, number, fresh, order, ask.contended, ask.tasks)


def _kind_at(ask: Ask, world: World, who: int) -> Rule:
    return world.part(ask.name if isinstance(ask, Act) else 0, who).kind


def _rests(state: State, who: int) -> bool:
    """Whether it left one hold to rest already; no id does so twice."""
    return who >= 0 and any(each.id.startswith(RESTING_MARK + IDS[who][1:ID_LENGTH]) for each in state.holds)


# -- writes by other programs ------------------------------------------------------------------------------------------

Writes = tuple[list[list[str]], State]


@dataclass(frozen=True)
class Write:
    """Another program's write: commands at one name, and their effect on its state."""

    does: Callable[[Keys, Rule, State, float], Writes]
    name: int = 0
    label: str = ""

    def __repr__(self) -> str:
        return f"Write({self.label}, name={self.name})"


def take(token: str, ms: int, name: int = 0) -> Write:
    """A holder that no client here knows, if it may hold; of a mutex with 0 ms for ever."""

    def does(at: Keys, kind: Rule, state: State, now: float) -> Writes:
        known = any(each.id == token for each in state.holds)
        alien = kind.shared and (not ms or token[ID_LENGTH + 1 : ID_LENGTH + 2] not in FAMILY[kind.mode[0]])
        if known or alien or not kind.admits(state.holds, token):
            return [], state
        if kind.shared:
            ends = int(now * 1000) + ms
            left = max(ms, *(int(((each.ends or 0) - now) * 1000) + 1 for each in state.holds), 0)
            entered = replace(state, holds=(*state.holds, Entry(token, (ends + 0.1) / 1000)))
            return [["ZADD", at.hold, str(ends), token], ["PEXPIRE", at.hold, str(left)]], entered
        entry = Entry(token.removeprefix(MARK), now + ms / 1000 if ms else None)
        command = ["SET", at.hold, token, *(["PX", str(ms)] if ms else [])]
        return [command], replace(state, holds=(entry,), marked=token.startswith(MARK))

    return Write(does, name, f"take {token} {ms}")


def set_fence(text: str, ms: int, name: int = 0) -> Write:
    """Another program, or an old dump, puts this into the fence key; a value that is no number counts as 0."""

    def does(at: Keys, _: Rule, state: State, now: float) -> Writes:
        ends = now + ms / 1000 if ms else math.inf
        command = ["SET", at.fence, text, *(["PX", str(ms)] if ms else [])]
        return [command], replace(state, fence=number(text), fence_ends=ends)

    return Write(does, name, f"set_fence {text} {ms}")


def crowd(mode: str, size: int, name: int = 0) -> Write:
    """So many tickets before all others, none of them fresh."""
    tickets = tuple(Ticket(place, f"{place:0{ID_LENGTH}x}|{mode}17|", 0, 0, 0, 0) for place in range(1, size + 1))
    pairs = [word for each in tickets for word in (str(each.order), each.id)]

    def does(at: Keys, _: Rule, state: State, now: float) -> Writes:
        queues = [["PEXPIRE", key, "60000"] for key in (at.queue, at.tickets)]
        return [["ZADD", at.queue, *pairs], *queues], replace(
            state, queue=(*tickets, *state.queue), queue_ends=now + 60
        )

    return Write(does, name, f"crowd {size}")


def one_clients_crowd(mode: str, size: int, name: int = 0) -> Write:
    """So many tasks, all of one client, wait behind all other waiters, for a minute from now."""

    def does(at: Keys, _: Rule, state: State, now: float) -> Writes:
        us, ends = int(now * 1_000_000) + 30_000_000, int(now * 1000) + 60_000
        randoms = [TAGS[0] + f"{place:0{ID_LENGTH - TAG_LENGTH}x}" for place in range(size)]
        until = (ends + 0.1) / 1000
        tickets = [Ticket(us + n, f"{each}|{mode}17|", 1, until, until, 1) for n, each in enumerate(randoms)]
        pairs = [word for each in tickets for word in (str(each.order), each.id)]
        told = [word for each in randoms for word in (each, f"1 {ends} {ends} 1 1")]
        queues = [["PEXPIRE", key, "60000"] for key in (at.queue, at.tickets)]
        after = replace(state, queue=(*state.queue, *tickets), queue_ends=now + 60)
        return [["ZADD", at.queue, *pairs], ["HSET", at.tickets, *told], *queues], after

    return Write(does, name, f"one_clients_crowd {size}")


def _without_tickets(state: State) -> State:
    return replace(state, queue=tuple(Ticket(each.order, each.id, 0, 0, 0, 0) for each in state.queue))


def lose(key: str, name: int = 0) -> Write:
    """Keys are gone: hold, fence, queue (with its tickets), or the tickets alone."""
    after: dict[str, Callable[[State], State]] = {
        "hold": lambda state: replace(state, holds=(), marked=False),
        "fence": lambda state: replace(state, fence=0, fence_ends=0.0),
        "queue": lambda state: replace(state, queue=(), queue_ends=0.0),
        "tickets": _without_tickets,
    }

    def does(at: Keys, _: Rule, state: State, __: float) -> Writes:
        gone = [getattr(at, key), *([at.tickets] if key == "queue" else [])]
        return [["DEL", *gone]], after[key](state)

    return Write(does, name, f"lose {key}")


Step = Ask | Write | Pass | Listen | Permit


# -- random ones -------------------------------------------------------------------------------------------------------

STRANGERS = (
    *("another's", "0f" * 16 + "|17|", "0f" * 16 + "!17|", "0f" * 15 + "|17|", "+another's"),
    *(f"{random}{mode}17|" for mode in ("r.", "w.", "s2/.", "s3/1.") for random in ("0f" * 16 + "|", "0F" * 16 + "!")),
    "0f" * 15 + "zz|r.17|",
)
"""Holders from outside, each where the name is of that kind."""


@st.composite
def modes(draw: st.DrawFn, families: Sequence[str]) -> tuple[str, ...]:
    """Of one name. An attempt has the mode of its waiter, and maybe a slot."""
    family = draw(st.sampled_from(families))
    if family in ("mutex", "fair"):
        return ("f" if family == "fair" else "",) * len(IDS)
    if family == "read-write":
        own = draw(st.lists(st.sampled_from(["r.", "r.", "w."]), min_size=SECOND_TRY, max_size=SECOND_TRY))
        return (*own, *(own[WAITS_AS[who]] for who in range(SECOND_TRY, len(IDS))))
    permits = draw(st.lists(st.sampled_from([2, 2, 3, 1]), min_size=SECOND_TRY, max_size=SECOND_TRY))
    slots = draw(st.lists(st.sampled_from(["", "0", "1", "2"]), min_size=len(WAITS_AS), max_size=len(WAITS_AS)))
    tries = [f"s{permits[WAITS_AS[who]]}/{slot}." for who, slot in zip(WAITS_AS, slots, strict=True)]
    return (*(f"s{each}/." for each in permits), *tries)


lengths = st.one_of(st.sampled_from([1, 2, 1_000, 10_000]), st.integers(1, 60_000))
or_none = st.one_of(st.just(0), lengths)
memories = st.one_of(st.sampled_from([1_000, 60_000, 3_600_000]), st.integers(1, 120_000))
passes = st.one_of(st.sampled_from([1, 999, 1_000, 10_000]), st.integers(1, 60_000), st.integers(1, 4 * 3_600_000))
any_id = st.sampled_from([OWNER, OWNER, OWNER, HEAD, HEAD, *range(len(IDS))])
numbers = st.sampled_from([0, 1, 1, 2, 3])
queueing = {
    "serve": st.sampled_from([Serve.GRANT, Serve.GRANT, Serve.WAKE, Serve.NOBODY]),
    "span": st.sampled_from([1, 1, 1, 16, 0]),
    "waiter": st.sampled_from([None, TICKET, TICKET]),
    "fresh": lengths,
    "order": st.one_of(st.none(), clocks),
    "keeps": st.booleans(),
    "tasks": st.integers(1, 100),
}


def steps(count: int) -> st.SearchStrategy[Step]:
    """At one of so many names."""
    name = st.integers(0, count - 1)
    ask = partial(st.builds, Act, memory=memories, lease=lengths, who=any_id, name=name, **queueing)
    brief = partial(st.builds, Act, memory=memories, name=name)
    back = st.sampled_from([0, 0, 0, 1, 2])
    rest = st.one_of(st.just(0), or_none)
    acquires = ask(st.just(Verb.ACQUIRE), clock=clocks, number=numbers)
    waits = ask(st.just(Verb.WAIT), number=numbers)
    releases = ask(st.just(Verb.RELEASE), token=tokens, rest=rest, tombstone=st.booleans(), number=back)
    extends = brief(st.just(Verb.EXTEND), any_id, or_none, tokens)
    looks = brief(st.just(Verb.EXTEND), st.just(NOBODY), st.just(0))
    adopts = brief(st.just(Verb.ADOPT), any_id, lengths, clock=clocks, waiter=any_id)
    tellers = st.none() | any_id  # the text that names the breaker
    breaks = brief(
        st.just(Verb.BREAK), st.sampled_from([NOBODY, ANYBODY]), serve=st.sampled_from(Serve), waiter=tellers
    )
    peeks = brief(st.just(Verb.PEEK), any_id, st.just(0), fair=st.booleans())
    writes = st.one_of(
        st.builds(take, st.sampled_from(STRANGERS), or_none, name),
        st.builds(set_fence, histories.fences, or_none, name),
        st.builds(lose, st.sampled_from(["hold", "hold", "fence", "queue"]), name),
    )
    listening = st.one_of(
        st.builds(Listen, st.integers(0, len(IDS) - 1), st.booleans()), st.builds(Permit, st.booleans())
    )
    asks = acquires, acquires, acquires, waits, waits, extends, releases, releases, looks, adopts, breaks, peeks
    return st.one_of(*asks, writes, listening, st.builds(Pass, passes))


def several(count: int) -> st.SearchStrategy[Step]:
    """At some or all of so many names together."""
    names = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True).map(tuple)
    ask = partial(st.builds, Act, memory=memories, lease=lengths, who=any_id, names=names, **queueing)
    acquires = ask(st.just(Verb.ACQUIRE), clock=clocks, number=numbers, fair=st.booleans())
    back = st.sampled_from([0, 0, 1, 2])
    rest = st.one_of(st.just(0), or_none)
    releases = ask(st.just(Verb.RELEASE), token=tokens, rest=rest, tombstone=st.booleans(), number=back)
    extends = st.builds(Act, st.just(Verb.EXTEND), any_id, or_none, tokens, memory=memories, names=names)
    looks = st.builds(Act, st.just(Verb.EXTEND), st.just(NOBODY), st.just(0), names=names)
    peeks = st.builds(Act, st.just(Verb.PEEK), any_id, st.just(0), names=names)
    return st.one_of(acquires, acquires, releases, extends, looks, peeks)


Play = tuple[World, list[Step]]


def plays(families: Sequence[str], *, count: int = 1, most: int = 25) -> st.SearchStrategy[Play]:
    """Worlds of so many names of these families, and a history of at most so many steps in each. Where there is more
    than one name, half the ops are for several."""
    every = steps(1) if count == 1 else st.one_of(steps(count), several(count))
    worlds = st.lists(modes(families), min_size=count, max_size=count).map(lambda found: World(tuple(found)))
    return st.tuples(worlds, st.lists(every, min_size=6, max_size=most))
