"""Machines of several clients over nodes that a test steps by hand, op by op, in a time that it moves."""

from __future__ import annotations

import itertools
import math
from typing import Any

from asynclock._options import ClientSettings, LockSettings
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.handover import Adoption, Handle
from asynclock.protocol.hold import Tenure
from asynclock.protocol.machine import Machine
from asynclock.protocol.terms import Terms
from asynclock.protocol.watchdog import LoopLag
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import RELEASE, Op, State
from asynclock.rules.mutex import MUTEX
from asynclock.stores.deciding import copy_of, decided, keys_of
from asynclock.stores.port import Reconnecting, ReplyHandler
from spec.machine import Result, Silent, Task
from tests.support.fake_clock import FakeClock

NAME = "x"


class SteppedNode:
    """A connection of one client to one server. Ops wait until the test carries them out."""

    def __init__(self, index: int, client: SteppedClient, state: dict[str, State]) -> None:
        self.index, self.label, self.state = index, f"node {index}", state
        self.listens, self.error = True, None  # type: tuple[bool, Exception | None]
        self.sent: list[tuple[Op, ReplyHandler]] = []
        self._pending: list[tuple[Op, ReplyHandler]] = []  # releases for the next connection
        self._client = client

    def send(self, op: Op, handler: ReplyHandler) -> None:
        if self.error is not None:
            if op.verb is RELEASE:
                self._pending.append((copy_of(op), handler))
            handler.fail(self.index, self.error, maybe=False)
        else:
            self.sent.append((copy_of(op), handler))

    def carry_out(self) -> None:
        """The first op that waits, and its reply and notices."""
        op, handler = self.sent.pop(0)
        keys, clock = keys_of("", op), self._client.clock
        change, vote = decided(op, [self.state.get(key, State()) for key in keys], clock.wall(), lambda tag: True)
        self.state.update(zip(keys, change.states, strict=True))
        handler.answer(self.index, vote)
        for notice in change.notices:
            for each in self._client.clients:
                each.machine.received(self.index, notice)

    def cut(self) -> None:
        """The connection is lost with all that waits, and will be back."""
        self.error = Reconnecting("gone")
        lost, self.sent = self.sent, []
        for _, handler in lost:
            handler.fail(self.index, self.error, maybe=True)

    def back(self) -> None:
        self.error = None
        self.sent, self._pending = self._pending, []
        self._client.machine.connected(True)


class SteppedClient:
    """The Core of one machine."""

    closed = forked = False
    observers: Any = Silent()

    def __init__(self, letter: str, servers: list[dict[str, State]], clock: FakeClock, clients: list[SteppedClient]):
        self.settings, self.clock, self.clients = ClientSettings(), clock, clients
        self.losses: list[str] = []
        self._letter, self._ids, self._calls = letter, itertools.count(1), list[tuple[Any, ...]]()
        self.quorum = Quorum([SteppedNode(i, self, each) for i, each in enumerate(servers)], clock, self.later)  # type: ignore[misc]
        self.nodes: list[SteppedNode] = list(self.quorum.nodes)  # type: ignore[arg-type]
        self.machine = Machine(self, LoopLag(), len(servers))  # type: ignore[arg-type]
        clients.append(self)

    def acquire(self) -> Acquisition:
        acquisition = Acquisition(self.machine, self._terms(), math.inf)
        acquisition.start()
        return acquisition

    def adopt(self, tenure: Tenure) -> Adoption:
        """Take over what another client has detached."""
        adoption = Adoption(self.machine, self._terms(), Handle(NAME, tenure.hold.op.id, tenure.fence))
        adoption.start()
        return adoption

    def _terms(self) -> Terms:
        return Terms(NAME, MUTEX, LockSettings(lease=30.0), Task(), None)  # type: ignore[arg-type]

    def new_id(self, seed: int, metadata: str, mode: str = "") -> str:
        return f"{self._letter * 12}{next(self._ids):020x}|{mode}{seed}|1|host|{metadata}"

    def within(self, settings: LockSettings) -> float:
        return settings.lease / 10

    def random(self) -> float:
        return 0.5

    def spent(self) -> float:
        return 0.0

    def result(self) -> Result:
        return Result()

    def later(self, call: Any, *args: object) -> None:
        self._calls.append((call, *args))

    def turn(self) -> None:
        """Handle what is left for later turns of the loop."""
        while self._calls:
            call, *args = self._calls.pop(0)
            call(*args)

    def fault(self, where: object, error: Exception) -> None:
        raise error

    def tell_lost(self, terms: Terms, reason: str, held_for: float, why: object) -> None:
        self.losses.append(reason)

    def judge_again(self) -> None: ...
    def renews(self, tenures: object) -> None: ...
    def dropped(self, tenure: object) -> None: ...


def clients_over(nodes: int) -> tuple[SteppedClient, SteppedClient, list[dict[str, State]]]:
    """Two clients, and what the servers have stored."""
    servers, clients, clock = [dict[str, State]() for _ in range(nodes)], list[SteppedClient](), FakeClock()
    return SteppedClient("a", servers, clock, clients), SteppedClient("b", servers, clock, clients), servers


def settle(*clients: SteppedClient) -> None:
    """All ops are carried out, until nothing is left to do now."""
    for _ in range(50):
        for each in clients:
            for node in each.nodes:
                while node.sent:
                    node.carry_out()
            each.turn()
