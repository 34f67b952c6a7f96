"""Acquires of stepped clients (`stepped_quorum.py`), with the terms that a test gives."""

from __future__ import annotations

from typing import Any

from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.causes import NoLease
from asynclock.rules.model import ID_LENGTH, Notice, Op, Verb
from tests.support.stepped_acquires import acquiring, tenure_of
from tests.support.stepped_quorum import NAME, SteppedClient, SteppedNode, clients_over, settle


def refusal_of(acquisition: Acquisition) -> NoLease:
    """How it ended without a lease."""
    refusal = acquisition.take()
    assert isinstance(refusal, NoLease)
    return refusal


def outcome_of(acquisition: Acquisition) -> object:
    """Its error; "ended": it has none; None: it is under way."""
    outcome: object = acquisition.future.exception()
    return outcome


def ops(client: SteppedClient, index: int = 0) -> list[Op]:
    """What waits at that node."""
    return [op for op, _ in client.nodes[index].sent]


def sent(client: SteppedClient, index: int = 0) -> list[Verb]:
    """The verbs of what waits at that node."""
    return [op.verb for op in ops(client, index)]


def reply(client: SteppedClient, rtt: float = 0.0) -> None:
    """What was sent is carried out, and the replies come after so many seconds."""
    client.clock.advance(rtt)
    for node, number in [(node, len(node.sent)) for node in client.nodes]:
        for _ in range(number):
            node.carry_out()
    client.turn()


def fail(client: SteppedClient, *, maybe: bool = False) -> None:
    """What was sent fails at all nodes, which stay connected; `maybe`: it may have been carried out."""
    for node in client.nodes:
        for _ in range(len(node.sent)):
            _, handler = node.sent.pop(0)
            handler.fail(node.index, ConnectionError("it hung up"), maybe=maybe)
    client.turn()


def take_down(client: SteppedClient) -> None:
    """From now on no node can be asked."""
    for node in client.nodes:
        node.error = ConnectionError("it is down")


def pass_time(client: SteppedClient, seconds: float) -> None:
    """Let time pass, and handle what is due then."""
    client.clock.advance(seconds)
    client.turn()


class DeferringNode(SteppedNode):
    """What is sent to it waits in a queue of its own at first."""

    def send(self, op: Op, handler: Any) -> None:
        super().send(op, handler)
        handler.defer(lambda: TimeoutError("it waits in the queue of its node"))


def defer_all(client: SteppedClient) -> None:
    """What is sent to its nodes from now on waits in their queues at first."""
    for node in client.nodes:
        node.__class__ = DeferringNode


def begin(client: SteppedClient) -> None:
    """What waits in the queue of its only node leaves it."""
    for _, handler in client.nodes[0].sent:
        ballot: Any = handler
        ballot.begin(client.clock.now())


class Waits:
    """A client that waits, with a ticket, for a name that another client holds. Each reply took `rtt` seconds."""

    def __init__(self, nodes: int, timeout: float | None = None, rtt: float = 0.0, **options: Any) -> None:
        self.holder, self.client, self.servers = clients_over(nodes)
        holding = self.holder.acquire()
        settle(self.holder)
        self.held = tenure_of(holding)
        self.acquisition = acquiring(self.client, timeout, **options)
        while sent(self.client):
            reply(self.client, rtt)
        self.clock = self.client.clock

    @property
    def tickets(self) -> list[int]:
        """How many tickets each node keeps."""
        return [len(server[NAME].queue) for server in self.servers]

    def notify(self, *nodes: int, number: int = 1, **facts: Any) -> None:
        """These nodes send a notice for the ticket."""
        ticket = self.servers[0][NAME].queue[0].id[:ID_LENGTH]
        for index in nodes:
            self.client.machine.received(index, Notice(ticket, number, name=NAME, **facts))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and handle what is due then."""
        pass_time(self.client, seconds)
