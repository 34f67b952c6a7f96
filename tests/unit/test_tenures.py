"""A tenure: when it is over, who learns of its end, and for how long its name stays taken after the release."""

from __future__ import annotations

import asyncio
import gc
from weakref import ref

import pytest

from asynclock import LockLost, LockNotHeld
from asynclock._errors import Reason
from asynclock.events import Detached, Released
from asynclock.protocol.hold import Tenure
from asynclock.rules.model import RELEASE, Serve
from spec.machine import Task
from tests.support.held import Held
from tests.support.stepped_acquires import LEASE, acquiring, tenure_of
from tests.support.stepped_quorum import NAME, clients_over, settle

PAST: dict[str, float | None] = {"expired": None, "max_hold": 10.0}
"""What a loss is called, and the max_hold that it takes."""


def reason_of(tenure: Tenure) -> Reason | None:
    """The reason of the loss that a use of it reports; None: it reports no loss."""
    error = tenure.error()
    return error.reason if isinstance(error, LockLost) else None


def rests(held: Held) -> list[float]:
    """For each release that is under way: the seconds for which it keeps the name taken."""
    return [op.rest for ops in held.under_way(RELEASE) for op in ops]


# -- when it is over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", PAST)
def test_it_is_over_from_the_moment_of_its_end(reason: Reason) -> None:
    """Each question gives the same answer at that moment: the lease, or max_hold, is over. Just before, it is not."""
    held = Held(renew=False, max_hold=PAST[reason])
    tenure = held.tenure
    held.clock.block(tenure.ends - held.now - 0.001)
    tenure.check_clock()
    assert tenure.held
    assert not tenure.ended_early
    held.clock.block(tenure.ends - held.now)
    assert held.now == tenure.ends
    assert not tenure.held
    assert tenure.ended_early is (reason == "expired")
    assert reason_of(tenure) == reason
    tenure.check_clock()
    assert held.losses == [reason]
    assert tenure.ended_early is (reason == "expired")
    assert reason_of(tenure) == reason


def test_it_is_not_held_in_a_forked_child() -> None:
    """The hold is that of the parent. A use of it is a mistake of the program, and no loss."""
    held = Held()
    held.client.forked = True
    assert held.tenure.open
    assert not held.tenure.held
    error = held.tenure.error()
    assert isinstance(error, LockNotHeld)
    assert "was acquired before a fork" in str(error)


@pytest.mark.parametrize("over", [False, True])
def test_a_hold_whose_max_hold_is_over_is_not_passed_on(over: bool) -> None:
    """A task of the same process waits. It gets the hold until max_hold of its owner is over, and no later."""
    held = Held()
    waiting = held.next_owner(max_hold=0.004)
    held.clock.block(held.tenure.until - held.now if over else 0.003)
    assert (held.hold.end(held.tenure) is None) is not over
    assert waiting.future.done() is not over


@pytest.mark.parametrize(("ends", "words"), [("end", "was released already"), ("detach", "was detached")])
def test_the_error_of_a_tenure_that_was_given_back_says_how(ends: str, words: str) -> None:
    """Its use afterwards is a mistake of the program, and no loss."""
    held = Held()
    getattr(held.hold, ends)(held.tenure)
    error = held.tenure.error()
    assert isinstance(error, LockNotHeld)
    assert words in str(error)


def test_it_belongs_to_the_task_that_has_entered_its_block() -> None:
    """Another task has acquired it. The one in the block would wait for itself if it asked for the name."""
    held, entered = Held(), Task()
    holds, acquired = held.client.machine.holds, held.tenure.task
    assert holds.number_of_task(NAME, acquired)
    held.tenure.enter(entered, lambda reason: None)
    assert holds.number_of_task(NAME, entered)
    assert not holds.number_of_task(NAME, acquired)


def test_a_failed_renewal_leaves_it_open_and_unknown() -> None:
    """No majority has answered. The next renewal that a majority grants makes it held again."""
    held = Held()
    held.hold.extend(LEASE)
    for node in (0, 1):
        held.fail(node)
    assert held.tenure.held
    assert "unknown" in repr(held.tenure)
    held.extend()
    assert "held" in repr(held.tenure)


# -- who learns of its end ---------------------------------------------------------------------------------------------


