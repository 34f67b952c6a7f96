"""The rules of a node for what ends a hold other than its own release (5, in part), and for a state whose time has
passed, as tables; pure."""

from __future__ import annotations

import pytest

from asynclock.rules.decide import decide
from asynclock.rules.model import (
    ANY,
    DONE,
    RESTING,
    RESTING_MARK,
    Entry,
    Notice,
    Op,
    Queueing,
    Rule,
    Serve,
    Slots,
    State,
    Ticket,
    Verb,
    Verdict,
    letter_of,
)
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore

NOW = 1_700_000_000.0
NOW_US = 1_700_000_000_000_000
MEMORY = 3_600.0

ME, OTHER = (letter * 32 + "|17|" for letter in "de")
READER = "d" * 32 + "|r.17|"
FOREIGN = "of another program"
WAITER = Ticket(NOW_US, OTHER, 3, NOW + 5, NOW + 8, 1)


@pytest.mark.parametrize(
    ("holder", "id", "verdict", "left"),
    [
        (ME, ME, Verdict.YES, ()),
        (ME, OTHER, Verdict.YES, ()),
        (FOREIGN, ME, Verdict.NO, (Entry(FOREIGN, NOW + 5),)),
        (FOREIGN, ANY, Verdict.YES, ()),
    ],
)
def test_rule_5_a_break_removes_the_holds_of_asynclock(
    holder: str, id: str, verdict: Verdict, left: tuple[Entry, ...]
) -> None:
    """Whichever client has them; that of another program only with the id ANY."""
    reply = decide(MUTEX, State((Entry(holder, NOW + 5),)), Op(Verb.BREAK, MUTEX, "name", id, 10.0), NOW)
    assert (reply.verdict, reply.state.holds) == (verdict, left)


def test_rule_5_a_break_keeps_the_hold_of_another_program_beside() -> None:
    """Of a kind that several ids can hold."""
    state = State((Entry(READER, NOW + 5), Entry(FOREIGN, NOW + 5)))
    reply = decide(READ, state, Op(Verb.BREAK, READ, "name", READER, 10.0), NOW)
    assert reply.state.holds == (Entry(FOREIGN, NOW + 5),)


def test_rule_5_a_break_notifies_the_holder_of_the_breaker_first() -> None:
    """Then of the break; and then the name is granted to the first waiter."""
    state = State((Entry(ME, NOW + 5),), queue=(WAITER,), queue_ends=NOW + 8, marked=True)
    op = Op(Verb.BREAK, MUTEX, "name", OTHER, 10.0, 0, MEMORY, queueing=Queueing(Serve.GRANT, waiter="web-3"))
    reply = decide(MUTEX, state, op, NOW)
    told = [(each.id, each.broken, each.name.endswith("web-3")) for each in reply.notices]
    assert told == [(ME[:32], True, True), (ME[:32], True, False), (OTHER[:32], False, False)]
    assert reply.state.holds == (Entry(OTHER, NOW + 8),)


@pytest.mark.parametrize("rest", [0.25, 3.0])
def test_rule_5_a_permit_rests_beside_the_others(rest: float) -> None:
    """It stays taken for that time, under an id that nobody has. The other holds stay as they are."""
    first, second = (f"{letter * 32}|s2/." for letter in "de")
    kind, state = Semaphore(2), State((Entry(first, NOW + 5), Entry(second, NOW + 6)))
    reply = decide(kind, state, Op(Verb.RELEASE, kind, "name", first, 10.0, 0, MEMORY, rest), NOW)
    assert reply.state.holds == (Entry(second, NOW + 6), Entry(RESTING_MARK + first[1:], NOW + rest))


def test_rule_8_a_short_min_hold_notifies_the_first_of_its_time() -> None:
    """Also one of less than a second: nobody is served before."""
    state = State((Entry(ME, NOW + 5),), queue=(WAITER,), queue_ends=NOW + 8, marked=True)
    op = Op(Verb.RELEASE, MUTEX, "name", ME, 10.0, 0, MEMORY, 0.25, queueing=Queueing(Serve.GRANT))
    assert decide(MUTEX, state, op, NOW).notices == (Notice(OTHER[:32], 3, left=0.25, name="name"),)


RESTS = (Entry(RESTING, NOW + 3),)
PLACE_RESTS = (Entry(f"{RESTING_MARK}{READER[1:]}", NOW + 2), Entry("a" * 32 + "|r.17|", NOW + 4))
SECOND = WAITER._replace(order=NOW_US + 1, id="f" * 32 + "|17|", number=7)


@pytest.mark.parametrize(
    ("kind", "holds", "leaves", "left"),
    [
        (MUTEX, RESTS, WAITER, 3.0),
        (MUTEX, (Entry(DONE, NOW + 3),), WAITER, 3.0),
        (MUTEX, RESTS, SECOND, 0.0),
        (MUTEX, (Entry(ME, NOW + 3),), WAITER, 0.0),
        (WRITE, PLACE_RESTS, WAITER, 2.0),
        (WRITE, PLACE_RESTS[1:], WAITER, 0.0),
        (WRITE, (*PLACE_RESTS, Entry("b" * 32 + "|r.17|", NOW + 1)), WAITER, 0.0),
    ],
)
def test_rule_8_a_first_waiter_that_leaves_a_rest_lets_the_next_one_know_its_end(
    kind: Rule, holds: tuple[Entry, ...], leaves: Ticket, left: float
) -> None:
    """It alone was told. Nobody is told where the name is held, or another waiter leaves."""
    first, second = (each._replace(id=f"{each.id[:33]}{kind.mode}17|") for each in (WAITER, SECOND))
    gone = first if leaves is WAITER else second
    state = State(holds, queue=(first, second), queue_ends=NOW + 8)
    op = Op(Verb.RELEASE, kind, "name", gone.id, 10.0, 0, MEMORY, queueing=Queueing(Serve.GRANT))
    told = (Notice(second.id[:32], 7, left=left, name="name"),) if left else ()
    assert decide(kind, state, op, NOW).notices == told


