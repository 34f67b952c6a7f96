"""The rules of a node for waiters (7 to 9, and 11), as tables; pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asynclock.rules.decide import decide
from asynclock.rules.model import (
    DONE,
    LAST,
    RESTING,
    SERVED,
    VISITED,
    Entry,
    Notice,
    Op,
    Queueing,
    Reply,
    Serve,
    State,
    Ticket,
    Verb,
    Verdict,
)
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import READ, WRITE
from tests.support.on_the_wire import reply_on_wire

NOW = 1_700_000_000.0
NOW_US = 1_700_000_000_000_000
SKEW_US = 10_000_000
MEMORY = 3_600.0


def id_of(letter: str) -> str:
    """An id of ours, its tag twelve times the letter."""
    return letter * 32 + "|17|"


ME, OTHER, A, B = map(id_of, "deab")


def ticket(id: str, order: int, fresh: float = 5.0, number: int = 3, span: int = 1) -> Ticket:
    """A ticket that turns into a hold until in 8 s."""
    return Ticket(NOW_US + order, id, number, NOW + fresh, NOW + 8, span)


def queue(*tickets: Ticket, **more: object) -> State:
    """A free name, or what `more` says, where these wait."""
    return State(queue=tickets, queue_ends=NOW + 20 if tickets else 0.0, **more)  # type: ignore[arg-type]


def held(by: str, *tickets: Ticket) -> State:
    """Held for 5 s; marked if there are waiters."""
    return queue(*tickets, holds=(Entry(by, NOW + 5),), fence=100, fence_ends=NOW + 60, marked=bool(tickets))


FIRST, SECOND = ticket(A, 1), ticket(B, 2)


def asked(state: State, verb: Verb, queueing: Queueing, deaf: str = "", may: bool = True, **more: object) -> Reply:
    """An op of ME, lease 10 s. All clients listen but the `deaf` ones."""
    fence = NOW_US if verb is Verb.ACQUIRE else 0
    op = Op(verb, MUTEX, "name", ME, 10.0, fence, MEMORY, queueing=queueing, **more)  # type: ignore[arg-type]
    return decide(MUTEX, state, op, NOW, lambda tag: tag[0] not in deaf if may else None)


def but(queueing: Queueing, **changes: object) -> Queueing:
    """The same, but for these."""
    names = ("serve", "fair", "span", "waiter", "number", "fresh", "order")
    return Queueing(**{name: getattr(queueing, name) for name in names} | changes)


def notice(id: str, number: int, fence: int = 0, left: float = 0.0) -> Notice:
    return Notice(id[:32], number, fence, left, "name")


def ids(state: State) -> list[str]:
    return [each.id for each in state.queue]


TRY = Queueing(Serve.GRANT, number=1, fresh=4.0)
FAIR_TRY = Queueing(Serve.GRANT, fair=True, number=1, fresh=4.0)
LOOK = Queueing(Serve.GRANT, number=4, fresh=4.0, order=NOW_US + 7)
GRANT, WAKE = Queueing(Serve.GRANT), Queueing(Serve.WAKE)


# -- rule 7: tickets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [Verb.ACQUIRE, Verb.WAIT])
def test_rule_7_a_refused_op_leaves_a_ticket(verb: Verb) -> None:
    """With its number, its span, and times from now; the reply has its place."""
    reply = asked(held(OTHER, FIRST), verb, but(LOOK, span=16))
    assert reply.state.queue[1] == Ticket(NOW_US + 7, ME, 4, NOW + 4, NOW + 10, 16)
    assert reply_on_wire(reply, NOW) == [0, 5_000, OTHER.encode(), 1, NOW_US + 7]


@pytest.mark.parametrize("verb", [Verb.ACQUIRE, Verb.WAIT, Verb.RELEASE])
def test_rule_7_without_a_number_there_is_no_ticket(verb: Verb) -> None:
    """An op that does not wait leaves none, and has no place."""
    reply = asked(held(OTHER), verb, GRANT)
    assert reply.state == held(OTHER)
    assert reply_on_wire(reply, NOW) == [0, 5_000, OTHER.encode(), -1, 0]


def test_rule_7_a_renewal_keeps_the_place() -> None:
    """The order key decides it, not when the ticket comes."""
    mine = ticket(ME, 7)
    reply = asked(held(OTHER, FIRST, mine, ticket(B, 9)), Verb.WAIT, LOOK)
    assert ids(reply.state) == [A, ME, B]
    assert reply.state.queue[1].number == 4


def test_rule_7_a_lost_ticket_comes_back_in_its_place() -> None:
    """A node that restarted learns it from the renewal."""
    assert ids(asked(held(OTHER, FIRST, ticket(B, 9)), Verb.WAIT, LOOK).state) == [A, ME, B]


@pytest.mark.parametrize(
    ("order", "number", "found"),
    [
        (0, 1, NOW_US),  # the node's own clock says
        (0, 2, NOW_US),
        (NOW_US + SKEW_US, 1, NOW_US + SKEW_US),
        (NOW_US + SKEW_US + 1, 1, NOW_US + SKEW_US),
        (NOW_US - SKEW_US - 1, 1, NOW_US - SKEW_US),
        (NOW_US - 60 * SKEW_US, 2, NOW_US - 60 * SKEW_US),  # it waits for ten minutes
    ],
)
def test_rule_7_a_first_order_is_clamped(order: int, number: int, found: int) -> None:
    """It is clamped to the node's clock. A later one was clamped before, and stays as it is."""
    queueing = Queueing(number=number, fresh=4.0, order=order)
    reply = asked(held(OTHER), Verb.ACQUIRE, queueing)
    assert (reply.order, reply.state.queue[0].order) == (found, found)


