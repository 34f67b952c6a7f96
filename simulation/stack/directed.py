"""Plans made by hand, for rules that matter only in a rare order of events: no draw has shown what they prevent."""

from __future__ import annotations

from dataclasses import replace

from asynclock._options import LockSettings
from asynclock.rules.mutex import MUTEX
from simulation.plan import ClientPlan, Fault, Job, LockPlan, NodePlan
from simulation.stack.plan import StackPlan

LEASE = 8.0


def _plan(deployment: str, nodes: int, jobs: tuple[Job, ...], faults: tuple[Fault, ...]) -> StackPlan:
    """Three processes, within the assumptions of docs/safety.md."""
    return StackPlan(
        seed=f"by hand, {deployment}",
        deployment=deployment,
        safe=True,
        options={"lease": LEASE, "max_lease": 2 * LEASE, "patience": 5.0, "fence_memory": 60.0, "connect_timeout": 1.0},
        clients=tuple(ClientPlan(1.0, 100.0 * number, 0.0, False) for number in range(3)),
        nodes=tuple(NodePlan(1.0, 0.0) for _ in range(nodes)),
        locks=(_lock("name"), _lock("other")),
        delay=0.004,
        new=False,
        native=False,
        jobs=jobs,
        faults=faults,
        seconds=40.0,
    )


def _lock(name: str) -> LockPlan:
    return LockPlan(name, MUTEX, LockSettings(lease=LEASE))


def _restarted_under_a_bare_majority() -> StackPlan:
    """Client 0 holds the name at the nodes 0 and 1, and does not reach node 2. Node 1 restarts empty. Client 1 wants
    the name, which is free at the nodes 1 and 2."""
    jobs = (
        Job(0, 3.0, 0, _lock("name"), None, 12.0),
        Job(1, 5.0, 1, _lock("name"), None, 1.0),
    )
    faults = (
        Fault(2.0, "partition", client=0, node=2, seconds=20.0, detail="both"),
        Fault(4.0, "crash empty", node=1, seconds=0.1, detail="refuses"),
    )
    return _plan("three", 3, jobs, faults)


def _undone_before_its_script_is_known() -> StackPlan:
    """The server forgets its scripts. It does not know that of the acquire of client 0, whose caller gives up before it
    learns that. Meanwhile client 1 brings the script, so the undo is carried out. The acquire must not follow it."""
    jobs = (
        Job(0, 1.0, 0, _lock("other"), None, 0.0),  # the processes connect
        Job(1, 1.5, 1, _lock("other"), None, 0.0),
        Job(2, 3.000, 1, _lock("other"), None, 0.5),
        Job(3, 3.009, 0, _lock("name"), None, 5.0, cancelled_after=0.005),
    )
    return _plan("one", 1, jobs, (Fault(2.999, "noscript", client=2),))


def _healed_twice() -> StackPlan:
    """Client 0 wins at the nodes 0 and 1, while client 1 has tried in vain to win and is still at node 2. So client 0
    asks node 2 again. Its connection breaks, and it asks once more on the next one, where it releases by the server's
    own command. Node 2 reads the first of the two last."""
    jobs = (
        Job(0, 1.0, 0, _lock("other"), None, 0.0),  # the processes connect
        Job(1, 1.5, 1, _lock("other"), None, 0.0),
        Job(2, 2.99, 1, _lock("name"), 0, 0.0),
        Job(3, 3.0, 0, _lock("name"), None, 0.2),
    )
    faults = (
        *(Fault(2.9, "partition", client=1, node=node, seconds=3.0, detail="both") for node in (0, 1)),
        Fault(3.042, "rst", client=0, node=2, detail="keeps"),
    )
    plan = _plan("three", 3, jobs, faults)
    return replace(plan, seed="by hand, 6", native=True)  # with this seed it is read late enough


PLANS = {
    "QUARANTINE": _restarted_under_a_bare_majority(),
    "REVOKED": _undone_before_its_script_is_known(),
    "UNANSWERED": _healed_twice(),
}
"""Ablation -> the plan that shows what breaks."""
