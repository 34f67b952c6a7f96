"""One node, and clients that wait for several fair names at once: can they keep each other out?

The node is the shipped `decide_all`, and `decide` for those who want one name. A client tries, and the node answers in
the same step. A refused client waits for a notice. A notice may be lost, or its client may give up. Where a scene has
losses, a client that waits may also try again at any time, as it does when it renews its ticket. Time stands still, and
tickets never expire.

The flaws:
    two holders    two clients have the same name
    a free name    nobody has any name of a client that waits, and no notice is under way or was lost
    no ticket      a client that waits has no ticket, or has more than one, or has a name
    an orphan      the node has a hold or a ticket of a client that has ended
    dead end       a client that is never served, in whatever order the steps come
    livelock       the steps can come in an order that is fair to all, again and again, and serve nobody
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from asynclock.locks.multi import Multi
from asynclock.rules.decide import decide
from asynclock.rules.model import ACQUIRE, ALONE, RELEASE, WAIT, Notice, Op, Part, Queueing, Serve, State, Verb, Verdict
from asynclock.rules.mutex import FAIR
from asynclock.rules.several import JointDecision
from spec.explorer import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asynclock.rules.model import Reply


class Rule(StrEnum):
    """The rules that can be taken out."""

    PLACES = "a try takes its place at each name by its first one"
    ALL_OR_NONE = "a refused try releases the names that were granted before"
    LEAVING_SERVES = "... and serves those who wait for them"
    SPAN_0 = "a waiter for several names is woken, and never becomes the holder of one"


BREAKS = {
    Rule.PLACES: ("two names", "dead end"),
    Rule.ALL_OR_NONE: ("two names", "no ticket"),
    Rule.LEAVING_SERVES: ("beside one", "a free name"),
    Rule.SPAN_0: ("two names", "two holders"),
}
"""For each rule: the scene that fails without it, and the flaw."""


class Scene(NamedTuple):
    """Who wants which names, once."""

    wants: tuple[str, ...]  # the names of each client, one letter each
    held: tuple[int, ...] = ()  # the clients that hold their names at the beginning
    losses: int = 0  # so many notices may be lost
    gives_up: int = 0  # so many clients may give up


SCENES = {
    "two names": Scene(("xy", "xy", "xy", "xy", "x", "y"), held=(5,)),
    "beside one": Scene(("xy", "xy", "x", "x", "y"), held=(2,), gives_up=1),
    "ring": Scene(("xy", "yz", "xz", "x", "y", "z"), held=(3, 4)),
    "lost notice": Scene(("xy", "xy", "xy", "x", "y"), held=(4,), losses=1),
}

LARGE = {
    "two rings": Scene(("xy", "xy", "yz", "yz", "xz", "xz", "x"), held=(6,)),
    "three names": Scene(("xyz", "xyz", "xy", "yz", "xz", "x", "y"), held=(5, 6)),
    "ring, lost notice": Scene(("xy", "yz", "xz", "x", "y"), held=(3,), losses=1, gives_up=1),
    "two names, lost notice": Scene(("xy", "xy", "xy", "xy", "x", "y"), held=(5,), losses=1, gives_up=1),
}
"""`python -m spec` explores them, and the tests do not."""

CYCLES = True
"""Livelocks are looked for."""


class Phase(StrEnum):
    IDLE = "idle"
    WAITING = "waiting"
    HOLDING = "holding"
    ENDED = "ended"


class Client(NamedTuple):
    phase: Phase = Phase.IDLE
    order: int = 0  # the order key of its first try
    called: str = ""  # the notice that is under way: "woken" or "granted"


class World(NamedTuple):
    """The whole state."""

    names: tuple[State, ...]
    clients: tuple[Client, ...]
    losses: int
    gives_up: int
    lost: bool = False  # a notice was lost


class Several:
    """The model of a scene."""

    def __init__(self, scene: Scene, without: Rule | None = None) -> None:
        self.scene = scene
        self._without = without
        self._names = sorted({name for wants in scene.wants for name in wants})

    def start(self) -> World:
        clients = tuple(Client() for _ in self.scene.wants)
        world = World((State(),) * len(self._names), clients, self.scene.losses, self.scene.gives_up)
        for index in self.scene.held:
            world = self._tries(world, index)
        return world

    def good(self, world: World) -> bool:
        return all(client.phase is Phase.ENDED for client in world.clients)

    def wrong(self, world: World) -> str | None:
        inside = [name for wants in self._of(world, Phase.HOLDING) for name in wants]
        if len(inside) > len(set(inside)):
            return "two holders"
        for index, client in enumerate(world.clients):
            own = self._ids_at(world, index)
            if client.phase in (Phase.IDLE, Phase.ENDED) and any(own):
                return "an orphan"
            granted = client.called == "granted" or world.lost
            if client.phase is Phase.WAITING and own != (0, 1) and not (granted and own[1] == 0):
                return "no ticket"
        taken = {name for name, state in zip(self._names, world.names, strict=True) if state.holds}
        quiet = not world.lost and not any(client.called for client in world.clients)
        if quiet and any(not taken & set(wants) for wants in self._of(world, Phase.WAITING)):
            return "a free name"
        return None

    def _of(self, world: World, phase: Phase) -> list[str]:
        """What the clients in that phase want."""
        return [wants for wants, each in zip(self.scene.wants, world.clients, strict=True) if each.phase is phase]

    def _ids_at(self, world: World, index: int) -> tuple[int, int]:
        """The number of holds and of tickets of a client."""
        own = _id(index)
        holds = sum(each.id == own for state in world.names for each in state.holds)
        return holds, sum(each.id == own for state in world.names for each in state.queue)

    def steps(self, world: World) -> Iterator[Step[World]]:
        for index, client in enumerate(world.clients):
            who = f"{'ABCDEFGH'[index]} ({self.scene.wants[index]})"
            match client.phase:
                case Phase.IDLE if self._may_begin(world, index):
                    yield Step(who, "tries", self._tries(world, index))
                case Phase.WAITING:
                    yield from self._waits(world, index, who)
                case Phase.HOLDING:
                    yield Step(who, "releases", self._leaves(world, index))

    def _may_begin(self, world: World, index: int) -> bool:
        """Of clients that want the same, the first comes first: who it is makes no difference."""
        before = zip(self.scene.wants[:index], world.clients, strict=False)
        return not any(wants == self.scene.wants[index] and each.phase is Phase.IDLE for wants, each in before)

    def _waits(self, world: World, index: int, who: str) -> Iterator[Step[World]]:
        client = world.clients[index]
        if client.called == "granted":
            yield Step(who, "is granted", _with(world, index, Client(Phase.HOLDING)))
        elif client.called:
            yield Step(who, "is woken, and tries", self._tries(world, index))
        elif self.scene.losses:
            yield Step(who, "tries again", self._tries(world, index))
        if client.called and world.losses:
            lost = world._replace(losses=world.losses - 1, lost=True)
            yield Step(who, "does not receive the notice", _with(lost, index, client._replace(called="")), whim=True)
        if world.gives_up:
            left = world._replace(gives_up=world.gives_up - 1)
            yield Step(who, "gives up", self._leaves(left, index), whim=True)

    def _tries(self, world: World, index: int) -> World:
        order = world.clients[index].order or 1 + max(each.order for each in world.clients)
        world, verdict = self._ask(world, index, ACQUIRE, order)
        if verdict is Verdict.YES:
            return _with(world, index, Client(Phase.HOLDING))
        return _with(world, index, world.clients[index]._replace(phase=Phase.WAITING, order=order))

    def _leaves(self, world: World, index: int) -> World:
        world, _ = self._ask(world, index, RELEASE, 0)
        return _with(world, index, Client(Phase.ENDED))

    def _ask(self, world: World, index: int, verb: Verb, order: int) -> tuple[World, Verdict]:
        """The node carries out a request; its notices are on their way. What came before for this client is old."""
        wants = self.scene.wants[index]
        places = [self._names.index(name) for name in wants]
        before = tuple(world.names[place] for place in places)
        verdict, after, notices = _answer(wants, before, verb, _id(index), order, self._without)
        names = list(world.names)
        for place, state in zip(places, after, strict=True):
            names[place] = state
        world = _with(world, index, world.clients[index]._replace(called=""))
        for notice in notices:
            other = int(notice.tag, 16)
            if notice.number and world.clients[other].phase in (Phase.WAITING, Phase.IDLE):
                called = "granted" if notice.fence else "woken"
                world = _with(world, other, world.clients[other]._replace(called=called))
        return world._replace(names=tuple(names)), verdict


# -- the node ----------------------------------------------------------------------------------------------------------


class BehindAll(JointDecision):
    """A try stands behind all tickets of a name where it has none, as before 2026-11-30."""

    def acquire(self) -> tuple[Reply, int]:
        op, queueing = self._op, self._op.queueing
        for again in (True, False):
            refused, reply = self._tries()
            if reply is None:
                return self._yes(self._level())
            for other in range(len(self.parts)):
                if other != refused:
                    self._leave(other)
            if reply.verdict is Verdict.NO and queueing.number:
                reply = self._ask(refused, WAIT, ticket=replace(queueing, span=0))
                if again and reply.verdict is Verdict.NO and reply.holder is None:
                    continue
            return reply, refused
        raise AssertionError(op)

    def _tries(self) -> tuple[int, Reply | None]:
        queueing = Queueing(self._op.queueing.serve, waiter=self._op.queueing.waiter)
        for index in range(len(self.parts)):
            reply = self._ask(index, ACQUIRE, fence=self._op.fence, ticket=queueing)
            if reply.verdict is not Verdict.YES:
                return index, reply
        return -1, None


class Keeping(JointDecision):
    """A refused try keeps the names that were granted before."""

    def _leave(self, index: int) -> None: ...


class Quiet(JointDecision):
    """A refused try serves nobody at the names that it leaves."""

    def _leave(self, index: int) -> None:
        self._ask(index, RELEASE, id=self._op.id)


class Granted(JointDecision):
    """The ticket of a waiter for several names becomes the holder of one."""

    def _ask(self, index: int, verb: Verb, *, id: str = "", fence: int = 0, ticket: Queueing = ALONE) -> Reply:
        return super()._ask(index, verb, id=id, fence=fence, ticket=replace(ticket, span=1))


DECISIONS = {
    None: JointDecision,
    Rule.PLACES: BehindAll,
    Rule.ALL_OR_NONE: Keeping,
    Rule.LEAVING_SERVES: Quiet,
    Rule.SPAN_0: Granted,
}


@cache
def _answer(
    wants: str, before: tuple[State, ...], verb: Verb, own: str, order: int, without: Rule | None
) -> tuple[Verdict, tuple[State, ...], tuple[Notice, ...]]:
    """The verdict of the node, its next states, and its notices. Fences are left out: they would make all states
    differ."""
    parts = [Part(name, FAIR) for name in wants]
    kind = FAIR if len(parts) == 1 else Multi(parts)
    number = 2 if verb is ACQUIRE else 0  # of a first ticket the clock would limit the order key
    queueing = Queueing(Serve.GRANT, kind.fair, number=number, fresh=inf, order=order)
    op = Op(verb, kind, ", ".join(wants), own, inf, 0, inf, queueing=queueing)
    if len(parts) == 1:
        reply = decide(FAIR, before[0], op, 0.0)
        states, notices = [reply.state], list(reply.notices)
    else:
        decision = DECISIONS[without](parts, before, op, 0.0, lambda tag: True)
        reply, _ = decision.acquire() if verb is ACQUIRE else decision.each()
        states, notices = decision.states, decision.notices
    return reply.verdict, tuple(replace(state, fence=0, fence_ends=0.0) for state in states), tuple(notices)


def _id(index: int) -> str:
    return f"{index:012x}{0:020x}|"


def _with(world: World, index: int, client: Client) -> World:
    return world._replace(clients=(*world.clients[:index], client, *world.clients[index + 1 :]))


def scene(name: str, without: Rule | None = None) -> Several:
    """The model of a scene."""
    return Several((SCENES | LARGE)[name], without)
