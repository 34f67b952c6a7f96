"""One node, where serving is granting: the command that frees the name makes the first in the queue the holder.

Each client has one connection. Its commands arrive in order, the node's replies come back in order, and both may be
late. A client takes a ticket, renews it, is granted, holds for longer than its lease, releases, gives up, dies. Its
connection breaks; then the node reads the commands that were under way later, or never. The node is the shipped
`decide`.

Time goes in ticks. All times in a state are ticks *from now*: a tick takes one off each of them, and `decide` is always
asked at time 0. Clocks run at the same speed here; the drift allowance covers their difference, by arithmetic.

The flaws:
    two holders             two clients believe, each by its own clock, that they hold the name
    a token did not rise    the token of a tenure is not above the tokens of all tenures before it
    a waiter not notified   the name was released, a client with a fresh ticket is subscribed, and the name stays free
    an orphan hold          a hold that its client has left, while no release of it is under way
    an orphan ticket        the same for a ticket
    dead end                a client that neither gets the name nor gives up
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, StrEnum
from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.decide import decide
from asynclock.rules.model import Notice, Op, Queueing, Serve, State, Ticket, Verb, Verdict
from asynclock.rules.mutex import MUTEX
from spec.explorer import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE = 2  # ticks; the life of a ticket, too
FRESH = 1  # a ticket is served during the first half of its life
NUMBERS = 3  # the numbers of a ticket repeat: at most two of them are under way at a time


class Rule(StrEnum):
    """The rules that can be taken out."""

    NUMBERED_VALIDITY = "validity counts from when the granted number of the ticket was sent"
    OWN_ID_MOVES_END = "a holder that asks again is granted again, and the end of its hold moves with the answer"
    FREER_SERVES = "the command that frees the name serves the queue"
    ONLY_FREER_SERVES = "no other command serves the queue"
    LEAVING_TAKES_TICKET = "release, leave and undo are one command: it deletes the ticket of the id"
    LEAVING_TAKES_HOLD = "... and the hold, if it is the id's"
    ONLY_OWN_HOLD = "... and no other hold"
    TOMBSTONE = "an undo on another connection than its acquire leaves a tombstone"
    NEVER_AFTER_UNDO = "a command that a node did not carry out is not sent again after its undo"


BREAKS = {
    Rule.NUMBERED_VALIDITY: ("overstayed", "two holders"),
    Rule.OWN_ID_MOVES_END: ("lost notice", "two holders"),
    Rule.FREER_SERVES: ("overstayed", "a waiter not notified"),
    Rule.ONLY_FREER_SERVES: ("three", "two holders"),
    Rule.LEAVING_TAKES_TICKET: ("faults", "an orphan ticket"),
    Rule.LEAVING_TAKES_HOLD: ("faults", "an orphan hold"),
    Rule.ONLY_OWN_HOLD: ("overstayed", "two holders"),
    Rule.TOMBSTONE: ("faults", "an orphan hold"),
    Rule.NEVER_AFTER_UNDO: ("faults", "an orphan hold"),
}
"""For each rule: the scene that fails without it, and the flaw."""


class Ask(NamedTuple):
    """A command on its way to the node."""

    verb: Verb
    id: str
    number: int = 0
    leaves: bool = False  # a release by a client that does not know that it holds
    tombstone: bool = False


class Message(NamedTuple):
    """A reply, or a notice, on its way to a client."""

    id: str
    number: int
    what: str  # yes, no, undone; granted: the ticket became the hold; again: the node did nothing, send it again
    fence: int = 0


class Phase(StrEnum):
    IDLE = "idle"
    ASKING = "asking"
    WAITING = "waiting"
    HOLDING = "holding"
    DONE = "done"
    DEAD = "dead"


class Client(NamedTuple):
    """One client, which wants the name `rounds` more times."""

    rounds: int
    phase: Phase = Phase.IDLE
    number: int = 0  # the number of its last ticket
    ends: tuple[int, ...] = (0,) * NUMBERS  # for each number, the validity left if that ticket became the hold
    valid: int = 0  # the validity left of its lease, as the client counts it
    out: tuple[Ask, ...] = ()
    inbox: tuple[Message, ...] = ()


class World(NamedTuple):
    """The whole state. `flaw` is the flaw of the last step."""

    node: State
    clients: tuple[Client, ...]
    whims: int  # the number of whims that may still happen
    top: int = 1  # the highest token of a tenure; all tokens are counted from it, so it stays 1
    frozen: tuple[tuple[Ask, int], ...] = ()  # sent on a broken connection, and how long the node may still read it
    lapsed: bool = False  # the hold expired, and nobody has held the name since
    flaw: str = ""


class Whim(Enum):
    GIVES_UP = "gives up"
    DIES = "dies"
    BREAKS = "its connection breaks"
    NOT_NOW = "its command was not carried out"


class Scene(NamedTuple):
    """The part that one walk explores. The whole would have millions of states."""

    rounds: tuple[int, ...]  # how often each client wants the name
    whims: int  # how many whims may happen ...
    what: frozenset[Whim]  # ... of which sort
    whom: str  # ... and to which clients
    time: bool  # whether time goes on


SCENES = {
    "overstayed": Scene((2, 1), 0, frozenset(), "", time=True),
    "three": Scene((1, 1, 1), 2, frozenset({Whim.GIVES_UP}), "ABC", time=False),
}

LARGE = {
    "faults": Scene((1, 1), 2, frozenset(Whim), "AB", time=True),
    "lost notice": Scene((2, 1), 1, frozenset({Whim.BREAKS}), "B", time=True),
}
"""`python -m spec` explores them, and the tests do not."""


class OneNode:
    """The model of a scene."""

    def __init__(self, scene: Scene, without: Rule | None = None) -> None:
        self.scene = scene
        self.without = without

    def start(self) -> World:
        node = State(fence=1, fence_ends=inf)
        return World(node, tuple(Client(rounds) for rounds in self.scene.rounds), self.scene.whims)

    def good(self, world: World) -> bool:
        return all(client.phase in (Phase.DONE, Phase.DEAD) and not client.out for client in world.clients)

    def wrong(self, world: World) -> str | None:
        if sum(client.phase is Phase.HOLDING and client.valid > 0 for client in world.clients) > 1:
            return "two holders"
        if world.flaw:
            return world.flaw
        node = world.node
        free = not node.holds and not world.lapsed
        if free and any(_must_be_served(world, ticket.id, ticket.fresh) for ticket in node.queue):
            return "a waiter not notified"
        if any(_left(world, entry.id) for entry in node.holds):
            return "an orphan hold"
        if any(_left(world, ticket.id) for ticket in node.queue):
            return "an orphan ticket"
        return None

    def steps(self, world: World) -> Iterator[Step[World]]:
        for index, client in enumerate(world.clients):
            yield from self._client_steps(world, index, client)
            if world.whims and _name(index) in self.scene.whom:
                yield from self._whims(world._replace(whims=world.whims - 1), index, client)
        if world.frozen:
            (ask, _), *rest = world.frozen
            after, _ = self._carry_out(world._replace(frozen=tuple(rest)), ask)
            yield Step("node", f"reads on a broken connection: {_text_of(ask)}", after)
        if self.scene.time:
            yield Step("time", "goes on by a tick", _tick(world))

    def _client_steps(self, world: World, index: int, client: Client) -> Iterator[Step[World]]:
        who, mine = _name(index), _id(index, client)
        if client.out:
            ask = client.out[0]
            after, message = self._carry_out(_with(world, index, client._replace(out=client.out[1:])), ask)
            if client.phase is not Phase.DEAD:
                after = self._send_to(after, index, message)
            yield Step("node", f"answers {_text_of(ask)}: {message.what}", after)
        if client.inbox:
            yield self._receive(world, index, client._replace(inbox=client.inbox[1:]), client.inbox[0])
        match client.phase:
            case Phase.IDLE:
                yield Step(who, f"tries, as {mine}", _with(world, index, _try(client, mine)))
            case Phase.WAITING if client.ends[client.number] < LEASE:
                yield Step(who, f"renews the ticket of {mine}", _with(world, index, _try(client, mine)))
            case Phase.HOLDING:
                yield Step(who, f"releases {mine}", self._leave(world, index, client))

    def _receive(self, world: World, index: int, client: Client, message: Message) -> Step[World]:
        who = _name(index)
        if message.what == "again":
            again = Ask(Verb.ACQUIRE, message.id, message.number)
            sent = client._replace(out=(*client.out, again))
            return Step(who, f"sends {_text_of(again)} again", _with(world, index, sent))
        if message.what in ("no", "undone"):
            return Step(who, "is refused, and waits", _with(world, index, client._replace(phase=Phase.WAITING)))
        number = client.number if self.without is Rule.NUMBERED_VALIDITY else message.number
        valid = client.ends[number]
        if not valid:
            return Step(who, f"receives {message.what} after the end of its lease", self._leave(world, index, client))
        flaw = "" if message.fence > world.top else "a token did not rise"
        holding = Client(client.rounds, Phase.HOLDING, valid=valid, out=client.out)
        after = _counted_from(_with(world._replace(flaw=flaw), index, holding), message.fence)
        return Step(who, f"receives {message.what} to number {message.number}: holds for {valid} ticks", after)

    def _leave(self, world: World, index: int, client: Client) -> World:
        """Release, or give up: one command. The id is used up; the client ignores what still arrives for it."""
        mine = _id(index, client)
        late = any(ask.id == mine and ask.verb is Verb.ACQUIRE for ask, _ in world.frozen)
        tombstone = late and self.without is not Rule.TOMBSTONE
        ask = Ask(Verb.RELEASE, mine, leaves=client.phase is not Phase.HOLDING, tombstone=tombstone)
        rounds = client.rounds - 1
        inbox = tuple(message for message in client.inbox if self._reacts_late(message))
        gone = Client(rounds, Phase.IDLE if rounds else Phase.DONE, out=(*client.out, ask), inbox=inbox)
        return _with(world, index, gone)

    def _send_to(self, world: World, index: int, message: Message) -> World:
        """Put it on its way to a client, unless the client has left the id or holds: then it would ignore it."""
        client = world.clients[index]
        waits = message.id == _id(index, client) and client.phase in (Phase.ASKING, Phase.WAITING)
        if not waits and not self._reacts_late(message):
            return world
        return _with(world, index, client._replace(inbox=(*client.inbox, message)))

    def _reacts_late(self, message: Message) -> bool:
        """Whether the client reacts to a message even after it has left the id."""
        return message.what == "again" and self.without is Rule.NEVER_AFTER_UNDO

    def _whims(self, world: World, index: int, client: Client) -> Iterator[Step[World]]:
        who, mine, may = _name(index), _id(index, client), self.scene.what
        if client.phase is Phase.DEAD:
            return
        if Whim.GIVES_UP in may and client.phase in (Phase.ASKING, Phase.WAITING):
            yield Step(who, f"gives {mine} up", self._leave(world, index, client), whim=True)
        if Whim.NOT_NOW in may and client.out and client.out[0].verb is Verb.ACQUIRE:
            ask, *rest = client.out
            again = _with(world, index, client._replace(out=tuple(rest)))
            again = self._send_to(again, index, Message(ask.id, ask.number, "again"))
            yield Step("node", f"answers {_text_of(ask)}: not now, nothing was done", again, whim=True)
        if Whim.DIES in may and client.phase is not Phase.DONE:
            dead = Client(client.rounds, Phase.DEAD, out=client.out)
            yield Step(who, "dies", _with(world, index, dead), whim=True)
        if Whim.BREAKS in may and (client.out or client.inbox):
            yield Step(who, "loses its connection", self._broken(world, index, client), whim=True)

    def _broken(self, world: World, index: int, client: Client) -> World:
        """The node may still read what is under way, or never. The client sends releases again on a new connection."""
        world = world._replace(frozen=world.frozen + tuple((ask, LEASE) for ask in client.out))
        tombstone = self.without is not Rule.TOMBSTONE
        pending = tuple(ask._replace(tombstone=tombstone) for ask in client.out if ask.verb is Verb.RELEASE)
        client = client._replace(out=pending, inbox=())
        return self._leave(world, index, client) if client.phase is Phase.ASKING else _with(world, index, client)

    def _carry_out(self, world: World, ask: Ask) -> tuple[World, Message]:
        """The node carries out a command; its notices are on their way."""
        node, message, notices = _answer(world.node, ask, self.without)
        world = world._replace(node=node, lapsed=world.lapsed and not node.holds)
        for notice in notices:
            granted = Message(notice.id, notice.number, "granted", notice.fence)
            world = self._send_to(world, _index(notice.id), granted)
        return world, message


# -- the node ----------------------------------------------------------------------------------------------------------


@cache
def _answer(state: State, ask: Ask, without: Rule | None) -> tuple[State, Message, tuple[Notice, ...]]:
    """The reply of `decide`, changed to what it would be without the rule `without`."""
    given, asked = state, ask
    holder = state.holds[0].id if state.holds else ""
    if ask.verb is Verb.RELEASE and holder and holder != ask.id:
        if without is Rule.ONLY_OWN_HOLD:
            asked = ask._replace(id=holder)
        if without is Rule.ONLY_FREER_SERVES:
            given = replace(state, holds=())
    serve = Serve.NOBODY if without is Rule.FREER_SERVES else Serve.GRANT
    queueing = Queueing(serve, number=ask.number + 1 if ask.verb is Verb.ACQUIRE else 0, fresh=FRESH)
    op = Op(ask.verb, MUTEX, "name", asked.id, LEASE, 0, inf, tombstone=ask.tombstone, queueing=queueing)
    reply = decide(MUTEX, given, op, 0)
    after, notices = reply.state, reply.notices
    if without is Rule.ONLY_FREER_SERVES and given is not state and not after.holds:
        after = replace(after, holds=state.holds)
    if without is Rule.OWN_ID_MOVES_END and ask.verb is Verb.ACQUIRE and holder == ask.id:
        after = replace(after, holds=state.holds)
    if without is Rule.LEAVING_TAKES_HOLD and ask.leaves and holder == ask.id:
        after, notices = state, ()
    if without is Rule.LEAVING_TAKES_TICKET and ask.leaves and holder != ask.id:
        after = replace(after, queue=state.queue, queue_ends=state.queue_ends)
    what = {Verdict.YES: "yes", Verdict.NO: "no", Verdict.UNDONE: "undone"}[reply.verdict]
    sent = tuple(notice._replace(number=notice.number - 1) for notice in notices)
    return after, Message(ask.id, ask.number, what, reply.fence), sent


def _tick(world: World) -> World:
    """One tick later: every time in the state is one less."""
    node = world.node
    aged = State(
        tuple(entry._replace(ends=(entry.ends or 0) - 1) for entry in node.holds),
        node.fence,
        node.fence_ends,
        tuple(entry._replace(ends=(entry.ends or 0) - 1) for entry in node.undone),
        tuple(_aged(ticket) for ticket in node.queue),
        node.queue_ends - 1,
        node.marked,
    ).at(0)
    clients = tuple(
        client._replace(ends=tuple(max(0, left - 1) for left in client.ends), valid=max(0, client.valid - 1))
        for client in world.clients
    )
    frozen = tuple((ask, left - 1) for ask, left in world.frozen if left > 1)
    lapsed = world.lapsed or bool(node.holds and not aged.holds)
    return world._replace(node=aged, clients=clients, frozen=frozen, lapsed=lapsed)


def _aged(ticket: Ticket) -> Ticket:
    return ticket._replace(fresh=max(0, ticket.fresh - 1), ends=max(0, ticket.ends - 1))


# -- the clients -------------------------------------------------------------------------------------------------------


def _name(index: int) -> str:
    return chr(ord("A") + index)


def _index(id: str) -> int:
    """The client that an id belongs to."""
    return ord(id[0]) - ord("A")


def _id(index: int, client: Client) -> str:
    """A client has a new id each time it wants the name."""
    return f"{_name(index)}{client.rounds}"


def _text_of(ask: Ask) -> str:
    number = f" number {ask.number}" if ask.verb is Verb.ACQUIRE else ""
    return f"{ask.verb.value} of {ask.id}{number}{' with a tombstone' if ask.tombstone else ''}"


def _with(world: World, index: int, client: Client) -> World:
    return world._replace(clients=(*world.clients[:index], client, *world.clients[index + 1 :]))


def _try(client: Client, id: str) -> Client:
    """An acquire that leaves a ticket with the next number, or renews it."""
    number = (client.number + 1) % NUMBERS
    ends = tuple(LEASE if each == number else left for each, left in enumerate(client.ends))
    out = (*client.out, Ask(Verb.ACQUIRE, id, number))
    return client._replace(phase=Phase.ASKING, number=number, ends=ends, out=out)


def _counted_from(world: World, fence: int) -> World:
    """The same world, with all tokens counted from this one."""
    less = max(fence - world.top, 0)
    clients = tuple(
        client._replace(inbox=tuple(message._replace(fence=max(message.fence - less, 0)) for message in client.inbox))
        for client in world.clients
    )
    return world._replace(node=replace(world.node, fence=world.node.fence - less), clients=clients)


def _must_be_served(world: World, id: str, fresh: float) -> bool:
    """Whether a ticket must be served: it is fresh, and its client is subscribed."""
    return fresh > 0 and world.clients[_index(id)].phase is not Phase.DEAD


def _left(world: World, id: str) -> bool:
    """Whether its client has left an id, while no release of it is under way."""
    index = _index(id)
    client = world.clients[index]
    gone = client.phase is not Phase.DEAD and id != _id(index, client)
    return gone and not any(ask.id == id and ask.verb is Verb.RELEASE for ask in client.out)


def scene(name: str, without: Rule | None = None) -> OneNode:
    return OneNode((SCENES | LARGE)[name], without)
