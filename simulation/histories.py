"""What the programs of a run saw of each name, as a history for `spec/linearizability.py`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock.rules.model import ID_LENGTH
from spec.linearizability import Call, Undecided, check
from spec.sequential import Mutex, ReadWrite, Semaphore, falling

if TYPE_CHECKING:
    from asynclock.protocol.hold import Tenure
    from asynclock.rules.model import Part
    from simulation.clients import Client
    from simulation.plan import LockPlan, Plan
    from simulation.world import World

MOST = 200_000
"""Steps of the search in one history."""


class Stay(NamedTuple):
    """A tenure of a program, from its entry on."""

    number: int
    client: Client
    who: str
    lock: LockPlan
    key: str
    entered: float


class Histories:
    """Records acquires and releases, as long as what docs/safety.md assumes has always held for the name. An acquire
    that gets no tenure is left out. A release takes effect at some time after the program last had the tenure for its
    own: that of a lost lease at some time after its end, and that of one that an operator broke at some time after the
    entry."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._calls: dict[str, list[Call]] = {}
        self._specs: dict[str, Any] = {}
        self._inside: dict[Stay, None] = {}

    def entered(self, client: Client, owner: str, lock: LockPlan, tenure: Tenure, began: float) -> Stay:
        """A program that asked at `began` has got a tenure."""
        now, number = self._world.schedule.now, self._world.count("stays")
        who = f"{client.name} {owner}" if lock.reentrant else f"{client.name} {number}"
        stay = Stay(number, client, who, lock, tenure.hold.op.id[:ID_LENGTH], now)
        broken = self._world.judge.was_broken(stay.key)  # its client may not know yet, and enter it again
        assumed = all(self._world.judge.have_been_assumed(part.name) for part in lock.parts)
        if assumed and lock.settings.fencing and not broken:
            self._inside[stay] = None
            for part in lock.parts:
                if part.name not in self._specs:
                    self._specs[part.name] = _spec_of(part, self._world.plan)
                what = {"r": "read", "w": "write"}.get(part.kind.letter, "acquire")
                self._calls.setdefault(part.name, []).append(Call(who, what, tenure.fence, began, now))
        return stay

    def left(self, stay: Stay, tenure: Tenure | None) -> None:
        """The program has ended its tenure. None: its process has ended."""
        if self._inside.pop(stay, stay) is None:
            began = stay.entered
            if tenure is not None and not self._world.judge.was_broken(stay.key):
                until = math.inf if tenure.held else stay.client.clock.true_time(tenure.ends)
                began = max(began, min(self._world.schedule.now, until))
            for part in stay.lock.parts:
                self._calls[part.name].append(Call(stay.who, "release", 0, began, math.inf))

    def gone(self, client: Client) -> None:
        """Its process has ended, or its client closes: the tenures may have been lost before."""
        for stay in [each for each in self._inside if each.client is client]:
            self.left(stay, None)

    def check(self) -> None:
        """At the end of the run."""
        for stay in list(self._inside):
            self.left(stay, None)
        for name, calls in self._calls.items():
            self._world.count("histories")
            try:
                violation = check(self._specs[name], calls, MOST)
            except Undecided:
                self._world.count("undecided")
                continue
            if violation is not None:
                self._world.judge.fail("not linearizable", f"{name}: {violation}")
            elif not isinstance(self._specs[name], Mutex) and (pair := falling(calls)) is not None:
                self._world.judge.fail("a token did not rise", f"{name}: {pair[0]}; {pair[1]}")


def _spec_of(part: Part, plan: Plan) -> Any:
    kind = part.kind
    if kind.slots:  # locks of one name may have different numbers: never more than the greatest are held
        parts = (each for lock in plan.locks for each in lock.parts)
        return Semaphore(max([kind.slots, *(each.kind.slots for each in parts if each.name == part.name)]))
    return ReadWrite() if kind.letter in ("r", "w") else Mutex(reentrant=True)  # else each stay is another's
