"""Plans made by hand, for rules that matter only in a rare order of events: no draw has shown what they prevent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asynclock._options import ClientSettings, LockSettings
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.rules.rwlock import READ, WRITE
from simulation.plan import ClientPlan, Fault, Job, LockPlan, NodePlan, Plan

if TYPE_CHECKING:
    from asynclock.rules.model import Kind


def _plan(
    name: str, lease: float, clients: tuple[float, ...], jobs: tuple[Job, ...], faults: tuple[Fault, ...]
) -> Plan:
    """Over three nodes, within the assumptions of docs/safety.md. `clients`: by how much the clock of each is ahead."""
    lock = _lock(lease)
    return Plan(
        seed=name,
        safe=True,
        synchronous=False,
        settings=ClientSettings(lock.settings, max_lease=2 * lease + 1.0, node_timeout=0.2, patience=5.0),
        clients=tuple(ClientPlan(1.0, 100.0 * number, ahead, False) for number, ahead in enumerate(clients)),
        nodes=tuple(NodePlan(1.0, 0.0) for _ in range(3)),
        locks=(lock,),
        delay=0.001,
        new=False,
        jobs=jobs,
        faults=faults,
        seconds=40.0,
    )


def _lock(lease: float, kind: Kind = MUTEX) -> LockPlan:
    return LockPlan("name", kind, LockSettings(lease=lease))


def _refused_while_others_are_silent() -> Plan:
    """Client 0 renews at nodes 0 and 1, and does not reach node 2, where its hold ends earlier. Then node 0 loses the
    key, and node 1 is out of reach. Node 0 refuses the next renewal, which has no majority. From the end at node 2 on,
    client 1 wins at the nodes 0 and 2."""
    lease = 8.0
    jobs = (
        Job(0, 1.0, 0, _lock(lease), None, 18.0),
        Job(1, 6.5, 1, _lock(lease), None, 5.0),
    )
    faults = (
        Fault(2.0, "partition", client=0, node=2, seconds=20.0, detail="both"),
        Fault(5.0, "evict", node=0, lock=_lock(lease)),
        Fault(5.5, "partition", client=0, node=1, seconds=20.0, detail="both"),
    )
    return _plan("refused while others are silent", lease, (0.0, 0.0), jobs, faults)


def _one_counter_ahead() -> Plan:
    """Client 0, whose wall clock is ahead, reaches node 0 only: the counter there is ahead now. Client 1 wins at the
    nodes 0 and 2, with a token that only node 0 has, and cannot send it to the others. It dies, and so does node 0.
    Client 2 wins at the other nodes."""
    lease = 1.0
    jobs = (
        Job(0, 2.0, 0, _lock(lease), 0, 0.0),
        Job(1, 3.0, 1, _lock(lease), None, 5.0),
        Job(2, 3.2, 2, _lock(lease), None, 0.1),
    )
    faults = (
        Fault(1.5, "partition", client=0, node=1, seconds=30.0, detail="both"),
        Fault(1.5, "partition", client=0, node=2, seconds=30.0, detail="both"),
        Fault(2.5, "slow", client=1, node=1, seconds=30.0),
        Fault(3.0015, "partition", client=1, node=1, seconds=30.0, detail="to"),
        Fault(3.0015, "partition", client=1, node=2, seconds=30.0, detail="to"),
        Fault(3.05, "kill", client=1, seconds=30.0),
        Fault(3.05, "crash", node=0, seconds=30.0, detail="silent"),
    )
    return _plan("one counter ahead", lease, (6.0, 0.0, 0.0), jobs, faults)


PLANS = {"REFUSAL_COUNTS": _refused_while_others_are_silent(), "WITNESSES": _one_counter_ahead()}
"""Ablation -> the plan that shows what breaks."""


def _loop(number: int, client: int, lock: LockPlan, holds_for: float) -> Job:
    """A task that acquires a lock again and again."""
    return Job(number, 1.0 + 0.01 * number, client, lock, None, holds_for, turns=10_000, until=39.0)


def _many_readers() -> Plan:
    """Four tasks of two clients read again and again, so that there is always a reader. A task of a third client wants
    to write."""
    lock = _lock(2.0, WRITE)
    jobs = (
        *(_loop(each, each % 2, replace(lock, kind=READ), 0.2) for each in range(4)),
        Job(9, 2.0, 2, lock, None, 0.1),
    )
    return replace(_plan("many readers", 2.0, (0.0, 0.0, 0.0), jobs, ()), locks=(lock,))


def _often_renewed() -> Plan:
    """Eight tasks of two clients acquire a fair lock again and again. One task of a third client has a shorter lease,
    so it renews its ticket several times before the others have had the lock."""
    lock, short = _lock(8.0, FAIR), _lock(0.9, FAIR)
    jobs = (*(_loop(each, each % 2, lock, 0.1) for each in range(8)), Job(9, 2.0, 2, short, None, 0.1))
    return replace(_plan("often renewed", 8.0, (0.0, 0.0, 0.0), jobs, ()), locks=(lock, short))


LOADS = {"many readers": _many_readers(), "often renewed": _often_renewed()}
"""What is asked for again at once, in which nobody starves."""