@pytest.mark.parametrize(("serve", "left"), [(Serve.WAKE, 3.0), (Serve.GRANT, 3.0), (Serve.NOBODY, None)])
def test_rule_8_a_waiter_that_has_entered_lets_the_next_one_know_the_end_of_a_rest(
    serve: Serve, left: float | None
) -> None:
    """By the release of an id that nobody has used."""
    holds = (Entry(f"{RESTING_MARK}{READER[1:]}", NOW + 3), Entry("b" * 32 + "|r.17|", NOW + 9))
    waiter = WAITER._replace(id=f"{OTHER[:33]}w.17|")
    state = State(holds, queue=(waiter,), queue_ends=NOW + 8)
    op = Op(Verb.RELEASE, READ, "name", "f" * 32 + "|r.17|", 10.0, 0, MEMORY, queueing=Queueing(serve))
    assert [each.left for each in decide(READ, state, op, NOW).notices] == [each for each in (left,) if each]


@pytest.mark.parametrize(
    ("known", "verdict", "holder", "fence"),
    [(OTHER, Verdict.YES, ME, NOW_US), (ME, Verdict.YES, ME, 100), (FOREIGN, Verdict.NO, FOREIGN, 100)],
)
def test_rule_5_an_adopt_takes_the_hold_of_a_known_id(known: str, verdict: Verdict, holder: str, fence: int) -> None:
    """With a new fence, but once only: the same adopt again changes nothing."""
    state = State((Entry(known, NOW + 5),), 100, NOW + 60)
    op = Op(Verb.ADOPT, MUTEX, "name", ME, 10.0, NOW_US, MEMORY, queueing=Queueing(waiter=OTHER))
    reply = decide(MUTEX, state, op, NOW)
    ends = NOW + (10 if verdict is Verdict.YES else 5)
    assert (reply.verdict, reply.state.holds, reply.state.fence) == (verdict, (Entry(holder, ends),), fence)


WHOLE = State((Entry(ME, NOW + 1),), 100, NOW + 2, (Entry(OTHER, NOW + 3),), (WAITER,), queue_ends=NOW + 4, marked=True)


@pytest.mark.parametrize(
    ("after", "holds", "fence", "undone", "queue", "marked"),
    [
        (0.5, 1, 100, 1, 1, True),
        (1.0, 0, 100, 1, 1, False),
        (2.0, 0, 0, 1, 1, False),
        (3.0, 0, 0, 0, 1, False),
        (4.0, 0, 0, 0, 0, False),
    ],
)
def test_each_part_of_a_state_ends_by_itself(
    after: float, holds: int, fence: int, undone: int, queue: int, marked: bool
) -> None:
    """A mark ends with the hold, and the end of a part is forgotten with it."""
    state = WHOLE.at(NOW + after)
    assert (len(state.holds), state.fence, len(state.undone), len(state.queue)) == (holds, fence, undone, queue)
    assert (state.marked, bool(state.fence_ends), bool(state.queue_ends)) == (marked, bool(fence), bool(queue))


def test_a_state_of_which_nothing_has_ended_is_the_same_object() -> None:
    """So a node with many names makes no copies."""
    assert WHOLE.at(NOW) is WHOLE
    assert (empty := State()).at(NOW) is empty


@pytest.mark.parametrize(("id", "letter"), [(READER, "r"), (READER.replace("|", "!"), "r"), (ME, ""), (FOREIGN, "")])
def test_an_id_says_its_kind(id: str, letter: str) -> None:
    """Also that of a client without notices. A mutex and another program have no letter."""
    assert letter_of(id) == letter


@pytest.mark.parametrize(("kind", "mode", "blocks"), [(WRITE, "r.", 1), (Semaphore(2), "s2/.", 0)])
def test_a_refusal_names_the_hold_that_it_waits_for(kind: Rule, mode: str, blocks: int) -> None:
    """A writer waits for the last of the readers, and the next holder of a permit for the first that ends."""
    holds = tuple(Entry(f"{letter * 32}|{mode}17|", NOW + ends) for letter, ends in (("e", 5), ("d", 6)))
    own = "f" * 32 + f"|{kind.mode}17|"
    reply = decide(kind, State(holds), Op(Verb.ACQUIRE, kind, "name", own, 10.0, NOW_US, MEMORY), NOW)
    assert (reply.verdict, reply.holder) == (Verdict.NO, holds[blocks])


@pytest.mark.parametrize(("taken", "slot"), [(((0, 1), (0, 1)), None), (((0, 1), (0,)), 1), ((), 1)])
def test_a_slot_is_chosen_that_a_majority_may_grant(taken: tuple[tuple[int, ...], ...], slot: int | None) -> None:
    """Of three nodes, two have refused, or none. A slot that is in use at one of them is free at a majority."""
    assert Semaphore(2).choose([Slots(each) for each in taken], 1, lambda: 0.9) == slot
