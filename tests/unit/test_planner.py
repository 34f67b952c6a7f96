"""The planner of one acquisition: what it makes of each round, when it asks next, and what it reports at the end."""

from __future__ import annotations

import math

import pytest

from asynclock._errors import ConfigError, QuorumUnavailable
from asynclock._options import LockSettings
from asynclock.protocol.causes import NoLease
from asynclock.protocol.planner import Next, Plan, Planner
from asynclock.protocol.terms import Terms
from asynclock.quorum.ballot import Ballot
from asynclock.rules.model import ACQUIRE, WAIT, Kind, Slots, Verb
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.port import UNDONE, Refused, Vote
from tests.support.fake_clock import FakeClock
from tests.support.stepped_quorum import NAME, SteppedClient
from tests.support.voted import FREE, SENT, held_by, id_of, voted

GRANTED = (1, False)
AWAY = ConnectionError("away")
OUTAGE = QuorumUnavailable("out of reach")
PATIENCE = 5.0
LATER = SENT + 1_000_000.0


def made(
    nodes: int = 3,
    kind: Kind = MUTEX,
    timeout: float | None = None,
    *,
    random: float = 0.0,
    within: float = 3.0,
    clock: FakeClock | None = None,
) -> Planner:
    """The planner of an acquire at so many nodes, which each have `within` seconds to answer. All random numbers are
    `random`."""

    class Client(SteppedClient):
        def within(self, settings: LockSettings) -> float:
            return within

        def random(self) -> float:
            return random

    client = Client("a", [{} for _ in range(nodes)], clock or FakeClock(SENT), [])
    terms = Terms(NAME, kind, LockSettings(lease=30.0), None, timeout)
    return Planner(client, terms, SENT)  # type: ignore[arg-type]


def refused(planner: Planner, ballot: Ballot, after: float = 0.25, give_up: float = math.inf) -> Next:
    """What follows from it, so many seconds after it was sent."""
    return planner.after_refusal(ballot, ballot.sent + after, give_up)


# -- what follows from a round ---------------------------------------------------------------------------------------

