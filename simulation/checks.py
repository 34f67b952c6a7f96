"""What is promised, checked in true time. The Judge knows what no client and no server knows: when each thing happened,
and what each node has granted until when."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple, Protocol

from asynclock.rules.model import ADOPT, ID_LENGTH, RELEASE, RESTING_MARK, TAG_LENGTH, TIMED, Verb, parts_of
from asynclock.rules.rwlock import READ

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from weakref import ref

    from asynclock._errors import Reason
    from asynclock.protocol.hold import Tenure
    from asynclock.rules.model import Entry, Op, Part, State
    from simulation.clients import Client
    from simulation.plan import Job, LockPlan
    from simulation.servers import Server
    from simulation.world import World

_TOLD = 0.02
"""A loss is told so many seconds after the end of the lease, at most: the watchdog looks every 0.01 s."""

_OLD = 25.0
"""A token is above those given so many seconds before, also where the counters were lost (docs/safety.md: 20 s)."""

_ROUNDING = 1e-6

_RATES = 0.01
"""The clocks of a client and of a server differ by this share, at most."""


class Flaw(NamedTuple):
    """A promise that was not kept."""

    what: str
    about: str

    def __str__(self) -> str:
        return f"{self.what}: {self.about}"


class Caller(Protocol):
    """A client, of this simulation or of the whole stack."""

    name: str
    closed: bool


class Record(NamedTuple):
    """A tenure that was given to a program."""

    key: str  # the random part of the id of its hold
    client: Client
    tenure: ref[Tenure]
    lock: LockPlan
    job: int
    fence: int
    entered: float  # the true time

    def __str__(self) -> str:
        return f"{self.client.name} (job {self.job}, id {self.key[12:18]}, token {self.fence})"


class Tokens:
    """The tokens of one name that programs have got, in the order of time."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._tops: list[int] = []  # the greatest so far
        self.owners: dict[int, str] = {}  # token -> the hold that has it

    def before(self, time: float) -> int:
        """The greatest that was given before that time."""
        index = bisect_left(self._times, time)
        return self._tops[index - 1] if index else 0

    def add(self, time: float, token: int, key: str) -> None:
        self._times.append(time)
        self._tops.append(max(token, self._tops[-1] if self._tops else 0))
        self.owners[token] = key

    def forget_lately(self, time: float) -> None:
        """Counters were lost: only what was given before that time counts from now on."""
        index = bisect_left(self._times, time)
        del self._times[index:], self._tops[index:]


