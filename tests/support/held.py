"""A client that holds a name at nodes that a test steps by hand (`stepped_quorum.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.hold import Hold, Tenure
from asynclock.rules.model import ID_LENGTH, Entry, Notice, Op, State, Ticket, Verb
from asynclock.stores.port import ReplyHandler
from tests.support.probes import in_wheel
from tests.support.stepped_acquires import LEASE, acquiring, tenure_of, terms_of
from tests.support.stepped_quorum import NAME, SteppedNode, clients_over, settle

OTHER = State(holds=(Entry("another's", None),))
"""Another attempt has the name."""
WAITERS = State(queue=(Ticket(1, f"{'f' * ID_LENGTH}|1|1|host|", 1, math.inf, math.inf, 1),), queue_ends=math.inf)
"""The name is free, and another client waits for it."""


class Listening:
    """In the place of the listeners of a client: keeps the events."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.active = (self,)

    def tell(self, event: object) -> None:
        self.events.append(event)


class Held:
    """A client that holds the name, and its servers. At the acquire, another attempt had the name at the nodes `taken`,
    another client waited at the nodes `waits`, the nodes `down` could not be reached, and the nodes `late` have not
    answered yet. The others have answered after `rtt` seconds."""

    def __init__(
        self,
        nodes: int = 3,
        taken: Iterable[int] = (),
        waits: Iterable[int] = (),
        down: Iterable[int] = (),
        late: Iterable[int] = (),
        rtt: float = 0.0,
        **options: Any,
    ) -> None:
        self.client, self.other, self.servers = clients_over(nodes)
        self.nodes, self.clock, self.losses = self.client.nodes, self.client.clock, self.client.losses
        self.client.observers = self.listening = Listening()
        self.take(*taken)
        for each in waits:
            self.servers[each][NAME] = WAITERS
        for each in down:
            self.nodes[each].cut()
        acquisition = acquiring(self.client, **options)
        self.clock.advance(rtt)
        self.answer(*(each for each in range(nodes) if each not in {*late}))
        self.tenure = tenure_of(acquisition)

    @property
    def hold(self) -> Hold:
        return self.tenure.hold

    @property
    def now(self) -> float:
        return self.clock.now()

    @property
    def watched(self) -> list[Any]:
        """What the watchdog has to check."""
        return in_wheel(self.client.machine.watchdog)

    def enter_again(self, **options: Any) -> Tenure:
        """The owner enters once more."""
        return self.hold.enter_again(self.tenure, terms_of(**options))

    def lose_key(self, *nodes: int) -> None:
        """These servers lose all that they have of the name."""
        for each in nodes:
            self.servers[each].pop(NAME, None)

    def take(self, *nodes: int) -> None:
        """Another attempt has the name at these servers."""
        for each in nodes:
            self.servers[each][NAME] = OTHER

    def next_owner(self, **options: Any) -> Acquisition:
        """The owner releases, and the next task of its process has a hold that it may pass on. Returns the acquire of
        the task that waits behind that one."""
        first, second = acquiring(self.client, **options), acquiring(self.client, **options)
        self.clock.block(1.0)
        self.hold.end(self.tenure)
        settle(self.client)
        self.tenure = tenure_of(first)
        return second

    def has_it(self) -> list[bool]:
        """Of each server, whether it has the hold."""
        return [self.hold.op.id in [hold.id for hold in state_of(each).holds] for each in self.servers]

    def answer(self, *nodes: int) -> None:
        """These nodes carry out what was sent to them, and what is sent to them meanwhile."""
        for each in nodes:
            while self.nodes[each].sent:
                self.nodes[each].carry_out()
        self.client.turn()

    def fail(self, node: int, *, maybe: bool = False) -> None:
        """The first op at that node fails. `maybe`: the node may carry it out."""
        _, handler = self.nodes[node].sent.pop(0)
        handler.fail(node, OSError(f"node {node} is away"), maybe=maybe)
        self.client.turn()

    def notify(self, node: int = 0, id: str = "", **what: Any) -> None:
        """That node sends the holder a notice; with another `id`, the notice is for another hold of the name."""
        self.client.machine.received(node, Notice(id or self.hold.op.id[:ID_LENGTH], 0, name=NAME, **what))

    def extend(self, length: float = LEASE) -> None:
        """The program extends it, and each node answers."""
        self.hold.extend(length)
        settle(self.client)

    def wait(self, seconds: float, step: float = 0.1) -> None:
        """Time passes, and each op is carried out."""
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            settle(self.client)

    def under_way(self, verb: Verb) -> list[list[Op]]:
        """Of each node, the ops of that verb that it has not carried out yet."""
        return [[op for op, _ in node.sent if op.verb is verb] for node in self.nodes]

    def asked(self, verb: Verb) -> list[bool]:
        """Of each node, whether such an op is under way to it."""
        return [bool(ops) for ops in self.under_way(verb)]


def state_of(server: dict[str, State]) -> State:
    return server.get(NAME, State())


def sent_to(node: SteppedNode) -> list[tuple[Op, ReplyHandler]]:
    """What is sent to that node from now on: the ops themselves, not copies of them."""
    found, send = list[tuple[Op, ReplyHandler]](), node.send

    def seen(op: Op, handler: ReplyHandler) -> None:
        found.append((op, handler))
        send(op, handler)

    node.send = seen  # type: ignore[method-assign]
    return found


def writes_of(held: Held) -> list[tuple[int, list[Verb]]]:
    """Each write before the end of a turn, from now on: the node, and what is sent to it."""
    found, nodes = list[tuple[int, list[Verb]]](), held.nodes

    def write(index: int) -> None:
        found.append((index, [op.verb for op, _ in nodes[index].sent]))

    held.client.quorum._flushes = [partial(write, node.index) for node in nodes]
    return found
