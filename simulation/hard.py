"""Plans that are harder than those of `plan.py`: tasks that acquire again at once, hundreds of waiters in one client,
rings of names, several settings for one name, clients of which some receive no notices, clocks that are far off, and an
even number of nodes. Each is drawn in a share of the runs, beside the jobs and faults of an ordinary plan."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from asynclock._options import LockSettings
from asynclock.locks.multi import Multi
from asynclock.rules.model import CLOCK_SKEW, Part
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from simulation.plan import ClientPlan, Fault, Job, LockPlan, NodePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.plan import Plan

KEPT = 0.2
"""The share of the jobs of the ordinary plan that stay."""

LOADED = ("mutex", "mutex", "fair", "fair", "read-write", "read-write", "semaphore", "semaphore", "reentrant", "plain")
"""What the tasks of a sustained load want."""

TURNS = (80, 160, 320)
"""Tenures that a sustained load is made for, at one node. At more nodes there are fewer, since each costs more."""

CROWDS = (40, 100, 100, 160, 600)
"""Tasks of one client that wait for one name, at one node."""

FEW = (30, 50, 80)
"""The same at more nodes."""


def harder(plan: Plan) -> Plan:
    """That plan, and what makes it harder."""
    return _Harder(plan).plan


class _Harder:
    """Adds to one plan."""

    def __init__(self, plan: Plan) -> None:
        self._random = random = Random(f"hard {plan.seed}")  # noqa: S311 - the whole is to be repeated
        self.plan = replace(plan, jobs=tuple(each for each in plan.jobs if random.random() < KEPT))
        self._number = 10_000
        for share, add in (
            (0.25, self._even), (0.25, self._far_clocks), (0.3, self._deaf), (0.4, self._mixed), (0.35, self._ring),
            (0.5, self._load), (0.25, self._crowd),
        ):  # fmt: skip
            if random.random() < share:
                add()

    # -- the deployment ------------------------------------------------------------------------------------------

    def _even(self) -> None:
        """Two or four nodes."""
        if len(self.plan.nodes) < 5:
            node = NodePlan(self._random.uniform(0.9955, 1.0045), self.plan.nodes[0].offset)
            mute = self.plan.mute | {len(self.plan.nodes)} if self.plan.mute else self.plan.mute
            self.plan = replace(self.plan, nodes=(*self.plan.nodes, node), mute=mute)

    def _far_clocks(self) -> None:
        """The wall clocks of some clients are further from those of the servers than CLOCK_SKEW."""
        self.plan = replace(self.plan, clients=tuple(self._far(each) for each in self.plan.clients))

    def _far(self, client: ClientPlan) -> ClientPlan:
        random = self._random
        if random.random() < 0.4:
            return client
        most = random.choice((2 * CLOCK_SKEW, 3600.0))
        return replace(client, wall_offset=random.choice((-1, 1)) * random.uniform(CLOCK_SKEW, most))

    def _deaf(self) -> None:
        """Some clients get no notices, from some nodes or from all."""
        random, nodes = self._random, range(len(self.plan.nodes))
        deaf = set[tuple[int, int]]()
        for client in range(len(self.plan.clients)):
            if random.random() < 0.6:
                deaf |= {(client, node) for node in random.sample(nodes, random.randint(1, len(nodes)))}
        self.plan = replace(self.plan, deaf=frozenset(deaf))

    # -- locks ---------------------------------------------------------------------------------------------------

    def _mixed(self) -> None:
        """Some jobs use the same name with other settings."""
        random, others = self._random, dict[str, LockPlan]()
        for lock in self.plan.locks:
            if not lock.kind.parts and lock.settings.fencing and random.random() < 0.7:
                others[lock.name] = self._other(lock)
        jobs = tuple(
            replace(each, lock=self._as(others[each.lock.name], each.lock))
            if each.lock.name in others and random.random() < 0.5
            else each
            for each in self.plan.jobs
        )
        self.plan = replace(self.plan, locks=(*self.plan.locks, *others.values()), jobs=jobs)

    def _other(self, lock: LockPlan) -> LockPlan:
        """With another lease, min_hold, renewal, window of `once`, order or number of permits."""
        random, lease = self._random, lock.settings.lease
        most = self.plan.settings.max_lease
        settings = replace(
            lock.settings,
            lease=round(random.choice((lease, max(0.9, 0.6 * lease), min(most, 1.8 * lease))), 3),
            min_hold=round(random.choice((0.0, 0.0, 0.3, 0.6 * lease)), 3),
            renew=random.random() < 0.7,
        )
        kind: Any = lock.kind
        if kind.slots:
            kind = Semaphore(random.randint(1, 4))
        elif kind in (MUTEX, FAIR) and not lock.reentrant:
            kind = random.choice((MUTEX, FAIR))
        once = round(random.uniform(1.0, most), 3) if lock.once else 0.0
        return replace(lock, kind=kind, settings=settings, once=once)

    def _as(self, other: LockPlan, lock: LockPlan) -> LockPlan:
        """A reader reads with the other settings, too."""
        return replace(other, kind=READ) if lock.kind is READ else other

    def _settings(self) -> LockSettings:
        return LockSettings(lease=max(0.9, self.plan.settings.lock.lease))

    def _ring(self) -> None:
        """Each lock has some of the names of its neighbours, as in the dining philosophers; and some names alone."""
        random = self._random
        size, wide = random.choice((2, 3, 3, 4, 5)), random.choice((2, 2, 3))
        kinds: list[Any] = [random.choice((MUTEX, FAIR, FAIR, WRITE, Semaphore(2))) for _ in range(size)]
        if random.random() < 0.4:
            kinds = [FAIR] * size
        names = [f"ring{number}" for number in range(size)]
        locks = [self._lock_of(names, kinds, first, min(wide, size)) for first in range(size)]
        singles = [LockPlan(name, kind, self._settings()) for name, kind in zip(names, kinds, strict=True)]
        if random.random() < 0.6:
            locks += random.sample(singles, random.randint(1, size))
        self._add_loop(locks, random.uniform(10, 30), random.choice((80, 160)), least=4)

    def _lock_of(self, names: list[str], kinds: list[Any], first: int, wide: int) -> LockPlan:
        parts = [(number + first) % len(names) for number in range(wide)]
        named = sorted(Part(names[each], self._shared(kinds[each])) for each in parts)
        return LockPlan(", ".join(each.name for each in named), Multi(named), self._settings())

    def _shared(self, kind: Any) -> Any:
        return READ if kind is WRITE and self._random.random() < 0.5 else kind

    # -- load ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Several tasks of several clients acquire one lock again and again."""
        random, settings = self._random, self._settings()
        lock = self._loaded(random.choice(LOADED), settings)
        locks = [lock]
        if not lock.reentrant and settings.fencing and random.random() < 0.25:
            locks.append(self._other(replace(lock, settings=replace(lock.settings, fencing=True))))
        self._add_loop(locks, random.uniform(10, 60), random.choice(TURNS), least=2)

    def _loaded(self, kind: str, settings: LockSettings) -> LockPlan:
        match kind:
            case "fair":
                return LockPlan("load", FAIR, settings)
            case "read-write":
                return LockPlan("load", WRITE, settings)
            case "semaphore":
                return LockPlan("load", Semaphore(self._random.randint(2, 5)), settings)
            case "plain":
                return LockPlan("load", MUTEX, replace(settings, fencing=False))
        return LockPlan("load", MUTEX, settings, reentrant=kind == "reentrant")

    def _add_loop(self, locks: Sequence[LockPlan], window: float, turns: int, least: int) -> None:
        """Tasks that use these locks in turn, for the window. Some of their clients are killed meanwhile."""
        random, plan = self._random, self.plan
        at = random.uniform(1, max(2.0, plan.seconds - window - 5))
        clients = random.sample(range(len(plan.clients)), random.randint(2, len(plan.clients)))
        turns //= 1 + len(plan.nodes) // 2
        tasks = max(least, random.choice((2, 4, 8, 16)))
        holds_for = random.choice((0.0, window / turns, window / turns))
        jobs = []
        for number in range(tasks):
            lock = locks[number % len(locks)]
            if lock.kind is WRITE and random.random() < 0.6:
                lock = replace(lock, kind=READ)
            timeout = random.uniform(0.3, 2.0) if random.random() < 0.15 else None
            job = Job(
                self._next(), at + random.random() * 0.2, clients[number % len(clients)], lock, timeout,
                holds_for * max(1, lock.kind.slots), until=at + window, turns=max(1, turns // tasks),
            )  # fmt: skip
            jobs.append(job)
        faults = [
            Fault(random.uniform(at, at + window), "kill", random.choice(clients), seconds=random.expovariate(1))
            for _ in range(random.choice((0, 0, 1, 2)))
        ]
        self._add(locks, jobs, faults)

    def _crowd(self) -> None:
        """Many tasks of one client wait for a name that another client holds, and those of a third client behind them.
        Then one of these two is often killed. If its machine is gone, the servers learn of that later."""
        random, plan, settings = self._random, self.plan, self._settings()
        kind: Any = random.choice((MUTEX, FAIR, WRITE, WRITE, Semaphore(2), Semaphore(80)))
        lock = LockPlan("crowd", kind, settings)
        at, clients = random.uniform(1, plan.seconds - 30), list(range(len(plan.clients)))
        random.shuffle(clients)
        holds_for, waits = random.uniform(0.5, 3), replace(lock, kind=READ if kind is WRITE else kind)
        jobs = [Job(self._next(), at, clients[0], lock, None, holds_for) for _ in range(max(1, kind.slots))]
        size = random.choice(CROWDS if len(plan.nodes) == 1 else FEW)
        begin = at + 0.1
        for _ in range(size):
            begin += random.expovariate(5 * size)
            jobs.append(Job(self._next(), begin, clients[1], waits, None, 0.002))
        for _ in range(random.randint(1, 4)):
            late = replace(lock, kind=random.choice((READ, WRITE)) if kind is WRITE else kind)
            jobs.append(Job(self._next(), begin + random.expovariate(4), clients[2 % len(clients)], late, None, 0.01))
        killed_at = begin + random.uniform(0, 1.2) * holds_for
        self._add(
            [lock], jobs, self._kills(killed_at, clients[random.random() < 0.75]) if random.random() < 0.8 else []
        )

    def _kills(self, at: float, client: int) -> list[Fault]:
        """A process is killed. In a part of these, nothing of that reaches the servers for a time."""
        random, nodes = self._random, range(len(self.plan.nodes))
        kill = Fault(at, "kill", client, seconds=random.uniform(0.1, 5.0))
        if random.random() < 0.6:
            return [kill]
        lasts = random.uniform(0.5, 2.0) * self.plan.settings.lock.lease
        return [*(Fault(at - 0.01, "partition", client, node, lasts, "both") for node in nodes), kill]

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _add(self, locks: Sequence[LockPlan], jobs: Sequence[Job], faults: Sequence[Fault]) -> None:
        plan = self.plan
        both = sorted([*plan.faults, *faults], key=lambda each: each.at)
        self.plan = replace(plan, locks=(*plan.locks, *locks), jobs=(*plan.jobs, *jobs), faults=tuple(both))
