"""The shipped client, explored: machines of `asynclock/protocol` over nodes that are the shipped `decide`.

The other models of this folder write the client once more, and smaller. Here nothing is written again: the clients are
`Machine`, `Acquisition` and `Adoption`, told by an explorer what an event loop would tell them. What a node keeps of
undelivered releases is `stores/redis/pending.py`. The explorer decides the order: which message arrives next, when a
timer fires, when a caller wakes, and what goes wrong.

A client has one connection to each node. Its ops arrive in order, the replies and notices come back in order, and both
may be late. When a connection breaks, the ops under way have failed, and may have been carried out. Those that the node
has not read may still be read, at any later moment.

Time stands still, except that the next timer of a client may fire while it has nothing under way. Only so many timers
may fire (`timers`); a state in which a client waits for one more is where a walk ends.

The flaws:
    two holders             two callers have tenures that exclude each other
    no majority has it      a caller has a tenure, and less than a majority of the nodes have its hold
    a token did not rise    the token of an exclusive tenure is not above the tokens before it
    an orphan               a node has a hold or a ticket of an id that no client knows, and no op of it is under way
    a free name             nobody has any name of a caller that waits, and nothing is under way or has gone wrong
    a free place            the first waiter of a queue could enter, and nothing is under way or has gone wrong
    overtaken               a fair lock went to a later waiter (`queues.py`)
    a place changed         a ticket of a fair lock came back in another place
    something is left       all callers have ended, and a machine has a claim, a hold or a ticket
    dead end                a caller that is not served, and waits for no timer
    no progress             nothing goes wrong any more, all timers fire and all messages arrive: a caller still waits

Where a scene has timers, a walk of the explorer may end while callers wait for one more. From there the world goes on
in one order, which is fair to all (`World.end_fairly`). Where a scene has none, its messages alone serve all callers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._errors import LockError
from asynclock._options import ClientSettings, LockSettings
from asynclock.locks.multi import Multi
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.fingerprint import fingerprint
from asynclock.protocol.handover import Adoption, handle_of, parse_handle
from asynclock.protocol.hold import Tenure
from asynclock.protocol.machine import Machine, end_unwanted
from asynclock.protocol.terms import Terms
from asynclock.protocol.watchdog import LoopLag
from asynclock.quorum.ballot import WON
from asynclock.quorum.quorum import Quorum
from asynclock.rules.model import EXTEND, ID_LENGTH, RELEASE, TIMED, Notice, Op, Part, State
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.deciding import copy_of, decided, keys_of
from asynclock.stores.redis.pending import PendingReleases
from spec.explorer import Step
from spec.queues import could_enter, parts_of, queues_of, rules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asynclock.protocol.machine import Claim
    from asynclock.rules.model import Kind

WALL = 1_700_000_000.0
LEASE = 30.0
SOON = 2.5
"""Seconds. A pause after split votes is shorter; the renewal of a ticket comes later."""
UNKNOWN_SCRIPT = "NOSCRIPT"
FAULTS = ("cuts", "overdue", "gives_up", "closes", "restarts", "forgets")
"""Of a scene."""
FIRES = "a timer fires"
NO_PROGRESS = "no progress"
FAIR_STEPS = 3_000
"""From any state all callers are served within so many steps, if nothing goes wrong any more: 941 are the most of
5,900 walks."""
SHOWN = 100
"""Of these."""


class Rule(StrEnum):
    """The rules of the client that can be taken out."""

    LEAVE = "a client that gives up, or whose connection was lost, takes back what it sent"
    GIVE_BACK = "what came for a caller that was cancelled before it woke is given back"
    PENDING = "a release that did not reach its node is sent again"
    TOMBSTONE = "it leaves a tombstone, since its acquire may be read later"


BREAKS = {
    Rule.LEAVE: ("gives up", "an orphan"),
    Rule.GIVE_BACK: ("gives up", "something is left"),
    Rule.PENDING: ("lost connection, local", "an orphan"),
    Rule.TOMBSTONE: ("lost connection, local", "an orphan"),
}
"""For each rule: the scene that fails without it, and the flaw."""


class Want(NamedTuple):
    """What one caller does: it acquires, once or more often, and ends each tenure."""

    client: str
    kind: Kind = MUTEX
    entries: int = 1  # of a reentrant lock
    timeout: float | None = None
    ends: str = "releases"  # or "detaches"
    adopts: bool = False  # the hold that another caller has detached
    settings: LockSettings = LockSettings(lease=LEASE)
    done_for: float = 0.0  # as `once`
    times: int = 1  # how often it does all this


class Scene(NamedTuple):
    """The part that one walk explores."""

    wants: tuple[Want, ...] = (Want("a"), Want("b"))
    nodes: int = 1
    cuts: int = 0  # how many connections may break
    overdue: int = 0  # how many ops may fail before their reply comes
    gives_up: int = 0  # how many calls may be cancelled
    closes: int = 0  # how many clients may close
    restarts: int = 0  # how many servers may forget all and restart
    forgets: int = 0  # how often a server may not know a script: the client sends the op again
    timers: int = 0  # how many timers may fire
    hasty: bool = False  # a timer may also fire while its client has something under way, and each op takes time


BOTH = Multi([Part("x", MUTEX), Part("y", MUTEX)])
TWO_TASKS = (Want("a"), Want("a"))
LOCAL = (Want("a"), Want("a"), Want("b"))
SHARING = (Want("a", READ), Want("b", WRITE), Want("c", READ))
IN_ORDER = tuple(Want(letter, FAIR) for letter in "abc")
PERMITS = tuple(Want(letter, Semaphore(2)) for letter in "abc")
NESTED = (Want("a", entries=2), Want("b"))
HANDED = (Want("a", ends="detaches"), Want("b", adopts=True))
ONCE = (Want("a", timeout=0, done_for=60.0), Want("b", timeout=0, done_for=60.0))
PLAIN = tuple(Want(letter, settings=LockSettings(lease=LEASE, fencing=False)) for letter in "ab")

SCENES = {
    "gives up": Scene(gives_up=1),
    "handover": Scene(HANDED, gives_up=1),
    "once": Scene(ONCE, gives_up=1),
}
"""These take a second each."""

LARGE = {
    "lost connection, local": Scene(TWO_TASKS, cuts=1, timers=1),
    "reentrant": Scene(NESTED, gives_up=1),
    "handover, lost connection": Scene(HANDED, cuts=1, timers=2),
    "lost connection": Scene(cuts=1, timers=1),
    "late reply": Scene(overdue=1, timers=1),
    "renewals": Scene(timers=3),
    "gives up, local": Scene(LOCAL, gives_up=1),
    "closes": Scene(LOCAL, closes=1),
    "fair": Scene(IN_ORDER, gives_up=1),
    "read-write": Scene(SHARING, gives_up=1),
    "read-write, lost connection": Scene(SHARING[:2], cuts=1, timers=1),
    "semaphore": Scene(PERMITS, gives_up=1),
    "multi": Scene((Want("a", BOTH), Want("b", BOTH)), gives_up=1, timers=1),
    "multi, lost connection": Scene((Want("a", BOTH), Want("b")), cuts=1, timers=1),
    "once, lost connection": Scene(ONCE, cuts=1, timers=1),
    "plain": Scene(PLAIN, gives_up=1, timers=1),
}
"""These take some ten seconds each. `python -m spec` explores them, and the tests do not."""


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
        self._ahead = world.random() * 8.0 - 4.0  # of the time of the servers; 0 in a walk through all states
        self.timers: list[Timer] = []

    def now(self) -> float:
        return self._world.time

    def wall(self) -> float:
        return WALL + self._world.time + self._ahead

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


class Task:
    """The task of a caller."""

    def done(self) -> bool:
        return False


class Silent:
    """Nobody listens to the events."""

    active = ()

    def tell(self, event: object) -> None: ...


class Core:
    """The outside of one machine (`asynclock/protocol/core.py`)."""

    closed = forked = False
    observers = Silent()
    quorum: Any

    def __init__(self, letter: str, world: World) -> None:
        self.settings = ClientSettings()
        self.clock: Any = Clock(world)
        self.own_clock = self.clock  # of the program, for the rules that `simulation` takes out
        self.calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []  # of the next turn
        self.letter = letter
        self.world = world
        self._ids = 0
        nodes: Any = [Node(letter, index, world) for index in range(world.scene.nodes)]
        self.quorum = Quorum(nodes, self.clock, self.later)

    def within(self, settings: LockSettings) -> float:
        return settings.lease / 10

    def random(self) -> float:
        return self.world.random()

    def new_id(self, seed: int, metadata: str, mode: str = "") -> str:
        self._ids += 1
        return f"{self.letter * 12}{self._ids:020x}|{mode}{seed}|1|host|{metadata}"

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


class Quiet:
    """The handler of a release that is sent once more. Nobody waits for its reply."""

    def __init__(self, op: Op, sent: float) -> None:
        self.op = op
        self.sent = sent

    def answer(self, index: int, vote: object) -> None: ...

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None: ...


class Node:
    """A node, as one client sees it. With its connection."""

    def __init__(self, letter: str, index: int, world: World) -> None:
        self.label = f"node {index}"
        self.listens = True
        self.error: Exception | None = None
        self.pending = PendingReleases()
        self.out: list[tuple[Op, Any]] = []  # on its way to the node, each with its handler
        self.inbox: list[tuple[Any, object] | Notice] = []  # on its way back
        self.unanswered: list[Any] = []  # the handlers of what was carried out, with the reply on its way
        self._index = index
        self._world = world
        self.lost_at = -1.0

    def send(self, op: Op, handler: Any) -> None:
        now = self._world.time
        if self.error is not None:
            if op.verb is RELEASE and op.since <= self.lost_at:
                self.pending.add(op, now, now)
            handler.fail(self._index, self.error, maybe=False)
            return
        if op.verb is not RELEASE and self._world.casts_no_vote(self._index):
            if op.verb is EXTEND:  # the server may have the key, and must keep it
                self.out.append((copy_of(op), Quiet(op, now)))
            handler.fail(self._index, ConnectionError("restarted a short while ago"), maybe=False)
            return
        wire = copy_of(op)  # as it is now: its owner may change it
        if op.verb is RELEASE:
            op.sent = handler.sent
            self.pending.sent.append(op)
            wire.tombstone = wire.tombstone or op.id in self.pending.unanswered
        self.out.append((wire, handler))

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way."""
        return not (self.out or self.inbox or self.unanswered)

    def cut(self) -> list[Op]:
        """The connection breaks. Returns what the node has not read."""
        now, handlers = self._world.time, [*self.unanswered, *(handler for _, handler in self.out)]
        unread = [op for op, _ in self.out]
        self.out, self.inbox, self.unanswered = [], [], []
        self.pending.cut_off(handlers, now, now)
        self.error, self.listens, self.lost_at = ConnectionError("lost"), False, now
        for handler in handlers:
            handler.fail(self._index, self.error, maybe=True)
        return unread

    def connect(self) -> None:
        """It is there again. It gets the pending releases first."""
        self.error, self.listens = None, True
        for release in self.pending.drain(self._world.time, 100):
            self.out.append((copy_of(release), Quiet(release, self._world.time)))

    def known_ids(self) -> set[str]:
        """Of ops under way, and of releases that will be sent."""
        ops = [*(op for op, _ in self.out), *(handler.op for handler in self.unanswered)]
        ids = {op.id for op in ops} | {op.queueing.waiter for op in ops}  # also the hold that an op adopts
        return ids | set(self.pending._releases)  # noqa: SLF001 - there is no other way to it


