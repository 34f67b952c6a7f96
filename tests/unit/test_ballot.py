"""The outcome of N answers: counted by brute force, and one vote at a time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator

import pytest

from asynclock.quorum.ballot import Ballot, Outcome, drift, tally, valid_until
from asynclock.rules.model import Op, Slots, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import UNDONE, Grant, Reconnecting, Refused

YES: Grant = 42, False
NO = Refused(1.5, "other")
BROKEN = ConnectionError("broken")


# -- tally and valid_until ---------------------------------------------------------------------------------------------


def counts(nodes: int) -> Iterator[tuple[int, int, int]]:
    """All (yes, no, failed) that so many nodes can have answered."""
    for yes, no, failed in itertools.product(range(nodes + 1), repeat=3):
        if yes + no + failed <= nodes:
            yield yes, no, failed


def by_definition(nodes: int, yes: int, no: int, failed: int) -> Outcome | None:
    """Try each way in which the open votes may still fall."""
    still_open = nodes - yes - no - failed
    ends = [(yes + y, no + n) for y, n, f in counts(nodes) if y + n + f == still_open]
    if 2 * yes > nodes:
        return Outcome.WON
    if all(2 * (y + n) <= nodes for y, n in ends):
        return Outcome.UNREACHABLE
    if 2 * (yes + no) > nodes and all(2 * y <= nodes for y, _ in ends):
        return Outcome.REFUSED
    return None


@pytest.mark.parametrize("nodes", range(1, 8))
def test_tally_is_as_defined(nodes: int) -> None:
    """WON with a majority of yes; else UNREACHABLE if no majority can answer; else REFUSED if a majority has answered,
    and none can say yes. Two refusals of five are no refusal while the others may be out of reach."""
    for votes in counts(nodes):
        assert tally(nodes, *votes) is by_definition(nodes, *votes), votes


@pytest.mark.parametrize("nodes", range(1, 8))
def test_a_ballot_with_all_votes_has_an_outcome(nodes: int) -> None:
    """A complete ballot is never open."""
    assert all(tally(nodes, *votes) for votes in counts(nodes) if sum(votes) == nodes)


@pytest.mark.parametrize("nodes", range(1, 8))
def test_valid_until_is_the_last_moment_of_a_majority(nodes: int) -> None:
    """Until then a majority of the nodes keeps the hold, and after it none does."""
    for ends in itertools.product([0.0, 1.0, 2.0], repeat=nodes):
        until = valid_until(ends)
        assert 2 * sum(end >= until for end in ends) > nodes
        assert 2 * sum(end > until for end in ends) <= nodes


def test_drift_grows_with_the_lease() -> None:
    """1 % and 2 ms, as the Redlock page says."""
    assert [drift(lease) for lease in (0.0, 1.0, 30.0)] == pytest.approx([0.002, 0.012, 0.302])


# -- ballots -----------------------------------------------------------------------------------------------------------


def ballot(nodes: int = 3, everyone: bool = False, certain: bool = False) -> Ballot:
    op = Op(Verb.ACQUIRE, MUTEX, "name", "id", 10.0)
    return Ballot(op, nodes, 0.0, 1.0, everyone=everyone, certain=certain)


def test_a_ballot_counts_as_tally_does() -> None:
    """Votes in any order: the outcome is tally's at the first moment that it has one."""
    rng = random.Random(1)
    for _ in range(500):
        nodes = rng.randint(1, 7)
        made = ballot(nodes)
        expected: Outcome | None = None
        for index in rng.sample(range(nodes), nodes):
            if rng.random() < 0.3:
                made.fail(index, BROKEN, maybe=rng.random() < 0.5)
            else:
                made.answer(index, rng.choice([YES, NO, UNDONE]))
            expected = expected or tally(nodes, made.yes, made.no, made.failed)
            assert made.outcome is expected


@pytest.mark.parametrize(("second", "third"), [(YES, YES), (YES, NO), (NO, YES)])
def test_a_ballot_settles_once(second: Grant | Refused, third: Grant | Refused) -> None:
    """on_settled is called with the outcome: not before there is one, and not for later votes."""
    received: list[Outcome | None] = []
    made = ballot()
    made.on_settled = lambda settled: received.append(settled.outcome)
    for index, vote in enumerate((YES, second, third)):
        made.answer(index, vote)
    assert received == [Outcome.WON]


