"""Tasks of one process that wait for one name: when the first of them asks for the others, when an outage ends for all
of them, and how many are handled in one turn of the loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from asynclock._errors import QuorumUnavailable
from asynclock._options import QUORUM_TIMEOUT
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.causes import NoLease
from asynclock.protocol.local_queue import PASSING, YieldedNames, may_pass
from asynclock.rules.model import ACQUIRE, RELEASE, Kind
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ
from asynclock.rules.semaphore import Semaphore
from tests.support.fake_clock import FakeClock
from tests.support.stepped_acquires import LEASE, acquiring, holds, tenure_of, tickets, under_way, waits
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle

PATIENCE = 5.0
"""Of a client, by default."""


def test_the_last_moment_in_which_a_hold_may_be_passed_on() -> None:
    """Five milliseconds after the round trip, and a third of the lease before its end: both included."""
    assert may_pass(PASSING, 0.0, PASSING + LEASE, LEASE, 1)
    assert may_pass(0.0, 0.0, LEASE / 3, LEASE, 1)


# -- one question for all ----------------------------------------------------------------------------------------------


def taken_by_another(rtt: float = 0.0) -> SteppedClient:
    """A client whose first task waits for the holder, and has got an answer after so many seconds."""
    client, other, _ = clients_over(1)
    holds(other)
    acquiring(client)
    client.clock.advance(rtt)
    settle(client)
    return client


def questions(client: SteppedClient, seconds: float, step: float = 0.01) -> list[float]:
    """When the client asks within these seconds, each answered at once. Counted from now."""
    began, found = client.clock.now(), list[float]()
    for _ in range(round(seconds / step)):
        client.clock.advance(step)
        client.turn()
        if under_way(client):
            found.append(client.clock.now() - began)
        settle(client)
    return found


def refused(acquisition: Acquisition) -> bool:
    """Whether its time is up, and the name is held."""
    return acquisition.future.done() and isinstance(acquisition.take(), NoLease)


def test_one_question_is_for_all_whose_time_is_up_soon() -> None:
    """An answer in the last third of its time, two seconds, is recent enough for a waiter. The first task asks a
    quarter of this time later than the first waiter needs it, so that the answer is recent enough for others, too."""
    client = taken_by_another()
    first = waits(client, timeout=6.0)
    client.clock.advance(0.45)
    second = waits(client, timeout=6.0)
    assert len(questions(client, 5.5)) == 1
    assert not first.future.done()  # the name may become free until then
    client.clock.advance(0.6)
    assert refused(first)
    assert refused(second)


def test_a_waiter_with_a_short_timeout_is_refused_by_an_answer_of_just_now() -> None:
    """A tenth of a second is recent enough for each. The first task does not ask again for it."""
    client = taken_by_another()
    client.clock.advance(0.01)
    waiter = waits(client, timeout=0.05)
    assert questions(client, 0.1) == []
    assert refused(waiter)


def test_no_question_comes_too_early_while_no_round_trip_is_known() -> None:
    """The first task has no answer yet when the second comes."""
    client, other, _ = clients_over(1)
    holds(other)
    acquiring(client)
    waiter = acquiring(client, timeout=1.5)
    settle(client)
    assert questions(client, 1.6) == [pytest.approx(1.125, abs=0.011)]
    assert refused(waiter)


@pytest.mark.parametrize(("rtt", "until"), [(0.8, 0.4), (0.95, 0.1), (1.2, 0.0)])
def test_a_question_leaves_two_round_trips_for_its_answer(rtt: float, until: float) -> None:
    """The first task asks so many seconds after the time from which an answer is recent enough: no later, and also for
    a waiter whose time begins within them."""
    client = taken_by_another(rtt)
    last = max(2.0, 2 * rtt)  # the part of the timeout in which an answer is recent enough
    first = waits(client, timeout=6.0)
    client.clock.advance(0.9 * until)
    second = waits(client, timeout=6.0)
    (asked, *_) = found = questions(client, 6.2)
    asked += 0.9 * until
    assert 6.0 - last + 0.9 * until <= asked <= 6.0 - last + until + 0.02
    assert len(found) == 1
    assert refused(first)
    assert refused(second)


@pytest.mark.parametrize(("late", "waits_on"), [(0.9, False), (1.1, True)])
def test_a_question_that_was_late_gets_more_time(late: float, waits_on: bool) -> None:
    """The loop was blocked, so the first task has asked in the second half of the time that an answer has. It is
    answered later than the time of the waiter is up: that is no outage. If it has asked in the first half, the node is
    silent."""
    client = taken_by_another()
    waiter = waits(client, timeout=6.0)
    client.clock.advance(3.9)
    client.clock.block(0.1 + late)
    client.clock.advance(0.0)
    client.turn()
    assert under_way(client, ACQUIRE)
    client.clock.advance(2.1 - late)
    client.turn()
    if waits_on:
        assert not waiter.future.done()
        settle(client)
        assert refused(waiter)
    else:
        error = waiter.future.exception()
        assert isinstance(error, QuorumUnavailable)
        assert "node 0 has not answered yet" in str(error)


def test_a_late_waiter_is_refused_by_the_next_answer() -> None:
    """Whatever round trip was known when it began to wait for that answer."""
    client = taken_by_another(rtt=0.8)
    client.clock.advance(2.0)
    waiter = waits(client, timeout=1.5)
    client.clock.block(5.0)
    client.clock.advance(0.0)
    client.turn()
    assert not waiter.future.done()
    assert under_way(client, ACQUIRE)
    client.clock.advance(0.01)
    settle(client)
    assert refused(waiter)


def test_a_majority_of_the_answers_refuses_a_waiter() -> None:
    """The first task has renewed its ticket, and waits for the last node."""
    client, other, _ = clients_over(3)
    holds(other)
    waits(client)
    waiter = waits(client, timeout=6.0)
    client.clock.advance(4.5)
    client.turn()
    for node in client.nodes[:2]:
        node.carry_out()
    client.clock.advance(1.5)
    assert refused(waiter)


def test_a_waiter_whose_time_is_up_while_its_node_is_connected_again() -> None:
    """It gets the error of the lost connection at once. No answer can be waited for."""
    client = taken_by_another()
    waiter = waits(client, timeout=1.5)
    client.clock.advance(1.0)
    client.nodes[0].cut()
    client.clock.advance(0.4)
    client.turn()
    assert not waiter.future.done()
    client.clock.advance(0.1)
    client.turn()
    assert ended(waiter)


def test_the_next_task_counts_those_behind_it() -> None:
    """The first task gives up. The ticket of the next one says how many tasks wait, itself included."""
    client, other, servers = clients_over(1)
    holds(other)
    first = waits(client)
    for _ in range(3):
        waits(client)
    first.abandon()
    settle(client)
    assert [ticket.tasks for ticket in tickets(servers[0])] == [3]


def test_a_waiter_that_was_just_cancelled_does_not_count() -> None:
    """Its task will find that in this turn. The one before it takes a fence for itself alone."""
    client, _, _ = clients_over(1)
    first, second, third = holds(client), acquiring(client), acquiring(client)
    third.future.cancel()
    first.hold.end(first)
    third.abandon()
    settle(client)
    tenure = tenure_of(second)
    assert tenure.hold.last_fence == tenure.fence


def test_a_waiter_that_was_just_cancelled_does_not_ask() -> None:
    """The one behind it does. Else a release before a crowd of cancelled tasks would cost a round trip and an undo for
    each of them."""
    client, _, _ = clients_over(1)
    first, second, third = holds(client), acquiring(client), acquiring(client)
    second.future.cancel()
    first.hold.end(first)
    assert [op.verb for op in under_way(client)] == [RELEASE, ACQUIRE]
    second.abandon()
    assert [op.verb for op in under_way(client)] == [RELEASE, ACQUIRE]
    settle(client)
    assert tenure_of(third).held


def test_a_queue_ends_when_nobody_waits_in_it() -> None:
    """Its asker has got the name, and the waiter behind it has left before."""
    client, _, _ = clients_over(1)
    asking, leaving = acquiring(client), acquiring(client)
    assert client.machine.queues.by_name
    leaving.abandon()
    assert client.machine.queues.by_name
    settle(client)
    assert tenure_of(asking).held
    assert not client.machine.queues.by_name


def test_only_a_waiter_with_a_timeout_has_a_timer() -> None:
    """It goes with the waiter. Thousands of tasks may wait."""
    client = taken_by_another()
    before = client.clock.armed
    waits(client)
    assert client.clock.armed == before
    waiter = waits(client, timeout=6.0)
    assert client.clock.armed == before + 1
    waiter.abandon()
    assert client.clock.armed == before


# -- outages -----------------------------------------------------------------------------------------------------------


def down() -> SteppedClient:
    """A client whose node is down. One task has asked, and tries again and again."""
    client, _, _ = clients_over(1)
    client.nodes[0].error = OSError("down")
    waits(client)
    return client


def ended(acquisition: Acquisition) -> bool:
    """Whether it has ended with the error of an outage."""
    return acquisition.future.done() and isinstance(acquisition.future.exception(), QuorumUnavailable)


def test_the_patience_counts_from_the_begin_of_an_outage() -> None:
    """Not from a later try. Those that came in the outage have their own patience from then on. Nobody asks once more
    in between."""
    client = down()
    (asker,) = client.machine.under_way
    assert isinstance(asker, Acquisition)
    early = [waits(client) for _ in range(3)]
    client.clock.advance(2.0)
    client.turn()
    late = [waits(client) for _ in range(2)]
    client.clock.advance(PATIENCE - 2.01)
    client.turn()
    assert not any(map(ended, (asker, *early, *late)))
    client.clock.advance(0.01)
    client.turn()
    assert all(map(ended, (asker, *early)))
    for _ in range(199):
        client.clock.advance(0.01)
        client.turn()
    assert not any(map(ended, late))
    client.clock.advance(0.011)
    client.turn()
    assert all(map(ended, late))


def test_the_patience_of_those_that_waited_before_begins_with_the_outage() -> None:
    """They have waited for a minute. Then the node goes down, and the first task asks for its patience. Those that came
    before the outage get its error then, and no sooner."""
    client = taken_by_another()
    (first,) = client.machine.under_way
    second, third = waits(client), waits(client)
    for _ in range(60):
        client.clock.advance(1.0)
        settle(client, *client.clients)
    client.nodes[0].cut()
    client.nodes[0].error = OSError("down")
    client.machine.connected(True)
    while client.machine.queues.by_name[NAME].outage is None:
        client.clock.advance(0.01)
        client.turn()
    first.abandon()
    client.turn()
    for _ in range(round(PATIENCE / 0.01) - 2):
        client.clock.advance(0.01)
        client.turn()
    assert not second.future.done()
    assert not third.future.done()
    client.clock.advance(0.03)
    client.turn()
    assert ended(second)
    assert ended(third)


def test_an_outage_is_over_with_an_answer() -> None:
    """The node is back, and another client has the name. A waiter whose time is up then is refused."""
    client, other, _ = clients_over(1)
    holds(other)
    client.nodes[0].error = OSError("down")
    waits(client)
    waiter = waits(client, timeout=3.0)
    client.clock.advance(1.0)
    client.turn()
    client.nodes[0].back()
    assert questions(client, 2.5)
    assert refused(waiter)


def test_a_waiter_whose_time_is_up_in_an_outage_gets_its_error() -> None:
    """At once, and not after another try of the first task."""
    client = down()
    waiter = waits(client, timeout=2.0)
    client.clock.advance(1.99)
    client.turn()
    assert not waiter.future.done()
    client.clock.advance(0.011)
    assert ended(waiter)


def test_those_whose_patience_has_ended_send_nothing() -> None:
    """The task before them has got no answer in all that time."""
    client = down()
    for _ in range(3):
        waits(client)
    client.clock.advance(PATIENCE - 0.001)
    client.turn()
    client.nodes[0].error = None  # the client does not know it yet
    client.clock.advance(0.001)
    client.turn()
    assert not under_way(client, ACQUIRE)
    assert not client.machine.under_way


# -- slices of work ----------------------------------------------------------------------------------------------------


class Turns:
    """The turns of the loop of a client, one by one. Each look at the clock of its work takes `work` seconds."""

    def __init__(self, client: SteppedClient, work: float) -> None:
        self._client = client
        self._spent = itertools.count()
        self._work = work
        self._next = list[tuple[Callable[..., object], tuple[object, ...]]]()
        client.later = self._later  # type: ignore[method-assign]
        client.spent = self._look  # type: ignore[method-assign]

    def _later(self, call: Callable[..., object], *args: object) -> None:
        self._next.append((call, args))

    def _look(self) -> float:
        return 50.0 + next(self._spent) * self._work

    def turn(self) -> bool:
        """The next one; False: there is nothing to do."""
        calls, self._next = self._next, []
        for call, args in calls:
            call(*args)
        self._client.turn()  # what the quorum has left
        return bool(calls)

    def done_in_each(self, acquisitions: list[Acquisition]) -> list[int]:
        """How many of them end in each turn, from now until nothing is left to do."""
        found, before = list[int](), sum(each.future.done() for each in acquisitions)
        found.append(before)
        for _ in range(100):
            if not self.turn():
                break
            now = sum(each.future.done() for each in acquisitions)
            found.append(now - before)
            before = now
        else:
            raise AssertionError("it goes on for ever")
        return [each for each in found if each]


in_slices = pytest.mark.parametrize(("work", "most"), [(0.0, 5), (0.0001, 5), (1.0, 1)])
"""Work that takes no time, or little, is done in one turn. Else other code of the loop runs in between."""


@in_slices
def test_waiters_whose_patience_has_ended_get_their_error_in_slices(work: float, most: int) -> None:
    """All of them get it."""
    client = down()
    some = [waits(client) for _ in range(5)]
    client.clock.advance(PATIENCE - 0.001)
    client.turn()
    turns = Turns(client, work)
    client.clock.advance(0.001)
    assert turns.done_in_each(some) == [most] * (5 // most)
    assert all(map(ended, some))


@in_slices
def test_waiters_that_asked_late_get_their_answer_in_slices(work: float, most: int) -> None:
    """The loop was blocked beyond their time, and the first task asks once for all of them."""
    client = taken_by_another()
    some = [waits(client, timeout=3.0) for _ in range(5)]
    turns = Turns(client, work)
    client.clock.block(8.0)
    client.clock.advance(0.0)
    while turns.turn():
        pass
    assert len(under_way(client, ACQUIRE)) == 1
    client.nodes[0].carry_out()
    assert turns.done_in_each(some) == [most] * (5 // most)
    assert all(map(refused, some))


@in_slices
def test_tasks_of_one_owner_enter_in_slices(work: float, most: int) -> None:
    """One of them has asked, and the others enter its reentrant lock, too."""
    client, _, _ = clients_over(1)
    first = acquiring(client, owner="me")
    some = [acquiring(client, owner="me") for _ in range(5)]
    turns = Turns(client, work)
    client.nodes[0].carry_out()
    tenure = tenure_of(first)
    assert turns.done_in_each(some) == [most] * (5 // most)
    assert all(tenure_of(each).hold is tenure.hold for each in some)


def test_only_one_asks_if_a_hold_ends_between_two_slices() -> None:
    """Two waiters have lost their patience, and two have not. The error of the second is left for the next turn, and
    before that a task that did not wait here gives the name back."""
    client = down()
    impatient = [waits(client) for _ in range(2)]
    client.clock.advance(1.0)
    client.turn()
    patient = [waits(client) for _ in range(2)]
    client.clock.advance(PATIENCE - 1.001)
    client.turn()
    turns = Turns(client, 1.0)
    client.clock.advance(0.001)
    while not impatient[0].future.done():
        assert turns.turn()
    assert not impatient[1].future.done()
    client.nodes[0].error = None
    client.machine.queues.next_turn([NAME])
    while turns.turn():
        pass
    assert all(map(ended, impatient))
    assert not any(each.future.done() for each in patient)
    assert len(under_way(client, ACQUIRE)) == 1


# -- owners of reentrant locks -----------------------------------------------------------------------------------------


def test_a_task_that_waits_for_another_of_its_owner_has_a_timer_for_its_timeout_alone() -> None:
    """It goes when the task enters or leaves."""
    client, other, _ = clients_over(1)
    held = holds(other)
    waits(client, owner="me")
    before = client.clock.armed
    waits(client, owner="me")
    assert client.clock.armed == before
    leaving, entering = waits(client, owner="me", timeout=60.0), waits(client, owner="me", timeout=60.0)
    assert client.clock.armed == before + 2
    leaving.abandon()
    assert client.clock.armed == before + 1
    held.hold.end(held)
    other.nodes[0].carry_out()
    client.turn()
    assert tenure_of(entering).held
    other.machine.watchdog.stop()
    client.machine.watchdog.stop()
    assert client.clock.armed == 0


# -- a client that closes ----------------------------------------------------------------------------------------------


def test_no_waiter_asks_while_its_client_closes() -> None:
    """The acquires end one after the other: when the first one does, the next is still there."""
    client = taken_by_another()
    some = [waits(client) for _ in range(3)]
    client.machine.begin_close()
    for each in list(client.machine.under_way):
        each.close()
        client.turn()
        assert not under_way(client, ACQUIRE)
    assert all(each.future.done() for each in some)


def test_no_hold_is_passed_on_while_its_client_closes() -> None:
    """Its task releases it by itself, and waiters are there still."""
    client, _, _ = clients_over(1)
    first, second, third = holds(client), acquiring(client), acquiring(client)
    first.hold.end(first)
    settle(client)
    tenure = tenure_of(second)
    assert tenure.hold.last_fence > tenure.fence
    client.machine.begin_close()
    tenure.hold.end(tenure)
    assert [op.verb for op in under_way(client)] == [RELEASE]
    assert not third.future.done()


# -- names that were given to other clients ----------------------------------------------------------------------------


def test_each_name_is_given_away_once() -> None:
    """The next task that wants it comes behind the waiters of other clients. Each name counts for itself."""
    clock = FakeClock()
    names = YieldedNames(clock.now, used=True)
    for name in "abc":
        names.add(MUTEX, name)
        clock.advance(QUORUM_TIMEOUT / 4)
    for name in "bac":
        assert names.take(name)
        assert not names.take(name)
    assert not names


def test_a_name_counts_as_given_away_for_a_moment() -> None:
    """The waiters that were notified have asked by then."""
    clock = FakeClock(0.0)
    names = YieldedNames(clock.now, used=True)
    names.add(MUTEX, "x")
    clock.advance(QUORUM_TIMEOUT)
    names.add(MUTEX, "y")
    assert names.take("x")
    clock.advance(1.01 * QUORUM_TIMEOUT)
    assert not names.take("y")


def test_names_that_were_given_away_before_are_forgotten() -> None:
    """A client may give away a million names and want none of them again. One that is given away again is the youngest
    from then on."""
    clock = FakeClock()
    names = YieldedNames(clock.now, used=True)
    for name in "aba":
        names.add(MUTEX, name)
        clock.advance(0.3 * QUORUM_TIMEOUT)
    clock.advance(0.5 * QUORUM_TIMEOUT)
    names.add(MUTEX, "c")
    assert names.take("a")
    assert names.take("c")
    assert not names


@pytest.mark.parametrize(
    ("kind", "used"),
    [(FAIR, True), (READ, True), (Semaphore(2), True), (MUTEX, False)],
    ids=["fair", "read", "semaphore", "single node"],
)
def test_what_is_given_away_without_a_name_that_counts(kind: Kind, used: bool) -> None:
    """Fair and shared kinds come after the tickets by themselves, or need not; and a single node grants to a waiter
    at once."""
    names = YieldedNames(FakeClock().now, used)
    names.add(kind, "x")
    assert not names
    assert not names.take("x")
