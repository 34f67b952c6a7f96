"""The marks of runs of `once` at the nodes that did not have the hold: what is sent, when, and until when."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from asynclock.protocol import done_marks
from asynclock.protocol.done_marks import MOST_PAUSE, PAUSE, TRIES
from asynclock.protocol.hold import Hold, Tenure
from asynclock.rules.model import DONE, MARKS_FREE, RELEASE, Entry, Notice, Op, State
from asynclock.stores.redis.pending import PendingReleases
from asynclock.stores.undelivered import PendingRelease
from spec.machine import Result
from tests.support.stepped_acquires import holds
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle

WITHIN = 3600.0
LEASE = 30.0
OTHER = "another's"


class Run:
    """A client over some nodes that holds the name, and whose run returns."""

    def __init__(self, nodes: int = 5) -> None:
        self.client, _, self.servers = clients_over(nodes)
        self.clock = self.client.clock
        self.tenure = self.acquired()

    def acquired(self) -> Tenure:
        return holds(self.client)

    @property
    def hold(self) -> Hold:
        return self.tenure.hold

    @property
    def followed(self) -> int:
        """The runs whose marks are not at all nodes yet."""
        return len(self.client.machine.holds.done_marks)

    def take(self, *nodes: int, by: str = OTHER) -> None:
        """Another id has the name there."""
        for each in nodes:
            self.servers[each][NAME] = State(holds=(Entry(by, None),))

    def free(self, *nodes: int) -> None:
        """Nobody has the name there."""
        for each in nodes:
            self.servers[each][NAME] = State()

    def returns(self, within: float = WITHIN) -> None:
        """Its release is under way."""
        self.tenure.mark_done(within)
        self.hold.end(self.tenure)
        self.client.machine.watchdog.stop()  # its timer would count

    def marked(self) -> list[bool]:
        states = [each.get(NAME, State()) for each in self.servers]
        return [[hold.id for hold in each.holds] == [DONE] for each in states]

    def sent(self) -> list[Op]:
        """The marks that are under way."""
        return [op for node in self.client.nodes for op, _ in node.sent if op.verb is RELEASE and op.marks_free]

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        settle(self.client)


def test_a_node_where_the_name_is_free_gets_the_mark_at_once() -> None:
    """It refused the release, and nobody has the name there. Its mark ends when the others end."""
    run = Run()
    run.free(3, 4)
    run.returns()
    settle(run.client)
    assert run.marked() == [True] * 5
    ends = [each[NAME].holds[0].ends or 0.0 for each in run.servers]
    assert max(ends) - min(ends) < 0.001
    assert not run.followed
    assert not run.clock.armed


def test_a_run_that_all_nodes_know_sends_nothing_more() -> None:
    """All of them had the hold."""
    run = Run()
    run.returns()
    settle(run.client)
    assert run.marked() == [True] * 5
    assert not run.followed
    assert not run.clock.armed


def test_a_single_node_is_not_followed() -> None:
    """It has the mark, or nobody has."""
    run = Run(1)
    run.returns()
    assert not run.followed


def test_a_node_with_another_attempt_is_asked_again() -> None:
    """The pauses double. The hold of the other stays as it is."""
    run = Run()
    run.take(3, 4)
    run.returns()
    settle(run.client)
    assert not run.sent()
    for pause in (PAUSE, 2 * PAUSE, 4 * PAUSE):
        run.clock.advance(0.99 * pause)
        assert not run.sent()
        run.clock.advance(0.011 * pause)
        assert len(run.sent()) == 2
        settle(run.client)
        assert [each.id for each in run.servers[3][NAME].holds] == [OTHER]
    run.free(3, 4)
    run.pass_time(8 * PAUSE)
    assert run.marked() == [True] * 5
    assert not run.followed
    assert not run.clock.armed


def test_a_late_vote_repeats_nothing() -> None:
    """One node that lacks the mark has been asked again when the vote of another one on the release comes."""
    run = Run()
    run.free(3, 4)
    run.returns()
    for node in run.client.nodes[:4]:
        node.carry_out()
    assert len(run.sent()) == 1
    run.client.nodes[4].carry_out()
    assert len(run.sent()) == 2
    settle(run.client)
    assert run.marked() == [True] * 5


def test_an_owner_that_stays_is_left_alone() -> None:
    """The same id has the name for longer than an attempt lasts: nothing is set after it."""
    run = Run()
    run.take(3, 4)
    run.returns()
    settle(run.client)
    run.pass_time(10.0)  # the node timeout is 3 s
    assert not run.followed
    run.free(3, 4)
    run.pass_time(60.0)
    assert run.marked() == [True] * 3 + [False] * 2
    assert not run.clock.armed


def test_other_attempts_one_after_the_other_are_outlasted() -> None:
    """Each of them has another id, so none of them is an owner."""
    run = Run()
    run.take(4)
    run.returns()
    settle(run.client)
    for number in range(40):
        run.take(4, by=f"attempt {number}")
        run.pass_time(0.2)
    run.free(4)
    run.pass_time(MOST_PAUSE)
    assert run.marked() == [True] * 5


def test_it_ends_after_one_lease() -> None:
    """A node never becomes free."""
    run = Run()
    run.take(4)
    run.returns()
    settle(run.client)
    for number in range(200):
        run.take(4, by=f"attempt {number}")
        run.pass_time(0.2)
    assert not run.followed
    assert not run.clock.armed
    assert sum(min(PAUSE * 2**n, MOST_PAUSE) for n in range(TRIES)) > 25.0  # the number of tries leaves that time


def test_a_node_that_is_down_is_asked_when_it_is_back() -> None:
    """While it is down nothing is sent: it would keep a release for each run."""
    run = Run()
    run.free(4)
    run.client.nodes[4].cut()
    run.returns()
    settle(run.client)
    assert run.marked() == [True] * 4 + [False]
    assert not run.sent()
    run.pass_time(1.0)
    assert run.followed
    run.client.nodes[4].error = None
    run.pass_time(MOST_PAUSE)
    assert run.marked() == [True] * 5


def test_no_mark_is_sent_after_its_end() -> None:
    """The loop was blocked until then. A node would mark a free name for a time that is over."""
    run = Run()
    run.take(4)
    run.returns(within=0.05)
    settle(run.client)
    run.free(4)
    run.clock.block(1.0)
    run.clock.advance(0.0)
    assert not run.sent()
    assert not run.followed
    assert not run.clock.armed


def test_a_run_whose_marks_have_ended_is_not_followed() -> None:
    """They end before the lease, and a node is down."""
    run = Run()
    run.client.nodes[4].cut()
    run.returns(within=1.0)
    settle(run.client)
    run.pass_time(0.5)
    assert run.followed
    run.pass_time(0.6)
    assert not run.followed
    assert not run.clock.armed
    run.client.nodes[4].error = None
    run.pass_time(LEASE)
    assert not run.marked()[4]


def test_a_mark_that_got_no_answer_is_sent_again() -> None:
    """Its connection was lost."""
    run = Run()
    run.free(4)
    run.returns()
    for node in run.client.nodes:
        node.carry_out()
    run.client.turn()
    assert len(run.sent()) == 1
    run.client.nodes[4].cut()
    run.client.nodes[4].error = None
    settle(run.client)
    assert run.marked() == [True] * 4 + [False]
    run.pass_time(PAUSE)
    assert run.marked() == [True] * 5


def test_marks_at_a_minority_are_completed() -> None:
    """Two of five nodes had the hold as the run returned, and one is down. The hold was not lost, as far as is known:
    without the marks of the other two, no caller would get an answer of a majority for as long as the marks last."""
    run = Run()
    run.free(2, 3)
    run.client.nodes[4].cut()
    run.returns()
    settle(run.client)
    assert run.marked() == [True] * 4 + [False]


def test_no_mark_is_set_without_a_majority() -> None:
    """The release found the hold gone at three nodes: the name may belong to another owner."""
    run = Run()
    run.free(2, 3, 4)
    run.returns()
    settle(run.client)
    run.pass_time(60.0)
    assert run.marked() == [True] * 2 + [False] * 3
    assert not run.followed


@pytest.mark.parametrize("loss", ["expired", "max_hold", "closed"])
def test_no_free_name_is_marked_after_a_loss(loss: str) -> None:
    """The run had the hold not to its end."""
    run = Run()
    run.free(4)
    run.hold.lose(loss)  # type: ignore[arg-type]
    run.returns()
    settle(run.client)
    assert not run.followed
    assert not run.marked()[4]


def test_no_free_name_is_marked_after_a_break() -> None:
    """A server has reported it before the release."""
    run = Run()
    run.free(4)
    run.hold.broken()
    settle(run.client)
    run.returns()
    settle(run.client)
    assert not run.marked()[4]


def test_a_report_of_a_break_ends_the_marks() -> None:
    """It comes while the release is under way. The report of the break of another hold does not."""
    run = Run()
    run.take(4)
    run.returns()
    settle(run.client)
    run.client.machine.received(0, Notice("f" * 32, 0, name=NAME, broken=True))
    assert run.followed
    run.client.machine.received(0, Notice(run.hold.op.id[:32], 0, name=NAME, broken=True))
    assert not run.followed
    assert not run.clock.armed


def test_a_break_by_this_client_ends_the_marks() -> None:
    """A vote that is under way changes nothing any more."""
    run = Run()
    run.take(3)
    run.free(4)
    run.returns()
    for node in run.client.nodes:
        node.carry_out()
    run.client.turn()
    assert len(run.sent()) == 1
    run.client.machine.holds.done_marks.forget(NAME)
    settle(run.client)
    run.free(3)
    run.pass_time(60.0)
    assert not run.marked()[3]
    assert not run.clock.armed


def test_a_later_hold_of_this_client_ends_the_marks() -> None:
    """It has the name again, so the marks were broken or lost."""
    run = Run()
    run.take(4)
    run.returns()
    settle(run.client)
    run.free(0, 1, 2, 3)
    run.acquired()
    assert run.followed
    run.clock.advance(PAUSE)
    assert not run.sent()
    assert not run.followed


def test_no_node_sends_a_mark_again_by_itself() -> None:
    """Neither after NOSCRIPT, nor on the next connection; nor does a node that is down keep it."""
    run = Run()
    run.free(4)
    run.returns()
    for node in run.client.nodes:
        node.carry_out()
    run.client.turn()
    op = run.client.nodes[4].sent[0][1].op
    assert op.done == MARKS_FREE
    assert op.revoked
    assert op.since == math.inf
    pending = PendingReleases()
    pending.add(op, 0.0, 0.0)
    assert not pending.to_send
    assert not PendingRelease(op, 0.0, 0.0).marks_free


def test_the_number_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is given up."""
    monkeypatch.setattr(done_marks, "MOST", 2)
    run = Run()
    marks = run.client.machine.holds.done_marks
    for name in "abc":
        op = Op(RELEASE, run.hold.op.kind, name, run.hold.op.id, 30.0, rest=WITHIN, done=True)
        marks.ask(op, 3.0, None, False)
    assert len(marks) == 2


