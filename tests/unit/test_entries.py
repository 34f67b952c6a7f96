"""A second task of the owner of a reentrant lock, while another one asks."""

from __future__ import annotations

import pytest

from asynclock import QuorumUnavailable, SelfDeadlock
from asynclock.rules.model import Verb
from spec.machine import Task
from tests.support.stepped_acquires import acquiring, tenure_of
from tests.support.stepped_quorum import clients_over, settle
from tests.support.stepped_waits import outcome_of, pass_time, refusal_of, sent, take_down


def test_timeout_zero_does_not_wait_for_the_entry() -> None:
    """The second task gets no lease, at once."""
    client, _, _ = clients_over(1)
    acquiring(client, owner="us")
    assert refusal_of(acquiring(client, 0, owner="us")).waited == 0.0


@pytest.mark.parametrize("timeout", [1.0, 4.0])
def test_the_time_of_the_second_task_is_exact(timeout: float) -> None:
    """It gets no lease at its end, and knows how long it has waited."""
    client, _, _ = clients_over(1)
    first = acquiring(client, owner="us")
    second = acquiring(client, timeout, owner="us")
    pass_time(client, timeout - 0.01)
    assert outcome_of(second) is None
    pass_time(client, 0.02)
    assert refusal_of(second).waited == timeout
    settle(client)
    assert tenure_of(first).held


def test_tasks_of_one_owner_enter_together() -> None:
    """The first of them asks. Those that waited for it, and those that come later, have its hold without a question."""
    client, _, _ = clients_over(1)
    tasks = [acquiring(client, owner="us") for _ in range(3)]
    assert sent(client) == [Verb.ACQUIRE]
    settle(client)
    tasks.append(acquiring(client, owner="us"))
    assert sent(client) == []
    tenures = [tenure_of(each) for each in tasks]
    assert len({tenure.hold for tenure in tenures}) == 1
    assert len({tenure.fence for tenure in tenures}) == 1


def test_an_outage_that_the_first_task_has_met() -> None:
    """At the end of its time the second task is told of it, and not that another owner has the name."""
    client, _, _ = clients_over(1)
    take_down(client)
    first = acquiring(client, owner="us")
    client.turn()
    second = acquiring(client, 1.0, owner="us")
    pass_time(client, 1.0)
    assert outcome_of(first) is None
    error = outcome_of(second)
    assert isinstance(error, QuorumUnavailable)
    assert "it is down" in str(error)


def test_a_task_that_would_wait_for_itself() -> None:
    """It holds the name through a lock that is not reentrant. The other task of the owner gives up, so this one would
    ask: it is told, and does not wait for ever."""
    client, _, _ = clients_over(1)
    task = Task()
    plain = acquiring(client, task=task)
    settle(client)
    tenure = tenure_of(plain)
    first = acquiring(client, 1.0, owner="us")
    second = acquiring(client, owner="us", task=task)
    pass_time(client, 1.0)
    assert refusal_of(first).waited == 1.0
    client.turn()
    assert isinstance(outcome_of(second), SelfDeadlock)
    assert tenure.held
    assert sent(client) == []
