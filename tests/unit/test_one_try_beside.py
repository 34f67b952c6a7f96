"""An acquire of a task that has a hold of the name already: first one try, then the wait that its caller asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asynclock import SelfDeadlock
from asynclock.locks.multi import Multi
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.hold import Tenure
from asynclock.rules.model import Part, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from spec.machine import Task
from tests.support.stepped_acquires import acquiring, tenure_of
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle
from tests.support.stepped_waits import begin, defer_all, fail, ops, outcome_of, pass_time, refusal_of, reply, sent

TIMEOUT = 6.0


def beside(client: SteppedClient, timeout: float | None = None) -> tuple[Tenure, Acquisition]:
    """The permit of a task, of two, and its acquire of another one, which has sent its try."""
    task = Task()
    first = acquiring(client, kind=Semaphore(2), task=task)
    settle(client)
    return tenure_of(first), acquiring(client, timeout, kind=Semaphore(2), task=task)


@pytest.mark.parametrize("timeout", [None, TIMEOUT])
def test_an_outage_during_the_try(timeout: float | None) -> None:
    """It has the patience of each acquire, and asks again."""
    client, _, _ = clients_over(1)
    mine, second = beside(client, timeout)
    fail(client)
    assert outcome_of(second) is None
    assert sent(client) == [Verb.ACQUIRE]
    settle(client)
    assert tenure_of(second).held
    assert mine.held


def test_a_try_that_takes_all_of_the_time() -> None:
    """The answer comes late. The acquire asks once more, and its refusal is one, and no outage."""
    client, other, _ = clients_over(1)
    theirs = acquiring(other, kind=Semaphore(2))
    settle(other)
    mine, second = beside(client, TIMEOUT)
    pass_time(client, TIMEOUT)
    pass_time(client, 0.5)
    assert outcome_of(second) is None
    reply(client)
    assert refusal_of(second).waited == TIMEOUT + 0.5
    assert mine.held
    assert tenure_of(theirs).held


def test_a_try_that_is_refused() -> None:
    """Another client has the other permit. The task leaves a ticket for it, and gets it."""
    client, other, _ = clients_over(1)
    theirs = acquiring(other, kind=Semaphore(2))
    settle(other)
    mine, second = beside(client)
    settle(client)
    assert outcome_of(second) is None
    tenure = tenure_of(theirs)
    tenure.hold.end(tenure)
    settle(other, client)
    assert tenure_of(second).held
    assert mine.held


def test_the_permits_of_other_tasks_of_the_process() -> None:
    """A task with one permit waits for a second one, and not for itself, although its process has all of them."""
    client, _, _ = clients_over(1)
    theirs = acquiring(client, kind=Semaphore(2))
    settle(client)
    mine, second = beside(client)
    settle(client)
    assert outcome_of(second) is None
    tenure = tenure_of(theirs)
    tenure.hold.end(tenure)
    settle(client)
    assert tenure_of(second).held
    assert mine.held


def test_timeout_zero_beside_an_own_hold_is_refused() -> None:
    """It would not wait, so it would not wait for itself."""
    client, _, _ = clients_over(1)
    task = Task()
    first = acquiring(client, task=task)
    settle(client)
    trying = acquiring(client, 0, task=task)
    settle(client)
    assert refusal_of(trying).holder == tenure_of(first).hold.op.id


def test_a_try_that_a_minority_has_granted_is_undone() -> None:
    """A writer waits at a majority, so a second read of the same task would wait for itself."""
    client, other, servers = clients_over(3)
    task = Task()
    reading = acquiring(client, kind=READ, task=task)
    settle(client)
    tenure = tenure_of(reading)
    writing = acquiring(other, kind=WRITE)
    settle(other)
    servers[2][NAME] = replace(servers[2][NAME], queue=())
    again = acquiring(client, kind=READ, task=task)
    settle(client)
    assert isinstance(outcome_of(again), SelfDeadlock)
    assert [[each.id for each in server[NAME].holds] for server in servers] == [[tenure.hold.op.id]] * 3
    assert outcome_of(writing) is None


def test_several_names_without_a_hold_of_this_task_are_asked_for_once() -> None:
    """The first refusal leaves a ticket. There is nothing beside which it would try first."""
    holder, client, _ = clients_over(1)
    held = holder.acquire()
    settle(holder)
    waiting = acquiring(client, kind=Multi([Part(NAME, MUTEX), Part("y", MUTEX)]))
    (asked,) = ops(client)
    assert asked.queueing.number == 1
    reply(client)
    assert sent(client) == []
    assert outcome_of(waiting) is None
    assert tenure_of(held).held


# -- tries that wait in the queue of their node ----------------------------------------------------------------------


def test_a_try_in_the_queue_of_its_node_ends_at_its_deadline() -> None:
    """With timeout=0 there is no other limit."""
    client, _, _ = clients_over(1)
    defer_all(client)
    trying = acquiring(client, 0)
    pass_time(client, 2.99)
    assert outcome_of(trying) is None
    pass_time(client, 0.02)
    assert "waits in the queue" in str(outcome_of(trying))


def test_a_try_that_leaves_the_queue_of_its_node_has_the_time_of_each_try() -> None:
    """It counts from then, and the node ends it."""
    client, _, _ = clients_over(1)
    defer_all(client)
    trying = acquiring(client, 0)
    pass_time(client, 1.0)
    begin(client)
    pass_time(client, 2.9)
    assert outcome_of(trying) is None
    reply(client)
    assert tenure_of(trying).held


def test_an_acquire_without_a_timeout_stays_in_the_queue_of_its_node() -> None:
    """Its caller waits as long as it takes."""
    client, _, _ = clients_over(1)
    defer_all(client)
    acquisition = acquiring(client)
    pass_time(client, 100.0)
    assert outcome_of(acquisition) is None
    assert sent(client) == [Verb.ACQUIRE]
    begin(client)
    reply(client)
    assert tenure_of(acquisition).held


def test_a_try_beside_an_own_hold_does_not_stay_in_the_queue_of_its_node() -> None:
    """It ends at its deadline, as each try with timeout=0. Then the acquire asks with the time of its caller."""
    client, _, _ = clients_over(1)
    task = Task()
    first = acquiring(client, kind=Semaphore(2), task=task, renew=False)
    settle(client)
    mine = tenure_of(first)
    defer_all(client)
    second = acquiring(client, kind=Semaphore(2), task=task)
    (tried,) = ops(client)
    pass_time(client, 3.01)
    assert [op.verb for op in ops(client) if op.id != tried.id] == [Verb.ACQUIRE]
    settle(client)
    assert tenure_of(second).held
    assert mine.held