A, B, C = map(held_by, "abc")
AT_ONE: list[tuple[Kind, Verb, list[Vote], int, Next]] = [
    (MUTEX, ACQUIRE, [A], 1, Next.WAIT_FOR_HOLDER),
    (MUTEX, ACQUIRE, [held_by("a", rank=3)], 1, Next.WAIT_FOR_HOLDER),
    (MUTEX, ACQUIRE, [held_by("a", rank=-1)], 1, Next.POLL),  # the node keeps no ticket, though one was sent
    (MUTEX, ACQUIRE, [UNDONE], 1, Next.POLL_WITH_NEW_ID),
]
AT_MANY: list[tuple[Kind, Verb, list[Vote], int, Next]] = [
    (MUTEX, ACQUIRE, [A, A, B], 1, Next.WAIT_FOR_HOLDER),
    (MUTEX, ACQUIRE, [A, A, B], 0, Next.TRY),
    (MUTEX, ACQUIRE, [A, B, C], 1, Next.BACK_OFF_AFTER_SPLIT),  # attempts: only one of them could hold a mutex
    (WRITE, ACQUIRE, [A, B, C], 1, Next.WAIT_FOR_HOLDERS),
    (WRITE, WAIT, [A, FREE, FREE], 1, Next.TRY),  # held by a minority
    (MUTEX, WAIT, [A, B, FREE], 1, Next.BACK_OFF_AFTER_SPLIT),  # free at a minority
    (MUTEX, WAIT, [A, B, C, FREE, FREE], 1, Next.BACK_OFF_AFTER_SPLIT),
    (MUTEX, WAIT, [A, B, FREE, FREE, FREE], 1, Next.TRY),
    (FAIR, ACQUIRE, [A, Refused(None, rank=1), Refused(None, rank=1)], 1, Next.WAIT_FOR_TURN),
    (READ, ACQUIRE, [A, Refused(None, rank=2), Refused(None, rank=2)], 1, Next.BACK_OFF_AFTER_SPLIT),
    (WRITE, ACQUIRE, [A, Refused(None, rank=3), Refused(None, rank=3)], 1, Next.WAIT_FOR_TURN),
    (MUTEX, ACQUIRE, [A, Refused(None, rank=1), Refused(None, rank=1)], 1, Next.BACK_OFF_AFTER_SPLIT),
    (MUTEX, ACQUIRE, [held_by("a", rank=-1), held_by("a", rank=0)], 1, Next.WAIT_FOR_HOLDER),
    (Semaphore(2), ACQUIRE, [held_by("a", slots=(0,)), held_by("a", slots=(0,))], 1, Next.TRY_ANOTHER_SLOT),
    (Semaphore(2), ACQUIRE, [held_by("a", slots=(0, 1)), held_by("a", slots=(0, 1))], 1, Next.WAIT_FOR_HOLDERS),
    (Semaphore(2, "1"), ACQUIRE, [held_by("a", slots=(0,))] * 2, 1, Next.BACK_OFF_AFTER_SPLIT),  # for waiters
    (Semaphore(2, "1"), ACQUIRE, [held_by("a", rank=3, slots=(0,))] * 2, 1, Next.WAIT_FOR_HOLDERS),
    (Semaphore(1, "1"), ACQUIRE, [held_by("a", slots=(0,))] * 2, 1, Next.WAIT_FOR_HOLDERS),  # of more permits
    (Semaphore(2, "0"), WAIT, [held_by("a", rank=1, slots=(0,))] * 2, 1, Next.BACK_OFF_AFTER_SPLIT),
    (Semaphore(2, "0"), WAIT, [held_by("a", slots=(0, 1))] * 2, 1, Next.WAIT_FOR_HOLDERS),
    (Semaphore(2, "0"), WAIT, [Refused(None, rank=0, slots=Slots((0,)))] * 2, 1, Next.TRY),
    (Semaphore(2, "0"), WAIT, [Refused(None, rank=4, slots=Slots((0,)))] * 2, 1, Next.LET_EARLIER_TRY),
    (READ, WAIT, [Refused(None, rank=4)] * 2, 1, Next.LET_EARLIER_TRY),
    (FAIR, WAIT, [Refused(None, rank=4)] * 2, 1, Next.WAIT_FOR_TURN),
    (
        Semaphore(2, "1"),
        ACQUIRE,
        [held_by("a", slots=(0,)), held_by("b", slots=(1,)), GRANTED],
        1,
        Next.TRY_ANOTHER_SLOT,
    ),
    (Semaphore(1), ACQUIRE, [GRANTED, held_by("a", slots=(0,)), AWAY], 1, Next.TRY_ANOTHER_SLOT),
]


@pytest.mark.parametrize(("kind", "verb", "votes", "number", "expected"), AT_ONE + AT_MANY)
def test_what_follows_from_the_votes(kind: Kind, verb: Verb, votes: list[Vote], number: int, expected: Next) -> None:
    """The facts that the planner takes from the votes, the op, and the kind of lock."""
    assert refused(made(len(votes), kind), voted(*votes, verb=verb, kind=kind, number=number)) is expected


# -- slots -----------------------------------------------------------------------------------------------------------


def test_a_slot_is_chosen_that_a_majority_may_grant() -> None:
    """Of five nodes, two may refuse it. The next attempt asks for it, and the one after that for any slot."""
    full, two = held_by("a", slots=(0, 1, 2)), held_by("a", slots=(0, 2))
    planner = made(5, Semaphore(3))
    assert refused(planner, voted(full, full, two, AWAY, AWAY, kind=Semaphore(3))) is Next.TRY_ANOTHER_SLOT
    assert planner.take_slot() == 1
    assert planner.take_slot() is None