def test_late_votes_are_reported() -> None:
    """Votes after the outcome are counted, and `late` receives them. After the last one the ballot forgets the owner of
    the callback, so that it can be collected."""
    received: list[int] = []
    made = ballot(5)
    made.on_late_vote(lambda _, index: received.append(index))
    for index in range(5):
        made.answer(index, YES)
    assert (received, made.yes, made.outcome, made.late) == ([3, 4], 5, Outcome.WON, ())


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_each_vote_is_reported_to_the_one_who_counts_them(nodes: int) -> None:
    """Answers and failures, those after the outcome too. Each before the ballot is settled by it: a hold counts a
    renewal at its nodes, and its outcome must not come first."""
    told: list[tuple[int, Outcome | None]] = []
    op, majority = Op(Verb.EXTEND, MUTEX, "name", "id", 10.0), nodes // 2 + 1
    made = Ballot(op, nodes, 0.0, 1.0, on_vote=lambda ballot, index: told.append((index, ballot.outcome)))
    for index in range(nodes):
        if index < majority:
            made.answer(index, YES)
        else:
            made.fail(index, BROKEN, maybe=True)
    assert told == [(index, None if index < majority else Outcome.WON) for index in range(nodes)]
    assert made.outcome is Outcome.WON


def test_a_vote_of_a_node_that_was_counted_out_is_dropped() -> None:
    """Its vote has failed. A later answer changes neither counts nor traces, and is not reported."""
    received: list[int] = []
    made = ballot()
    made.on_late_vote(lambda _, index: received.append(index))
    made.fail(0, BROKEN, maybe=True)
    made.answer(0, YES)
    assert (made.yes, made.failed, made.votes[0], received) == (0, 1, BROKEN, [])


def test_a_late_answer_counts_for_what_is_carried_out() -> None:
    """Two of three nodes were counted out. Once one of them has answered, a majority has carried the release out."""
    made = ballot()
    made.answer(0, YES)
    made.fail(1, BROKEN, maybe=True)
    made.fail(2, BROKEN, maybe=True)
    assert (made.outcome, made.carried_out) == (Outcome.UNREACHABLE, False)
    made.answer(2, NO)
    made.answer(2, NO)
    assert (made.outcome, made.carried_out) == (Outcome.UNREACHABLE, True)


def test_a_node_that_is_not_asked_has_nothing_to_carry_out() -> None:
    """A release goes to one node of three, because the others never had the id: a majority is without it."""
    made = ballot()
    made.leave_out({0: None, 1: BROKEN})
    assert made.carried_out


@pytest.mark.parametrize("again", [YES, NO, BROKEN])
def test_a_node_has_one_vote(again: Grant | Refused | Exception) -> None:
    """A second answer of a node does not count."""
    made = ballot()
    made.answer(0, YES)
    if isinstance(again, Exception):
        made.fail(0, again, maybe=True)
    else:
        made.answer(0, again)
    assert (made.yes, made.no, made.failed, made.outcome) == (1, 0, 0, None)


def test_traces_are_where_the_op_took_effect_or_may() -> None:
    """Granted, unanswered and ambiguous; not where it was refused, undone, certainly not carried out or not asked."""
    made = ballot(7)
    made.leave_out({6: None})
    made.answer(0, YES)
    made.answer(1, NO)
    made.answer(2, UNDONE)
    made.fail(3, BROKEN, maybe=True)
    made.fail(4, BROKEN, maybe=False)
    assert made.traces() == [0, 3, 5]


def test_the_summary_of_votes() -> None:
    """Fences of the grants, denials, errors, and the nodes whose silence leaves the outcome open."""
    made = ballot(5)
    made.answer(0, YES)
    made.answer(1, NO)
    made.answer(2, UNDONE)
    made.fail(3, BROKEN, maybe=False)
    assert made.fences() == [42]
    assert made.nodes_without_grant() == [1, 2, 3]
    assert made.denials() == [NO]
    assert [(index, type(error)) for index, error in made.errors()] == [(3, ConnectionError)]
    assert made.silent() == []  # refused by a majority, whatever the last one says