async def test_its_end_wakes_those_that_wait_for_it() -> None:
    """Not one that has stopped waiting. One that was cancelled in the same turn has no result to get."""
    held, loop = Held(), asyncio.get_running_loop()
    first, second, gone, cancelled = (loop.create_future() for _ in range(4))
    for waiter in (first, gone, cancelled, second):
        held.tenure.add_waiter(waiter)
    held.tenure.remove_waiter(gone)
    cancelled.cancel()
    held.hold.end(held.tenure)
    assert first.result() is None
    assert second.result() is None
    assert not gone.done()
    assert cancelled.cancelled()


async def test_it_keeps_no_waiter_that_has_gone() -> None:
    """A lease may be held for long, and its program may wait for its end with a timeout again and again."""
    held, waiter = Held(), asyncio.get_running_loop().create_future()
    held.tenure.add_waiter(waiter)
    held.tenure.remove_waiter(waiter)
    left = ref(waiter)
    del waiter
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("reason", ["taken", "closed"])
def test_its_owner_is_called_once_with_the_reason_of_its_loss(reason: Reason, lost: bool) -> None:
    """Also an owner that asks for the call when the tenure is lost already."""
    held, told = Held(), list[LockLost]()
    if lost:
        held.hold.lose(reason)
    held.tenure.call_on_loss(told.append)
    assert len(told) == lost
    held.hold.lose(reason)
    assert [error.reason for error in told] == [reason]


def test_an_owner_that_releases_is_not_called() -> None:
    """That is no loss."""
    held, told = Held(), list[LockLost]()
    held.tenure.call_on_loss(told.append)
    held.hold.end(held.tenure)
    held.tenure.call_on_loss(told.append)
    assert told == []


@pytest.mark.parametrize("left", [False, True])
def test_a_loss_interrupts_the_body_until_that_has_ended(left: bool) -> None:
    """The body is told the reason. Its tenure is released a little after its end."""
    held, told = Held(), list[Reason]()
    held.tenure.enter(held.tenure.task, told.append)
    if left:
        held.tenure.leave()
    held.hold.lose("taken")
    assert told == ([] if left else ["taken"])


@pytest.mark.parametrize("ends", ["released", "detached", "lost"])
def test_the_event_of_its_end_has_the_seconds_that_it_was_held(ends: str) -> None:
    """A release has an event, and so has a detach; that of a loss comes from the Core."""
    held = Held()
    held.clock.advance(3.0)
    if ends == "released":
        held.hold.end(held.tenure)
    elif ends == "detached":
        held.hold.detach(held.tenure)
    else:
        held.hold.lose("taken")
    assert [(type(event), event.held_for) for event in held.listening.events] == {
        "released": [(Released, 3.0)],
        "detached": [(Detached, 3.0)],
        "lost": [],
    }[ends]


def test_a_tenure_that_no_caller_took_has_no_event() -> None:
    """Its caller was cancelled before it woke: there was no event of its beginning."""
    held = Held()
    held.tenure.mark_untaken()
    held.hold.end(held.tenure)
    assert held.listening.events == []