def closing(client: SteppedClient) -> Result:
    """The client closes, and waits for this."""
    waiter = Result()
    client.machine.holds.done_marks.begin_close(waiter)
    return waiter


def test_a_close_waits_for_marks_that_are_under_way() -> None:
    """It does not wait for a node that is down."""
    run = Run()
    run.free(3, 4)
    run.returns()
    waiter = closing(run.client)
    assert not waiter.done()
    run.client.nodes[4].cut()
    settle(run.client)
    assert run.marked() == [True] * 4 + [False]
    assert waiter.done()
    assert not run.clock.armed


def test_a_close_without_marks_does_not_wait() -> None:
    """Nor does one of a client that only waits for a node that is down."""
    run = Run()
    run.client.nodes[4].cut()
    run.returns()
    settle(run.client)
    assert run.followed
    assert closing(run.client).done()
    assert not run.followed
    assert closing(Run().client).done()


def test_a_client_that_hangs_up_sends_no_more_marks() -> None:
    """It has waited long enough. The marks of all its runs are given up."""
    run = Run()
    run.take(4)
    run.returns()
    settle(run.client)
    assert run.clock.armed
    run.client.machine.holds.done_marks.stop()
    assert not run.followed
    assert not run.clock.armed


def test_the_first_pause_is_no_shorter_than_the_round_trip() -> None:
    """A node is far away: to ask it sooner would only make more ops."""
    run = Run()
    run.take(3, 4)
    run.returns()
    run.clock.advance(0.3)
    settle(run.client)
    run.clock.advance(0.29)
    assert not run.sent()
    run.clock.advance(0.02)
    assert len(run.sent()) == 2


