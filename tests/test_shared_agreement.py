"""The rule and the scripts of the kinds that several may hold are one: random histories without expiry, in which
replies and state are compared after each step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynclock._decide import decide
from asynclock._op import Kind, Op, Queueing, Serve, Verb
from asynclock._state import ID_LENGTH, State
from asynclock.locks.rwlock import READ
from asynclock.locks.semaphore import SEMAPHORE, wants
from asynclock.stores._keys import keys
from asynclock.stores._wire import encode_whole
from tests.stage import Stage, staged

EXAMPLES = int(os.environ.get("ASYNCLOCK_EXAMPLES", "0"))
NAME = "shared"
AT = keys("", NAME)
LEASE = 600.0
MODES = {
    "read-write": ["r.", "r.", "w.", "r.", "w.", "r."],
    "semaphore": ["s2/.", "s2/1.", "s3/1.", "s3/.", "s1/.", "s3/0."],
}
KINDS: dict[str, Kind] = {"read-write": READ, "semaphore": SEMAPHORE}


@dataclass(frozen=True)
class Step:
    """One op of one of six ids, each a client of its own; `number` 0 leaves no ticket."""

    verb: Verb
    who: int
    serve: Serve
    number: int
    rest: bool
    tombstone: bool


steps = st.builds(
    Step,
    st.sampled_from([Verb.ACQUIRE] * 4 + [Verb.RELEASE] * 4 + [Verb.WAIT] * 2 + [Verb.EXTEND, Verb.BREAK]),
    st.integers(0, 5),
    st.sampled_from([Serve.GRANT, Serve.GRANT, Serve.WAKE, Serve.NOBODY]),
    st.sampled_from([0, 2, 2, 3]),
    st.sampled_from([False] * 5 + [True]),
    st.sampled_from([False] * 5 + [True]),
)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A server of this module's own."""
    with staged() as stage:
        yield stage


@pytest.mark.parametrize("family", KINDS)
@settings(max_examples=EXAMPLES or 250, derandomize=not EXAMPLES, database=None, deadline=None)
@given(history=st.lists(steps, min_size=1, max_size=16), deaf=st.sets(st.integers(0, 5), max_size=2))
def test_decide_and_script_agree_without_expiry(
    stage: Stage, family: str, history: Sequence[Step], deaf: set[int]
) -> None:
    """Who is let in, who waits in which order, who is served, and what is told of it."""
    ids = [f"{letter * ID_LENGTH}|{mode}17|1|host|" for letter, mode in zip("abcdef", MODES[family], strict=True)]
    kind, state, now = KINDS[family], State(), time.time()
    stage.cli.flushall()
    ears = stage.cli.pubsub()
    with ears:
        for index, each in enumerate(ids):
            if index not in deaf:
                ears.subscribe(f"asynclock~{each[:12]}")
        listening = {each[:12] for index, each in enumerate(ids) if index not in deaf}
        for _ in listening:
            ears.get_message(timeout=5)
        for number, step in enumerate(history):
            op = op_of(kind, step, ids, number, now)
            decided = decide(kind, state, op, now, lambda tag: tag in listening)
            command = encode_whole(op, "")
            real = said(stage, command)
            assert_same_reply(decided.wire(now), real, granted=op.verb in (Verb.EXTEND, Verb.RELEASE, Verb.BREAK))
            state = decided.state
            state = replace(state, fence=int(stage.cli.get(AT.fence) or 0)) if state.fence else state
            assert_same_state(stage, state)


def op_of(kind: Kind, step: Step, ids: Sequence[str], number: int, now: float) -> Op:
    whose = "" if step.verb is Verb.BREAK else ids[step.who]
    order = int(now * 1_000_000) + step.who * 1000
    slotted = step.verb is not Verb.BREAK and wants(whose)[1]  # an attempt over N nodes, whose ticket has another id
    waits = 0 if step.verb is Verb.EXTEND or slotted else step.number
    queueing = Queueing(step.serve, number=waits, fresh=LEASE / 2, order=order)
    seed = int(now * 1_000_000) + number if step.verb is Verb.ACQUIRE else 0
    rest = LEASE if step.rest and step.verb is Verb.RELEASE else 0.0
    tombstone = step.tombstone and step.verb is Verb.RELEASE
    return Op(step.verb, kind, NAME, whose, LEASE, seed, 3600.0, rest, False, tombstone, queueing)


def said(stage: Stage, command: bytes) -> list[Any]:
    reader = hiredis.Reader()
    reader.feed(command)
    reply: list[Any] = stage.cli.execute_command(*reader.gets())  # type: ignore[no-untyped-call]
    return reply


def assert_same_reply(wire: list[Any], real: list[Any], granted: bool) -> None:
    """But for ms that pass, and for a fence that the server's clock gave."""
    if wire[0] == 0 and wire[1] > 0:
        assert abs(real[1] - wire[1]) < 60_000
        real = [0, wire[1], *real[2:]]
    if wire[0] == 0 and wire[1] > 0 and wire[2] != real[2]:
        assert real[2]  # two that end at the same ms: either
        real = [*real[:2], wire[2], *real[3:]]
    if wire[0] == 0 and len(wire) > 5:
        assert sorted(wire[5].split()) == sorted(real[5].split())
        real = [*real[:5], wire[5]]
    if wire[0] == 1:
        assert granted or real[1] >= wire[1] - 60_000_000
        real = [1, wire[1]]
    assert real == wire


def assert_same_state(stage: Stage, state: State) -> None:
    cli = stage.cli
    assert {each.decode() for each in cli.zrange(AT.hold, 0, -1)} == {each.id for each in state.holds}
    assert [each.decode() for each in cli.zrange(AT.queue, 0, -1)] == [each.id for each in state.queue]
    tickets = {random.decode(): ticket.split()[0] for random, ticket in cli.hgetall(AT.tickets).items()}
    assert tickets == {each.id[:ID_LENGTH]: b"%d" % each.number for each in state.queue}
    undone = {key.decode()[-ID_LENGTH:] for key in cli.keys(f"{AT.undone}*")}
    assert undone == {each.id[:ID_LENGTH] for each in state.undone}