@pytest.mark.parametrize("ends", ["", "end", "detach"])
def test_only_a_tenure_that_is_open_is_reported_as_dropped(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector does so, in any thread. There is nothing to do for one that has ended."""
    held, dropped = Held(), list[str]()
    monkeypatch.setattr(held.client, "dropped", lambda tenure: dropped.append(repr(tenure)))
    if ends:
        getattr(held.hold, ends)(held.tenure)
    del held.tenure
    gc.collect()
    assert len(dropped) == (not ends)


# -- for how long the name stays taken ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("min_hold", "done_for"), [(30.0, 10.0), (10.0, 30.0), (30.0, 0.0), (0.0, 30.0)])
def test_the_longer_of_min_hold_and_the_mark_of_once_counts(min_hold: float, done_for: float) -> None:
    """min_hold counts from the beginning of the tenure, and the mark from its release."""
    held = Held(min_hold=min_hold)
    held.clock.block(2.0)
    if done_for:
        held.tenure.mark_done(done_for)
    held.hold.end(held.tenure)
    assert rests(held) == [max(min_hold - 2.0, done_for)] * 3


@pytest.mark.parametrize("contended", [False, True])
@pytest.mark.parametrize("within", [0.0, 0.5])
def test_a_run_of_once_is_marked_as_done_for_any_time(contended: bool, within: float) -> None:
    """A release without that mark says only that the name rests. The same goes for a release that other clients wait
    for."""
    held = Held(min_hold=1.0)
    if contended:
        held.notify()
    if within:
        held.tenure.mark_done(within)
    held.hold.end(held.tenure)
    assert [op.done for ops in held.under_way(RELEASE) for op in ops] == [within > 0] * 3


def test_min_hold_does_not_count_for_a_caller_that_was_cancelled() -> None:
    """It was cancelled before it had the tenure, so it did nothing that min_hold could keep apart."""
    client, _, _ = clients_over(3)
    acquisition = acquiring(client, min_hold=30.0)
    settle(client)
    acquisition.abandon()
    assert [op.rest for node in client.nodes for op, _ in node.sent if op.verb is RELEASE] == [0.0] * 3


@pytest.mark.parametrize(("outer", "inner"), [(30.0, 0.5), (0.0, 0.5), (0.0, 30.0), (0.5, 30.0)])
def test_the_longest_min_hold_of_an_owner_counts(outer: float, inner: float) -> None:
    """The inner block is left first, and sends no release."""
    held = Held(min_hold=outer)
    again = held.enter_again(min_hold=inner)
    assert held.hold.end(again) is None
    held.hold.end(held.tenure)
    assert rests(held) == [pytest.approx(max(outer, inner))] * 3


def test_a_hold_with_an_inner_block_that_has_ended_is_passed_on() -> None:
    """As any other: its settings are still those of the next task."""
    held = Held()
    waiting = held.next_owner()
    again = held.enter_again()
    held.clock.block(0.001)
    assert held.hold.end(again) is None
    assert not waiting.future.done()
    assert held.hold.end(held.tenure) is None
    assert tenure_of(waiting).hold is held.hold


def test_a_hold_does_not_go_on_for_a_tenure_that_was_dropped() -> None:
    """The program has dropped the inner tenure, and the loop has not run since. The release of the outer one is
    sent."""
    held = Held()
    again = held.enter_again()
    del again
    gc.collect()
    assert held.hold.end(held.tenure) is not None
    assert held.asked(RELEASE) == [True] * 3


def test_a_tenure_that_has_ended_does_not_keep_the_hold() -> None:
    """The program still refers to the inner lease, which it has released."""
    held = Held()
    again = held.enter_again(max_hold=5.0)
    held.hold.end(again)
    held.wait(6.0)
    assert held.losses == []
    held.hold.end(held.tenure)
    assert held.asked(RELEASE) == [True] * 3


# -- when its client closes --------------------------------------------------------------------------------------------


def closed(held: Held) -> None:
    """Its client begins to close."""
    held.client.machine.begin_close()
    held.client.machine.close_hold(held.hold)


def test_a_close_finds_a_lease_that_is_over() -> None:
    """The loop was blocked, and no timer has run: it has expired, and a close is no reason for that."""
    held = Held()
    held.clock.block(2 * LEASE)
    closed(held)
    assert held.losses == ["expired"]


def test_a_close_keeps_the_longest_min_hold_of_an_owner() -> None:
    """Whichever of its blocks has it."""
    held = Held(min_hold=5.0)
    again = held.enter_again(min_hold=20.0)
    closed(held)
    assert not again.open
    assert rests(held) == [20.0] * 3


def test_a_close_leaves_the_name_of_a_dropped_tenure_free() -> None:
    """The program has dropped it, and the loop has not run since."""
    held = Held()
    hold = held.hold
    del held.tenure
    gc.collect()
    held.client.machine.begin_close()
    held.client.machine.close_hold(hold)
    assert rests(held) == [0.0] * 3


@pytest.mark.parametrize("done", [False, True])
def test_a_close_keeps_the_mark_of_a_run_that_has_returned(done: bool) -> None:
    """It has returned before its client closes, and its lease is not released yet."""
    held = Held()
    if done:
        held.tenure.mark_done(0.5)
    closed(held)
    assert [(op.done, op.rest) for ops in held.under_way(RELEASE) for op in ops] == [(done, 0.5 if done else 0.0)] * 3


@pytest.mark.parametrize("serve", Serve)
def test_a_release_that_serves_nobody_is_sent_as_one_that_others_wait_for(serve: Serve) -> None:
    """The withdrawal of the last ticket of the client serves the queue, and must come after this release."""
    held = Held()
    held.hold.close(serve)
    found = {(op.queueing.serve, op.queueing.contended) for ops in held.under_way(RELEASE) for op in ops}
    assert found == {(serve, serve is Serve.NOBODY)}