def test_a_late_vote_on_the_release_does_not_begin_the_pauses_anew() -> None:
    """Another node has been asked twice by then."""
    run = Run()
    run.take(3)
    run.returns()
    for node in run.client.nodes[:4]:
        node.carry_out()
    run.clock.advance(PAUSE)
    run.client.nodes[3].carry_out()
    run.clock.advance(PAUSE / 2)
    run.client.nodes[4].carry_out()
    run.clock.advance(1.5 * PAUSE)
    run.client.nodes[3].carry_out()
    run.clock.advance(3.9 * PAUSE)
    assert not run.sent()
    run.clock.advance(0.2 * PAUSE)
    assert len(run.sent()) == 1


def test_the_pauses_of_a_node_that_stays_taken() -> None:
    """Twenty at most, which double up to two seconds. The lease is longer, and the name has one attempt there after the
    other."""
    run = Run()
    run.hold.extend(10 * LEASE)
    settle(run.client)
    run.take(4)
    run.returns()
    settle(run.client)
    asked = [run.clock.now()]
    for number in range(6000):
        run.take(4, by=f"attempt {number}")
        run.clock.advance(0.01)
        if run.sent():
            asked.append(run.clock.now())
        settle(run.client)
    expected = [min(0.02 * 2**number, 2.0) for number in range(20)]
    assert [after - before for before, after in pairwise(asked)] == pytest.approx(expected, abs=0.011)
    assert not run.followed


