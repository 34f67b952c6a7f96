"""The rules of a node for holds and fences (1 to 6), as tables; pure. Those of the queue: test_decide_queue.py."""

from __future__ import annotations

import pytest

from asynclock.rules.decide import decide
from asynclock.rules.model import CLOCK_SKEW, DONE, RESTING, Entry, Op, Reply, State, Verb, Verdict
from asynclock.rules.mutex import MUTEX
from tests.support.on_the_wire import reply_on_wire

NOW = 1_700_000_000.0
NOW_US = 1_700_000_000_000_000
SKEW_US = 10_000_000
MEMORY = 3_600.0

FREE = State()
HELD = State((Entry("me", NOW + 5),), 100, NOW + 60)
OTHERS = State((Entry("other", NOW + 5),), 100, NOW + 60)
ENDLESS = State((Entry("other", None),))
UNDONE = State(undone=(Entry("me", NOW + 5),))
FORGOTTEN = State((Entry("me", NOW + 5),))


def ask(
    verb: Verb, lease: float = 10.0, fence: int = 0, rest: float = 0.0, plain: bool = False, tombstone: bool = False
) -> Op:
    """An op of "me"."""
    return Op(verb, MUTEX, "name", "me", lease, fence, MEMORY, rest, plain, tombstone)


def asked(state: State, op: Op, now: float = NOW) -> Reply:
    return decide(MUTEX, state, op, now)


@pytest.mark.parametrize(
    ("state", "now", "verdict"),
    [
        (UNDONE, NOW, Verdict.UNDONE),
        (UNDONE, NOW + 4.999, Verdict.UNDONE),
        (UNDONE, NOW + 5, Verdict.YES),  # the tombstone has ended
        (State(undone=(Entry("other", NOW + 5),)), NOW, Verdict.YES),
        (State((Entry("me", NOW + 5),), undone=UNDONE.undone), NOW, Verdict.UNDONE),  # even if it holds
    ],
)
def test_rule_1_an_undone_id_is_refused(state: State, now: float, verdict: Verdict) -> None:
    """As long as its tombstone lasts, and no other id is."""
    assert asked(state, ask(Verb.ACQUIRE, fence=NOW_US), now).verdict is verdict


def test_rule_1_a_refusal_changes_nothing() -> None:
    """The state is as if the op had never come."""
    assert asked(UNDONE, ask(Verb.ACQUIRE, fence=NOW_US)).state == UNDONE


@pytest.mark.parametrize(("tombstone", "left"), [(True, (Entry("me", NOW + 10),)), (False, ())])
def test_rule_1_release_leaves_a_tombstone_on_request(tombstone: bool, left: tuple[Entry, ...]) -> None:
    """Also for an id that never came: the tombstone is for that one."""
    assert asked(FREE, ask(Verb.RELEASE, tombstone=tombstone)).state.undone == left


def test_rule_1_a_second_tombstone_replaces_the_first() -> None:
    """There is one per id, and others stay."""
    state = State(undone=(Entry("me", NOW + 5), Entry("other", NOW + 6)))
    found = asked(state, ask(Verb.RELEASE, tombstone=True)).state.undone
    assert sorted(found) == [Entry("me", NOW + 10), Entry("other", NOW + 6)]


@pytest.mark.parametrize(
    ("lease", "ends"),
    [(10.0, NOW + 10), (5.0, NOW + 5), (1.0, NOW + 5)],  # never back
)
@pytest.mark.parametrize("verb", [Verb.ACQUIRE, Verb.EXTEND])
def test_rule_2_the_same_again(verb: Verb, lease: float, ends: float) -> None:
    """A holder gets the same reply again: same fence, and the end moves with it."""
    reply = asked(HELD, ask(verb, lease, fence=50))
    assert (reply.verdict, reply.fence) == (Verdict.YES, 100)
    assert reply.state.holds == (Entry("me", ends),)


def test_rule_2_a_hold_without_end_gets_one() -> None:
    """Another program ran PERSIST: the next reply mends it."""
    state = State((Entry("me", None),), 100, NOW + 60)
    assert asked(state, ask(Verb.ACQUIRE, fence=NOW_US)).state.holds == (Entry("me", NOW + 10),)


@pytest.mark.parametrize(
    ("state", "clock", "fence"),
    [
        (FREE, NOW_US, NOW_US),
        (FREE, NOW_US + SKEW_US, NOW_US + SKEW_US),
        (FREE, NOW_US + SKEW_US + 1, NOW_US + SKEW_US),  # ahead: clamped
        (FREE, NOW_US - SKEW_US, NOW_US - SKEW_US),
        (FREE, NOW_US - SKEW_US - 1, NOW_US - SKEW_US),  # behind: clamped
        (FREE, 0, NOW_US - SKEW_US),
        (State(fence=100, fence_ends=NOW + 1), NOW_US, NOW_US),
        (State(fence=NOW_US - 1, fence_ends=NOW + 1), NOW_US, NOW_US),
        (State(fence=NOW_US, fence_ends=NOW + 1), NOW_US, NOW_US + 1),
        (State(fence=2 * NOW_US, fence_ends=NOW + 1), NOW_US, 2 * NOW_US + 1),
        (State(fence=2 * NOW_US, fence_ends=NOW), NOW_US, NOW_US),  # F was forgotten
        (FORGOTTEN, NOW_US, NOW_US),  # a holder whose counter was lost
    ],
)
def test_rule_3_the_fence_of_a_new_hold(state: State, clock: int, fence: int) -> None:
    """max(F + 1, P), P clamped to the node's clock; and it is remembered."""
    reply = asked(state, ask(Verb.ACQUIRE, fence=clock))
    assert (reply.verdict, reply.fence) == (Verdict.YES, fence)
    assert (reply.state.fence, reply.state.fence_ends) == (fence, NOW + MEMORY)