def test_a_node_that_decides_nothing_is_not_silent() -> None:
    """Two of three nodes failed: the third one had no time to answer, and is not to blame."""
    made = ballot(3)
    made.fail(0, BROKEN, maybe=False)
    assert made.silent() == [1, 2]
    made.fail(1, BROKEN, maybe=False)
    assert made.outcome is Outcome.UNREACHABLE
    assert made.silent() == []


def test_a_ballot_of_everyone_waits_for_the_last() -> None:
    """The outcome may be certain, but the answer of each node is needed."""
    made = ballot(everyone=True)
    made.answer(0, YES)
    made.answer(1, YES)
    assert made.outcome is None
    made.fail(2, BROKEN, maybe=True)
    assert made.outcome is Outcome.WON


def test_a_ballot_of_everyone_waits_for_the_last_behind_failures() -> None:
    """No majority can answer any more, and the last one may have something to tell."""
    made = ballot(everyone=True)
    made.fail(0, BROKEN, maybe=False)
    made.fail(1, BROKEN, maybe=False)
    assert made.outcome is None
    made.answer(2, YES)
    assert made.outcome is Outcome.UNREACHABLE


def test_two_of_five_are_no_majority() -> None:
    """Neither of answers, nor of refusals, nor of nodes that are without an id; three are."""
    made = ballot(5)
    for index, majority in enumerate([False, False, True]):
        made.answer(index, NO)
        assert (made.answered, made.denied, made.carried_out) == (majority,) * 3


@pytest.mark.parametrize("vote", [YES, NO])
def test_nodes_that_connect_again_may_make_a_majority(vote: Grant | Refused) -> None:
    """Together with those that answered. Without any of them there is nothing to wait for."""
    made = ballot(5)
    made.answer(0, vote)
    made.fail(1, Reconnecting("lost"), maybe=False)
    assert not made.may_be_reached_soon
    made.fail(2, Reconnecting("lost"), maybe=False)
    assert made.may_be_reached_soon
    refused = ballot(5)
    for index in range(3):
        refused.answer(index, NO)
    assert not refused.may_be_reached_soon


def test_a_release_is_carried_out_where_there_was_nothing() -> None:
    """A node that answers no is without the id, as one that has deleted it."""
    made = ballot()
    made.answer(0, YES)
    assert not made.carried_out
    made.answer(1, NO)
    assert made.carried_out


@pytest.mark.parametrize("votes", [[YES], [NO], [BROKEN], [YES, NO, BROKEN], [NO, NO, YES], [BROKEN, BROKEN, YES]])
def test_nothing_is_kept_for_late_votes_if_none_can_come(votes: list[Grant | Refused | Exception]) -> None:
    """Each node has answered or failed. A callback would keep its owner alive."""
    made = ballot(len(votes))
    for index, vote in enumerate(votes):
        assert not made.complete
        if isinstance(vote, Exception):
            made.fail(index, vote, maybe=True)
        else:
            made.answer(index, vote)
    assert made.complete
    made.on_late_vote(lambda ballot, index: None)
    assert made.late == ()


@pytest.mark.parametrize(("third", "outcome"), [(NO, Outcome.REFUSED), (Refused(1.5, "a third"), None)])
def test_a_ballot_that_has_to_be_certain(third: Refused, outcome: Outcome | None) -> None:
    """A majority refuses. One holder on a majority is certain; else the last nodes may say who it is."""
    made = ballot(nodes=5, certain=True)
    for index, vote in enumerate([NO, NO, third]):
        made.answer(index, vote)
    assert made.outcome is outcome
    made.fail(3, BROKEN, maybe=True)
    made.answer(4, NO)
    assert made.outcome is Outcome.REFUSED


def test_a_ballot_that_has_to_be_certain_ends_with_the_last_answer() -> None:
    """Each node names another holder, and no more can be learnt."""
    made = ballot(certain=True)
    for index, holder in enumerate("abc"):
        assert made.outcome is None
        made.answer(index, Refused(1.5, holder))
    assert made.outcome is Outcome.REFUSED


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [([], Outcome.UNREACHABLE), ([NO], Outcome.UNREACHABLE), ([YES, NO], Outcome.REFUSED)],
)
def test_a_ballot_that_expires(votes: list[list[object]], outcome: Outcome) -> None:
    """A node without an answer counts as silent: without a majority of answers there is no refusal."""
    made = ballot()
    for index, vote in enumerate(votes):
        made.answer(index, vote)
    made.expire()
    assert made.outcome is outcome