class Judge:
    """See the module. `flaw` is the first flaw."""

    def __init__(self, world: World, max_lease: float) -> None:
        self.flaw: Flaw | None = None
        self._world = world
        self._max_lease = max_lease
        self._records: dict[Record, None] = {}  # of tenures that may be held
        self._ends: dict[str, list[float]] = {}  # id -> the true time until which each node has granted it
        self._granted_at: dict[str, float] = {}  # id -> when a node had it first
        self._tickets_end: dict[tuple[int, str], float] = {}  # node, id -> the true time at which its ticket ends
        self._tokens: dict[str, Tokens] = {}
        self._written: dict[str, int] = {}  # the protected data: name -> the greatest token of a write
        self._released: set[tuple[int, str]] = set()  # node, id: a release of it was carried out there
        self._broken: set[str] = set()  # ids that an operator has broken
        self._broken_at: dict[str, float] = {}  # name -> when a hold of it was broken last
        self._rests_until: dict[str, float] = {}  # name -> until when nobody enters, for the sake of min_hold
        self._left_alone: set[str] = set()  # ids of holds whose end nobody sends: dropped or detached
        self._released_at: dict[str, float] = {}
        self._done_until: dict[str, float] = {}  # name -> until when no run of `once` may begin
        self._adopted: dict[str, str] = {}  # handle -> the adopter
        self._lost_at = -math.inf  # when counters were lost last, in a plan that is not safe

    @property
    def now(self) -> float:
        return self._world.schedule.now

    @property
    def _safe(self) -> bool:
        return self._world.plan.safe

    def _assumed(self, name: str) -> bool:
        """Whether what docs/safety.md assumes holds for that name now."""
        return self._world.assumptions.hold(name, self.now)

    def have_been_assumed(self, name: str) -> bool:
        """Whether it has held until now."""
        return self._world.assumptions.have_held(name, self.now)

    def fail(self, what: str, about: object) -> None:
        if self.flaw is None:
            self.flaw = Flaw(what, str(about))
            self._world.trace("judge", str(self.flaw))

    def escaped(self, client: Client, error: BaseException) -> None:
        """An error has reached the event loop."""
        if not isinstance(error, Exception):
            raise error
        self.fail("an error escaped", f"{client.name}: {error!r}")

    # -- at the servers ------------------------------------------------------------------------------------------

    def carried_out(
        self, server: Server, op: Op, vote: object, before: Sequence[State], after: Sequence[State]
    ) -> None:
        """A server has carried an op out."""
        now, nodes = server.now(), len(self._world.servers)
        own = (
            {op.id[:ID_LENGTH], op.queueing.waiter[:ID_LENGTH]} if op.verb in (RELEASE, ADOPT) else {op.id[:ID_LENGTH]}
        )
        for old, new in zip(before, after, strict=True):
            if not self._safe and op.queueing.number:
                self._note_ticket(server, op, new)
            self._check_stays_away(server, op, new, now)
            if new.holds is old.holds and op.verb is not Verb.BREAK:
                continue  # as most: a refusal, or the renewal of a ticket
            had, has = _ids(old, now), _ids(new, now)
            for key, entry in has.items():
                ends = self._ends.get(key)
                if ends is None:
                    ends = self._ends[key] = [-math.inf] * nodes
                    self._granted_at[key] = self.now
                if entry.ends is not None:
                    granted = max(server.true_time(entry.ends), self._tickets_end.get((server.index, key), -math.inf))
                    ends[server.index] = max(ends[server.index], granted)
            gone = had.keys() - has.keys()
            if op.verb is Verb.BREAK:
                self._broken |= gone
                self._broken_at[op.name] = self.now
                self._done_until.pop(op.name, None)
                self._rests_until.pop(op.name, None)
            elif gone - own:
                self.fail("another's key was deleted", f"{op!r} of {op.id[12:18]} at {server.label}")
            elif gone and op.verb is RELEASE:
                self._check_not_held(op)
        self._see(op, before, after, now)
        if self._world.tracing:
            self._world.trace(server.label, f"{op.verb.value} {op.name} {op.id[12:18]} of {op.id[:4]}: {vote}")

    def _see(self, op: Op, before: Sequence[State], after: Sequence[State], now: float) -> None:
        """What an acquire may be refused for."""
        self._world.waiting.seen(op, before, after, now)

    def _note_ticket(self, server: Server, op: Op, state: State) -> None:
        """A ticket becomes a hold that ends with it. If the server's clock is stepped forward meanwhile, the hold ends
        early, as docs/safety.md says of a step under a hold: its client cannot know that."""
        key = (op.queueing.waiter or op.id)[:ID_LENGTH]
        for ticket in state.queue:
            if ticket.id[:ID_LENGTH] == key:
                self._tickets_end[server.index, key] = server.true_time(ticket.ends)

    def _check_stays_away(self, server: Server, op: Op, state: State, now: float) -> None:
        """An id is spent by its release: neither its hold nor its ticket comes back. A plain SET looks at no tombstone,
        as docs/safety.md says: one that comes late takes the name for its lease."""
        key = op.id[:ID_LENGTH]
        if (server.index, key) in self._released and key not in self._left_alone:
            if key in _ids(state, now) or any(each.id[:ID_LENGTH] == key for each in state.queue):
                if op.plain:
                    self._left_alone.add(key)
                    return
                self.fail("an id came back after its release", f"{op!r} of {key[12:18]} at {server.label}")
        elif op.verb is RELEASE and not op.queueing.number:
            self._released.add((server.index, key))

    def _check_not_held(self, op: Op) -> None:
        for record, _ in self._held():
            if record.key == op.id[:ID_LENGTH]:
                self.fail("released while held", f"{record} of {op.name}")

    def forgot(self, server: Server) -> None:
        """A server has lost counters."""
        self._released = {each for each in self._released if each[0] != server.index}
        if not self._safe:
            self._lost_at = self.now
            for tokens in self._tokens.values():
                tokens.forget_lately(self.now - _OLD)

    # -- at the clients ------------------------------------------------------------------------------------------

    def entered(self, client: Client, tenure: Tenure, lock: LockPlan, job: int) -> None:
        """A program has got a tenure."""
        key = tenure.hold.op.id[:ID_LENGTH]
        record = Record(key, client, tenure.weak_self, lock, job, tenure.fence, self.now)
        self._world.trace(client.name, f"has {lock.name} as {record}")
        if tenure.held:
            self._check_rested(record)
            for part in lock.parts:
                if self._assumed(part.name) and self.now < self._done_until.get(part.name, -math.inf):
                    self.fail("a run after a run that returned", f"{record} of {part.name}")
        if lock.settings.fencing:
            for part in lock.parts:
                self._check_token(record, part.name, shared=_is_shared(part))
        self._records[record] = None
        self._check_ends(record, tenure)
        self._check_alone()

    def _check_alone(self) -> None:
        """Disjoint: no two holds of a name, unless their kinds admit both. A hold that is passed on inside a process
        has one tenure at a time, but for the tenures of one owner of a reentrant lock. All that are held are compared:
        a hold that was not held for a time, in doubt, may be held again."""
        found: dict[str, list[tuple[Record, Part]]] = {}
        for record, _ in self._held():
            if record.key not in self._broken:
                for part in record.lock.parts:
                    found.setdefault(part.name, []).append((record, part))
        for name, held in found.items():
            if len(held) > 1 and not _admit_each_other(held) and self._assumed(name):
                self.fail("two holders", f"of {name}: " + ", ".join(str(each) for each, _ in held))

    def _check_rested(self, record: Record) -> None:
        """A name stays taken for min_hold after its holder entered."""
        for part in record.lock.parts:
            if self._assumed(part.name) and self.now < self._rests_until.get(part.name, -math.inf):
                self.fail("min_hold was not kept", f"{record} of {part.name}")

    def _check_token(self, record: Record, name: str, *, shared: bool) -> None:
        tokens = self._tokens.setdefault(name, Tokens())
        fence, key = record.fence, record.key
        granted = self._granted_at.get(key, self.now)
        others = tokens.owners.get(fence, key)
        again = record.lock.reentrant and others == key and fence in tokens.owners
        if not shared and fence in tokens.owners and not again:
            self.fail("a token was given twice", f"{record} of {name}")
        lost_between = granted <= self._lost_at
        if not lost_between and fence <= tokens.before(granted - _ROUNDING):
            self.fail("a token did not rise", f"{record} of {name}, after {tokens.before(granted)}")
        in_order = not (shared or again) and key not in self._broken and not self._broken_lately(name)
        if in_order and self.have_been_assumed(name) and fence <= tokens.before(math.inf):
            self.fail("a token did not rise", f"{record} of {name}, after {tokens.before(math.inf)}")
        if not lost_between:
            tokens.add(self.now, fence, key)

    def was_broken(self, key: str) -> bool:
        """Whether an operator has broken the hold with that id."""
        return key in self._broken

    def granted_until(self, key: str) -> float:
        """The true time until which a majority of the nodes has granted the hold with that id."""
        ends = sorted(self._ends.get(key, ()), reverse=True)
        return ends[len(ends) // 2] if ends else -math.inf

    def _broken_lately(self, name: str) -> bool:
        """Whether a hold of that name was broken, and may not have ended for its client: then holds may be given in
        another order than that of their grants."""
        return self.now < self._broken_at.get(name, -math.inf) + self._max_lease + 1.0

    def _check_ends(self, record: Record, tenure: Tenure) -> None:
        """The client takes the hold for its own no longer than the nodes have granted it."""
        hold = tenure.hold
        if not tenure.open or hold.valid_until == -math.inf:
            return
        end = self.granted_until(record.key)
        mine = record.client.clock.true_time(hold.valid_until)
        if mine > end + _ROUNDING:
            self.fail("held past its end", f"{record} of {hold.name}: until {mine:.6f}, granted until {end:.6f}")

    def _held(self) -> Iterator[tuple[Record, Tenure]]:
        """The tenures that are held, by the clocks of their clients."""
        for record in list(self._records):
            tenure = record.tenure()
            if tenure is None or not tenure.open:
                del self._records[record]
            elif tenure.held:
                yield record, tenure

    def look(self) -> None:
        """At all tenures."""
        if not self._records:
            return
        for record in list(self._records):
            tenure = record.tenure()
            if tenure is None or not tenure.open:
                del self._records[record]
                continue
            self._check_ends(record, tenure)
            self._check_max_hold(record, tenure)
            if self._is_overdue(record, tenure):  # a refusal that came just now may have moved its end into the past
                self._world.schedule.at(self.now + _TOLD, self._check_told, record)
        self._check_alone()

    def _check_max_hold(self, record: Record, tenure: Tenure) -> None:
        """By the clock of its client."""
        most = record.lock.settings.max_hold
        if most is not None and tenure.held and self.now > record.entered + most * (1 + _RATES):
            self.fail("held for longer than max_hold", str(record))

    def _check_told(self, record: Record) -> None:
        """The client has had the time to tell a loss."""
        tenure = record.tenure()
        if tenure is not None and record in self._records and self._is_overdue(record, tenure):
            self.fail("a loss was not told in time", f"{record} of {tenure.hold.name}")

    def _is_overdue(self, record: Record, tenure: Tenure) -> bool:
        """Whether it is open, although its loss was to be told by now: its lease has ended, and its loop runs."""
        return tenure.open and self.now > _due(record.client, tenure) + _TOLD and not record.client.closed

    def check_waited(self, client: Caller, job: Job, waited: float, most: float, why: str) -> None:
        """An acquire has ended without a lease, after so many seconds of its client's clock. It does so at the end of
        its timeout, and in an outage also after `most` seconds."""
        least = min(math.inf if job.timeout is None else job.timeout, most)
        if waited < least - _ROUNDING and not client.closed:
            about = f"{client.name}, job {job.number} of {job.lock.name}: {why} after {waited:.3f} s"
            self.fail("given up too soon", about)

    def told(self, client: Client, tenure: Tenure, loss: Reason) -> None:
        """A program is told a loss: that of a lease that has ended by the clock comes in time."""
        due = _due(client, tenure)
        if loss in ("expired", "max_hold") and self.now > due + _TOLD:
            self.fail("a loss was not told in time", f"{tenure.hold.name} of {client.name}: {self.now - due:.3f} s")

    def writes(self, tenure: Tenure) -> None:
        """The program writes to the protected data, which refuses the writes of older tokens."""
        fence = tenure.fence
        if not tenure.terms.settings.fencing:
            return
        self._check_alone()
        for part in parts_of(tenure.terms):
            if _is_shared(part):
                continue
            if fence >= self._written.get(part.name, 0):
                self._written[part.name] = fence
            elif self._assumed(part.name) and not self._broken_lately(part.name):
                self.fail("a write under a lease was refused", f"{part.name}, token {fence}")

    def released(self, tenure: Tenure, lock: LockPlan, entered: float, ends: float = math.inf) -> None:
        """The program ends a tenure that it got at `entered`. Until the servers have the release, its hold, and so the
        rest of the name, ends with the lease, at `ends`."""
        self._released_at[tenure.hold.name] = self.now
        if tenure.held:
            self._rests(tenure, lock, entered, ends, self.now)

    def delivered(self, tenure: Tenure, lock: LockPlan, entered: float, sent: float) -> None:
        """A majority has carried out that release. A break since it was sent has ended the rest."""
        self._rests(tenure, lock, entered, math.inf, sent)

    def _rests(self, tenure: Tenure, lock: LockPlan, entered: float, ends: float, since: float) -> None:
        if not lock.settings.min_hold or lock.reentrant or tenure.hold.op.id[:ID_LENGTH] in self._broken:
            return
        until = min(entered + (1 - 2 * _RATES) * lock.settings.min_hold - 0.01, ends)
        for part in lock.parts:
            if not _is_shared(part) and self._broken_at.get(part.name, -math.inf) <= since:
                self._rests_until[part.name] = until

    def done(self, tenure: Tenure) -> None:
        """A majority knows that a run of `once` has returned. A break since it was sent has ended that."""
        name = tenure.hold.name
        sent = self._released_at[name]
        if self._broken_at.get(name, -math.inf) <= sent:
            self._done_until[name] = sent + 0.99 * tenure.done_for - 0.01

    def dropped(self, tenure: Tenure) -> None:
        self._left_alone.add(tenure.hold.op.id[:ID_LENGTH])

    detached = dropped

    def adopted(self, handle: str, tenure: Tenure) -> None:
        """A program has taken a hold over."""
        key = tenure.hold.op.id[:ID_LENGTH]
        if self._adopted.setdefault(handle, key) != key and self._assumed(tenure.hold.name):
            self.fail("a handle was adopted twice", tenure.hold.name)

    def gone(self, client: Client) -> None:
        """Its process has ended, or it closes."""
        for record in [each for each in self._records if each.client is client]:
            del self._records[record]

    def closed(self, client: Client) -> None:
        """It has closed: nothing of it is left in the process."""
        self._check_idle(client)

    # -- after all has healed ------------------------------------------------------------------------------------

    def waits_too_long(self) -> None:
        """All has healed long ago."""
        waits = ", ".join(f"job {number} of {client.name}" for number, client in self._world.waits.items())
        self.fail("not served", waits or "a task that does not end")

    def nothing_is_left(self) -> None:
        """All tasks have ended, and each node is connected."""
        live = {client.tag for client in self._world.live()}
        for client in self._world.live():
            self._check_idle(client)
        for server in self._world.servers:
            for name, stored in server.states.items():
                state = stored.at(server.now())
                for its_id in (*(each.id for each in state.holds), *(each.id for each in state.queue)):
                    if its_id[:TAG_LENGTH] in live and its_id[:ID_LENGTH] not in self._left_alone:
                        about = f"{its_id[12:18]} of {its_id[:4]} in {name} at {server.label}"
                        self.fail("an id is left at a server", about)

    def _check_idle(self, client: Client) -> None:
        machine = client.machine
        parts = {
            "a claim": machine.under_way, "a hold": machine.holds, "a ticket": machine.tickets.all(),
            "a local queue": machine.queues, "a timer": client.clock.timers,
        }  # fmt: skip
        for what, each in parts.items():
            if each:
                self.fail(f"{what} is left", client.name)

    def nothing_is_stored(self) -> None:
        """All leases have ended."""
        for server in self._world.servers:
            for name, stored in server.states.items():
                state = stored.at(server.now())
                if state.holds or state.queue or state.undone:
                    self.fail("a server keeps what has ended", f"{name} at {server.label}: {state}")


def _due(client: Client, tenure: Tenure) -> float:
    """The true time at which the loss of a tenure is to be told, if it is not renewed. The answer of a node that still
    has it may make up for a refusal, so a refusal is told by the end that the lease had before."""
    promised: float = tenure.hold._promised  # noqa: SLF001 - math.inf: there was no refusal
    ends = tenure.ends if promised == math.inf else max(tenure.ends, min(promised, tenure.until))
    at: float = client.clock.true_time(ends)
    return max(at, client.loop.runs_since)  # math.inf: the loop is stopped


def _is_shared(part: Part) -> bool:
    """Whether several may hold that name in this way."""
    return bool(part.kind.slots) or part.kind.letter == READ.letter


def _admit_each_other(held: Sequence[tuple[Record, Part]]) -> bool:
    """Whether all these may hold one name at the same time."""
    first, part = held[0]
    if part.kind.slots:
        return len({record.key for record, _ in held}) == len(held) <= max(each.kind.slots for _, each in held)
    if all(each.kind.letter == READ.letter for _, each in held):
        return True
    return all(record.key == first.key and record.lock.reentrant for record, _ in held)


def _ids(state: State, now: float) -> dict[str, Entry]:
    """The holds of clients, by the random part of their ids."""
    return {
        each.id[:ID_LENGTH]: each
        for each in state.holds
        if (each.ends is None or each.ends > now) and each.id not in TIMED and each.id[0] != RESTING_MARK
    }
