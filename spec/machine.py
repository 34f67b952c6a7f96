"""The shipped client, explored: two machines of `asynclock/protocol` and one node, which is the shipped `decide`.

The other models of this folder write the client once more, and smaller. Here nothing is written again: the clients are
`Machine` and `Acquisition`, told by an explorer what an event loop would tell them. The explorer decides the order:
which message arrives next, when a timer fires, and which reply is lost.

A client has one connection. Its ops arrive in order, the replies and notices come back in order, and both may be late.
A lost reply breaks the connection: all that was under way on it is gone, the ops have failed, and may have been carried
out. Then the connection is up again.

Time stands still, except that the next timer of a client may fire while it has nothing under way. Only so many timers
may fire (`timers`); a state in which a client waits for one more is where a walk ends.

The flaws:
    two holders             two clients have a tenure that is held
    a token did not rise    the token of a tenure is not above the tokens of all tenures before it
    an orphan               the node has a hold or a ticket of an id that no client knows, and no op of it is under way
    something is left       both clients are done, and a machine has a claim, a hold or a ticket
    dead end                a client that neither gets the name nor waits for a timer
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._errors import QuorumUnavailable
from asynclock._options import ClientSettings
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.fingerprint import fingerprint
from asynclock.protocol.hold import Tenure
from asynclock.protocol.machine import Machine
from asynclock.protocol.terms import Terms
from asynclock.protocol.watchdog import LoopLag
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import State
from asynclock.rules.mutex import MUTEX
from asynclock.stores.deciding import copy_of, decided
from spec.explorer import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asynclock._options import LockSettings
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Notice, Op

NAME = "x"
WALL = 1_700_000_000.0


class Rule(StrEnum):
    """The rules of the client that can be taken out."""

    UNDO = "a round without a reply is undone before the next one"
    LEAVE = "a client that gives up takes back what it sent"


BREAKS = {
    Rule.UNDO: ("lost reply", "an orphan"),
    Rule.LEAVE: ("gives up", "an orphan"),
}
"""For each rule: the scene that fails without it, and the flaw."""


class Scene(NamedTuple):
    """The part that one walk explores."""

    losses: int = 0  # how many replies may be lost
    gives_up: int = 0  # how many calls may be cancelled
    timers: int = 0  # how many timers may fire


SCENES = {"lost reply": Scene(losses=1, timers=1), "gives up": Scene(gives_up=1)}


# -- the outside of one machine ----------------------------------------------------------------------------------------


class Timer:
    """A timer of one client."""

    def __init__(self, when: float, call: Callable[[], object]) -> None:
        self.when = when
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self.call = None


class Clock:
    """The time of the world, with the timers of one client."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.timers: list[Timer] = []

    def now(self) -> float:
        return self._world.time

    def wall(self) -> float:
        return WALL + self._world.time

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(when, callback)
        self.timers = [each for each in self.timers if each.call is not None] + [timer]
        return timer

    def next(self) -> Timer | None:
        """The next timer that has something to do."""
        return min((each for each in self.timers if each.call is not None), key=lambda each: each.when, default=None)


class Result:
    """What the caller of a call waits for."""

    def __init__(self) -> None:
        self.outcome: object = None

    def done(self) -> bool:
        return self.outcome is not None

    def set_result(self, result: object) -> None:
        del result
        self.outcome = "ended"

    def set_exception(self, error: BaseException) -> None:
        self.outcome = error

    def cancel(self) -> None:
        self.outcome = "cancelled"

    def cancelled(self) -> bool:
        return self.outcome == "cancelled"

    def exception(self) -> object:
        return self.outcome

    def __await__(self) -> Any:
        raise NotImplementedError


class Silent:
    """Nobody listens to the events."""

    active = ()

    def tell(self, event: object) -> None: ...


class Core:
    """The outside of one machine (`asynclock/protocol/core.py`)."""

    closed = forked = False
    observers = Silent()

    def __init__(self, letter: str, world: World) -> None:
        self.settings = ClientSettings()
        self.clock: Any = Clock(world)
        self.calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []  # of the next turn
        self._letter = letter
        self._ids = 0
        node: Any = Node(letter, world)
        self.quorum = Quorum([node], self.clock, later=self.later)

    def within(self, settings: LockSettings) -> float:
        return settings.lease / 10

    def random(self) -> float:
        return 0.5

    def new_id(self, seed: int, metadata: str, mode: str = "") -> str:
        self._ids += 1
        return f"{self._letter * 12}{self._ids:020x}|{mode}{seed}|1|host|{metadata}"

    def spent(self) -> float:
        return 0.0

    def later(self, call: Callable[..., object], *args: object) -> None:
        self.calls.append((call, args))

    def result(self) -> Result:
        return Result()

    def judge_again(self) -> None: ...

    def renews(self, tenures: object) -> None: ...

    def dropped(self, tenure: object) -> None: ...

    def tell_lost(self, terms: Terms, reason: str, held_for: float, why: object) -> None: ...

    def fault(self, where: object, error: Exception) -> None:
        raise error