def test_rule_7_an_attempt_carries_the_ticket_of_its_waiter() -> None:
    """Attempts over N nodes have ids of their own; the ticket keeps its."""
    assert ids(asked(held(OTHER), Verb.ACQUIRE, but(TRY, waiter=A)).state) == [A]
    assert ids(asked(queue(FIRST, SECOND), Verb.ACQUIRE, but(TRY, waiter=A)).state) == [B]


def test_rule_7_an_undo_stores_the_ticket_again() -> None:
    """The release is for the attempt's id, the ticket for the waiter."""
    reply = asked(held(ME), Verb.RELEASE, Queueing(waiter=A, number=2, fresh=4.0, order=NOW_US - 5))
    assert reply.verdict is Verdict.YES
    assert reply.state.queue == (Ticket(NOW_US - 5, A, 2, NOW + 4, NOW + 10, 1),)


def test_rule_5_an_undo_that_removes_no_hold_stores_no_ticket() -> None:
    """It may arrive late, when the waiter has withdrawn its ticket. A ticket that is there stays as it is."""
    queueing = Queueing(waiter=A, number=2, fresh=4.0, order=NOW_US - 5)
    assert ids(asked(held(OTHER), Verb.RELEASE, queueing).state) == []
    assert asked(held(OTHER, FIRST), Verb.RELEASE, queueing).state.queue == (FIRST,)


def test_rule_5_release_deletes_its_own_ticket() -> None:
    """A waiter leaves the queue in that way."""
    assert ids(asked(held(OTHER, FIRST, ticket(ME, 7)), Verb.RELEASE, GRANT).state) == [A]


@pytest.mark.parametrize("verb", [Verb.ACQUIRE, Verb.WAIT])
def test_rule_1_an_undone_id_leaves_no_ticket(verb: Verb) -> None:
    """The tombstone goes before both, and nobody is served."""
    state = queue(FIRST, undone=(Entry(ME, NOW + 5),))
    reply = asked(state, verb, TRY)
    assert (reply.verdict, reply.state, reply.notices) == (Verdict.UNDONE, state, ())


# -- rule 8: serving ---------------------------------------------------------------------------------------------------


def test_rule_8_a_release_notifies_the_first() -> None:
    """Over N nodes: the first waiter is notified, and keeps its ticket."""
    reply = asked(held(ME, FIRST, SECOND), Verb.RELEASE, WAKE)
    assert reply.notices == (notice(A, 3),)
    assert (reply.state.holds, ids(reply.state)) == ((), [A, B])


