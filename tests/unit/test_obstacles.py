"""What a waiter knows of holders, where the nodes name different ones: for how long, and when it asks again."""

from __future__ import annotations

import pytest

from asynclock.protocol.planner import Obstacles, Plan
from asynclock.quorum.ballot import Ballot
from asynclock.rules.model import WAIT
from asynclock.rules.rwlock import WRITE
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.port import Refused, Slots
from tests.support.probes import most_known_ids
from tests.support.voted import FREE, SENT, held_by, voted

LIFE = 0.5
"""Seconds in which an attempt of the waiter's own client is decided and undone."""

LONGEST = 6.0
"""The same of any client."""

LEASE = 3_000.0
"""Its renewals come later than what these tests look at."""


def least() -> float:
    """The least random number."""
    return 0.0


def made() -> Obstacles:
    return Obstacles(least, LIFE, LONGEST)


def probed(*votes: Refused, sent: float = SENT) -> Ballot:
    """The answers to a probe of a writer."""
    return voted(*votes, verb=WAIT, kind=WRITE, sent=sent, lease=LEASE)


def test_one_holder_on_a_majority_decides() -> None:
    """The waiter tries when its hold has ended at a majority. What the other nodes name does not count, not even a key
    of another program."""
    votes = held_by("a", 2.0), held_by("a", 3.0), held_by("a", 4.0), Refused(1.0, "a stranger's"), held_by("b", 5.0)
    assert made().plan(probed(*votes), SENT + 0.25, 0.25, 0) == Plan(SENT + 2.25)


def test_ids_are_holds_once_no_attempt_could_have_lived_so_long() -> None:
    """At that moment, and not before."""
    votes = held_by("a", 2.0), held_by("b", 3.0), held_by("c", 4.0)
    seen = made()
    seen.since(votes, 3, SENT)
    sent = SENT + LONGEST - 0.125
    assert seen.plan(probed(*votes, sent=sent), sent, 0.25, 0).probe
    assert seen.plan(probed(*votes, sent=SENT + LONGEST), SENT + LONGEST, 0.25, 0) == Plan(SENT + LONGEST + 3.0)


@pytest.mark.parametrize(
    ("third", "seconds"),
    [
        (held_by("c", 4.0), 3.0),  # its release notifies the waiter
        (Refused(4.0, "a stranger's"), 0.05),  # nobody notifies the waiter: it looks again and again
        (FREE, 2.0),  # the node names nobody, so there is nobody to look for
    ],
)
def test_holds_that_notify_nobody_are_looked_for(third: Refused, seconds: float) -> None:
    """Also if only one of several holds is such a hold."""
    votes = held_by("a", 2.0), held_by("b", 3.0), third
    seen = made()
    seen.since(votes, 3, SENT - LONGEST)
    assert seen.plan(probed(*votes), SENT + 0.25, 0.25, 0) == Plan(SENT + 0.25 + seconds)


def test_new_ids_at_each_answer_are_asked_about_less_and_less() -> None:
    """Three tries follow at once, since the votes may be split. Then probes follow that come after the end of an
    attempt, with pauses that double."""
    seen, pauses, now = made(), list[float](), SENT
    for number in range(8):
        votes = [held_by(f"{number}{letter}") for letter in "abc"]
        plan = seen.plan(voted(*votes, kind=WRITE, sent=now, lease=LEASE), now, 0.002, 0)
        assert plan.probe is (number >= 3)
        pauses.append(plan.at - now)
        now = plan.at
    assert pauses == pytest.approx([0.001, 0.002, 0.004, 0.5, 0.5, 1.0, 2.0, 4.0])


def test_after_holds_that_were_known_votes_may_be_split_again() -> None:
    """They have been released, and other attempts met each other: three tries follow at once, as at first."""
    seen, now = made(), SENT + LONGEST
    known = [held_by(letter) for letter in "abc"]
    for _ in range(5):
        seen.plan(probed(*known), SENT, 0.002, 0)
    seen.plan(probed(*known, sent=now), now, 0.002, 0)
    plans = [seen.plan(voted(*map(held_by, "def"), kind=WRITE, sent=now, lease=LEASE), now, 0.002, 0) for _ in range(4)]
    assert [each.probe for each in plans] == [False, False, False, True]


@pytest.mark.parametrize(
    ("known", "until"),
    [
        (0.25, LIFE),  # an attempt of its own client may live for so long
        (0.5, 2.0),  # one of a client that is farther away may
        (1.0, 4.0),
        (3.0, LONGEST),
    ],
)
def test_ids_that_are_known_for_longer_are_asked_about_later(known: float, until: float) -> None:
    """Four times as long after they were named first, and at the latest when no attempt lives any more."""
    votes = [held_by(letter) for letter in "abc"]
    seen = made()
    seen.since(votes, 3, SENT)
    assert seen.plan(probed(*votes, sent=SENT + known), SENT + known + 0.125, 0.125, 0) == Plan(SENT + until, True)


def test_the_ids_at_a_majority_decide_since_when_they_are_known() -> None:
    """Of five nodes, the third earliest."""
    seen = made()
    for when, letter in enumerate("abcde", 1):
        seen.since([held_by(letter)] * 5, 5, float(when))
    assert seen.since([held_by(letter) for letter in "cbeda"], 5, 6.0) == 3.0


def test_the_last_64_ids_are_remembered() -> None:
    """No more, and no less."""
    seen = made()
    pairs = [[held_by(f"{number}a"), held_by(f"{number}b")] for number in range(33)]
    for number, pair in enumerate(pairs[:32]):
        seen.since(pair, 2, float(number))
    assert most_known_ids(seen) == 64
    assert seen.since(pairs[0], 2, 100.0) == 0.0
    seen.since(pairs[32], 2, 101.0)
    assert most_known_ids(seen) == 64
    assert seen.since(pairs[0], 2, 102.0) == 0.0
    assert seen.since(pairs[1], 2, 103.0) == 103.0


def test_an_id_of_each_node_is_remembered() -> None:
    """Also of more nodes than 64."""
    seen, ids = made(), [held_by(str(number)) for number in range(71)]
    seen.since(ids, 71, 1.0)
    assert seen.since(ids, 71, 2.0) == 1.0


@pytest.mark.parametrize(("age", "counts"), [(2 * LIFE - 0.0625, True), (2 * LIFE, False)])
def test_replies_about_slots_count_for_two_lives_of_an_attempt(age: float, counts: bool) -> None:
    """After that, other slots may be free."""
    seen, kind = made(), Semaphore(3)
    seen.taken(voted(held_by("a", slots=(0, 1, 2)), FREE, FREE, kind=kind))
    found = seen.taken(voted(FREE, held_by("a", slots=(0, 1)), FREE, kind=kind, sent=SENT + age))
    assert found == [Slots((0, 1, 2))] * counts + [Slots((0, 1))]
