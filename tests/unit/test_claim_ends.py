"""How a claim ends: for a caller that waits for it, for one that has gone, and with an error."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from typing import Any

import pytest

from asynclock._errors import ConfigError, LockError, QuorumUnavailable
from asynclock._options import LockSettings
from asynclock.events import Event, Released
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.causes import NoLease
from asynclock.protocol.hold import Tenure
from asynclock.protocol.machine import end_unwanted
from asynclock.protocol.states import DONE, Asking, Queued
from asynclock.protocol.terms import Terms
from asynclock.rules.model import State
from asynclock.rules.mutex import MUTEX
from spec.machine import Task
from tests.support.stepped_acquires import tenure_of
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle

both = pytest.mark.parametrize("nodes", [1, 3])


def opened(nodes: int) -> tuple[SteppedClient, SteppedClient, list[dict[str, State]]]:
    """Two clients whose callers wait for futures of the loop, and their servers."""
    client, other, servers = clients_over(nodes)
    for each in (client, other):
        each.result = asyncio.get_running_loop().create_future  # type: ignore[method-assign, assignment]
    return client, other, servers


def asked(client: SteppedClient, timeout: float | None = None, owner: str | None = None) -> Acquisition:
    """A task asks for the mutex."""
    terms = Terms(NAME, MUTEX, LockSettings(lease=30.0), Task(), timeout, owner)
    give_up = client.clock.now() + timeout if timeout else math.inf
    acquisition = Acquisition(client.machine, terms, give_up)
    acquisition.start()
    return acquisition


def nobody_holds(servers: list[dict[str, State]]) -> bool:
    return not any(server[NAME].holds or server[NAME].queue for server in servers)


# -- callers that have gone --------------------------------------------------------------------------------------------


@both
async def test_a_caller_that_goes_leaves_nothing(nodes: int) -> None:
    """Neither at the servers nor in the client, whose timers are stopped. To go twice is to go once."""
    client, other, servers = opened(nodes)
    held = asked(other)
    settle(client, other)
    timers = client.clock.armed
    claim = asked(client, timeout=20.0)
    settle(client, other)
    claim.abandon()
    settle(client, other)
    claim.abandon()
    assert client.clock.armed == timers
    assert claim.future.cancelled()
    assert claim.state is DONE
    assert not client.machine.under_way
    assert not any(server[NAME].queue for server in servers)
    held.abandon()
    settle(client, other)
    assert nobody_holds(servers)


@both
async def test_a_caller_that_goes_before_it_has_its_tenure_gives_it_back(nodes: int) -> None:
    """Its claim is done, and its task was cancelled before it woke. A second call finds nothing left to give."""
    client, other, servers = opened(nodes)
    claim = asked(client)
    settle(client)
    claim.abandon()
    settle(client)
    assert nobody_holds(servers)
    again = asked(other)
    settle(client, other)
    claim.abandon()
    settle(client, other)
    tenure = tenure_of(again)
    assert tenure.held


async def test_what_no_caller_has_had_is_released_without_an_event() -> None:
    """No listener was told of its grant."""

    class Told:
        active = (None,)

        def __init__(self) -> None:
            self.events = list[Event]()

        def tell(self, event: Event) -> None:
            self.events.append(event)

    client, _, _ = opened(1)
    client.observers = Told()
    for taken in (False, True):
        claim = asked(client)
        settle(client)
        tenure = tenure_of(claim)
        if taken:
            tenure.hold.end(tenure)
        else:
            end_unwanted(tenure)
        settle(client)
        assert [type(event) for event in client.observers.events] == [Released] * taken


async def test_a_caller_that_goes_after_a_refusal_sends_nothing() -> None:
    """It has no hold to give back."""
    client, other, _ = opened(1)
    asked(other)
    settle(client, other)
    claim = asked(client, timeout=0)
    settle(client, other)
    assert claim.future.done()
    claim.abandon()
    assert not client.nodes[0].sent


async def test_asyncio_logs_no_error_of_a_caller_that_has_gone() -> None:
    """The claim has failed, and its task was cancelled before it woke."""
    logged = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    client, _, _ = opened(1)
    claim = asked(client)
    claim.fail(LockError("unread"))
    claim.abandon()
    settle(client)
    del claim
    gc.collect()
    assert not logged


@both
async def test_a_grant_for_a_cancelled_caller_goes_to_the_next_task(nodes: int) -> None:
    """Its future was cancelled in the turn of the grant, and its task has not run since."""
    client, _, _ = opened(nodes)
    first, second = asked(client), asked(client)
    first.future.cancel()
    settle(client)
    tenure = tenure_of(second)
    assert tenure.held


@both
async def test_a_refusal_of_a_cancelled_caller_ends_its_claim(nodes: int) -> None:
    """Nobody reads it, and the next task asks."""
    client, other, _ = opened(nodes)
    held = asked(other)
    settle(client, other)
    claim = asked(client, timeout=0)
    claim.future.cancel()
    settle(client, other)
    assert claim.state is DONE
    claim.abandon()
    held.abandon()
    behind = asked(client)
    settle(client, other)
    assert isinstance(behind.take(), Tenure)


async def test_a_cancelled_caller_that_waited_for_its_owner_is_not_refused() -> None:
    """Another task of the owner of a reentrant lock asks. The time of this one ends in the turn in which it is
    cancelled."""
    client, other, _ = opened(1)
    asked(other)
    settle(client, other)
    first, second = asked(client, owner="me"), asked(client, timeout=1.0, owner="me")
    settle(client, other)
    second.future.cancel()
    client.clock.advance(1.0)
    assert second.state is DONE
    assert first.state is not DONE


# -- the local queue ---------------------------------------------------------------------------------------------------


@both
async def test_while_a_task_has_the_hold_the_next_one_waits_for_it(nodes: int) -> None:
    """It does not ask the servers, which would refuse it."""
    client, _, _ = opened(nodes)
    first, second = asked(client), asked(client)
    settle(client)
    assert isinstance(first.take(), Tenure)
    assert isinstance(second.state, Queued)


@both
async def test_the_next_task_asks_when_a_claim_fails(nodes: int) -> None:
    """Whatever the reason."""
    client, _, _ = opened(nodes)
    first, second = asked(client), asked(client)
    assert isinstance(second.state, Queued)
    first.fail(LockError("any"))
    assert isinstance(second.state, Asking)
    assert isinstance(first.future.exception(), LockError)


# -- errors ------------------------------------------------------------------------------------------------------------


@both
async def test_the_caller_gets_the_first_error(nodes: int) -> None:
    """What it has sent is undone. A later error comes too late."""
    client, _, servers = opened(nodes)
    claim = asked(client)
    first = LockError("first")
    claim.fail(first)
    claim.fail(LockError("second"))
    assert claim.future.exception() is first
    settle(client)
    assert nobody_holds(servers)


@both
async def test_an_error_for_a_cancelled_caller_ends_its_claim(nodes: int) -> None:
    """Its future was cancelled in this turn. What it has sent is undone."""
    client, _, servers = opened(nodes)
    claim = asked(client)
    claim.future.cancel()
    claim.fail(LockError("unread"))
    settle(client)
    assert claim.state is DONE
    assert nobody_holds(servers)


@both
async def test_a_close_of_the_client_is_an_error_of_its_callers(nodes: int) -> None:
    """Of those that wait. A claim that has its result keeps it."""
    client, other, _ = opened(nodes)
    done = asked(other)
    settle(client, other)
    waits = asked(client)
    settle(client, other)
    for claim in (done, waits):
        claim.close()
        claim.close()
    assert isinstance(waits.future.exception(), ConfigError)
    assert isinstance(done.take(), Tenure)


@both
async def test_an_outage_is_an_error_that_is_freed_with_its_claim(nodes: int) -> None:
    """An acquire with timeout=0 meets it. The claim and the error do not refer to each other, so no garbage collection
    is needed."""
    client, _, _ = opened(nodes)
    for node in client.nodes:
        node.error = ConnectionError("gone")
    claim = asked(client, timeout=0)
    client.turn()
    assert isinstance(claim.future.exception(), QuorumUnavailable)
    future = weakref.ref(claim.future)
    gc.disable()
    try:
        del claim
        assert future() is None
    finally:
        gc.enable()


async def test_a_keyboard_interrupt_ends_the_claim_and_the_turn() -> None:
    """The program is to end, and its caller must not wait for ever."""
    client, _, _ = opened(1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    client.judge_again = interrupted  # type: ignore[method-assign]
    client.nodes[0].error = ConnectionError("gone")
    claim = asked(client)
    with pytest.raises(KeyboardInterrupt):
        client.turn()
    assert isinstance(claim.future.exception(), KeyboardInterrupt)


# -- refusals ----------------------------------------------------------------------------------------------------------


@both
async def test_a_refusal_ends_a_claim(nodes: int) -> None:
    """With the holder in the way as its result. Nothing of it is left."""
    client, other, _ = opened(nodes)
    asked(other)
    settle(client, other)
    claim = asked(client, timeout=0)
    settle(client, other)
    assert claim.future.done()
    result = claim.take()
    assert isinstance(result, NoLease)
    assert result.holder
    assert claim.state is DONE
    assert not client.machine.under_way