def test_rule_8_a_release_grants_to_the_first() -> None:
    """On a single node: it holds until its ticket's end, with the node's fence, and the notice names the ticket."""
    reply = asked(held(ME, FIRST, SECOND), Verb.RELEASE, GRANT)
    assert reply.notices == (notice(A, 3, NOW_US),)
    assert reply.state == replace(
        queue(SECOND), holds=(Entry(A, NOW + 8),), marked=True, fence=NOW_US, fence_ends=NOW + MEMORY
    )
    assert reply.fence == 100  # the released hold's F, not the next one's


@pytest.mark.parametrize(
    ("before", "span", "fence"),
    [(100, 1, NOW_US), (100, 16, NOW_US + 15), (2 * NOW_US, 1, 2 * NOW_US + 1), (2 * NOW_US, 16, 2 * NOW_US + 16)],
)
def test_rule_8_the_fence_of_a_grant(before: int, span: int, fence: int) -> None:
    """From the node's clock, above F, with all that the ticket wants."""
    state = queue(ticket(A, 1, span=span), fence=before, fence_ends=NOW + 1)
    reply = asked(state, Verb.RELEASE, GRANT)
    assert (reply.state.fence, reply.notices) == (fence, (notice(A, 3, fence),))


@pytest.mark.parametrize("serve", [GRANT, WAKE], ids=["grant", "wake"])
@pytest.mark.parametrize(
    ("first", "deaf"), [(ticket(A, 1, fresh=0.0), ""), (FIRST, A[0])], ids=["no longer fresh", "deaf"]
)
def test_rule_8_an_unreachable_head_is_removed(first: Ticket, deaf: str, serve: Queueing) -> None:
    """The next one is served. The removed one comes back with its renewal, if it lives."""
    reply = asked(held(ME, first, SECOND), Verb.RELEASE, serve, deaf=deaf)
    assert [notice.id for notice in reply.notices] == [B[:32]]
    assert A not in ids(reply.state)


def test_rule_8_nothing_is_granted_without_a_receiver() -> None:
    """The name is free in the end; the fence stays used."""
    reply = asked(held(ME, FIRST, SECOND), Verb.RELEASE, GRANT, deaf=A[0] + B[0])
    assert (reply.state.holds, reply.state.queue, reply.notices) == ((), (), ())
    assert reply.state.fence == NOW_US + 1


def test_rule_8_without_permission_to_publish_nobody_is_served() -> None:
    """The node cannot know whether they listen: the tickets stay, their owners poll."""
    reply = asked(held(ME, FIRST, SECOND), Verb.RELEASE, GRANT, may=False)
    assert (reply.state.holds, ids(reply.state), reply.notices) == ((), [A, B], ())


@pytest.mark.parametrize(("stale", "served"), [(VISITED - 1, True), (VISITED, False)])
def test_rule_8_a_release_visits_a_bounded_number(stale: int, served: bool) -> None:
    """The cost of a release is bounded; the rest is for the next one."""
    others = [ticket(f"{i:032x}|", i - 100, fresh=0.0) for i in range(stale)]
    reply = asked(held(ME, *others, FIRST), Verb.RELEASE, GRANT)
    assert bool(reply.notices) is served
    assert ids(reply.state) == ([] if served else [A])


def test_rule_8_the_last_that_are_served_continue_the_batch() -> None:
    """And not those in these places of a client that was killed: the readers behind them would wait for a renewal."""
    readers = [f"{i:032x}|r." for i in range(100)]
    killed = [each.replace("0" * 12, "d" * 12, 1) for each in readers[50:80]]
    waiting = [*readers[:50], *killed, *readers[50:]]
    tickets = tuple(Ticket(i, each, 3, NOW + 5, NOW + 8, 1) for i, each in enumerate(waiting))
    state = State((Entry(f"{'e' * 32}|w.", NOW + 5),), 100, NOW + 60, (), tickets, NOW + 20)
    op = Op(Verb.RELEASE, WRITE, "name", f"{'e' * 32}|w.", 10.0, 100, MEMORY, queueing=GRANT)
    reply = decide(WRITE, state, op, NOW, lambda tag: tag != "d" * 12)
    assert [each.id for each in reply.notices] == [each[:32] for each in readers[:SERVED]]
    assert [each.continue_batch for each in reply.notices] == [False] * (SERVED - LAST) + [True] * LAST