# -- the world ---------------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """A task that uses a lock."""

    number: int
    want: Want
    task: Task = field(default_factory=Task)
    claim: Claim | None = None
    tenures: list[Tenure] = field(default_factory=list)
    entered: int = 0
    times: int = 0  # how often it has ended its tenures
    extending: Any = None  # the round before a detach
    ended: bool = False

    @property
    def name(self) -> str:
        return f"{self.want.client}{self.number}"

    @property
    def wakes(self) -> bool:
        return self.claim is not None and self.claim.future.done()


class World:
    """The clients, with their callers, and the nodes."""

    def __init__(self, scene: Scene, without: Rule | None = None, random: Callable[[], float] = lambda: 0.5) -> None:
        self.scene = scene
        self.random = random
        self.time = 1_000.0
        self.states: list[dict[str, State]] = [{} for _ in range(scene.nodes)]
        self.restarted = [-math.inf] * scene.nodes  # when
        self.late: list[tuple[int, list[Op], float]] = []  # of broken connections: what each node has not read; until
        self.left = scene._asdict()  # how much may still go wrong
        self.cores: dict[str, Core] = {}
        for want in scene.wants:
            if want.client not in self.cores:
                self.cores[want.client] = Core(want.client, self)
        self.machines = {letter: Machine(core, LoopLag(), scene.nodes) for letter, core in self.cores.items()}
        self.callers = [Caller(number, want) for number, want in enumerate(scene.wants)]
        self.handles: list[str] = []
        self.excused: dict[str, None] = {}  # ids that may stay at a minority for one lease (docs/evidence.md)
        self.top: dict[str, int] = {}
        self.flaw = ""
        self.calm = True  # nothing has gone wrong
        self._ticks = 0  # where time does not stand still: a server is at no moment twice
        self._without = without
        self._rules = rules_of(each.kind for each in scene.wants)
        self._queues = queues_of(self._rules) if scene.nodes == 1 else {}  # nothing has gone wrong there yet
        self._is_fenced = all(each.settings.fencing for each in scene.wants)

    def fingerprint(self) -> tuple[object, ...]:
        inside = (
            self.machines, self.callers, self.states, self.late, self.left, self.handles, self.top, self.flaw,
            self.calm, self.time, self.restarted, [core.closed for core in self.cores.values()],
            [[each.out, each.inbox, each.unanswered, each.pending, each.error is None, each.lost_at]
             for each in self._nodes()],
            [[(each.when, each.call) for each in core.clock.timers if each.call] for core in self.cores.values()],
        )  # fmt: skip
        settings = [core.settings for core in self.cores.values()]
        clocks = [core.clock for core in self.cores.values()]
        kinds = [each.kind for each in self.scene.wants]
        return fingerprint(
            inside, [self, *self.cores.values(), *self._nodes(), *settings, *clocks, *kinds, *self.scene.wants]
        )

    def _nodes(self) -> list[Node]:
        return [node for core in self.cores.values() for node in core.quorum.nodes]

    # -- the next steps ------------------------------------------------------------------------------------------

    def choices(self) -> Iterator[tuple[str, str, bool]]:
        """The next steps: who, what, and whether it may also not happen."""
        for letter, core in self.cores.items():
            for index, node in enumerate(core.quorum.nodes):
                if node.out:
                    yield letter, f"node {index} reads", False
                if node.inbox:
                    yield letter, f"reads of node {index}", False
                if not core.closed:
                    yield from self._troubles(letter, index, node)
            if self._may_fire(letter):
                yield letter, FIRES, False
            if self.left["closes"] and not core.closed:
                yield letter, "closes", True
        yield from self._choices_of_servers()
        for caller in self.callers:
            if not caller.ended:
                yield from self._choices_of(caller)

    def _choices_of_servers(self) -> Iterator[tuple[str, str, bool]]:
        for number, (index, _, until) in enumerate(self.late):
            if self.time <= until:
                yield "late", f"node {index} reads of connection {number}", True
        if self.left["restarts"]:
            for index in range(self.scene.nodes):
                yield "server", f"{index} restarts", True

    def _troubles(self, letter: str, index: int, node: Node) -> Iterator[tuple[str, str, bool]]:
        """With a connection."""
        if node.error is not None:
            yield letter, f"connects to node {index}", False
        if self.left["cuts"] and not node.quiet:
            yield letter, f"loses node {index}", True
        if self.left["overdue"] and node.unanswered:
            yield letter, f"has no reply of node {index} in time", True
        if self.left["forgets"] and node.out and not node.out[0][0].tombstone:  # that one is sent with the script
            yield letter, f"node {index} does not know the script", True

    def _choices_of(self, caller: Caller) -> Iterator[tuple[str, str, bool]]:
        if caller.claim is not None:
            if caller.wakes:
                yield caller.name, "wakes", False
            if self.left["gives_up"]:
                yield caller.name, "gives up", True
        elif caller.extending is None:
            if caller.entered < caller.want.entries and (self.handles or not caller.want.adopts):
                yield caller.name, "adopts" if caller.want.adopts else "acquires", False
            if caller.tenures and caller.entered == caller.want.entries:
                yield caller.name, caller.want.ends, False

    def _may_fire(self, letter: str) -> bool:
        core = self.cores[letter]
        if not self.left["timers"] or core.closed or core.clock.next() is None:
            return False
        return self.scene.hasty or all(node.quiet and node.error is None for node in core.quorum.nodes)

    # -- one step ------------------------------------------------------------------------------------------------

    def do(self, who: str, what: str) -> None:
        """Do one step, and all that it leaves for the next turn."""
        if who == "late":
            self._read_late(int(what.rpartition(" ")[2]))
        elif who == "server":
            self._restart(int(what.partition(" ")[0]))
        elif who in self.cores:
            self._do(self.cores[who], self.machines[who], what)
        else:
            self._call(next(each for each in self.callers if each.name == who), what)
        self._settle()

    def _do(self, core: Core, machine: Machine, what: str) -> None:
        if what == FIRES:
            self._fire(core)
            return
        if what == "closes":
            self._close(core, machine)
            return
        index = next(int(word) for word in what.split() if word.isdigit())
        node = core.quorum.nodes[index]
        if what.endswith("reads"):
            op, handler = node.out.pop(0)
            self._carry_out(index, op, handler, node)
        elif what.startswith("reads"):
            self._read(index, machine, node)
        elif what.endswith("script"):
            self.left["forgets"] -= 1
            node.unanswered.append(node.out[0][1])
            node.inbox.append((node.out.pop(0)[1], UNKNOWN_SCRIPT))
        elif what.startswith("connects"):
            node.connect()
            machine.connected(True)
        elif what.startswith("loses"):
            self.left["cuts"] -= 1
            self._goes_wrong()
            if (
                unread := node.cut()
            ) and self._is_fenced:  # a plain SET that comes late takes the name (docs/safety.md)
                self.late.append((index, unread, self.time + LEASE))
                self.excused |= {op.queueing.waiter: None for op in unread if op.queueing.number and op.queueing.waiter}
            if self._without is Rule.PENDING:
                node.pending._releases.clear()  # noqa: SLF001
        else:
            self.left["overdue"] -= 1
            self._goes_wrong()
            node.unanswered[0].fail(index, TimeoutError("late"), maybe=True)

    def _goes_wrong(self) -> None:
        self.calm = False
        self._queues = {}  # a waiter may lose its place

    def _call(self, caller: Caller, what: str) -> None:
        """A caller does something."""
        want, machine = caller.want, self.machines[caller.want.client]
        match what:
            case "acquires":
                owner = want.client if want.entries > 1 else None
                terms = Terms(_name(want.kind), want.kind, want.settings, caller.task, want.timeout, owner)
                give_up = self.time + want.timeout if want.timeout else math.inf
                self._start(caller, Acquisition(machine, terms, give_up))
            case "adopts":
                handle = parse_handle(self.handles.pop())
                terms = Terms(handle.name, want.kind, want.settings, caller.task, None)
                self._start(caller, Adoption(machine, terms, handle))
            case "wakes":
                self._wake(caller)
            case "gives up":
                self.left["gives_up"] -= 1
                self._give_up(caller)
            case "detaches":
                caller.extending = caller.tenures[0].hold.extend(LEASE)
            case "releases":
                self._release(caller)

    def _start(self, caller: Caller, claim: Claim) -> None:
        if self._without is Rule.LEAVE:
            made_as = type(claim)
            claim.__class__ = type(made_as.__name__, (made_as,), {"__slots__": (), "_leave": _forget})
        caller.claim = claim
        caller.entered += 1
        try:
            claim.start()
        except LockError:
            claim.abandon()
            self._end(caller)

    def _wake(self, caller: Caller) -> None:
        """As `calls._result_of`."""
        claim, caller.claim = caller.claim, None
        assert claim is not None  # noqa: S101 - the choice
        core = self.cores[caller.want.client]
        if isinstance(claim.future.exception(), BaseException):
            claim.abandon()
            self._end(caller)
            return
        result = claim.take()
        if core.closed or (isinstance(result, Tenure) and result.ended_early):
            end_unwanted(result)
            caller.entered -= 1
            if core.closed:
                self._end(caller)
            else:
                self._start(caller, claim.again())
        elif isinstance(result, Tenure):
            self._enter(caller, result)
        else:
            self._end(caller)

    def _enter(self, caller: Caller, tenure: Tenure) -> None:
        caller.tenures.append(tenure)
        again = len(caller.tenures) > 1 or caller.want.adopts  # with the token that the hold has
        if not again and caller.want.settings.fencing:
            for part in parts_of(caller.want.kind):
                exclusive = not part.kind.shared or part.kind is WRITE
                if exclusive and tenure.fence <= self.top.get(part.name, 0):
                    self.flaw = "a token did not rise"
        for name in tenure.hold.names:
            self.top[name] = max(self.top.get(name, 0), tenure.fence)

    def _give_up(self, caller: Caller) -> None:
        claim, caller.claim = caller.claim, None
        assert claim is not None  # noqa: S101 - the choice
        if self._without is not Rule.GIVE_BACK or not claim.future.done():
            claim.abandon()
        for tenure in caller.tenures:
            tenure.hold.end(tenure)
        self._end(caller)

    def _release(self, caller: Caller) -> None:
        tenure = caller.tenures.pop()
        if caller.want.done_for and tenure.held:
            tenure.mark_done(caller.want.done_for)
        tenure.hold.end(tenure)
        if not caller.tenures:
            self._again(caller)

    def _again(self, caller: Caller) -> None:
        """It has ended its tenures."""
        caller.times += 1
        caller.entered = 0
        caller.ended = caller.times >= caller.want.times

    def _end(self, caller: Caller) -> None:
        caller.tenures = []
        caller.ended = True

    def _fire(self, core: Core) -> None:
        self.left["timers"] -= 1
        self.calm = self.calm and all(node.quiet for node in self._nodes())  # else a message takes longer than a pause
        timer = core.clock.next()
        self.time = max(self.time, timer.when)
        call_now, timer.call = timer.call, None
        call_now()

    def _close(self, core: Core, machine: Machine) -> None:
        """As `Session.aclose`. What is under way may still arrive."""
        self.left["closes"] -= 1
        self._goes_wrong()
        core.closed = True
        machine.begin_close()
        for hold in machine.holds.in_slices():
            if hold is not None:
                machine.close_hold(hold)
        machine.watchdog.stop()
        machine.holds.done_marks.stop()
        for claim in list(machine.under_way):
            claim.close()
        for caller in self.callers:
            if caller.want.client == core.letter and caller.claim is None:
                # One that was lost before, as by max_hold, is released at the end of its block: it stays for its lease.
                self.excused |= {each.hold.op.id: None for each in caller.tenures if each.loss not in (None, "closed")}
                self._end(caller)

    def _settle(self) -> None:
        """The next turns of all clients, and the rounds before a detach."""
        for core in self.cores.values():
            while core.calls:
                call, args = core.calls.pop(0)
                call(*args)
        for caller in self.callers:
            if caller.extending is not None and caller.extending.outcome is not None:
                ballot, caller.extending = caller.extending, None
                if caller.ended:
                    continue
                tenure = caller.tenures[0]
                if ballot.outcome is WON and tenure.held:
                    self.handles.append(handle_of(tenure.hold.op, tenure.hold.last_fence))
                if self.scene.nodes > 1:
                    self.excused[tenure.hold.op.id] = None
                    tenure.hold.detach(tenure)
                    self._end(caller)
                else:
                    self._release(caller)
                self._settle()

    # -- the nodes -----------------------------------------------------------------------------------------------

    def _carry_out(self, index: int, op: Op, handler: Any, node: Node) -> None:
        """A node carries an op out; its reply and its notices are on their way."""
        vote = self._decide(index, op)
        node.unanswered.append(handler)
        node.inbox.append((handler, vote))

    def _read_late(self, number: int) -> None:
        index, ops, _ = self.late[number]
        self._decide(index, ops.pop(0))
        if not ops:
            del self.late[number]

    def _restart(self, index: int) -> None:
        """A server forgets all. Its connections break, and what it has not read is lost."""
        self.left["restarts"] -= 1
        self._goes_wrong()
        self.states[index] = {}
        self.restarted[index] = self.time
        self.late = [each for each in self.late if each[0] != index]
        for core in self.cores.values():
            node = core.quorum.nodes[index]
            if node.error is None and not core.closed:
                node.cut()

    def casts_no_vote(self, index: int) -> bool:
        """The quarantine of a server, as each client knows it (`spec/restart.py` explores how it does)."""
        return self.scene.nodes > 1 and self.time < self.restarted[index] + LEASE + 1

    def _decide(self, index: int, op: Op) -> object:
        if self._without is Rule.TOMBSTONE:
            op.tombstone = False
        states, keys = self.states[index], keys_of("", op)
        before = [states.get(key, State()) for key in keys]
        self._ticks += self.scene.hasty
        now = WALL + self.time + 1e-6 * self._ticks
        listens = partial(self._listens, index)
        change, vote = decided(op, before, now, listens)
        states.update(zip(keys, change.states, strict=True))
        for key in self._queues.keys() & states.keys() & {*keys}:
            was = before[keys.index(key)]
            self.flaw = self.flaw or self._queues[key].decided(op, was, states[key], now, listens) or ""
        for notice in change.notices:
            self.cores[notice.id[0]].quorum.nodes[index].inbox.append(notice)
        return vote

    def _listens(self, index: int, tag: str) -> bool:
        node: Node = self.cores[tag[0]].quorum.nodes[index]
        return node.listens and not self.cores[tag[0]].closed

    def _read(self, index: int, machine: Machine, node: Node) -> None:
        message: Any = node.inbox.pop(0)
        if isinstance(message, Notice):
            machine.received(index, message)
        else:
            handler, vote = message
            node.unanswered.remove(handler)
            if vote is not UNKNOWN_SCRIPT:
                handler.answer(index, vote)
            elif handler.op.revoked:
                handler.fail(index, LookupError("NOSCRIPT"), maybe=False)
            else:
                node.out.append((copy_of(handler.op), handler))

    # -- what must never be --------------------------------------------------------------------------------------

    def wrong(self) -> str | None:
        """The flaw of this state."""
        return self.flaw or self._wrong_holds() or self._wrong_nodes() or self._wrong_end()

    def _held(self) -> list[tuple[Caller, Tenure]]:
        return [(each, tenure) for each in self.callers for tenure in each.tenures if tenure.held]

    def _wrong_holds(self) -> str | None:
        held = self._held()
        for caller, tenure in held:
            for other, another in held:
                if tenure.hold is not another.hold and set(tenure.hold.names) & set(another.hold.names):
                    kinds = caller.want.kind, other.want.kind
                    if not all(kind is READ or isinstance(kind, Semaphore) for kind in kinds):
                        return "two holders"
            if isinstance(caller.want.kind, Semaphore) and len(held) > caller.want.kind.slots:
                return "two holders"
            has = [self.casts_no_vote(i) or self._has(i, tenure) for i in range(self.scene.nodes)]
            if sum(has) <= self.scene.nodes // 2:
                return "no majority has it"
        return None

    def _has(self, index: int, tenure: Tenure) -> bool:
        """Whether a node has the hold, under each of its names, where its id may have a mode."""
        own = tenure.hold.op.id[:ID_LENGTH]
        return all(
            any(each.id[:ID_LENGTH] == own for each in self._state(index, name).holds) for name in tenure.hold.names
        )

    def _state(self, index: int, name: str) -> State:
        return self.states[index].get(name, State()).at(WALL + self.time)

    def _wrong_nodes(self) -> str | None:
        known, found = self._known_ids(), set[str]()
        for index, states in enumerate(self.states):
            for name in states:
                state = self._state(index, name)
                found |= {each.id[:ID_LENGTH] for each in state.queue}
                found |= {each.id[:ID_LENGTH] for each in state.holds if each.id not in TIMED}
        if found - {each[:ID_LENGTH] for each in known}:
            return "an orphan"
        if not self.calm or self._is_late() or not all(node.quiet for node in self._nodes()):
            return None
        if any(each.claim and not each.wakes and self._could_have(each) for each in self.callers):
            return "a free name"
        return "a free place" if self.scene.nodes == 1 and any(map(self._has_place, self._rules)) else None

    def _could_have(self, caller: Caller) -> bool:
        """Whether nobody has any of the names for which it waits. Over several nodes those who wait for one of them may
        try again a moment after their votes were split."""
        names = {part.name for part in parts_of(caller.want.kind)}
        if any(self._state(index, name).holds for index in range(self.scene.nodes) for name in names):
            return False
        waits = [each for each in self.callers if each.claim is not None and not each.wakes]
        beside = [each for each in waits if names & {part.name for part in parts_of(each.want.kind)}]
        timers = [self.cores[each.want.client].clock.next() for each in beside]
        tries_soon = any(timer is not None and timer.when < self.time + SOON for timer in timers)
        return self.scene.nodes == 1 or not tries_soon

    def _has_place(self, name: str) -> bool:
        """Whether somebody waits who could enter. Those who have been granted, and have not woken yet, wait no more."""
        return could_enter(self._rules[name][0], self._state(0, name), WALL + self.time, partial(self._listens, 0))

    def _is_late(self) -> bool:
        """Whether a timer is overdue: a ticket may have expired before its owner has renewed it."""
        timers = [core.clock.next() for core in self.cores.values()]
        return any(timer is not None and timer.when < self.time for timer in timers)

    def _wrong_end(self) -> str | None:
        if not all(each.ended for each in self.callers) or not all(node.quiet for node in self._nodes()):
            return None
        if any(each.under_way or len(each.holds) or each.tickets.all() for each in self.machines.values()):
            return "something is left"
        return None

    def _known_ids(self) -> set[str]:
        """Of holds, of claims, of handles, and of ops under way."""
        known = {parse_handle(each).id for each in self.handles} | set(self.excused)
        known |= {hold.op.id for each in self.machines.values() for hold in each.holds.in_slices() if hold is not None}
        for node in self._nodes():
            known |= node.known_ids()
        for caller in self.callers:
            known |= {tenure.hold.op.id for tenure in caller.tenures}
            result = None if caller.claim is None else caller.claim._result  # noqa: SLF001 - it has not woken yet
            known |= {result.hold.op.id} if isinstance(result, Tenure) else set()
        for machine in self.machines.values():
            for claim in machine.under_way:
                known |= _ids_of(claim)
        return known

    def served(self) -> bool:
        """Whether all have ended, but for those that wait for a handle that nobody has made."""
        waits = [each for each in self.callers if not each.ended]
        return all(each.want.adopts and not each.entered for each in waits)

    def end_fairly(self, trace: list[tuple[str, str]]) -> str | None:
        """From now on nothing goes wrong, and all timers fire, each once nothing else is to happen. The actor that has
        done nothing for longest comes next. Adds the steps to the trace. Returns the flaw: a wrong state, or a caller
        that is not served; then the trace has the first steps only, since the others repeat them."""
        begin = len(trace)
        self.left |= dict.fromkeys(FAULTS, 0) | {"timers": FAIR_STEPS}
        done: dict[tuple[str, str], int] = {}
        for number in range(FAIR_STEPS):
            must = [(who, what) for who, what, whim in self.choices() if not whim]
            soon = [each for each in must if each[1] != FIRES]
            if not must:
                break
            if soon:
                step = min(soon, key=lambda each: done.get(each, -1))
            else:
                step = min(must, key=lambda each: self.cores[each[0]].clock.next().when)
            done[step] = number
            trace.append(step)
            self.do(*step)
            if (what := self.wrong()) is not None:
                return what
        if self.served():
            return None
        del trace[begin + SHOWN :]
        return NO_PROGRESS