@pytest.mark.parametrize("timeout", [0, None, 1_000.0])
def test_an_acquire_without_time_tries_eight_more_slots(timeout: float | None) -> None:
    """One with time does not count them."""
    planner, tried = made(3, Semaphore(2), timeout), 0
    votes = [held_by("a", slots=(0,)), held_by("a", slots=(0,)), FREE]
    while tried < 100:
        ballot = voted(*votes, kind=Semaphore(2), number=0 if timeout == 0 else 1)
        step = refused(planner, ballot)
        if step is not Next.TRY_ANOTHER_SLOT:
            break
        planner.plan(step, ballot, SENT + 0.25)
        tried += 1
    assert tried == (8 if timeout == 0 else 100)


def test_the_second_try_of_another_slot_pauses() -> None:
    """The first follows at once. Then the pauses double from one round trip on, whatever the rank of the ticket."""
    planner, pauses = made(3, Semaphore(2)), list[float]()
    ballot = voted(*[held_by("a", rank=5, slots=(0,))] * 3, kind=Semaphore(2))
    refused(planner, ballot, after=0.0078125)
    for _ in range(4):
        plan = planner.plan(Next.TRY_ANOTHER_SLOT, ballot, SENT)
        assert not plan.probe
        pauses.append(plan.at - SENT)
    assert pauses == [0.0, 0.0078125, 0.015625, 0.03125]


# -- when it asks next -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "votes", "expected"),
    [
        (Next.WAIT_FOR_HOLDER, [held_by("a", 2.0)] * 3, Plan(SENT + 2.25)),
        (Next.WAIT_FOR_HOLDER, [Refused(2.0, "a stranger's", 0)] * 3, Plan(SENT + 0.5)),
        (Next.WAIT_FOR_HOLDER, [FREE] * 3, Plan(SENT + 10.0, probe=True)),
        (Next.WAIT_FOR_HOLDER, [held_by("a", 20.0)] * 3, Plan(SENT + 10.0, probe=True)),
        (Next.WAIT_FOR_TURN, [FREE] * 3, Plan(SENT + 10.0, probe=True)),
        (Next.LET_EARLIER_TRY, [FREE] * 3, Plan(SENT + 0.25 + 0.2)),
        (Next.BACK_OFF_AFTER_SPLIT, [Refused(None, rank=2)] * 3, Plan(SENT + 0.25 + 0.15)),
        (Next.TRY, [FREE] * 3, Plan(SENT + 0.25)),
        (Next.TRY_WITH_NEW_ID, [FREE] * 3, Plan(SENT + 0.25)),
        (Next.POLL, [FREE] * 3, Plan(SENT + 0.25 + 0.002)),
        (Next.POLL, [held_by("a", 0.0009765625)] * 3, Plan(SENT + 0.2509765625)),
        (Next.POLL_WITH_NEW_ID, [held_by("a", 0.0009765625)] * 3, Plan(SENT + 0.25 + 0.002)),
    ],
)
def test_when_each_step_is_done(step: Next, votes: list[Vote], expected: Plan) -> None:
    """With the greatest random numbers, after a round that took 0.25 s. The lock's lease is 30 s."""
    planner, ballot = made(random=1.0), voted(*votes)
    refused(planner, ballot)
    plan = planner.plan(step, ballot, SENT + 0.25)
    assert plan.at == pytest.approx(expected.at)
    assert plan.probe is expected.probe


@pytest.mark.parametrize(("rank", "most"), [(0, 0.05), (1, 0.25)])
def test_the_first_waiter_polls_more_often(rank: int, most: float) -> None:
    """A single node without notices may make its ticket the hold at any time."""
    planner, ballot, pauses = made(1, random=1.0), voted(held_by("a", rank=rank)), list[float]()
    for _ in range(12):
        pauses.append(planner.plan(Next.POLL, ballot, SENT).at - SENT)
    assert max(pauses) == pytest.approx(most)


