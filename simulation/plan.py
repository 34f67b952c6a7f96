"""The plan of one run, drawn from a seed: the deployment, the locks, the jobs of the programs, and the faults. A
plan is the whole input of a run: the same plan gives the same run, and a shorter plan may fail in the same way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from asynclock._options import ClientSettings, LockSettings
from asynclock.locks.multi import Multi
from asynclock.rules.model import Part
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore

if TYPE_CHECKING:
    from asynclock.rules.model import Kind

RUNS = 12
"""A seed has so many runs ..."""
SECONDS = 300.0
"""... of so many seconds each: together an hour. What follows until all have ended does not count."""

LONG_RUNS = range(RUNS, RUNS + 4)
"""A seed has these runs as well, which are not made by default ..."""
LONG_SECONDS = 900.0
"""... of so many seconds each: also an hour. Each has as many jobs and faults, so there is more time between them:
leases are renewed more often, and more of what is kept for a time ends."""

HARD_RUNS = range(LONG_RUNS.stop, LONG_RUNS.stop + 1)
"""... and this one, beside the long ones ..."""
HARD_SECONDS = 300.0
"""... of so many seconds, with what `hard.py` adds."""

JOBS = 150
"""Of one run, at least. A job calls two functions or more, unless it is refused."""

FAULTS = (8, 16)
"""Of one run: the least and the greatest number."""

_DIRECTIONS = "to", "from", "both"
"""In which a link is cut, as its client sees it."""


@dataclass(frozen=True)
class LockPlan:
    """A lock, as the jobs use it."""

    name: str
    kind: Kind
    settings: LockSettings
    reentrant: bool = False
    once: float = 0.0

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        rule: Any = self.kind
        return self.kind.parts or (Part(self.name, rule),)


@dataclass(frozen=True)
class ClientPlan:
    """A process, with its clock."""

    rate: float
    offset: float
    wall_offset: float
    timers_first: bool


@dataclass(frozen=True)
class NodePlan:
    """A server, with its clock."""

    rate: float
    offset: float


@dataclass(frozen=True)
class Job:
    """A task of a program: it acquires a lock, works, and ends its tenure."""

    number: int
    at: float
    client: int
    lock: LockPlan
    timeout: float | None
    holds_for: float
    ends_by: str = "release"  # or "drop", or "detach"
    cancelled_after: float | None = None
    extends_by: float | None = None
    depth: int = 0  # so often it enters again
    owner: str = ""  # of a reentrant lock, if several tasks are one owner
    adopters: tuple[tuple[float, int], ...] = ()  # seconds after the detach, and the client
    adoption_cancelled_after: float | None = None
    turns: int = 1  # so often its task does this, at most, one after the other ...
    until: float = 0.0  # ... as long as it begins before that time

    def __str__(self) -> str:
        more = f", cancelled after {self.cancelled_after:.3f} s" if self.cancelled_after is not None else ""
        more += f", {self.turns} times" if self.turns > 1 else ""
        return f"client {self.client} wants {self.lock.name} for {self.holds_for:.3f} s{more}, then {self.ends_by}"

    @property
    def adopted(self) -> Job:
        """What an adopter does."""
        return replace(self, ends_by="release", extends_by=None, cancelled_after=None)


@dataclass(frozen=True)
class Fault:
    """Something goes wrong for a time."""

    at: float
    what: str
    client: int = 0
    node: int = 0
    seconds: float = 0.0
    detail: str = ""
    lock: LockPlan | None = None

    def __str__(self) -> str:
        where = self.lock.name if self.lock is not None else f"client {self.client}, node {self.node}"
        return f"{self.what} {self.detail} ({where}; {self.seconds:.3f} s)"


@dataclass(frozen=True)
class Plan:
    """See the module."""

    seed: str
    safe: bool  # what docs/safety.md assumes holds
    synchronous: bool  # the wall clocks agree, so that tokens rise also where counters are lost
    settings: ClientSettings
    clients: tuple[ClientPlan, ...]
    nodes: tuple[NodePlan, ...]
    locks: tuple[LockPlan, ...]
    delay: float
    new: bool  # the servers were never used
    mute: frozenset[int] = frozenset()  # the nodes that send no notices
    deaf: frozenset[tuple[int, int]] = frozenset()  # client, node: this client gets no notices from that node
    jobs: tuple[Job, ...] = ()
    faults: tuple[Fault, ...] = ()
    seconds: float = SECONDS

    @cached_property
    def longest_lease(self) -> float:
        extended = [job.extends_by for job in self.jobs if job.extends_by is not None]
        return max([*extended, *(lock.settings.lease for lock in self.locks)])


# -- drawing -----------------------------------------------------------------------------------------------------------


def plan_of(seed: int, run: int) -> Plan:
    """The plan number `run` of a seed."""
    if run in HARD_RUNS:
        from simulation.hard import harder  # it uses the classes of this module

        return harder(_Drawing(f"{seed}/{run}", HARD_SECONDS).plan())
    return _Drawing(f"{seed}/{run}", LONG_SECONDS if run in LONG_RUNS else SECONDS).plan()


@dataclass
class _Drawing:
    """Draws one plan."""

    seed: str
    seconds: float
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(f"plan {self.seed}")  # noqa: S311 - the whole is to be repeated

    def plan(self) -> Plan:
        random = self.random
        nodes = random.choice((1, 1, 3, 3, 5))
        self.safe = random.random() < 0.7
        self.nodes, self.clients = nodes, random.randint(2, 4)
        lease = round(random.choice((1.0, 2.0, 3.0, 5.0, 8.0)) * random.uniform(0.9, 1.1), 3)
        max_lease = round(2 * lease + random.uniform(0, 3), 3)
        delay = random.choice((0.0002, 0.001, 0.004, 0.015))
        timeout = None if nodes == 1 or random.random() < 0.6 else round(min(0.2, lease / 4), 3)
        settings = ClientSettings(
            LockSettings(lease=lease), max_lease=max_lease, node_timeout=timeout,
            patience=random.choice((0.5, 2.0, 5.0)), fence_memory=random.choice((60.0, 300.0)),
        )  # fmt: skip
        self.lease, self.max_lease = lease, max_lease
        skew = 0.0 if not self.safe else random.choice((0.0, 0.05, 4.0))
        plan = Plan(
            seed=self.seed,
            safe=self.safe,
            synchronous=not self.safe,
            settings=settings,
            clients=tuple(self._client(skew) for _ in range(self.clients)),
            nodes=tuple(NodePlan(self._rate(), random.uniform(-skew, skew)) for _ in range(nodes)),
            locks=self._with_shared_names(tuple(self._lock(number) for number in range(random.randint(2, 4)))),
            delay=delay,
            new=random.random() < 0.15,
            mute=frozenset(range(nodes)) if random.random() < 0.06 else frozenset(),
            seconds=self.seconds,
        )
        self.locks = plan.locks
        faults = self._faults()
        return replace(plan, jobs=self._jobs([fault.at for fault in faults]), faults=faults)

    def _rate(self) -> float:
        """The drift allowance is 1 % between a client and a server."""
        return self.random.uniform(0.9955, 1.0045)

    def _client(self, skew: float) -> ClientPlan:
        random = self.random
        return ClientPlan(
            self._rate(), random.uniform(0, 1e5), random.uniform(-skew, skew), timers_first=random.random() < 0.3
        )

    def _lock(self, number: int) -> LockPlan:
        random, name = self.random, f"lock{number}"
        lease = round(self.lease * random.choice((1.0, 1.0, 0.6)), 3)
        settings = LockSettings(
            lease=max(lease, 0.9),
            min_hold=round(lease * random.uniform(0.1, 0.9), 3) if random.random() < 0.12 else 0.0,
            max_hold=round(random.uniform(0.5, 2 * lease), 3) if random.random() < 0.15 else None,
            renew=random.random() < 0.9,
            metadata="note" if random.random() < 0.1 else "",
        )
        kinds = (
            "mutex",
            "mutex",
            "mutex",
            "fair",
            "fair",
            "read-write",
            "read-write",
            "semaphore",
            "multi",
            "reentrant",
            "once",
            "plain",
        )
        match random.choice(kinds):
            case "fair":
                return LockPlan(name, FAIR, settings)
            case "read-write":
                return LockPlan(name, WRITE, settings)
            case "semaphore":
                return LockPlan(name, Semaphore(random.randint(2, 3)), settings)
            case "multi":
                parts = [Part(f"{name}{letter}", MUTEX) for letter in "ab"]
                if random.random() < 0.5:
                    parts[1] = Part(f"{name}b", Semaphore(2))
                return LockPlan(f"{name}a, {name}b", Multi(parts), settings)
            case "reentrant":
                return LockPlan(name, MUTEX, replace(settings, max_hold=None), reentrant=True)
            case "once":
                return LockPlan(name, MUTEX, settings, once=round(random.uniform(1.0, self.max_lease), 3))
            case "plain":
                return LockPlan(name, MUTEX, replace(settings, fencing=False, min_hold=0.0))
        return LockPlan(name, MUTEX, settings)

    def _with_shared_names(self, locks: tuple[LockPlan, ...]) -> tuple[LockPlan, ...]:
        """In the long runs a lock of several names often has the name of another lock among them. (A seed that a test
        repeats gives the short run of before: so too below.)"""
        random = Random(f"names {self.seed}")  # noqa: S311 - the whole is to be repeated
        others = [each for each in locks if not each.kind.parts and each.settings.fencing]
        if self.seconds != LONG_SECONDS or not others:
            return locks
        return tuple(self._with_name_of(random.choice(others), each) if each.kind.parts else each for each in locks)

    def _with_name_of(self, other: LockPlan, lock: LockPlan) -> LockPlan:
        random = Random(f"kinds {self.seed} {lock.name}")  # noqa: S311 - as above
        kind: Any = random.choice((READ, WRITE)) if other.kind is WRITE else other.kind
        if random.random() < 0.3:
            return lock
        parts = [Part(other.name, kind), random.choice(lock.parts)]
        return replace(lock, name=", ".join(sorted(each.name for each in parts)), kind=Multi(parts))

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _jobs(self, faults: list[float]) -> tuple[Job, ...]:
        random, times = self.random, list[float]()
        while len(times) < JOBS:
            near = random.choice(faults) if random.random() < 0.5 else random.uniform(0, self.seconds - 1)
            start = min(max(0.0, near + random.gauss(0, 2)), self.seconds - 1)
            times += [start + random.expovariate(4) for _ in range(random.randint(1, 8))]
        jobs = [self._job(number, at) for number, at in enumerate(sorted(times))]
        return tuple(self._more_of(each) for each in jobs + self._crowd(len(jobs)))

    def _more_of(self, job: Job) -> Job:
        """In the long runs an extension may give more than the lease of the lock, and an adoption may be cancelled."""
        random = Random(f"job {job.number} {self.seed}")  # noqa: S311 - as above
        if self.seconds != LONG_SECONDS:
            return job
        if job.extends_by is not None and random.random() < 0.5:
            job = replace(job, extends_by=random.uniform(job.lock.settings.lease, self.max_lease))
        if job.adopters and random.random() < 0.3:
            job = replace(job, adoption_cancelled_after=random.expovariate(random.choice((3, 200))))
        return job

    def _crowd(self, number: int) -> list[Job]:
        """Many tasks of one client want one name at the same moment."""
        random, first = self.random, self._job(number, self.random.uniform(0, self.seconds - 1))
        crowd = replace(first, timeout=None, holds_for=0.0, ends_by="release", cancelled_after=None, extends_by=None)
        return [replace(crowd, number=number + each) for each in range(random.choice((0, 5, 30)))]

    def _job(self, number: int, at: float) -> Job:
        random, lock = self.random, self.random.choice(self.locks)
        if lock.kind is WRITE and random.random() < 0.6:
            lock = replace(lock, kind=READ)
        holds_for = random.choice((0.0, random.expovariate(20), random.expovariate(1), random.expovariate(0.25)))
        timeout = random.choice((None, None, None, 0, random.uniform(0.01, 0.5), random.uniform(0.5, 6)))
        ends_by = random.choices(("release", "drop", "detach"), (20, 1, 2))[0]
        if lock.reentrant or lock.kind.parts:
            ends_by = "release"
        adopters = tuple((random.expovariate(3), self._some_client()) for _ in range(random.choice((0, 1, 1, 2))))
        return Job(
            number, at, self._some_client(), lock, timeout, min(holds_for, 12.0), ends_by,
            cancelled_after=random.expovariate(random.choice((0.5, 3, 200))) if random.random() < 0.2 else None,
            extends_by=random.uniform(0.5, 1.0) * lock.settings.lease if random.random() < 0.1 else None,
            depth=random.choice((0, 1, 2)) if lock.reentrant else 0,
            owner=random.choice(("", "", "owner")) if lock.reentrant else "",
            adopters=adopters if ends_by == "detach" else (),
        )  # fmt: skip

    def _some_client(self) -> int:
        return self.random.randrange(self.clients)

    # -- faults --------------------------------------------------------------------------------------------------

    def _faults(self) -> tuple[Fault, ...]:
        random = self.random
        times = sorted(random.uniform(1, self.seconds - 5) for _ in range(random.randint(*FAULTS)))
        if random.random() < 0.5:  # two at the same moment
            times = sorted([*times, random.choice(times) + random.uniform(0, 1)])
        self._forgot: list[tuple[float, int]] = []
        faults = [self._fault(at) for at in times]
        return tuple(sorted([*faults, *self._beside(faults), *self._alone()], key=lambda each: each.at))

    def _alone(self) -> list[Fault]:
        """A client loses a majority of the nodes for about a lease, while its program runs: another client may get what
        it holds. Only in the long runs: a seed that a test repeats gives the short run of before."""
        random = Random(f"alone {self.seed}")  # noqa: S311 - the whole is to be repeated
        if self.seconds != LONG_SECONDS:
            return []
        return [
            Fault(
                random.uniform(1, self.seconds - 30), "alone", random.randrange(self.clients),
                random.randrange(self.nodes), self.lease * random.uniform(0.3, 1.8), random.choice(_DIRECTIONS)
            )
            for _ in range(random.randint(1, 3))
        ]  # fmt: skip

    def _beside(self, faults: list[Fault]) -> list[Fault]:
        """While a server is about to lose data, another one is often out of reach: then its votes count."""
        random = self.random
        return [
            Fault(fault.at - random.uniform(0, 2), "isolate", node=(fault.node + 1) % self.nodes, seconds=self.lease)
            for fault in faults
            if self.nodes > 1 and fault.what.startswith("crash ") and random.random() < 0.6
        ]

    def _fault(self, at: float) -> Fault:
        random = self.random
        what = random.choice(
            ("cut", "cut", "partition", "partition", "partition", "slow", "stop", "stop", "kill", "close", "crash",
             "crash", "freeze", "freeze", "errors", "noscript", "wall", "break", "isolate", "forget", "forget")
        )  # fmt: skip
        if what == "forget":
            return self._forgetting(at)
        seconds = random.choice((random.expovariate(10), random.expovariate(1), random.uniform(0.2, 1.5) * self.lease))
        detail = {
            "partition": random.choice(_DIRECTIONS),
            "crash": random.choice(("refuses", "silent")),
        }.get(what, "")
        if what == "wall":
            seconds = random.uniform(-1, 1) if self.safe else 0.0
        lock = random.choice(self.locks) if what == "break" else None
        node = random.randrange(self.nodes)
        return Fault(at, what, self._some_client(), node, min(seconds, 20.0), detail, lock)

    def _forgetting(self, at: float) -> Fault:
        """A server loses data. In a safe plan less than half of the servers have lost some lately: those that restart
        cast no vote until the holds that they forgot have ended."""
        random, node = self.random, self.random.randrange(self.nodes)
        seconds = random.expovariate(1)
        lost = random.choice(("empty", "rewound"))
        since = at - self.max_lease - 30
        lately = {each for when, each in self._forgot if when > since} | {node}
        if self.safe and 2 * len(lately) >= self.nodes:
            return Fault(at, "crash", node=node, seconds=seconds, detail="refuses")
        self._forgot.append((at, node))
        if self.safe or random.random() < 0.4:
            return Fault(at, f"crash {lost}", node=node, seconds=seconds, detail=random.choice(("refuses", "silent")))
        if random.random() < 0.5:
            return Fault(at, "evict", node=node, lock=random.choice(self.locks))
        return Fault(at, "step", node=node, seconds=random.uniform(-1, 1) * self.lease)
