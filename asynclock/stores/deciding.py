"""What an op makes of the states of its names, and the vote that it gets: `decide` for one op, over states that a store
has read. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from asynclock._errors import brief
from asynclock.rules.decide import decide
from asynclock.rules.model import Entry, Notice, Op, Queueing, Slots, State, Verb, Verdict, parts_of
from asynclock.rules.registry import FAMILIES, family_of
from asynclock.rules.several import decide_all
from asynclock.stores.port import UNDONE, NodeView, Refused, WaiterView, WrongKind

if TYPE_CHECKING:
    from asynclock.rules.model import Kind, Part, Reply
    from asynclock.stores.port import Grant, Undone

_MARGIN = 0.001
"""Seconds added to the remaining time of a hold, so that the name is free in every store when a waiter asks again."""


class Change(NamedTuple):
    """The result of a step."""

    states: Sequence[State]  # the new states of the same keys; a state that equals State() need not be stored
    notices: Sequence[Notice] = ()  # pushed after the commit, each to the listener of its tag


Step: TypeAlias = Callable[[Sequence[State], float], Change]
"""From the states of some keys and the server's Unix time to what becomes of them. It may be run again, if the store
has to repeat the transaction. What it raises must roll the transaction back."""


def keys_of(prefix: str, op: Op) -> list[str]:
    """The keys of the names of an op."""
    if not op.kind.parts:
        return [prefix + op.name]
    return [prefix + part.name for part in parts_of(op)]


def copy_of(op: Op) -> Op:
    """A copy of an op, because its owner may change it before the transaction begins. Without `copy` and `replace`,
    which take five times as long."""
    queueing = op.queueing
    return Op(
        op.verb, op.kind, op.name, op.id, op.lease, op.fence, op.memory, op.rest, op.plain, op.tombstone,
        Queueing(
            queueing.serve, queueing.fair, queueing.span, queueing.waiter, queueing.number, queueing.fresh,
            queueing.order, queueing.contended, queueing.tasks, queueing.looks,
        ),
        op.done, op.since,
    )  # fmt: skip


def decided(
    op: Op, states: Sequence[State], now: float, has_listener: Callable[[str], bool | None]
) -> tuple[Change, Grant | Refused | Undone]:
    """The states of the names of an op after it, its notices, and its answer. Raises WrongKind. Pure.

    An undo leaves its tombstones also at names that are in use as another kind by now: the acquire that it undoes may
    arrive after that use has ended."""
    parts = parts_of(op)
    mine = [
        index
        for index, (part, state) in enumerate(zip(parts, states, strict=True))
        if op.verb is Verb.BREAK or _is_of(state.at(now), part.kind)
    ]
    after = list(states)
    if op.verb is Verb.RELEASE and op.tombstone:
        for index in set(range(len(parts))) - set(mine):
            after[index] = _undone(op, parts[index], states[index].at(now), now)
        if not mine:
            return Change(after), Refused(None)
    if not mine or (len(mine) < len(op.kind.parts) and op.verb is not Verb.RELEASE):
        raise WrongKind(f"{brief(op.name)} is in use as another kind")
    some, found = [parts[index] for index in mine], [states[index] for index in mine]
    notices: Sequence[Notice]
    if op.kind.parts:
        reply, part, found, notices = decide_all(some, found, op, now, has_listener)
    else:
        reply, part = decide(some[0].kind, found[0], op, now, has_listener), 0
        found, notices = [reply.state], reply.notices
    for index, state in zip(mine, found, strict=True):
        after[index] = state
    return Change(after, notices), vote_of(reply, now, mine[part])


def vote_of(reply: Reply, now: float, part: int = 0) -> Grant | Refused | Undone:
    """The vote for a reply of `decide` at `now`, or of `decide_all` about the name number `part`. Pure."""
    match reply.verdict:
        case Verdict.YES:
            return reply.fence, reply.marked
        case Verdict.UNDONE:
            return UNDONE
    slots = None if reply.taken is None else Slots(reply.taken, part)
    if reply.holder is None:
        return Refused(None, "", reply.rank, reply.order, slots)
    left = math.inf if reply.holder.ends is None else reply.holder.ends - now + _MARGIN
    return Refused(left, reply.holder.id, reply.rank, reply.order, slots)


def _undone(op: Op, part: Part, state: State, now: float) -> State:
    """With the tombstone of an undo at a name where its hold is not."""
    own = part.named(op.id) if op.kind.parts else op.id
    others = tuple(each for each in state.undone if each.id != own)
    return replace(state, undone=(*others, Entry(own, now + op.lease)))


def _is_of(state: State, kind: Kind) -> bool:
    """Whether a name is held as that kind, or not at all."""
    return not state.holds or family_of(state.holds[0].id) == FAMILIES[kind.letter]


def view_of(state: State, now: float) -> NodeView:
    return NodeView(
        "string" if state.holds else "none",
        tuple((each.id, None if each.ends is None else each.ends - now) for each in state.holds),
        state.fence,
        tuple(WaiterView(each.order, each.id, each.number, each.tasks) for each in state.queue),
    )