def split_pause(planner: Planner) -> float:
    """The seconds for which it backs off, as the first of the queue."""
    ballot = voted(A, B, C)
    refused(planner, ballot, after=0.0078125)
    return planner.plan(Next.BACK_OFF_AFTER_SPLIT, ballot, SENT).at - SENT


def test_pauses_grow_with_split_votes_in_a_row() -> None:
    """Each doubles. A hold in the way ends the row."""
    planner, held = made(random=1.0), voted(A, A, A)
    assert [split_pause(planner) for _ in range(3)] == [0.0078125, 0.015625, 0.03125]
    planner.plan(Next.WAIT_FOR_HOLDER, held, SENT)
    assert [split_pause(planner) for _ in range(2)] == [0.0078125, 0.015625]
    planner.plan(Next.WAIT_FOR_HOLDERS, held, SENT)
    assert split_pause(planner) == 0.0078125


@pytest.mark.parametrize("step", [Next.WAIT_FOR_TURN, Next.LET_EARLIER_TRY, Next.TRY, Next.POLL, Next.POLL_WITH_NEW_ID])
def test_only_split_votes_count_as_such(step: Next) -> None:
    """The pause after the first ones is the shortest."""
    planner = made(random=1.0)
    for _ in range(3):
        planner.plan(step, voted(FREE, FREE, FREE), SENT)
    assert split_pause(planner) == 0.0078125


def test_attempts_and_holds_are_told_apart_by_time() -> None:
    """An attempt lives for two node timeouts at most: the first probe comes after two of its own. An id that the nodes
    have named for two of the longest node timeouts that a client can have is that of a hold."""
    planner, votes = made(5, WRITE, within=0.0625), [held_by(letter, 0.5) for letter in "abcde"]

    def plan(verb: Verb, at: float) -> Plan:
        return planner.plan(Next.WAIT_FOR_HOLDERS, voted(*votes, kind=WRITE, verb=verb, sent=at), at)

    plans = [plan(ACQUIRE, SENT) for _ in range(4)]
    assert [each.probe for each in plans] == [False, False, False, True]
    assert plans[3].at == SENT + 0.125
    assert plan(WAIT, SENT + 5.875).probe
    assert plan(WAIT, SENT + 6.0) == Plan(SENT + 6.5)


def test_the_end_of_a_rest_is_awaited_at_once() -> None:
    """No attempt has its id, so the nodes may name different ones: the name is free when a majority of them ends."""
    planner, taken = made(3, Semaphore(3)), Slots((0, 1, 2))
    rests = [Refused(left, f"~{id_of(who)[1:]}", 0, slots=taken) for who, left in (("a", 1.0), ("b", 1.5), ("c", 2.0))]
    ballot = voted(*rests, kind=Semaphore(3))
    assert refused(planner, ballot) is Next.WAIT_FOR_HOLDERS
    assert planner.plan(Next.WAIT_FOR_HOLDERS, ballot, SENT + 0.25) == Plan(SENT + 1.75)


# -- what is known of the holder -------------------------------------------------------------------------------------


def test_the_holder_that_a_majority_named_last_is_reported() -> None:
    """With the time for which it holds, as far as that is known now."""
    planner = made()
    refused(planner, voted(B, B, B))
    refused(planner, voted(A, A, B, sent=SENT + 1.0), after=0.25)
    now = SENT + 1.25
    assert planner.no_lease(now + 4.0, 5.25, None) == NoLease(id_of("a"), 16.0, 4.0, 5.25)
    assert planner.no_lease(now + 90.0, 91.25, None) == NoLease(id_of("a"), 0.0, 90.0, 91.25)


@pytest.mark.parametrize("votes", [[B, None, None], [B, B, None, None, None], [GRANTED, B, AWAY]])
def test_a_minority_names_no_other_holder(votes: list[Vote]) -> None:
    """The end of the time cut the round short, for example. The earlier refusal stays."""
    planner = made(len(votes))
    refused(planner, voted(*[A] * len(votes)))
    refused(planner, voted(*votes, sent=SENT + 1.0), after=1.0, give_up=SENT + 2.0)
    assert planner.no_lease(SENT + 2.25, 2.0, None) == NoLease(id_of("a"), 18.0, 2.0, 2.0)