def test_rule_3_the_skew_is_as_documented() -> None:
    """The skew that the tables above assume."""
    assert CLOCK_SKEW * 1_000_000 == SKEW_US


@pytest.mark.parametrize(
    ("state", "wire"),
    [(OTHERS, [0, 5_000, b"other", -1, 0]), (ENDLESS, [0, -1, b"other", -1, 0])],
)
@pytest.mark.parametrize("plain", [False, True])
def test_rule_3_a_held_name_is_refused(state: State, wire: list[object], plain: bool) -> None:
    """The refusal names the holder and the time left; nothing changes."""
    reply = asked(state, ask(Verb.ACQUIRE, fence=NOW_US, plain=plain))
    assert reply_on_wire(reply, NOW) == wire
    assert reply.state == state


def test_rule_3_a_plain_hold_has_no_fence() -> None:
    """SET NX PX and no more: no counter, and no tombstone is read."""
    reply = asked(UNDONE, ask(Verb.ACQUIRE, fence=NOW_US, plain=True))
    assert reply_on_wire(reply, NOW) == [1, 0]
    assert reply.state == State((Entry("me", NOW + 10),), undone=UNDONE.undone)


def test_rule_3_a_plain_id_is_not_known_again() -> None:
    """SET NX refuses the id that holds as it does any other."""
    assert asked(HELD, ask(Verb.ACQUIRE, plain=True)).verdict is Verdict.NO


@pytest.mark.parametrize(
    ("state", "now", "wire"),
    [
        (FREE, NOW, [0, -2, b"", -1, 0]),
        (OTHERS, NOW, [0, 5_000, b"other", -1, 0]),
        (ENDLESS, NOW, [0, -1, b"other", -1, 0]),
        (HELD, NOW + 5, [0, -2, b"", -1, 0]),  # it has ended
    ],
)
@pytest.mark.parametrize("verb", [Verb.EXTEND, Verb.RELEASE])
def test_rules_4_and_5_are_for_the_owner(verb: Verb, state: State, now: float, wire: list[object]) -> None:
    """No other id extends or releases a hold, and no key comes back."""
    reply = asked(state, ask(verb), now)
    assert reply_on_wire(reply, now) == wire
    assert reply.state.holds == state.at(now).holds


@pytest.mark.parametrize("ends", [NOW + 5, None])
def test_rule_4_a_probe_changes_nothing(ends: float | None) -> None:
    """Extend by 0 only reads, even a hold without end."""
    state = State((Entry("me", ends),))
    reply = asked(state, ask(Verb.EXTEND, 0.0))
    assert (reply.verdict, reply.state) == (Verdict.YES, state)


@pytest.mark.parametrize(("rest", "left"), [(0.0, ()), (3.0, (Entry(RESTING, NOW + 3),))])
def test_rule_5_release_frees_or_lets_rest(rest: float, left: tuple[Entry, ...]) -> None:
    """The hold is deleted; with min_hold the name stays taken, without a holder."""
    reply = asked(HELD, ask(Verb.RELEASE, rest=rest))
    assert (reply.verdict, reply.state.holds) == (Verdict.YES, left)


@pytest.mark.parametrize(("rest", "left"), [(0.0, ()), (3.0, (Entry(DONE, NOW + 3),))])
def test_rule_5_a_run_that_returned_leaves_a_mark_of_its_own(rest: float, left: tuple[Entry, ...]) -> None:
    """`once` tells it from a min_hold."""
    release = Op(Verb.RELEASE, MUTEX, "name", "me", 10.0, 0, MEMORY, rest, done=True)
    assert asked(HELD, release).state.holds == left


@pytest.mark.parametrize("holder", [RESTING, DONE])
@pytest.mark.parametrize("verb", [verb for verb in Verb if verb is not Verb.BREAK])
def test_rule_5_a_resting_name_admits_nobody(verb: Verb, holder: str) -> None:
    """Not even the client that released it."""
    state = State((Entry(holder, NOW + 3),))
    rank = 0 if verb is Verb.PEEK else -1  # its refusal
    assert reply_on_wire(asked(state, ask(verb, fence=NOW_US)), NOW) == [0, 3_000, holder.encode(), rank, 0]


@pytest.mark.parametrize("state", [FREE, HELD, OTHERS], ids=["free", "held", "another's"])
@pytest.mark.parametrize("verb", [Verb.EXTEND, Verb.RELEASE])
def test_rule_6_a_higher_token_raises_the_fence(verb: Verb, state: State) -> None:
    """Whichever id holds: a node that missed the token catches up, and remembers it as long as any."""
    found = asked(state, ask(verb, fence=101)).state
    assert (found.fence, found.fence_ends) == (101, NOW + MEMORY)


@pytest.mark.parametrize("token", [0, 99, 100])
@pytest.mark.parametrize("verb", [Verb.EXTEND, Verb.RELEASE])
def test_rule_6_no_token_lowers_the_fence(verb: Verb, token: int) -> None:
    """F only rises."""
    assert asked(HELD, ask(verb, fence=token)).state.fence == 100


@pytest.mark.parametrize(("token", "ends"), [(0, NOW + 60), (99, NOW + MEMORY), (100, NOW + MEMORY)])
def test_rule_6_extend_keeps_the_fence_in_memory(token: int, ends: float) -> None:
    """A name that is held is not forgotten, however long."""
    assert asked(HELD, ask(Verb.EXTEND, fence=token)).state.fence_ends == ends