def test_expiry_does_not_change_an_outcome() -> None:
    """A certain outcome stays."""
    made = ballot()
    made.answer(0, YES)
    made.answer(1, YES)
    made.expire()
    assert made.outcome is Outcome.WON


@pytest.mark.parametrize("nodes", [1, 3])
def test_answers_after_the_expiry_do_not_change_the_outcome(nodes: int) -> None:
    """Its caller has gone on. They are counted, because a grant has to be undone."""
    settled: list[Outcome | None] = []
    made = ballot(nodes)
    made.when_settled(lambda ballot: settled.append(ballot.outcome))
    made.expire()
    for index in range(nodes):
        made.answer(index, YES)
    assert (settled, made.outcome) == ([Outcome.UNREACHABLE], Outcome.UNREACHABLE)
    assert (made.yes, made.traces()) == (nodes, [*range(nodes)])


async def test_a_waiting_task_gets_the_outcome() -> None:
    """Also one that was cancelled meanwhile: then nothing is completed twice."""
    for cancelled in (False, True):
        made, waiter = ballot(1), asyncio.get_running_loop().create_future()
        made.wakes(waiter)
        if cancelled:
            waiter.cancel()
        made.answer(0, NO)
        assert waiter.done()
        assert waiter.cancelled() is cancelled
        assert cancelled or waiter.result() is Outcome.REFUSED


def test_votes_that_come_while_it_is_sent_count_later() -> None:
    """In the next turn, in their order, and once for each node."""
    made = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), 3, 0.0, 1.0, sending=True)
    made.fail(0, BROKEN, maybe=True)
    made.answer(1, YES)
    made.answer(1, NO)
    assert (made.votes, made.outcome) == ([None] * 3, None)
    early, made.early = made.early, None
    assert made.votes == [None] * 3
    made.answer(2, YES)
    made.count_early(early or ())
    assert made.votes == [BROKEN, YES, YES]
    assert (made.outcome, made.traces()) == (Outcome.WON, [0, 1, 2])


def test_all_early_failures_are_known_when_it_settles() -> None:
    """Two of three decide; the error names the third, too."""
    made = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), 3, 0.0, 1.0, sending=True)
    settled: list[int] = []
    made.when_settled(lambda ballot: settled.append(len(ballot.errors())))
    for index in range(3):
        made.fail(index, BROKEN, maybe=False)
    early, made.early = made.early, None
    made.count_early(early or ())
    assert (made.outcome, made.failed, settled) == (Outcome.UNREACHABLE, 3, [3])


def test_early_refusals_count() -> None:
    """They are no failures, and leave no trace at their nodes."""
    made = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), 5, 0.0, 1.0, sending=True)
    for index in range(2):
        made.answer(index, NO)
    made.answer(2, YES)
    made.fail(3, BROKEN, maybe=False)
    early, made.early = made.early, None
    made.count_early(early or ())
    assert (made.yes, made.no, made.failed, made.outcome) == (1, 2, 1, Outcome.REFUSED)
    assert made.traces() == [2, 4]


def test_the_time_of_an_op_that_waited_counts_from_its_beginning() -> None:
    """It has as many seconds as if it had not waited, and its queue is no longer to blame."""
    made = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "", 30.0), 1, 2.0, 3.0)
    error = TimeoutError("the queue is long")
    made.defer(lambda: error)
    assert made.deferred is not None
    assert made.deferred() is error
    made.begin(7.5)
    assert (made.deferred, made.sent, made.deadline) == (None, 7.5, 8.5)


def test_nodes_that_are_left_out_have_failed() -> None:
    """Two of three: no majority can answer. Those that were not asked without an error have nothing to report."""
    made = ballot()
    made.leave_out({0: None, 2: BROKEN})
    assert (made.failed, made.errors()) == (2, [(2, BROKEN)])
    made.answer(1, YES)
    assert made.outcome is Outcome.UNREACHABLE


def test_a_late_answer_counts_beside_a_node_that_was_left_out() -> None:
    """One of five was not asked, one has answered too late, and one in time: a majority is without the id."""
    made = ballot(5)
    made.leave_out({0: None})
    made.fail(1, BROKEN, maybe=True)
    made.answer(2, YES)
    assert not made.carried_out
    made.answer(1, YES)
    assert made.carried_out