def test_rule_8_min_hold_notifies_the_first_of_the_time() -> None:
    """Free in so many ms; nobody is served before."""
    reply = asked(held(ME, FIRST, SECOND), Verb.RELEASE, GRANT, rest=3.0)
    assert reply.state.holds == (Entry(RESTING, NOW + 3),)
    assert reply.notices == (notice(A, 3, left=3.0),)


@pytest.mark.parametrize("verb", [Verb.WAIT, Verb.RELEASE])
def test_rule_8_an_op_that_finds_the_name_free_serves(verb: Verb) -> None:
    """A holder whose lease ended serves nobody: a waiter that renews its ticket, or leaves, does."""
    ended = replace(held(OTHER, FIRST), holds=(Entry(OTHER, NOW),))
    reply = asked(ended, verb, LOOK if verb is Verb.WAIT else GRANT)
    assert reply.state.holds == (Entry(A, NOW + 8),)
    assert reply_on_wire(reply, NOW)[0] == 0


def test_rule_8_a_probe_of_the_first_waiter_returns_free() -> None:
    """It is not served: it asks itself."""
    reply = asked(queue(ticket(ME, 7), ticket(B, 9)), Verb.WAIT, LOOK)
    assert (reply_on_wire(reply, NOW), reply.notices) == ([0, -2, b"", 0, NOW_US + 7], ())


def test_rule_8_a_newcomer_gets_a_free_name() -> None:
    """Not fair: a newcomer enters though others wait, and its hold is marked for them."""
    reply = asked(queue(FIRST), Verb.ACQUIRE, TRY)
    assert (reply.verdict, reply.notices) == (Verdict.YES, ())
    assert (ids(reply.state), reply.state.marked) == ([A], True)


def test_rule_8_fair_only_the_first_enters() -> None:
    """Another waiter serves the first one, and is refused."""
    reply = asked(queue(ticket(A, -1)), Verb.ACQUIRE, FAIR_TRY)
    assert reply_on_wire(reply, NOW) == [0, 8_000, A.encode(), 0, NOW_US]
    assert reply.notices == (notice(A, 3, NOW_US),)


@pytest.mark.parametrize("before", [(), (ticket(A, 1, fresh=0.0),)], ids=["nobody", "one no longer fresh"])
def test_rule_8_fair_the_first_enters(before: tuple[Ticket, ...]) -> None:
    """Its ticket is deleted, the mark is for the waiters behind it."""
    mine = ticket(ME, 7)
    reply = asked(queue(*before, mine, ticket(B, 9)), Verb.ACQUIRE, but(LOOK, fair=True))
    assert (reply.verdict, ids(reply.state), reply.state.marked) == (Verdict.YES, [B], True)


# -- rule 9: marks -----------------------------------------------------------------------------------------------------


def test_rule_9_a_hold_with_waiters_is_marked_and_notified_once() -> None:
    """The first ticket does it; those after find the mark."""
    first = asked(held(OTHER), Verb.WAIT, LOOK)
    assert (first.state.marked, first.notices) == (True, (notice(OTHER, 0),))
    assert asked(first.state, Verb.WAIT, LOOK).notices == ()


@pytest.mark.parametrize("holder", ["d" * 32, "d" * 32 + "!17|", "another's", "", RESTING, DONE])
def test_rule_9_no_other_hold_is_marked(holder: str) -> None:
    """Another library compares its token with the whole value; and nobody serves for an unreachable holder or a resting
    name."""
    reply = asked(held(holder), Verb.WAIT, LOOK)
    assert (reply.state.marked, reply.notices, ids(reply.state)) == (False, (), [ME])


def test_rule_9_a_marked_hold_is_its_owners() -> None:
    """Its owner can extend and release it, and gets its notices."""
    state = held(ME, FIRST)
    assert asked(state, Verb.EXTEND, GRANT).state.marked
    assert asked(state, Verb.ACQUIRE, TRY).verdict is Verdict.YES
    assert asked(state, Verb.RELEASE, Queueing()).verdict is Verdict.YES


