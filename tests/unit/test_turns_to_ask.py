"""A task of a process asks: the first one of its local queue, behind remote waiters, and with which request."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock import ConfigError
from asynclock._options import LockSettings
from asynclock.protocol.local_queue import SPAN
from asynclock.rules.model import Verb
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ
from asynclock.stores.port import WrongKind
from tests.support.stepped_acquires import acquiring, tenure_of
from tests.support.stepped_quorum import NAME, clients_over, settle
from tests.support.stepped_waits import Waits, ops, outcome_of, pass_time, reply, sent


class Stop(BaseException):
    """As KeyboardInterrupt, which would end the test run."""


@pytest.mark.parametrize("error", [MemoryError(), Stop()], ids=["error", "interrupt"])
def test_a_task_that_cannot_ask_stops_nobody(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """An error comes as it is the turn of a task. That task gets it, and the task behind it asks. The release that has
    begun this turn raises only a KeyboardInterrupt."""
    client, _, _ = clients_over(1)
    first = acquiring(client)
    settle(client)
    tenure = tenure_of(first)
    fails, behind = acquiring(client), acquiring(client)

    def new_id(*args: object) -> str:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(client, "new_id", new_id)
    if isinstance(error, Exception):
        tenure.hold.end(tenure)
    else:
        with pytest.raises(Stop):
            tenure.hold.end(tenure)
    assert outcome_of(fails) is None  # it ends in a turn of its own, and the next task asks there
    settle(client)
    assert outcome_of(fails) is error
    assert tenure_of(behind).held


def test_a_lease_that_is_too_short_is_refused_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error, and not the task that serves the local queue later."""
    client, _, _ = clients_over(1)
    first = acquiring(client)
    settle(client)

    def within(settings: LockSettings) -> float:
        raise ConfigError(f"lease={settings.lease:g} s is too short")

    monkeypatch.setattr(client, "within", within)
    with pytest.raises(ConfigError, match="too short"):
        acquiring(client, lease=0.1)
    assert tenure_of(first).held


def test_a_name_that_this_process_holds_as_another_kind() -> None:
    """The server would refuse it. A task that would wait in the local queue does not ask the server, and is refused at
    once, too."""
    client, _, _ = clients_over(1)
    reading = acquiring(client, kind=READ)
    settle(client)
    with pytest.raises(WrongKind):
        acquiring(client)
    assert tenure_of(reading).held


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_task_yields_to_remote_waiters(nodes: int) -> None:
    """Its client has released the name to them a moment ago. It asks nothing at first, and then takes a ticket."""
    client, _, _ = clients_over(nodes)
    client.machine.yielded.add(MUTEX, NAME)
    acquiring(client)
    assert sent(client) == []
    pass_time(client, 0.001)
    assert sent(client) == [Verb.WAIT]


@pytest.mark.parametrize(("timeout", "asked"), [(None, Verb.WAIT), (1.0, Verb.WAIT), (0.05, Verb.ACQUIRE)])
def test_the_next_task_of_a_local_queue_yields_to_remote_waiters(timeout: float | None, asked: Verb) -> None:
    """It asks with the release of the task before it, and takes a ticket first. With little time left it tries."""
    waits = Waits(3)
    local = acquiring(waits.holder, timeout)
    waits.held.hold.end(waits.held)
    assert sent(waits.holder) == [Verb.RELEASE, asked]
    assert outcome_of(local) is None


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_task_alone_asks_for_itself(nodes: int) -> None:
    """With one fence, and a ticket of one task."""
    holder, client, _ = clients_over(nodes)
    held = holder.acquire()
    settle(holder)
    acquiring(client)
    while sent(client):
        assert [(op.queueing.span, op.queueing.tasks) for op in ops(client)] == [(1, 1)]
        reply(client)
    assert tenure_of(held).held


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_task_asks_for_those_behind_it(nodes: int) -> None:
    """With fences for all tenures that one round trip may serve, and a ticket that counts the tasks."""
    client, _, _ = clients_over(nodes)
    first = acquiring(client)
    settle(client)
    tenure = tenure_of(first)
    for _ in range(3):
        acquiring(client)
    tenure.hold.end(tenure)
    _, asked = ops(client)
    assert asked.queueing.span == SPAN
    if nodes == 1:
        assert asked.queueing.tasks == 3


def test_a_plain_try_that_was_refused_has_an_id_of_its_own() -> None:
    """The SET may still arrive at its node, so the script that leaves a ticket has another id."""
    holder, client, _ = clients_over(1)
    held = holder.acquire()
    settle(holder)
    acquiring(client, fencing=False)
    (plain,) = ops(client)
    first = plain.id
    assert plain.plain
    reply(client)
    (scripted,) = ops(client)
    assert not scripted.plain
    assert scripted.id != first
    assert tenure_of(held).held


def test_an_attempt_of_a_minority_is_undone_before_the_next() -> None:
    """One of three nodes has granted it. The undo goes there first, in the same turn as the next attempt."""
    holder, client, servers = clients_over(3)
    held = holder.acquire()
    settle(holder)
    servers[2].clear()
    acquiring(client)
    reply(client)
    assert sent(client, 0) == [Verb.ACQUIRE]
    assert sent(client, 2)[-2:] == [Verb.RELEASE, Verb.ACQUIRE]
    assert tenure_of(held).held


@pytest.mark.parametrize("kind", [MUTEX, FAIR])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_waiter_says_that_it_waits(kind: Any, nodes: int) -> None:
    """In its picture, too: it waits while the servers keep its ticket."""
    waits = Waits(nodes, kind=kind)
    assert waits.acquisition.terms.had_to_wait
    assert "waiting until" in repr(waits.acquisition)


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_acquire_that_is_granted_at_once_did_not_wait(nodes: int) -> None:
    """Nobody had the name, and its release has nobody served."""
    client, _, _ = clients_over(nodes)
    acquisition = acquiring(client)
    settle(client)
    assert not acquisition.terms.had_to_wait
    tenure = tenure_of(acquisition)
    tenure.hold.end(tenure)
    assert [op.queueing.contended for op in ops(client)] == [False]