@pytest.mark.parametrize("node", range(5))
def test_each_node_gets_the_mark(node: int) -> None:
    """Also if its vote is not the last one."""
    run = Run()
    run.free(node)
    run.returns()
    settle(run.client)
    assert run.marked() == [True] * 5


def test_a_mark_of_less_than_a_second_is_set() -> None:
    """It ends with the others."""
    run = Run()
    run.free(4)
    run.returns(within=0.5)
    settle(run.client)
    assert run.marked() == [True] * 5


def test_a_node_that_was_silent_is_asked_after_a_pause() -> None:
    """It is up. It may be busy: to ask it at once would not help."""
    run = Run()
    run.returns()
    for node in run.client.nodes[:4]:
        node.carry_out()
    ((_, handler),) = run.client.nodes[4].sent
    run.client.nodes[4].sent.clear()
    handler.fail(4, TimeoutError("silent"), maybe=True)
    assert not run.sent()
    run.clock.advance(PAUSE)
    assert len(run.sent()) == 1
    settle(run.client)
    assert run.marked() == [True] * 5


def test_a_second_run_of_a_name_takes_the_place_of_the_first() -> None:
    """The client has broken the first one's marks, and has run again. Nothing more is sent for the first run."""
    run = Run()
    run.take(4)
    run.returns()
    settle(run.client)
    run.free(0, 1, 2, 3)
    run.tenure = run.acquired()
    run.returns()
    for _ in range(10):
        for op in run.sent():
            assert op.id == run.hold.op.id
        settle(run.client)
        run.clock.advance(PAUSE)
    assert run.followed == 1


def test_a_mark_of_an_earlier_run_is_replaced_at_once() -> None:
    """Its node lacks the mark of this run, and no owner has the name there. The marks end together."""
    run = Run()
    run.servers[4][NAME] = State(holds=(Entry(DONE, run.clock.wall() + 10.0),))
    run.returns()
    settle(run.client)
    assert not run.followed
    ends = [each[NAME].holds[0].ends or 0.0 for each in run.servers]
    assert max(ends) - min(ends) < 0.001


def test_a_vote_on_the_release_after_a_break_changes_nothing() -> None:
    """This client has broken the name meanwhile: no free name is marked any more."""
    run = Run()
    run.free(4)
    run.returns()
    for node in run.client.nodes[:4]:
        node.carry_out()
    run.client.machine.holds.done_marks.forget(NAME)
    run.client.nodes[4].carry_out()
    assert not run.sent()
    assert not run.marked()[4]


def test_four_thousand_runs_are_followed_at_once() -> None:
    """One more, and the oldest is given up."""
    run = Run(3)
    marks = run.client.machine.holds.done_marks
    for number in range(4097):
        op = Op(RELEASE, run.hold.op.kind, str(number), run.hold.op.id, 30.0, rest=WITHIN, done=True)
        marks.ask(op, 3.0, None, False)
    assert len(marks) == 4096