class Node:
    """The only node, as one client sees it."""

    label = "node"
    listens = True
    error: Exception | None = None

    def __init__(self, letter: str, world: World) -> None:
        self._letter = letter
        self._world = world

    def send(self, op: Op, handler: Ballot) -> None:
        self._world.links[self._letter].out.append((copy_of(op), handler))  # as it is now: its owner may change it


class Link:
    """The connection of one client."""

    def __init__(self) -> None:
        self.out: list[tuple[Op, Ballot]] = []
        self.inbox: list[tuple[Ballot, object] | Notice] = []
        self.unanswered: list[Ballot] = []  # carried out, with the reply on its way


# -- the world ---------------------------------------------------------------------------------------------------------


class World:
    """Two clients and a node."""

    def __init__(self, scene: Scene, without: Rule | None) -> None:
        self.time = 1_000.0
        self.state = State()
        self.losses, self.gives_up, self.timers = scene.losses, scene.gives_up, scene.timers
        self.links = {"a": Link(), "b": Link()}
        self.cores = {letter: Core(letter, self) for letter in self.links}
        self.machines = {letter: Machine(core, LoopLag(), 1) for letter, core in self.cores.items()}
        self.calls: dict[str, Acquisition] = {}
        self.tenures: dict[str, Tenure] = {}
        self.done: dict[str, None] = {}
        self.top = 0
        self.flaw = ""
        self._without = without
        self._settings = ClientSettings().lock

    def fingerprint(self) -> tuple[object, ...]:
        inside = (
            self.machines, self.links, self.calls, self.tenures, self.done, self.state, self.top, self.flaw,
            self.losses, self.gives_up, self.timers, self.time,
            [[(each.when, each.call) for each in core.clock.timers if each.call] for core in self.cores.values()],
        )  # fmt: skip
        nodes = [node for core in self.cores.values() for node in core.quorum.nodes]
        settings = [core.settings for core in self.cores.values()]
        clocks = [core.clock for core in self.cores.values()]
        return fingerprint(inside, [self, *self.cores.values(), *nodes, *settings, *clocks, self._settings, MUTEX])

    def choices(self) -> Iterator[tuple[str, str, bool]]:
        """The next steps: who, what, and whether it may also not happen."""
        for letter, link in self.links.items():
            if link.out:
                yield letter, "the node reads", False
            if link.inbox:
                yield letter, "reads", False
            if letter in self.tenures:
                yield letter, "releases", False
            elif letter not in self.calls and letter not in self.done:
                yield letter, "acquires", False
            quiet = not (link.out or link.inbox or link.unanswered)
            if quiet and letter in self.calls and self.timers and self.cores[letter].clock.next() is not None:
                yield letter, "a timer fires", False
            if self.losses and link.unanswered:
                yield letter, "a reply is lost", True
            if self.gives_up and letter in self.calls:
                yield letter, "gives up", True

    def do(self, who: str, what: str) -> None:
        """Do one step, and all that it leaves for the next turn."""
        link, core, machine = self.links[who], self.cores[who], self.machines[who]
        match what:
            case "acquires":
                call = self.calls[who] = Acquisition(machine, Terms(NAME, MUTEX, self._settings, who, None))
                if self._without is not None:
                    call._leave = partial(_forget, call)  # type: ignore[method-assign] # noqa: SLF001
                call.start()
            case "the node reads":
                self._carry_out(who, *link.out.pop(0))
            case "reads":
                self._read(who, link.inbox.pop(0))
            case "releases":
                tenure = self.tenures.pop(who)
                tenure.hold.end(tenure)
                self.done[who] = None
            case "a timer fires":
                self.timers -= 1
                timer = core.clock.next()
                self.time = max(self.time, timer.when)
                call_now, timer.call = timer.call, None
                call_now()
            case "a reply is lost":
                self.losses -= 1
                failed = [*link.unanswered, *(ballot for _, ballot in link.out)]
                link.out, link.inbox, link.unanswered = [], [], []
                for ballot in failed:
                    ballot.fail(0, ConnectionError("lost"), maybe=True)
                machine.connected(True)
            case "gives up":
                self.gives_up -= 1
                self.calls.pop(who).abandon()
                self.done[who] = None
        self._settle()

    def _settle(self) -> None:
        """The next turns of both clients, and the calls that have ended."""
        for core in self.cores.values():
            while core.calls:
                call, args = core.calls.pop(0)
                call(*args)
        for who, acquisition in list(self.calls.items()):
            if acquisition.future.done():
                del self.calls[who]
                if isinstance(acquisition.future.exception(), QuorumUnavailable):  # its patience has ended
                    self.done[who] = None
                    continue
                result = acquisition.take()
                if isinstance(result, Tenure):
                    self.tenures[who] = result
                    self.flaw = self.flaw or ("" if result.fence > self.top else "a token did not rise")
                    self.top = max(self.top, result.fence)

    def _carry_out(self, who: str, op: Op, ballot: Ballot) -> None:
        """The node carries an op out; its reply and its notices are on their way."""
        change, vote = decided(op, [self.state], WALL + self.time, lambda tag: True)
        [self.state] = change.states
        link = self.links[who]
        link.unanswered.append(ballot)
        link.inbox.append((ballot, vote))
        for notice in change.notices:
            self.links[notice.id[0]].inbox.append(notice)

    def _read(self, who: str, message: Any) -> None:
        if len(message) == 2:
            ballot, vote = message
            self.links[who].unanswered.remove(ballot)
            ballot.answer(0, vote)
        else:
            self.machines[who].received(0, message)

    def wrong(self) -> str | None:
        """The flaw of this state."""
        if sum(tenure.held for tenure in self.tenures.values()) > 1:
            return "two holders"
        if self.flaw:
            return self.flaw
        known = self._known_ids()
        if {each.id for each in self.state.holds} - known or {each.id for each in self.state.queue} - known:
            return "an orphan"
        under_way = any(link.out or link.inbox or link.unanswered for link in self.links.values())
        if len(self.done) < len(self.links) or under_way:
            return None
        left = any(each.under_way or len(each.holds) or each.tickets.all() for each in self.machines.values())
        return "something is left" if left else None

    def _known_ids(self) -> set[str]:
        """Of holds, of claims, and of ops under way."""
        known = {hold.op.id for each in self.machines.values() for hold in each.holds.of(NAME)}
        for link in self.links.values():
            known.update(op.id for op, _ in link.out)
            known.update(ballot.op.id for ballot in link.unanswered)
        attempts = [each._attempt for each in self.calls.values()]  # noqa: SLF001 - there is no other way to it
        return known | {each.op.id for each in attempts if each is not None and each.op is not None}

    def good(self) -> bool:
        """Both are done; or one waits for a timer, and no more may fire."""
        if len(self.done) == len(self.links):
            return True
        waits = any(self.cores[letter].clock.next() is not None for letter in self.calls)
        return waits and not self.timers