def _name(kind: Kind) -> str:
    return ", ".join(part.name for part in kind.parts) or "x"


def _ids_of(claim: Any) -> set[str]:
    """The ids that a claim may have at the nodes."""
    if isinstance(claim, Adoption):
        return {claim._op.id, claim._handle.id}  # noqa: SLF001 - there is no other way to them
    rounds, ids = claim._rounds, set[str]()  # noqa: SLF001
    if rounds is not None and rounds.op is not None:
        ids.add(rounds.op.id)
    if rounds is not None and rounds.ticket is not None:
        ids.add(rounds.ticket.id)
    return ids


def _forget(call: Any) -> None:
    """In the place of the undo: the rule is taken out."""
    if call._rounds is not None:  # noqa: SLF001
        call._rounds.use_new_id()  # noqa: SLF001


class Place:
    """A state: the way to it, and what it is. States with the same fingerprint are the same."""

    def __init__(self, world: World, path: tuple[tuple[str, str], ...]) -> None:
        self.path = path
        self.choices = tuple(world.choices())
        self._picture = world.fingerprint()
        self.wrong = world.wrong()
        self.good = world.served()
        is_end = all(whim for _, _, whim in self.choices)
        if is_end and world.scene.timers and not self.good and self.wrong is None:
            self.wrong, self.good = world.end_fairly([]), True

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
    return Shipped((SCENES | LARGE)[name], without)
