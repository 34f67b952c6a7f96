"""The plan of one run, drawn from a seed: the deployment, the locks, the jobs of the programs, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from asynclock._options import LockSettings
from asynclock.locks.multi import Multi
from asynclock.rules.model import Part
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from simulation.plan import ClientPlan, Fault, Job, LockPlan, NodePlan

DEPLOYMENTS = ("one", "three", "five", "sentinel", "cluster", "database")
"""A seed has one run of each."""

SECONDS = 60.0
"""Of one run. What follows until all have ended does not count."""

NEXT = "at the next write"
ARMED = ("rst", "half-open", "partition", "crash", "freeze", "noscript", "kill", "close", "move", "cancel")
"""Faults that may wait for the next write on a link, and happen within a round trip after it."""

JOBS = 80
FAULTS = (6, 12)


@dataclass(frozen=True)
class StackPlan:
    """See the module."""

    seed: str
    deployment: str
    safe: bool  # what docs/safety.md assumes holds
    options: dict[str, Any]  # of the client
    clients: tuple[ClientPlan, ...]
    nodes: tuple[NodePlan, ...]
    locks: tuple[LockPlan, ...]
    delay: float
    new: bool  # the servers were never used
    native: bool  # they know DELIFEQ
    jobs: tuple[Job, ...] = ()
    faults: tuple[Fault, ...] = ()
    seconds: float = SECONDS

    @property
    def longest_lease(self) -> float:
        return max(lock.settings.lease for lock in self.locks)


def plan_of(seed: int, run: int) -> StackPlan:
    """The plan number `run` of a seed."""
    return _Drawing(f"{seed}/{run}", DEPLOYMENTS[run]).plan()


@dataclass
class _Drawing:
    """Draws one plan."""

    seed: str
    deployment: str
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(f"stack {self.seed}")  # noqa: S311 - the whole is to be repeated

    def plan(self) -> StackPlan:
        random = self.random
        self.nodes = {"three": 3, "five": 5, "cluster": 3, "sentinel": 2}.get(self.deployment, 1)
        self.quorum = self.nodes if self.deployment in ("three", "five") else 1
        self.clients = random.randint(2, 4)
        self.lease = round(random.choice((1.0, 2.0, 3.0, 5.0, 12.0, 20.0)) * random.uniform(0.9, 1.1), 3)
        self.max_lease = round(2 * self.lease + random.uniform(0, 3), 3)
        self.safe = random.random() < 0.75
        self.forgot: list[tuple[float, int]] = []
        faults = self._faults()
        if any(each.what == "failover" for each in faults):
            self.safe = False
        skew = random.choice((0.0, 0.05, 2.0)) if self.safe else 0.0
        options = {
            "lease": self.lease, "max_lease": self.max_lease, "patience": random.choice((0.5, 2.0, 5.0)),
            "fence_memory": random.choice((60.0, 300.0)), "connect_timeout": random.choice((0.3, 1.0)),
        }  # fmt: skip
        if self.quorum > 1 and random.random() < 0.4:
            options["node_timeout"] = round(min(0.2, self.lease / 4), 3)
        plan = StackPlan(
            seed=self.seed,
            deployment=self.deployment,
            safe=self.safe,
            options=options,
            clients=tuple(
                ClientPlan(self._rate(), random.uniform(0, 1e5), random.uniform(-skew, skew), timers_first=False)
                for _ in range(self.clients)
            ),
            nodes=tuple(self._node(skew) for _ in range(self.nodes)),
            locks=tuple(self._lock(number) for number in range(random.randint(2, 3))),
            delay=random.choice((0.0002, 0.001, 0.004)),
            new=random.random() < 0.15,
            native=random.random() < 0.4,
        )
        self.locks = plan.locks
        return replace(plan, jobs=self._jobs([each.at for each in faults]), faults=faults)

    def _rate(self) -> float:
        """The drift allowance is 1 % between a client and a server."""
        return self.random.uniform(0.9955, 1.0045)

    def _node(self, skew: float) -> NodePlan:
        """The masters of a cluster have one clock, and a master and its replica have one: leases that move with their
        slot, or to a replica that takes over, end by the clock of the new master (docs/safety.md)."""
        rate, offset = self._rate(), self.random.uniform(-skew, skew)
        return NodePlan(1.0, 0.0) if self.deployment in ("cluster", "sentinel") else NodePlan(rate, offset)

    def _lock(self, number: int) -> LockPlan:
        random, name = self.random, f"lock{number}"
        lease = max(round(self.lease * random.choice((1.0, 1.0, 0.6)), 3), 0.9)
        settings = LockSettings(
            lease=lease,
            min_hold=round(lease * random.uniform(0.1, 0.9), 3) if random.random() < 0.1 else 0.0,
            max_hold=round(random.uniform(0.5, 2 * lease), 3) if random.random() < 0.1 else None,
            renew=random.random() < 0.9,
            metadata="note" if random.random() < 0.1 else "",
        )
        kinds = ("mutex", "mutex", "mutex", "fair", "read-write", "semaphore", "multi", "plain")
        match random.choice(kinds):
            case "fair":
                return LockPlan(name, FAIR, settings)
            case "read-write":
                return LockPlan(name, WRITE, settings)
            case "semaphore":
                return LockPlan(name, Semaphore(random.randint(2, 3)), settings)
            case "multi":
                names = [f"{{{name}}}a", f"{{{name}}}b"]
                kind = Multi([Part(names[0], MUTEX), Part(names[1], random.choice((MUTEX, Semaphore(2))))])
                return LockPlan(", ".join(names), kind, settings)
            case "plain":
                return LockPlan(name, MUTEX, replace(settings, fencing=False, min_hold=0.0))
        return LockPlan(name, MUTEX, settings)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _jobs(self, faults: list[float]) -> tuple[Job, ...]:
        random, times = self.random, list[float]()
        while len(times) < JOBS:
            near = random.choice(faults) if random.random() < 0.5 else random.uniform(0, SECONDS - 1)
            start = min(max(0.0, near + random.gauss(0, 1)), SECONDS - 1)
            times += [start + random.expovariate(4) for _ in range(random.randint(1, 6))]
        return tuple(self._job(number, at) for number, at in enumerate(sorted(times)))

    def _job(self, number: int, at: float) -> Job:
        random, lock = self.random, self.random.choice(self.locks)
        if lock.kind is WRITE and random.random() < 0.6:
            lock = replace(lock, kind=READ)
        holds_for = random.choice((0.0, random.expovariate(20), random.expovariate(1), random.expovariate(0.5)))
        timeout = random.choice((None, None, None, 0, random.uniform(0.01, 0.5), random.uniform(0.5, 6)))
        ends_by = random.choices(("release", "drop", "detach"), (40, 1, 3))[0]
        if lock.kind.parts or not lock.settings.fencing or lock.settings.max_hold is not None:
            ends_by = "release"
        adopters = tuple(
            (random.expovariate(3), random.randrange(self.clients)) for _ in range(random.choice((0, 1, 1, 2)))
        )
        return Job(
            number, at, random.randrange(self.clients), lock, timeout, min(holds_for, 8.0),
            ends_by=ends_by,
            cancelled_after=random.expovariate(random.choice((0.5, 3, 200))) if random.random() < 0.2 else None,
            extends_by=max(0.7, random.uniform(0.5, 1.0) * lock.settings.lease) if random.random() < 0.1 else None,
            adopters=adopters if ends_by == "detach" else (),
        )  # fmt: skip

    # -- faults ------------------------------------------------------------------------------------------------------

    def _faults(self) -> tuple[Fault, ...]:
        random = self.random
        times = sorted(random.uniform(1, SECONDS - 5) for _ in range(random.randint(*FAULTS)))
        if random.random() < 0.5:  # two at the same moment
            times = sorted([*times, random.choice(times) + random.uniform(0, 1)])
        faults = [self._fault(at) for at in times]
        return tuple(sorted([*faults, *self._beside(faults)], key=lambda each: each.at))

    def _beside(self, faults: list[Fault]) -> list[Fault]:
        """While a server is about to lose data, another one is often out of reach: then its votes count."""
        random = self.random
        return [
            Fault(fault.at - random.uniform(0, 2), "isolate", node=(fault.node + 1) % self.nodes, seconds=self.lease)
            for fault in faults
            if self.quorum > 1 and fault.what.startswith("crash ") and random.random() < 0.6
        ]

    def _fault(self, at: float) -> Fault:
        random = self.random
        kinds = [
            "rst", "rst", "half-open", "half-open", "pieces", "slow", "partition", "partition", "stop", "kill", "close",
            "crash", "freeze", "freeze", "errors", "errors", "noscript", "forget",
            "look", "look", "break", "cancel",

        ]  # fmt: skip
        if self.deployment == "cluster":
            kinds += ["move"] * 6
        if not self.safe and self.deployment in ("sentinel", "cluster"):
            kinds += ["failover"] * 3
        what = random.choice(kinds)
        seconds = random.choice((random.expovariate(10), random.expovariate(1), random.uniform(0.2, 1.5) * self.lease))
        client, node = random.randrange(self.clients), random.randrange(self.nodes)
        if what == "forget":
            return self._forgetting(at, node)
        detail = {
            "partition": random.choice(("to", "from", "both")),
            "half-open": random.choice(("to", "from", "both")),
            "rst": random.choice(("keeps", "loses")),
            "crash": random.choice(("refuses", "silent")),
            "kill": random.choice(("", "silent")),
            "errors": random.choice(("readonly", "oom", "loading", "busy", "misconf")),
            "errors in a database": random.choice(("busy", "ambiguous", "silent")),
            "failover": random.choice(("old answers", "old is gone")),
            "move": str(random.randrange(3)),
            "look": str(random.randrange(3)),
            "break": str(random.randrange(3)),
        }.get("errors in a database" if what == "errors" and self.deployment == "database" else what, "")
        if what in ARMED and random.random() < 0.6:
            detail = f"{detail} {NEXT}".strip()
        return Fault(at, what, client, node, min(seconds, 10.0), detail)

    def _forgetting(self, at: float, node: int) -> Fault:
        """A server loses data. In a safe plan less than half of the servers of a quorum have lost some lately."""
        random, seconds = self.random, self.random.expovariate(1)
        lately = {each for when, each in self.forgot if when > at - self.max_lease - 15} | {node}
        if self.safe and 2 * len(lately) >= self.quorum:
            return Fault(at, "crash", node=node, seconds=seconds, detail="refuses")
        self.forgot.append((at, node))
        lost = random.choice(("empty", "rewound"))
        return Fault(at, f"crash {lost}", node=node, seconds=seconds, detail=random.choice(("refuses", "silent")))