def test_one_of_several_holders_is_reported() -> None:
    """Of a kind that several may hold. Of a mutex these are attempts, and none is known to hold it."""
    votes = [held_by("a", 3.0), held_by("b", 9.0), held_by("c", 5.0)]
    for kind, reported in ((WRITE, NoLease(id_of("b"), 9.0, 0.0, 1.0)), (MUTEX, NoLease(waited=1.0))):
        planner = made(3, kind)
        refused(planner, voted(*votes, kind=kind))
        assert planner.no_lease(SENT + 0.25, 1.0, None) == reported


@pytest.mark.parametrize(
    ("votes", "free"),
    [
        (None, False),
        ([A, FREE], False),
        ([FREE, FREE], True),
        ([A, FREE, FREE], True),
        ([A, A, FREE], False),
        ([A, A, A, FREE, FREE], False),
    ],
)
def test_whether_the_name_was_free_is_reported(votes: list[Vote] | None, free: bool) -> None:
    """A majority said so in the last round. A waiter of the local queue does not know."""
    ballot = None if votes is None else voted(*votes)
    planner = made(len(votes or [A]))
    assert planner.no_lease(SENT, 1.0, ballot) == NoLease(waited=1.0, free=free)
    refused(planner, voted(*[A] * len(votes or [A])))
    assert planner.no_lease(SENT + 0.25, 1.0, ballot) == NoLease(id_of("a"), 20.0, 0.0, 1.0, free)


# -- when it must ask ------------------------------------------------------------------------------------------------


def test_an_answer_that_is_too_old_at_the_end_is_asked_for_again() -> None:
    """An acquire that knows of no refusal, or whose answer is new enough, need not ask."""
    planner = made(timeout=9.0)
    give_up = SENT + 9.0
    assert planner.answer_from(give_up) == give_up - 3.0
    assert planner.must_ask_by(give_up) == math.inf
    refused(planner, voted(A, A, A), after=1.0)
    assert planner.must_ask_by(give_up) == give_up - 3.0
    refused(planner, voted(A, A, A, sent=SENT + 5.0), after=1.0)
    assert planner.must_ask_by(give_up) == math.inf


def test_the_answers_of_far_nodes_are_asked_for_earlier() -> None:
    """By two of the round trips that the last round took, if the timeout is short."""
    planner = made(timeout=0.75, within=9.0)
    assert planner.answer_from(LATER) == LATER - 0.25
    refused(planner, voted(A, A, A), after=2.0)
    assert planner.answer_from(LATER) == LATER - 4.0


# -- interruptions ---------------------------------------------------------------------------------------------------


def test_connections_that_closed_are_waited_for() -> None:
    """As long as an attempt to connect may take, from the first failure on, and not beyond its time. An acquire that
    was refused before probes then, another one tries. At the end of its time the error of the last round is raised."""
    planner, again = made(), QuorumUnavailable("gone again")
    refused(planner, voted(A, A, A))
    assert planner.may_be_interrupted(SENT)
    assert planner.after_interruption(OUTAGE, SENT, LATER) == Plan(SENT + 1.0, probe=True)
    assert planner.must_ask_by(SENT + 9.0) == math.inf
    assert planner.may_be_interrupted(SENT + 0.5)
    assert planner.after_interruption(again, SENT + 0.5, LATER) == Plan(SENT + 1.0, probe=True)
    assert planner.after_interruption(again, SENT + 0.5, SENT + 0.75) == Plan(SENT + 0.75, probe=True)
    assert not planner.may_be_interrupted(SENT + 1.0)
    planner.check_outage(SENT + 0.5, SENT + 0.75)
    with pytest.raises(QuorumUnavailable, match="gone again"):
        planner.check_outage(SENT + 0.75, SENT + 0.75)


