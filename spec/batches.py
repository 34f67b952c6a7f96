"""One node, a queue of many waiters, and few that one op serves: does each live waiter get its turn?

One op serves at most SERVED tickets, of which the last LAST continue the batch, and visits at most VISITED. Here these
are 3, 1 and 5, so that a queue of six is long. Any of the waiters may be dead; the first steps say which. The node
finds no listener for those that are deaf. Those that are silent still have a connection: a notice reaches it, and
nothing follows. The node is the shipped `decide`.

All wait behind a holder at first. A client that is woken (over N nodes) tries again, and one that is granted (at a
node alone) holds the name. If the notice says so, it continues the batch then: it sends the release of an id that is
not used. Notices come late, in any order. Where a scene has `renewals`, a client that waits may also renew its ticket
at any time, and what a silent client has may end at any time, as its lease does. Where it has none, the notices alone
serve all.

The flaws:
    two holders    clients that exclude each other have the name
    a free place   the first live waiter could enter, and no notice is under way; not in scenes with renewals, since
                   one op may not visit all dead tickets of their queues, or wake silent clients only
    dead end       a live client that is never served, in whatever order the steps come
    livelock       the steps can come in an order that is fair to all, again and again, and serve nobody
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from asynclock.rules.decide import Decision, decide
from asynclock.rules.model import ACQUIRE, RELEASE, Notice, Op, Queueing, Serve, State, Verb, Verdict
from asynclock.rules.mutex import FAIR
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from spec.explorer import Step
from spec.queues import could_enter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asynclock.rules.model import Rule as Kind

LIMITS = {"SERVED": 3, "LAST": 1, "VISITED": 5}
PERMITS = Semaphore(3)


class Rule(StrEnum):
    """The rules that can be taken out."""

    CONTINUES = "the last that an op serves continue the batch"
    SEVERAL_LAST = "... and these are several, since one may be silent"
    DEAF = "tickets whose client does not listen are dropped, and the next ones are served"


BREAKS = {
    Rule.CONTINUES: ("readers", "a free place"),
    Rule.SEVERAL_LAST: ("one is silent", "a free place"),
    Rule.DEAF: ("deaf", "a free place"),
}
"""For each rule: the scene that fails without it, and the flaw."""


class Scene(NamedTuple):
    """The first client holds the name, and the others wait."""

    kinds: Sequence[Kind]
    serve: Serve = Serve.GRANT
    deaf: int = 0  # so many may be deaf
    silent: int = 0
    renewals: bool = False
    last: int = LIMITS["LAST"]


READERS = (WRITE, *[READ] * 5)
MIXED = (WRITE, READ, READ, WRITE, READ, READ, READ)

SCENES = {
    "readers": Scene(READERS, deaf=2),
    "readers, woken": Scene(READERS, Serve.WAKE, deaf=1),
    "deaf": Scene((FAIR,) * 6, deaf=5),
    "one is silent": Scene(READERS, Serve.WAKE, silent=1, last=2),
    "silent": Scene(READERS, deaf=1, silent=1, renewals=True),
}

LARGE = {
    "readers, deaf": Scene(READERS, deaf=5),
    "readers and writers": Scene(MIXED[:6], deaf=5),
    "readers and writers, silent": Scene(MIXED, deaf=6, silent=2, renewals=True),
    "readers and writers, woken": Scene(MIXED, Serve.WAKE, deaf=1, silent=1, renewals=True),
    "permits": Scene((PERMITS,) * 8, deaf=5),
    "permits, silent": Scene((PERMITS,) * 7, deaf=2, silent=1, renewals=True),
    "more than one op visits": Scene((FAIR,) * 8, deaf=7, silent=1, renewals=True),
    "more than one op visits, woken": Scene((FAIR,) * 8, Serve.WAKE, deaf=7, silent=1, renewals=True),
}
"""`python -m spec` explores them, and the tests do not."""

CYCLES = True
"""Livelocks are looked for."""


class Phase(StrEnum):
    WAITING = "waiting"
    HOLDING = "holding"
    ENDED = "ended"
    DEAF = "deaf"
    SILENT = "silent"


DEAD = (Phase.DEAF, Phase.SILENT)


class Client(NamedTuple):
    phase: Phase = Phase.WAITING
    called: str = ""  # the notice that is under way: "woken" or "granted"
    continues: bool = False  # it continues the batch once it has the name


class World(NamedTuple):
    """The whole state."""

    node: State
    clients: tuple[Client, ...]


class Batches:
    """The model of a scene."""

    def __init__(self, scene: Scene, without: Rule | None = None) -> None:
        self.scene = scene
        self._without = without
        self._limits = LIMITS | {"LAST": 1 if without is Rule.SEVERAL_LAST else scene.last}

    def start(self) -> World:
        return World(State(), (Client(),))

    def good(self, world: World) -> bool:
        is_whole = len(world.clients) == len(self.scene.kinds)
        return is_whole and all(client.phase in (Phase.ENDED, *DEAD) for client in world.clients)

    def wrong(self, world: World) -> str | None:
        inside = [index for index, client in enumerate(world.clients) if client.phase is Phase.HOLDING]
        for index in inside:
            kind, own = self.scene.kinds[index], self._id(index)
            others = [each for each in world.node.holds if each.id != own]
            if not kind.admits([each for each in others if self._index(each.id) in inside], own):
                return "two holders"
        quiet = not any(client.called for client in world.clients) and not self.scene.renewals
        dead = [self._id(index) for index, client in enumerate(world.clients) if client.phase in DEAD]
        if quiet and could_enter(self.scene.kinds[0], world.node, 0.0, lambda own: own not in dead):
            return "a free place"
        return None

    def steps(self, world: World) -> Iterator[Step[World]]:
        if len(world.clients) < len(self.scene.kinds):
            yield from self._fates(world)
            return
        for index, client in enumerate(world.clients):
            who = "ABCDEFGH"[index]
            match client.phase:
                case Phase.WAITING if client.called == "granted":
                    yield Step(who, "is granted", self._enters(world, index))
                case Phase.WAITING if client.called:
                    yield Step(who, "is woken, and tries", self._tries(world, index))
                case Phase.WAITING if self.scene.renewals:
                    yield Step(who, "tries again", self._tries(world, index))
                case Phase.HOLDING:
                    after, _ = self._ask(world, index, RELEASE)
                    yield Step(who, "releases", _with(after, index, Client(Phase.ENDED)))
                case Phase.SILENT if self.scene.renewals and self._is_there(world, index):
                    yield Step("time", f"ends what {who} has", self._lapses(world, index))

    def _fates(self, world: World) -> Iterator[Step[World]]:
        """Of the next client. Once all are known, they come to the node; the dead ones die a moment later."""
        phases, who = [client.phase for client in world.clients], "ABCDEFGH"[len(world.clients)]
        fates = {
            Phase.WAITING: True,
            Phase.DEAF: phases.count(Phase.DEAF) < self.scene.deaf,
            Phase.SILENT: phases.count(Phase.SILENT) < self.scene.silent,
        }
        for phase in [phase for phase, may_be in fates.items() if may_be]:
            after = world._replace(clients=(*world.clients, Client(phase)))
            yield Step(
                who, f"is {phase}", self._all_come(after) if len(after.clients) == len(self.scene.kinds) else after
            )

    def _all_come(self, world: World) -> World:
        for index, client in enumerate(world.clients):
            world, verdict = self._ask(world, index, ACQUIRE)
            if verdict is Verdict.YES and client.phase is Phase.WAITING:
                world = _with(world, index, Client(Phase.HOLDING))
        return world

    def _deaf(self, world: World) -> tuple[str, ...]:
        """The channels of the deaf clients."""
        return tuple(self._id(i)[:12] for i, client in enumerate(world.clients) if client.phase is Phase.DEAF)

    def _is_there(self, world: World, index: int) -> bool:
        own = self._id(index)
        return any(each.id == own for each in world.node.holds) or any(each.id == own for each in world.node.queue)

    def _lapses(self, world: World, index: int) -> World:
        """Nobody learns of it, until somebody asks."""
        own, node = self._id(index), world.node
        holds = tuple(each for each in node.holds if each.id != own)
        queue = tuple(each for each in node.queue if each.id != own)
        return world._replace(node=replace(node, holds=holds, queue=queue, marked=node.marked and bool(holds)))

    def _tries(self, world: World, index: int) -> World:
        world, verdict = self._ask(world, index, ACQUIRE)
        return self._enters(world, index) if verdict is Verdict.YES else world

    def _enters(self, world: World, index: int) -> World:
        continues = world.clients[index].continues and self._without is not Rule.CONTINUES
        world = _with(world, index, Client(Phase.HOLDING))
        return self._ask(world, len(world.clients), RELEASE)[0] if continues else world

    def _ask(self, world: World, index: int, verb: Verb) -> tuple[World, Verdict]:
        """The node carries out a request; its notices are on their way. `index`: beyond the clients: an id that is not
        used."""
        ask = Ask(self._kind(index), verb, self._id(index), self.scene.serve, index + 1)
        limits = tuple(self._limits.items())
        verdict, node, notices = _answer(world.node, ask, self._deaf(world), limits, self._without)
        if index < len(world.clients):
            world = _with(world, index, world.clients[index]._replace(called=""))
        for notice in notices:
            client = world.clients[other := self._index(notice.id)]
            if notice.number and client.phase is Phase.WAITING:
                called = "granted" if notice.fence else "woken"
                continues = client.continues or notice.continue_batch
                world = _with(world, other, Client(Phase.WAITING, called, continues))
        return world._replace(node=node), verdict

    def _kind(self, index: int) -> Kind:
        return self.scene.kinds[min(index, len(self.scene.kinds) - 1)]

    def _id(self, index: int) -> str:
        return f"{index:012x}{0:020x}|{self._kind(index).mode}"

    def _index(self, own: str) -> int:
        return int(own[:12], 16)


# -- the node ----------------------------------------------------------------------------------------------------------


class _Hopeful(Decision):
    """A client that does not listen is served all the same."""

    def _grant(self, head: object, last: bool) -> bool | None:
        super()._grant(head, last)  # type: ignore[arg-type]
        return None


class Ask(NamedTuple):
    """A request to the node."""

    kind: Kind
    verb: Verb
    id: str
    serve: Serve
    order: int


@cache
def _answer(
    before: State, ask: Ask, deaf: tuple[str, ...], limits: tuple[tuple[str, int], ...], without: Rule | None
) -> tuple[Verdict, State, tuple[Notice, ...]]:
    """The verdict of the node, its next state, and its notices. Fences are left out: they would make all states
    differ."""
    number = 0 if ask.verb is RELEASE else 2  # of a first ticket the clock would limit the order key
    queueing = Queueing(ask.serve, ask.kind.fair, number=number, fresh=inf, order=ask.order)
    op = Op(ask.verb, ask.kind, "x", ask.id, inf, 0, inf, queueing=queueing)
    values: dict[str, Any] = dict(limits)
    with mock.patch.multiple("asynclock.rules.decide", **values):
        if without is Rule.DEAF:
            decision = _Hopeful(ask.kind, before.at(0.0), op, 0.0, lambda tag: tag not in deaf)
            reply = decision.release() if ask.verb is RELEASE else decision.acquire()
        else:
            reply = decide(ask.kind, before, op, 0.0, lambda tag: tag not in deaf)
    return reply.verdict, replace(reply.state, fence=0, fence_ends=0.0), reply.notices


def _with(world: World, index: int, client: Client) -> World:
    return world._replace(clients=(*world.clients[:index], client, *world.clients[index + 1 :]))


def scene(name: str, without: Rule | None = None) -> Batches:
    """The model of a scene."""
    return Batches((SCENES | LARGE)[name], without)