def test_a_grant_that_is_taken_back_is_a_refusal() -> None:
    """The node has lost the hold since. The vote of a node that did not grant stays as it was."""
    ballot = Ballot(Op(Verb.ACQUIRE, MUTEX, "x", "id", 30.0), 5, 0.0, 1.0)
    for index, vote in enumerate((YES, YES, YES, NO)):
        ballot.answer(index, vote)
    ballot.fail(4, BROKEN, maybe=True)
    for index in (2, 3, 4):
        ballot.take_back(index, Refused(None))
    assert ballot.votes == [YES, YES, Refused(None), NO, BROKEN]
    assert (ballot.yes, ballot.no, ballot.failed) == (2, 2, 1)


# -- what the votes say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "fences", "token", "sure"),
    [
        (1, [7], 7, True),
        (2, [5, 7], 7, False),
        (2, [7, 7], 7, True),
        (3, [5, 7], 7, False),
        (3, [5, 7, 7], 7, True),
        (4, [5, 7, 7], 7, False),
        (5, [5, 7, 7], 7, False),
        (5, [5, 7, 7, 7], 7, True),
    ],
)
def test_a_token_counts_once_a_majority_of_all_nodes_has_it(
    nodes: int, fences: list[int], token: int, sure: bool
) -> None:
    """It is the greatest fence of the grants. A majority meets each later majority, so the next token is greater."""
    made = ballot(nodes)
    for index, fence in enumerate(fences):
        made.answer(index, (fence, False))
    assert made.token() == (token, sure)
    for least in (5, 6, 7, 8):
        assert made.witnesses(least) is (2 * sum(fence >= least for fence in fences) > nodes)


@pytest.mark.parametrize(
    ("ranks", "median"), [([], 0), ([3], 3), ([0, 2], 2), ([0, 0, 1], 0), ([2, 0, 1], 1), ([4, 0, 1, 2, 3], 2)]
)
def test_the_place_of_a_ticket(ranks: list[int], median: int) -> None:
    """The median of its ranks, and its order keys, at the nodes that keep it; another node refuses without a rank."""
    made = ballot(len(ranks) + 2)
    for index, rank in enumerate(ranks):
        made.answer(index, Refused(1.5, "other", rank, 100 - rank))
    made.answer(len(ranks), NO)
    assert made.rank() == median
    assert made.orders() == sorted(100 - rank for rank in ranks)


def test_the_nodes_where_nobody_holds_the_name() -> None:
    """They refuse all the same, because a ticket goes first."""
    made = ballot(5)
    votes: list[Grant | Refused] = [NO, Refused(None), Refused(None), YES]
    for index, vote in enumerate(votes):
        made.answer(index, vote)
    assert made.free() == 2


def test_the_slots_in_use_where_it_was_refused() -> None:
    """By node; only of a kind that has slots."""
    made = ballot(3)
    votes: list[Grant | Refused] = [YES, Refused(1.5, "other", slots=Slots((0, 1))), NO]
    for index, vote in enumerate(votes):
        made.answer(index, vote)
    assert made.taken() == {1: Slots((0, 1))}


def test_a_hold_that_a_majority_refuses_is_taken_where_another_has_it_at_any_node() -> None:
    """No operator has broken it."""
    made = ballot()
    made.answer(0, Refused(None))
    made.answer(1, NO)
    assert made.loss_reason() == "taken"


@pytest.mark.parametrize(
    ("answers", "failures", "nothing"),
    [
        ([], [False, False, False], True),
        ([], [False, False, True], False),
        ([], [False, False], False),  # the third may still carry it out
        ([NO], [False, False], False),  # a refusal leaves a ticket
        ([YES], [False, False], False),
    ],
)
def test_an_op_that_left_nothing(answers: list[Grant | Refused], failures: list[bool], nothing: bool) -> None:
    """Each node has failed, and it is certain that none has carried the op out."""
    made = ballot()
    for index, vote in enumerate(answers):
        made.answer(index, vote)
    for index, maybe in enumerate(failures, len(answers)):
        made.fail(index, BROKEN, maybe=maybe)
    assert made.left_nothing is nothing