def test_an_answer_ends_an_interruption() -> None:
    """The next one is a new one."""
    planner = made()
    refused(planner, voted(A, A, A))
    planner.after_interruption(OUTAGE, SENT, LATER)
    refused(planner, voted(A, A, A, sent=SENT + 1.0))
    assert planner.interrupted is None
    planner.check_outage(SENT + 2.0, SENT + 2.0)
    assert planner.may_be_interrupted(SENT + 9.0)
    assert planner.after_interruption(OUTAGE, SENT + 9.0, LATER) == Plan(SENT + 10.0, probe=True)


@pytest.mark.parametrize(
    ("timeout", "refused_before", "in_outage", "expected"),
    [
        (None, False, False, False),  # nobody is known to hold the name: it is an outage
        (None, True, False, True),
        (None, True, True, False),
        (0, False, False, True),  # the one try is repeated, and tries
        (0, False, True, False),
        (1.0, False, False, False),
    ],
)
def test_who_waits_for_connections_that_closed(
    timeout: float | None, refused_before: bool, in_outage: bool, expected: bool
) -> None:
    """An acquire that was refused before, and one with a single try; none in an outage."""
    planner = made(timeout=timeout)
    if refused_before:
        refused(planner, voted(A, A, A))
    if in_outage:
        planner.join_outage(OUTAGE, LATER)
    assert planner.may_be_interrupted(SENT) is expected
    assert planner.after_interruption(OUTAGE, SENT, LATER).probe is refused_before


# -- outages ---------------------------------------------------------------------------------------------------------


def unanswered(planner: Planner, after: float = 0.25, give_up: float = math.inf, sent: float = SENT) -> Plan:
    """What follows from a round without a majority, so many seconds after it was sent."""
    return planner.after_outage(OUTAGE, voted(AWAY, AWAY, A, sent=sent), sent + after, give_up, crowd=1)


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_an_outage_is_tried_through(timeout: float | None) -> None:
    """Until the patience ends, which counts from the round that was not answered. What was known of the holder is not
    known any more."""
    planner = made(timeout=timeout, random=1.0)
    refused(planner, voted(A, A, A))
    planner.after_interruption(OUTAGE, SENT, LATER)
    assert planner.patience_ends == math.inf
    assert not planner.in_outage
    plan = unanswered(planner)
    assert plan.at == pytest.approx(SENT + 0.25 + 0.02)
    assert not plan.probe
    assert planner.in_outage
    assert planner.patience_ends == SENT + PATIENCE
    assert (planner.refused, planner.interrupted, planner.answered_at) == (None, None, -math.inf)
    planner.check_outage(SENT + PATIENCE - 0.25, math.inf)
    for give_up in (math.inf, SENT + PATIENCE):
        with pytest.raises(QuorumUnavailable, match="out of reach"):
            planner.check_outage(SENT + PATIENCE, give_up)
    with pytest.raises(QuorumUnavailable, match="out of reach"):
        planner.check_outage(SENT + 2.0, SENT + 2.0)


def test_an_acquire_with_one_try_does_not_try_through_an_outage() -> None:
    """Its error comes at once."""
    with pytest.raises(QuorumUnavailable, match="out of reach"):
        unanswered(made(timeout=0))


def test_an_outage_whose_patience_is_over_is_an_error() -> None:
    """At the end of the patience, or of the time."""
    for after, give_up in ((PATIENCE, math.inf), (2.0, SENT + 2.0)):
        with pytest.raises(QuorumUnavailable, match="out of reach"):
            unanswered(made(), after, give_up)


def test_an_error_that_only_the_user_can_solve_is_raised_at_once() -> None:
    """It is no outage."""
    planner = made()
    with pytest.raises(ConfigError, match="no rights"):
        planner.after_outage(ConfigError("no rights"), voted(AWAY, AWAY, AWAY), SENT, math.inf, crowd=1)
    assert not planner.in_outage


