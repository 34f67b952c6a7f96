"""The rule for several names, as tables; pure."""

from __future__ import annotations

import pytest

from asynclock.locks.multi import Multi
from asynclock.rules.model import Entry, Op, Part, Queueing, Serve, State, Ticket, Verb, Verdict
from asynclock.rules.mutex import FAIR
from asynclock.rules.several import Several, decide_all

NOW = 1_700_000_000.0
NOW_US = 1_700_000_000_000_000

ME, *OTHERS = (letter * 32 + "|17|" for letter in "deab")
BOTH = Multi([Part("left", FAIR), Part("right", FAIR)])


def waiting(order: int, id: str) -> Ticket:
    """Of a waiter for both names."""
    return Ticket(NOW_US + order, id, 3, NOW + 5, NOW + 8, span=0)


def queue(*tickets: Ticket) -> State:
    """A free name where these wait."""
    return State(queue=tickets, queue_ends=NOW + 20 if tickets else 0.0)


def asked(left: State, right: State, order: int) -> Several:
    """A try of ME, which has waited since `order`."""
    queueing = Queueing(Serve.GRANT, number=2, fresh=5.0, order=NOW_US + order)
    op = Op(Verb.ACQUIRE, BOTH, "both", ME, 10.0, NOW_US, 3_600.0, queueing=queueing)
    return decide_all(BOTH.parts, [left, right], op, NOW, lambda tag: True)


@pytest.mark.parametrize("own", [0, 1])
def test_the_first_of_all_waiters_enters_where_both_queues_have_others(own: int) -> None:
    """Both names are free, and each has two waiters for both. The ticket of the first of all is at one name. At the
    other it counted as the last, so it left the first name again; and so did each of them, as long as they waited."""
    mine, other = waiting(1, ME), waiting(2, OTHERS[0])
    states = [queue(mine, waiting(4, OTHERS[1])), queue(other, waiting(5, OTHERS[2]))]
    found = asked(*(states if own == 0 else reversed(states)), order=1)
    assert found.reply.verdict is Verdict.YES
    assert [len(state.queue) for state in found.states] == ([1, 2] if own == 0 else [2, 1])
    assert found.states[0].fence == found.states[1].fence == NOW_US


def test_a_later_one_waits_at_the_name_where_another_goes_first() -> None:
    """There it has its place by its first try, and no ticket at the name that let it in."""
    left, right = queue(waiting(3, ME)), queue(waiting(2, OTHERS[0]), waiting(5, OTHERS[1]))
    found = asked(left, right, order=3)
    assert (found.reply.verdict, found.part, found.reply.rank) == (Verdict.NO, 1, 1)
    assert [each.id for each in found.states[1].queue] == [OTHERS[0], ME, OTHERS[1]]
    assert (found.states[0].queue, found.states[0].holds) == ((), ())
    assert [each.id for each in found.notices] == [OTHERS[0][:32]]


def test_the_ticket_of_a_refused_try_never_becomes_the_holder() -> None:
    """It has span 0: one of the names alone is of no use."""
    found = asked(queue(), queue(waiting(2, OTHERS[0])), order=3)
    assert [each.span for each in found.states[1].queue] == [0, 0]


@pytest.mark.parametrize(("fences", "token"), [((200, 100), 100), ((100, 200), 100)])
def test_the_fence_of_an_extend_is_the_least_of_all_names(fences: tuple[int, int], token: int) -> None:
    """A witness of a token has it at each name."""
    left, right = (State((Entry(ME, NOW + 5),), fence, NOW + 60) for fence in fences)
    found = decide_all(BOTH.parts, [left, right], Op(Verb.EXTEND, BOTH, "both", ME, 10.0), NOW, lambda tag: True)
    assert (found.reply.verdict, found.reply.fence) == (Verdict.YES, token)


@pytest.mark.parametrize(("holders", "part"), [((OTHERS[0], ME), 0), ((ME, OTHERS[0]), 1), (("", OTHERS[0]), 1)])
def test_the_refusal_of_an_extend_is_that_of_a_name_that_another_holds(holders: tuple[str, str], part: int) -> None:
    """It says more than that of a name that nobody holds. The names that this id has are extended."""
    states = [State((Entry(each, NOW + 5),) if each else ()) for each in holders]
    found = decide_all(BOTH.parts, states, Op(Verb.EXTEND, BOTH, "both", ME, 10.0), NOW, lambda tag: True)
    assert (found.reply.verdict, found.part) == (Verdict.NO, part)
    ends = [state.holds[0].ends for state, holder in zip(found.states, holders, strict=True) if holder == ME]
    assert all(end == NOW + 10 for end in ends)


@pytest.mark.parametrize(("waits", "part"), [((True, True), 0), ((False, True), 1)])
def test_the_refusal_of_a_peek_is_that_of_the_first_name_where_a_ticket_goes_first(
    waits: tuple[bool, bool], part: int
) -> None:
    """Nobody holds the names, and others have tickets there."""
    states = [queue(waiting(order, OTHERS[order])) if each else queue() for order, each in enumerate(waits)]
    found = decide_all(BOTH.parts, states, Op(Verb.PEEK, BOTH, "both", ME, 10.0), NOW, lambda tag: True)
    assert (found.reply.verdict, found.part, found.reply.rank) == (Verdict.NO, part, 0)


def test_all_names_get_the_greatest_of_their_fences() -> None:
    """As long as the token is remembered: so the next holder of either name has a token above it."""
    ahead = State(fence=NOW_US + 500, fence_ends=NOW + 60)
    for states in ([ahead, State()], [State(), ahead]):
        found = asked(*states, order=1)
        assert found.reply.fence == NOW_US + 501
        assert [(each.fence, each.fence_ends) for each in found.states] == [(NOW_US + 501, NOW + 3_600)] * 2
