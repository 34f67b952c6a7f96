"""Three nodes, where serving is a wake-up: a majority decides, and no single node can grant the hold.

Each client has a connection to each node. The node reads its commands in order, with any delay. Replies and notices
arrive at once: a delay at the node has the same effect as a delay on the way back. The nodes are the shipped `decide`,
and the shipped `Ballot` counts the votes. Time does not go on (`one_node.py` has the clock): a pause is a step that may
come at any time, and leases and tickets end only in steps that say so.

No client asks again without a notice, except after something expired. So a missing notice leaves a dead end.

The flaws:
    two holders    two clients have a majority
    useless tries  more than a first try and one with a ticket, while the same hold stands
    dead end       a client that wants the name and never gets it
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock.quorum.ballot import Ballot, Outcome
from asynclock.rules.decide import decide
from asynclock.rules.model import Entry, Op, Queueing, Serve, State, Verb
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.stores.deciding import vote_of
from asynclock.stores.port import Refused
from spec.explorer import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 3
MAJORITY = NODES // 2 + 1
LAG = 1  # a client does not try while more answers than this are due from a node: the node would count as silent


class Rule(StrEnum):
    """The rules that can be taken out."""

    UNDO_FIRST = "undo k is queued on every node before attempt k + 1"
    QUIET_UNDO = "an undo notifies nobody ..."
    WAKING_UNDO = "... unless its attempt had, or may have had, a majority"
    SPLIT_GIVES_BACK = "split votes are undone"
    ORDER_KEY = "the order key is the same on every node and in every renewal"
    TICKET_NEEDS_MAJORITY = "a ticket is kept only while its owner reaches a majority"
    DELAYED_RESTART = "a restarted node casts no vote until the holds that it may have forgotten have ended"


BREAKS = {
    Rule.UNDO_FIRST: ("fair", "dead end"),
    Rule.QUIET_UNDO: ("held", "useless tries"),
    Rule.WAKING_UNDO: ("two", "dead end"),
    Rule.SPLIT_GIVES_BACK: ("one down", "dead end"),
    Rule.ORDER_KEY: ("fair", "dead end"),
    Rule.TICKET_NEEDS_MAJORITY: ("cut off", "dead end"),
    Rule.DELAYED_RESTART: ("restart", "two holders"),
}
"""For each rule: the scene that fails without it, and the flaw."""


class Scene(NamedTuple):
    """The part that one walk explores."""

    clients: int = 2
    fair: bool = False
    down: bool = False  # the last node is out of reach
    held: bool = False  # the last client holds all the time, on all nodes but the last; tries are counted
    gives_up: bool = False  # the first client may give up
    cut_off: bool = False  # the first client may lose the middle node, for ever
    restart: bool = False  # the first node may lose all data while a client holds


SCENES = {
    "two": Scene(gives_up=True),
    "held": Scene(3, held=True),
    "fair": Scene(fair=True, down=True),
}

LARGE = {
    "one down": Scene(down=True, gives_up=True),
    "cut off": Scene(fair=True, down=True, cut_off=True),
    "restart": Scene(restart=True),
}
"""`python -m spec` explores them, and the tests do not."""


class Ask(NamedTuple):
    """A command on its way to a node."""

    verb: Verb
    id: str
    ticket: bool = False  # leaves the ticket of its client, or puts it back
    serve: Serve = Serve.WAKE


class Phase(StrEnum):
    READY = "ready"  # to try, at any time
    ASKING = "asking"
    WAITING = "waiting"  # for a notice
    HOLDING = "holding"
    DONE = "done"


Vote = tuple[Any, ...]
SILENT: Vote = ("silent",)
UNASKED: tuple[Vote | None, ...] = (None,) * NODES


class Client(NamedTuple):
    """One client. Its attempts use two ids in turn: the undo of an attempt is sent before its id is used again."""

    phase: Phase = Phase.READY
    attempt: int = 0
    votes: tuple[Vote | None, ...] = UNASKED
    queues: bool = False  # it was refused: its next try leaves tickets
    notified: bool = False
    out: tuple[tuple[Ask, ...], ...] = ((),) * NODES
    late: tuple[Ask | None, ...] = (None,) * NODES  # undos that are sent after the next attempt (without UNDO_FIRST)
    tries: int = 0


class World(NamedTuple):
    nodes: tuple[State, ...]
    clients: tuple[Client, ...]
    cut: bool = False  # the first client is cut off
    expired: bool = False  # a hold or a ticket has expired, and nobody was notified
    restarted: bool = False
    forgotten: str = ""  # the hold that the first node forgot when it restarted; "": it votes


class Quorum:
    """The model of a scene."""

    def __init__(self, scene: Scene, without: Rule | None = None) -> None:
        self.scene = scene
        self.without = without

    def start(self) -> World:
        clients, node = (Client(),) * self.scene.clients, State(fence=1, fence_ends=inf)
        if not self.scene.held:
            return World((node,) * NODES, clients)
        mine = _id(len(clients) - 1, 0)
        held = replace(node, holds=(Entry(mine, 1),))
        holder = Client(Phase.HOLDING, votes=((1,), (1,), SILENT))
        return World((held,) * (NODES - 1) + (node,), (*clients[:-1], holder))

    def good(self, world: World) -> bool:
        if self.scene.held:  # at rest
            return all(client.phase is not Phase.READY and not any(client.out) for client in world.clients)
        wanting = world.clients[1:] if world.cut else world.clients
        return all(client.phase is Phase.DONE for client in wanting)

    def wrong(self, world: World) -> str | None:
        if sum(client.phase is Phase.HOLDING for client in world.clients) > 1:
            return "two holders"
        if any(client.tries > 2 for client in world.clients):
            return "useless tries"
        return None

    def steps(self, world: World) -> Iterator[Step[World]]:
        for index, client in enumerate(world.clients):
            yield from self._client_steps(world, index, client)
            for n in range(NODES):
                if client.out[n]:
                    yield self._carry_out(world, index, n)
        yield from self._faults(world)

    # -- the clients ---------------------------------------------------------------------------------------------------

    def _client_steps(self, world: World, index: int, client: Client) -> Iterator[Step[World]]:
        who, mine = _name(index), _id(index, client.attempt)
        waits = client.phase is Phase.WAITING
        all_replied = all(len(asks) <= LAG for asks in client.out)
        if all_replied and (client.phase is Phase.READY or (waits and (client.notified or world.expired))):
            ticket = " with a ticket" if client.queues else ""
            yield Step(who, f"tries, as {_id(index, 1 - client.attempt)}{ticket}", self._try(world, index, client))
        if client.phase is Phase.HOLDING and not self.scene.held:
            asks = {n: Ask(Verb.RELEASE, mine) for n in range(NODES)}
            yield Step(who, f"releases {mine}", self._send(world, index, Client(Phase.DONE, out=client.out), asks))
        if self.scene.gives_up and not index and client.phase in (Phase.READY, Phase.ASKING, Phase.WAITING):
            yield Step(who, "gives up", self._leave(world, index, client, Phase.DONE), whim=True)

    def _try(self, world: World, index: int, client: Client) -> World:
        attempt = 1 - client.attempt
        ask = Ask(Verb.ACQUIRE, _id(index, attempt), client.queues)
        late, tries = client.late, client.tries + self.scene.held
        client = Client(Phase.ASKING, attempt, queues=client.queues, out=client.out, tries=tries)
        world = self._send(world, index, client, dict.fromkeys(range(NODES), ask))
        world = self._send(world, index, world.clients[index], {n: undo for n, undo in enumerate(late) if undo})
        return self._counted(world, index)

    def _counted(self, world: World, index: int) -> World:
        """The world after a vote: the client acts if its ballot has an outcome now."""
        client = world.clients[index]
        tally = _tally(client.votes, client.queues)
        if client.phase is not Phase.ASKING or tally is None:
            return world
        if tally.outcome is Outcome.WON:
            granted = [n for n, vote in enumerate(client.votes) if vote and vote[0] == 1]
            holding = client._replace(phase=Phase.HOLDING, notified=False)
            leave = {n: Ask(Verb.RELEASE, _ticket(index)) for n in range(NODES) if client.queues and n not in granted}
            return self._send(world, index, holding._replace(queues=False), leave)
        if tally.outcome is Outcome.UNREACHABLE and self.without is not Rule.TICKET_NEEDS_MAJORITY:
            return self._leave(world, index, client, Phase.READY)
        waits = client.queues and (tally.held or (self.scene.fair and tally.behind and tally.free >= MAJORITY))
        split = client.queues and not tally.held
        if self.without is Rule.SPLIT_GIVES_BACK and split and not waits:
            return _with(world, index, client._replace(phase=Phase.WAITING))
        undo = self._undo(index, client, ticket=client.queues)
        client = client._replace(phase=Phase.WAITING if waits else Phase.READY, votes=UNASKED, queues=True)
        if self.without is Rule.UNDO_FIRST:
            return _with(world, index, client._replace(late=tuple(undo.get(n) for n in range(NODES))))
        return self._send(world, index, client, undo)

    def _undo(self, index: int, client: Client, ticket: bool) -> dict[int, Ask]:
        """The undo, for each node where the attempt took effect or may still do so."""
        traces = [n for n, vote in enumerate(client.votes) if vote is None or vote[0] == 1]
        serve = Serve.WAKE if len(traces) >= MAJORITY and self.without is not Rule.WAKING_UNDO else Serve.NOBODY
        if self.without is Rule.QUIET_UNDO:
            serve = Serve.WAKE
        return {n: Ask(Verb.RELEASE, _id(index, client.attempt), ticket, serve) for n in traces}

    def _leave(self, world: World, index: int, client: Client, phase: Phase) -> World:
        """Undo the attempt, and withdraw the tickets."""
        undo = self._undo(index, client, ticket=False) if client.phase is Phase.ASKING else {}
        undo |= {n: late for n, late in enumerate(client.late) if late}
        gone = Client(phase, client.attempt, out=client.out)
        world = self._send(world, index, gone, undo)
        leave = {n: Ask(Verb.RELEASE, _ticket(index)) for n in range(NODES) if client.queues}
        return self._send(world, index, world.clients[index], leave)

    def _send(self, world: World, index: int, client: Client, asks: dict[int, Ask]) -> World:
        out, votes = list(client.out), list(client.votes)
        for n, ask in asks.items():
            if self._reaches(world, index, n):
                out[n] = (*out[n], ask)
            elif ask.verb is Verb.ACQUIRE:
                votes[n] = SILENT
        return _with(world, index, client._replace(out=tuple(out), votes=tuple(votes)))

    def _reaches(self, world: World, index: int, n: int) -> bool:
        cut = world.cut and index == 0 and n == 1
        quarantined = n == 0 and bool(world.forgotten)
        return not cut and not quarantined and not (self.scene.down and n == NODES - 1)

    # -- the nodes -----------------------------------------------------------------------------------------------------

    def _carry_out(self, world: World, index: int, n: int) -> Step[World]:
        client = world.clients[index]
        ask, *rest = client.out[n]
        state, vote, notified_clients = _answer(world.nodes[n], ask, index, self.scene.fair, self.without)
        out = (*client.out[:n], tuple(rest), *client.out[n + 1 :])
        client = client._replace(out=out)
        if ask.verb is Verb.ACQUIRE and ask.id == _id(index, client.attempt) and client.phase is Phase.ASKING:
            client = client._replace(votes=(*client.votes[:n], vote, *client.votes[n + 1 :]))
        world = _with(world, index, client)
        world = world._replace(nodes=(*world.nodes[:n], state, *world.nodes[n + 1 :]))
        for other in notified_clients:
            waits = world.clients[other].phase in (Phase.ASKING, Phase.WAITING, Phase.READY)
            if waits and world.clients[other].queues:
                world = _with(world, other, world.clients[other]._replace(notified=True))
        notices = f", notifies {', '.join(map(_name, notified_clients))}" if notified_clients else ""
        verdict = "yes" if vote[0] == 1 else f"no ({vote[2] or 'free'})"
        text = f"{ask.verb.value} of {ask.id}: {verdict}{notices}"
        return Step(f"node {n}", text, self._counted(world, index))

    def _faults(self, world: World) -> Iterator[Step[World]]:
        if self.scene.cut_off and not world.cut:
            after = self._silenced(world._replace(cut=True), 0, 1)
            yield Step("A", "is cut off from node 1", after, whim=True)
        if world.cut and (after := _lapsed(world)) != world:
            yield Step("node 1", "forgets A: its lease and its ticket expire", after)
        for index, client in enumerate(world.clients):
            if self.scene.restart and not world.restarted and client.phase is Phase.HOLDING:
                yield Step("node 0", "restarts empty", self._restarted(world, _id(index, client.attempt)), whim=True)
            if world.forgotten == _id(index, client.attempt) and client.phase is not Phase.HOLDING:
                yield Step("node 0", "ends its quarantine", world._replace(forgotten=""))

    def _silenced(self, world: World, index: int, n: int) -> World:
        """The commands on their way from a client to a node are lost."""
        client = world.clients[index]
        client = client._replace(out=(*client.out[:n], (), *client.out[n + 1 :]))
        if client.phase is Phase.ASKING and client.votes[n] is None:
            client = client._replace(votes=(*client.votes[:n], SILENT, *client.votes[n + 1 :]))
        return self._counted(_with(world, index, client), index)

    def _restarted(self, world: World, holder: str) -> World:
        """The first node restarts empty, and all connections to it break."""
        forgotten = "" if self.without is Rule.DELAYED_RESTART else holder
        nodes = (State(fence=1, fence_ends=inf), *world.nodes[1:])
        world = world._replace(nodes=nodes, forgotten=forgotten, restarted=True)
        for index in range(len(world.clients)):
            world = self._silenced(world, index, 0)
        return world


# -- counting and answering --------------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """The result of some votes."""

    outcome: Outcome
    held: bool  # by one id, on a majority
    free: int
    behind: bool  # other waiters are before this one


@cache
def _tally(votes: tuple[Vote | None, ...], certain: bool) -> Tally | None:
    """The result of these votes; None: it is still open."""
    ballot = Ballot(_op(Ask(Verb.ACQUIRE, "A0"), 0, False, 0), NODES, 0, 1, certain=certain)
    for n, vote in enumerate(votes):
        if vote == SILENT:
            ballot.fail(n, TimeoutError(), maybe=False)
        elif vote is not None:
            ballot.answer(n, (1, False) if vote == (1,) else Refused(*vote[1:]))
    if ballot.outcome is None:
        return None
    return Tally(ballot.outcome, ballot.holder() is not None, ballot.free(), behind=ballot.rank() > 0)


@cache
def _answer(
    state: State, ask: Ask, index: int, fair: bool, without: Rule | None
) -> tuple[State, Vote, tuple[int, ...]]:
    """The node afterwards, its vote, and the clients that it notifies. Tokens are left out (`span.py` has them)."""
    order = index + 1
    if without is Rule.ORDER_KEY:  # each node counts arrivals itself; a renewal keeps its place
        mine = [ticket.order for ticket in state.queue if ticket.id == _ticket(index)]
        order = mine[0] if mine else 1 + max((ticket.order for ticket in state.queue), default=0)
        if ask.verb is Verb.RELEASE:  # an undo: the attempt was granted, so its ticket was the first
            order = 0
    reply = decide(FAIR if fair else MUTEX, state, _op(ask, index, fair, order), 0)
    found = vote_of(reply, 0)
    vote = (0, found.left, found.holder, min(found.rank, 1)) if isinstance(found, Refused) else (1,)
    notified_clients = tuple(ord(notice.id[0]) - ord("A") for notice in reply.notices)
    queue = reply.state.queue
    if without is Rule.ORDER_KEY:
        queue = tuple(ticket._replace(order=place) for place, ticket in enumerate(queue, 1))
    return replace(reply.state, fence=1, queue=queue), vote, notified_clients


def _op(ask: Ask, index: int, fair: bool, order: int) -> Op:
    """Time stands still: all leases and tickets have one tick left."""
    number = 2 if ask.ticket else 0
    waiter = _ticket(index) if ask.ticket else ""
    queueing = Queueing(ask.serve, fair, waiter=waiter, number=number, fresh=1, order=order)
    return Op(ask.verb, FAIR if fair else MUTEX, "name", ask.id, 1, 0, inf, queueing=queueing)


def _lapsed(world: World) -> World:
    """The lease and the ticket of the first client expire at the middle node, which it no longer reaches."""
    node, client = world.nodes[1], world.clients[0]
    if client.phase is Phase.HOLDING:
        return world
    holds = tuple(entry for entry in node.holds if entry.id[0] != "A")
    queue = tuple(ticket for ticket in node.queue if ticket.id[0] != "A")
    if (holds, queue) == (node.holds, node.queue):
        return world
    node = replace(node, holds=holds, queue=queue, marked=node.marked and bool(holds)).at(0)
    return world._replace(nodes=(world.nodes[0], node, *world.nodes[2:]), expired=True)


def _name(index: int) -> str:
    return chr(ord("A") + index)


def _id(index: int, attempt: int) -> str:
    return f"{_name(index)}{attempt}"


def _ticket(index: int) -> str:
    return f"{_name(index)}t"


def _with(world: World, index: int, client: Client) -> World:
    return world._replace(clients=(*world.clients[:index], client, *world.clients[index + 1 :]))


def scene(name: str, without: Rule | None = None) -> Quorum:
    return Quorum((SCENES | LARGE)[name], without)
