"""How a quorum sends ops to its nodes, undoes attempts, and counts which nodes are up: over nodes made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock.quorum.ballot import Ballot, Outcome
from asynclock.quorum.quarantine import Quarantine
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import Op, Queueing, Serve, State, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.runtime.opening import open_nodes
from asynclock.stores.port import Facts, Grant, Refused, ReplyHandler
from asynclock.stores.redis.encoding import encode_native
from tests.support.fake_clock import FakeClock
from tests.support.stepped_quorum import clients_over

YES: Grant = 42, False
NO = Refused(1.5, "other")
BROKEN = ConnectionError("broken")


class Plain:
    """A node that only notes what it is told, in one list for all nodes."""

    def __init__(self, number: int, told: list[Any], error: Exception | None = None, listens: bool = True) -> None:
        self.number, self.label, self.told = number, f"node {number}", told
        self.error, self.listens = error, listens

    async def open(self) -> None:
        self.told.append(("open", self.number))

    def send(self, op: Op, handler: ReplyHandler) -> None:
        self.told.append((op.verb.value, self.number))
        self.op = op
        if self.error is not None:
            handler.fail(self.number, self.error, maybe=False)


class Buffering(Plain):
    """It sends its ops at the end of the turn."""

    def flush(self) -> None:
        self.told.append(("flush", self.number))


class Session(Plain):
    """Its tickets may outlive a connection."""

    keeps_tickets = True


class Restarting(Plain):
    """Its server may forget holds."""

    facts: Facts | None = None

    def end_quarantine(self) -> None:
        self.told.append(("end quarantine", self.number))

    async def read_mark(self) -> None:
        self.told.append(("read mark", self.number))


class Over(Quorum):
    """A quorum of such nodes. The test calls `turn` for what is left for the next turn."""

    def __init__(self, *kinds: type[Plain], quarantine: Quarantine | None = None) -> None:
        self.told: list[Any] = []
        self._calls: list[Any] = []
        nodes: Any = [kind(number, self.told) for number, kind in enumerate(kinds)]
        super().__init__(nodes, FakeClock(), lambda *call: self._calls.append(call), quarantine)
        self.stubs: list[Any] = nodes

    def turn(self) -> None:
        while self._calls:
            call, *args = self._calls.pop(0)
            call(*args)


def attempt(memory: float = 0.0) -> Op:
    return Op(Verb.ACQUIRE, MUTEX, "x", "id", 30.0, 7, memory)


# -- the nodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", range(1, 7))
def test_a_majority_of_the_nodes_is_up_and_listens(nodes: int) -> None:
    """Of all that are configured; half of them is none."""
    quorum = Over(*[Plain] * nodes)
    for node in quorum.stubs:
        node.error, node.listens = BROKEN, False
    for count, node in enumerate(quorum.stubs, 1):
        node.error, node.listens = None, True
        assert quorum.is_up is (2 * count > nodes)
        assert quorum.listens is (2 * count > nodes)


def test_only_a_node_that_is_alone_grants_to_the_next_waiter() -> None:
    """Two nodes would grant to different waiters: each wakes its own."""
    assert [Over(*[Plain] * nodes).serve for nodes in (1, 2, 3)] == [Serve.GRANT, Serve.WAKE, Serve.WAKE]


def test_tickets_outlive_an_outage_only_at_a_single_node_that_keeps_them() -> None:
    """Over several nodes a ticket has to be at a majority."""
    assert not Over(Plain).keeps_tickets
    assert [Over(*[Session] * nodes).keeps_tickets for nodes in (1, 2, 3)] == [True, False, False]
    quorum = Over(Session)
    quorum.stubs[0].keeps_tickets = False
    assert not Quorum(quorum.nodes, FakeClock(), print).keeps_tickets


# -- restarted servers -------------------------------------------------------------------------------------------------

NEW = Facts("run", "", 999.0)


def over_servers(*facts: Facts | None, quarantine: bool = True) -> Over:
    quorum = Over(*[Restarting] * len(facts), quarantine=Quarantine(61.0, FakeClock()) if quarantine else None)
    for node, each in zip(quorum.stubs, facts, strict=True):
        node.facts = each
    return quorum


def test_a_server_that_was_met_and_is_out_of_reach_may_have_a_mark() -> None:
    """One that this client has never met has none: it would be another deployment."""
    quorum = over_servers(NEW, NEW, None)
    assert quorum.reaches_all_known()
    quorum.stubs[2].error = BROKEN
    assert quorum.reaches_all_known()
    quorum.stubs[0].error = BROKEN
    assert not quorum.reaches_all_known()
    assert Over(Plain, Plain).reaches_all_known()


async def test_the_quarantine_of_all_servers_of_a_new_deployment_ends() -> None:
    """Each of them has just started, and has no mark."""
    quorum = over_servers(NEW, NEW, NEW)
    assert quorum.quarantines
    await open_nodes(quorum)
    assert quorum.told[3:] == [("end quarantine", number) for number in range(3)]


@pytest.mark.parametrize("nodes", [1, 3])
async def test_without_a_quarantine_no_marks_are_set_or_read(nodes: int) -> None:
    """As for a single server, and for nodes that forget nothing. Nothing is waited for, either."""
    for quarantine in (False, True):
        quorum = over_servers(*[NEW] * nodes, quarantine=quarantine)
        await open_nodes(quorum)
        assert quorum.quarantines is quarantine
        assert {what for what, _ in quorum.told} == {"open"} | ({"end quarantine"} if quarantine else set())


# -- sending -----------------------------------------------------------------------------------------------------------


def test_ops_leave_at_the_end_of_the_turn() -> None:
    """So that all ops of one turn leave together. Nobody writes them now but a flush."""
    quorum = Over(Buffering, Plain, Buffering)
    quorum.ask(attempt(), 1.0)
    quorum.ask(attempt(), 1.0, only=(2, 0))
    assert [number for _, number in quorum.told] == [0, 1, 2, 2, 0]
    assert {what for what, _ in quorum.told} == {"acquire"}
    quorum.told.clear()
    quorum.flush()
    assert quorum.told == [("flush", 0), ("flush", 2)]


@pytest.mark.parametrize(("only", "asked"), [(None, (0, 1, 2)), ((2, 0), (2, 0))])
def test_an_op_that_leaves_at_once_does_so_node_by_node(only: tuple[int, ...] | None, asked: tuple[int, ...]) -> None:
    """A contended name may be free for a moment only. A node without a buffer has sent it anyway."""
    quorum = Over(Buffering, Plain, Buffering)
    quorum.ask(attempt(), 1.0, only=only, at_once=True)
    buffered = {0: True, 1: False, 2: True}
    expected = [[("acquire", each), ("flush", each)][: 1 + buffered[each]] for each in asked]
    assert quorum.told == [each for pair in expected for each in pair]


def test_nodes_that_are_not_asked_cast_no_vote() -> None:
    """The ballot does not wait for them. It reports those that are out of reach."""
    quorum = Over(*[Plain] * 5)
    quorum.stubs[4].error = BROKEN
    made = quorum.ask(attempt(), 1.0, only=(0, 2, 3))
    assert (made.failed, made.errors()) == (2, [(4, BROKEN)])
    for index in (0, 2):
        made.answer(index, YES)
    assert made.outcome is None
    made.answer(3, YES)
    assert made.outcome is Outcome.WON
    assert made.traces() == [0, 2, 3]


def test_no_event_comes_inside_the_call_that_asks() -> None:
    """Not even where no node can be asked: the ballot settles in the next turn."""
    quorum, settled = Over(Plain, Plain, Plain), list[Outcome | None]()
    for node in quorum.stubs:
        node.error = BROKEN
    made = quorum.ask(attempt(), 1.0, on_settled=lambda ballot: settled.append(ballot.outcome))
    assert (made.outcome, settled) == (None, [])
    quorum.turn()
    assert settled == [Outcome.UNREACHABLE]


def test_each_node_has_the_same_time_to_answer() -> None:
    """So many seconds from the call."""
    quorum = Over(Plain)
    made = quorum.ask(attempt(), 1.5, gives_up=quorum.clock.now() + 4.0)
    assert (made.sent, made.deadline, made.gives_up) == (1_000.0, 1_001.5, 1_004.0)


# -- undoing -----------------------------------------------------------------------------------------------------------


def ballot_of(quorum: Over, granted: int) -> Ballot:
    """An attempt that so many nodes have granted, and the others have refused."""
    made = Ballot(attempt(), len(quorum.nodes), 1_000.0, 1_001.0)
    for index in range(len(quorum.nodes)):
        made.answer(index, YES if index < granted else NO)
    return made


def test_an_attempt_is_undone_where_it_may_be() -> None:
    """Granted, silent and ambiguous; not where it was refused or has surely failed. No node sends the attempt again."""
    quorum, op = Over(*[Plain] * 5), attempt()
    made = Ballot(op, 5, 1_000.0, 1_001.0)
    made.answer(0, YES)
    made.fail(2, BROKEN, maybe=True)
    made.answer(3, NO)
    made.fail(4, BROKEN, maybe=False)
    quorum.undo(made, 1.0)
    assert quorum.told == [("release", 0), ("release", 1), ("release", 2)]
    assert quorum.stubs[0].op.id == op.id
    assert op.revoked


def test_nothing_is_sent_where_nothing_is_left() -> None:
    """All nodes have refused."""
    quorum = Over(*[Plain] * 3)
    quorum.undo(ballot_of(quorum, granted=0), 1.0)
    assert quorum.told == []


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("with_ticket", [False, True])
@pytest.mark.parametrize("nodes", range(1, 7))
def test_an_undo_serves_the_queue_after_a_majority(nodes: int, with_ticket: bool, closes: bool) -> None:
    """No waiter waits for a minority. Nor is one served by a client that closes: the withdrawal of its ticket does
    that."""
    for granted in range(1, nodes + 1):
        quorum = Over(*[Plain] * nodes)
        ticket = Queueing(waiter="ticket", number=1) if with_ticket else None
        quorum.undo(ballot_of(quorum, granted), 1.0, ticket, Serve.NOBODY if closes else None)
        queueing = quorum.stubs[0].op.queueing
        assert queueing.serve is (quorum.serve if 2 * granted > nodes and not closes else Serve.NOBODY)
        assert queueing.waiter == ("ticket" if with_ticket else "")


@pytest.mark.parametrize("closes", [False, True])
def test_the_undo_of_a_client_that_closes_is_carried_out_as_a_script(closes: bool) -> None:
    """A server's own command does not match a hold that is marked, and the withdrawal of the ticket would overtake the
    script that follows. While it does not close, the command costs a tenth."""
    quorum = Over(*[Plain] * 3)
    quorum.undo(ballot_of(quorum, granted=2), 1.0, None, Serve.NOBODY if closes else None)
    assert (encode_native(quorum.stubs[0].op, "", ("DELEX", "IFEQ")) is None) is closes


def test_an_undo_leaves_nothing_at_a_node_that_the_attempt_did_not_reach() -> None:
    """Neither a hold nor a fence that the server would have to keep."""
    client, _, servers = clients_over(3)
    made = client.quorum.ask(attempt(memory=60.0), 1.0)
    for node in client.nodes:
        node.sent.clear()  # lost on the way
    client.quorum.undo(made, 1.0)
    for node in client.nodes:
        node.carry_out()
    assert [server.get("x", State()) for server in servers] == [State()] * 3