def _forget(call: Acquisition) -> None:
    """In the place of the undo: the rule is taken out."""
    if call._attempt is not None:  # noqa: SLF001
        call._attempt.use_new_id()  # noqa: SLF001


class Place:
    """A state: the way to it, and what it is. States with the same fingerprint are the same."""

    def __init__(self, world: World, path: tuple[tuple[str, str], ...]) -> None:
        self.path = path
        self.choices = tuple(world.choices())
        self.wrong = world.wrong()
        self.good = world.good()
        self._picture = world.fingerprint()

    def __hash__(self) -> int:
        return hash(self._picture)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self._picture == other._picture


class Shipped:
    """The model of a scene."""

    def __init__(self, scene: Scene, without: Rule | None = None) -> None:
        self.scene = scene
        self.without = without

    def start(self) -> Place:
        return self._after(())

    def steps(self, place: Place) -> Iterator[Step[Place]]:
        for who, what, whim in place.choices:
            yield Step(who, what, self._after((*place.path, (who, what))), whim)

    def _after(self, path: tuple[tuple[str, str], ...]) -> Place:
        """The state after these steps. They are done once more, since a machine cannot be copied."""
        world = World(self.scene, self.without)
        for who, what in path:
            world.do(who, what)
        return Place(world, path)

    def wrong(self, place: Place) -> str | None:
        return place.wrong

    def good(self, place: Place) -> bool:
        return place.good


def scene(name: str, without: Rule | None = None) -> Shipped:
    """The model of a scene."""
    return Shipped(SCENES[name], without)