def test_no_error_is_raised_without_an_outage() -> None:
    """Not at the end of the time either, if the name is held."""
    planner = made()
    planner.check_outage(SENT + 9.0, SENT + 9.0)
    refused(planner, voted(A, A, A))
    planner.check_outage(SENT + 9.0, SENT + 9.0)


@pytest.mark.parametrize(
    ("nodes", "votes", "number", "plain", "ends"),
    [
        (3, [A, A, A], 0, False, False),  # a server that cannot write refuses, too: only a ticket shows that it can
        (3, [A, A, A], 1, False, True),
        (1, [held_by("a", rank=-1)], 0, True, False),
        (1, [held_by("a", rank=-1)], 0, False, True),  # the next round leaves no ticket either
        (1, [UNDONE], 0, False, True),
    ],
)
def test_a_refusal_ends_an_outage(nodes: int, votes: list[Vote], number: int, plain: bool, ends: bool) -> None:
    """Unless the next round is the first with a ticket."""
    planner = made(nodes)
    planner.join_outage(OUTAGE, SENT + 9.0)
    refused(planner, voted(*votes, number=number, plain=plain))
    assert planner.in_outage is not ends
    assert planner.patience_ends == (math.inf if ends else SENT + 9.0)


def test_the_free_name_of_a_first_waiter_ends_an_outage() -> None:
    """Its ticket shows that the servers write, though it tries at once."""
    planner = made()
    planner.join_outage(OUTAGE, SENT + 9.0)
    assert refused(planner, voted(FREE, FREE, FREE, verb=WAIT)) is Next.TRY
    assert not planner.in_outage


def test_a_silent_node_is_reported_with_its_last_error_of_the_outage() -> None:
    """The error of a round names the reason, and not the silence."""
    clock = FakeClock(SENT)
    planner = made(clock=clock)
    planner.error(voted(AWAY, ConnectionError("refused"), A))
    clock.advance(60.0)
    error = planner.error(voted(None, None, A))
    assert {str(each) for each in error.errors.values()} == {"away", "refused"}  # type: ignore[union-attr]


def test_a_round_that_no_majority_answered_does_not_count_as_an_answer() -> None:
    """Its time was up, and an earlier answer decides. Neither the time of that answer nor its round trip changes."""
    planner = made(timeout=9.0)
    refused(planner, voted(A, A, A))
    assert refused(planner, voted(None, None, A, sent=SENT + 8.0), after=1.0, give_up=SENT + 9.0) is Next.STOP
    assert planner.answered_at == SENT + 0.25
    assert planner.rtt == 0.25


@pytest.mark.parametrize(("timeout", "after", "step"), [(9.0, 8.75, Next.WAIT_FOR_HOLDER), (9.0, 9.0, Next.STOP)])
def test_a_refusal_at_the_end_of_the_time_is_the_last(timeout: float, after: float, step: Next) -> None:
    """At that moment, and not before."""
    assert refused(made(timeout=timeout), voted(A, A, A), after, SENT + timeout) is step


@pytest.mark.parametrize(
    ("timeout", "step"), [(0, Next.STOP), (1.0, Next.WAIT_FOR_HOLDER), (None, Next.WAIT_FOR_HOLDER)]
)
def test_only_an_acquire_without_time_has_one_try(timeout: float | None, step: Next) -> None:
    """With timeout=0. Any other time may bring a notice."""
    assert refused(made(timeout=timeout), voted(A, A, A)) is step


def test_a_single_node_chooses_the_slot() -> None:
    """An acquire with one try has no other slot to ask for."""
    ballot = voted(held_by("a", slots=(0,)), kind=Semaphore(2))
    assert refused(made(1, Semaphore(2), timeout=0), ballot) is Next.STOP


def test_a_fair_lock_waits_for_its_turn() -> None:
    """The name is free, and a waiter is before it."""
    votes = [Refused(None, rank=1)] * 3
    assert refused(made(3, FAIR), voted(*votes, kind=FAIR)) is Next.WAIT_FOR_TURN