def test_rule_9_the_last_waiter_leaves_no_mark_on_its_own_hold() -> None:
    """Nobody waits for it, so the server's own compare-and-delete may release it."""
    assert not asked(queue(ticket(ME, 7)), Verb.ACQUIRE, TRY).state.marked


# -- rule 11: heals ----------------------------------------------------------------------------------------------------


READER, WRITER = "d" * 32 + "|r.17|", "a" * 32 + "|w.17|"
HEAL, FAIR_HEAL = Queueing(), Queueing(fair=True)


def healed(state: State, id: str = READER) -> Reply:
    """A reader's hold that a majority has, and this node lacks."""
    return decide(READ, state, Op(Verb.ACQUIRE, READ, "name", id, 10.0, NOW_US, MEMORY, queueing=HEAL), NOW)


@pytest.mark.parametrize("heal", [HEAL, FAIR_HEAL], ids=["a mutex", "fair"])
def test_rule_11_a_heal_goes_before_the_queue(heal: Queueing) -> None:
    """It is granted, with the mark for those that wait. No ticket is served or lost."""
    reply = asked(queue(FIRST, SECOND), Verb.ACQUIRE, heal)
    assert (reply.verdict, reply.notices) == (Verdict.YES, ())
    assert (reply.state.holds, ids(reply.state), reply.state.marked) == ((Entry(ME, NOW + 10),), [A, B], True)


def test_rule_11_a_heal_of_a_reader_goes_before_a_writer_that_waits() -> None:
    """Beside other readers, too."""
    others = Entry("e" * 32 + "|r.17|", NOW + 5)
    reply = healed(queue(ticket(WRITER, 1), holds=(others,)))
    assert (reply.verdict, reply.notices) == (Verdict.YES, ())
    assert ({*reply.state.holds}, ids(reply.state)) == ({others, Entry(READER, NOW + 10)}, [WRITER])


@pytest.mark.parametrize("serve", [Serve.WAKE, Serve.GRANT])
def test_rule_11_a_round_of_a_reader_waits_behind_a_writer(serve: Serve) -> None:
    """It serves, so it is no heal."""
    op = Op(Verb.ACQUIRE, READ, "name", READER, 10.0, NOW_US, MEMORY, queueing=Queueing(serve))
    assert decide(READ, queue(ticket(WRITER, 1)), op, NOW).verdict is Verdict.NO


def test_rule_11_a_heal_does_not_go_beside_a_holder_that_excludes_it() -> None:
    """The state stays as it is."""
    state = queue(ticket(B, 2), holds=(Entry(WRITER, NOW + 5),))
    assert (healed(state).verdict, healed(state).state) == (Verdict.NO, state)
    refused = asked(held(OTHER, FIRST), Verb.ACQUIRE, FAIR_HEAL)
    assert (refused.verdict, refused.state) == (Verdict.NO, held(OTHER, FIRST))


def test_rule_11_a_heal_of_an_id_that_was_undone_is_refused() -> None:
    """It arrives after the release (rule 1)."""
    state = queue(ticket(WRITER, 1), undone=(Entry(READER, NOW + 5),))
    assert (healed(state).verdict, healed(state).state) == (Verdict.UNDONE, state)


@pytest.mark.parametrize(("waiters", "rank"), [(SERVED - 1, -1), (SERVED, 0)])
def test_rule_10_a_peek_enters_beside_as_many_as_one_op_serves(waiters: int, rank: int) -> None:
    """A reader, behind other readers. The last that one op serves would be itself."""
    readers = [ticket(f"{number:032x}|r.17|", number) for number in range(waiters)]
    reply = decide(READ, queue(*readers), Op(Verb.PEEK, READ, "name", ME[:33] + "r.17|", 10.0), NOW)
    assert (reply.verdict, reply.rank) == (Verdict.NO, rank)


def test_rule_10_a_peek_of_a_reader_does_not_enter_beside_a_writer() -> None:
    """That waits, and would be served before it."""
    peek = Op(Verb.PEEK, READ, "name", ME[:33] + "r.17|", 10.0)
    reply = decide(READ, queue(ticket("a" * 32 + "|w.17|", 1)), peek, NOW)
    assert (reply.verdict, reply.rank) == (Verdict.NO, 0)
