"""The whole stack in virtual time: no violation, the same run again from a seed, what breaks without a rule."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lupa", reason="the servers run the scripts by lupa")

from asynclock import Lease, LockLost
from asynclock._options import LockSettings
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import READ
from simulation.plan import Fault, Job, LockPlan
from simulation.stack import cli
from simulation.stack.ablations import find_in_directed, without
from simulation.stack.directed import PLANS
from simulation.stack.plan import DEPLOYMENTS, NEXT, plan_of
from simulation.stack.world import simulate

if TYPE_CHECKING:
    from simulation.stack.plan import StackPlan

FOUND = [
    ("LATE_REPLY", 2, 4, "a hold that nobody knows"),
    ("PENDING", 4, 4, "a hold that nobody knows"),
    ("SWITCH", 8, 3, "an old master is used"),
    ("TOMBSTONE", 6, 1, "an id came back after its release"),
    ("TIMEOUT", 0, 0, "given up too soon"),
    ("PATIENCE", 0, 0, "given up too soon"),
    ("LOSS_IS_TOLD", 0, 3, "a loss did not interrupt the body"),
    ("IN_TIME", 0, 4, "a loss was not told in time"),
    ("OWN_CANCEL", 0, 3, "a cancel that the program did not send"),
    ("MIN_HOLD", 0, 3, "min_hold was not kept"),
    ("MAX_HOLD", 1, 5, "held for longer than max_hold"),
    ("ADOPTED", 4, 0, "a token was given twice"),
]
"""Of each rule that is taken out: a run in which a promise is broken, and the promise."""

OPTIONS = {"lease": 20.0, "max_lease": 45.0, "patience": 0.5, "fence_memory": 60.0, "connect_timeout": 0.3}
"""Of the clients in a plan that is made by hand."""

_TRACE = """
from dataclasses import replace
from hashlib import sha256
from simulation.stack.plan import plan_of
from simulation.stack.world import simulate
for run in range(6):
    plan = plan_of(3, run)
    jobs, faults = (tuple(each for each in some if each.at < 15) for some in (plan.jobs, plan.faults))
    trace = simulate(replace(plan, jobs=jobs, faults=faults, seconds=15.0), tracing=True).trace
    print(sha256("\\n".join(trace).encode()).hexdigest(), len(trace) > 40)
"""


@pytest.fixture(autouse=True)
def patient_nodes() -> None:
    """A busy machine delays nothing here, so nodes have the time that users give them."""


@pytest.mark.parametrize("run", range(len(DEPLOYMENTS)), ids=DEPLOYMENTS)
def test_no_violation(run: int) -> None:
    """With real sockets replaced by simulated ones, and nothing else of the library."""
    found = simulate(plan_of(1, run))
    assert found.flaw is None
    assert found.calls > 80
    assert found.faults >= 6


@pytest.mark.timeout(240)  # twelve runs
def test_a_seed_gives_the_same_run_again() -> None:
    """In other processes, too, whose addresses and hashes of text differ. The first quarter of a run is enough."""
    traces = [
        subprocess.run(
            [sys.executable, "-c", _TRACE],
            env={**os.environ, "PYTHONHASHSEED": str(hashes), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hashes in (1, 2)
    ]
    assert [line.split()[1] for line in traces[0].splitlines()] == ["True"] * len(DEPLOYMENTS)
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    ("rule", "flaw"),
    [
        ("QUARANTINE", "two holders"),
        ("REVOKED", "an id came back after its release"),
        ("UNANSWERED", "an id came back after its release"),
    ],
)
def test_what_no_draw_finds(rule: str, flaw: str) -> None:
    """A plan made by hand has no flaw with the rule, and that flaw without it."""
    assert simulate(PLANS[rule]).flaw is None
    found = find_in_directed(rule)
    assert found is not None
    assert found.what == flaw


@pytest.mark.parametrize(("rule", "seed", "run", "what"), FOUND, ids=[each[0] for each in FOUND])
def test_a_missing_rule_is_found(rule: str, seed: int, run: int, what: str) -> None:
    """Each check can fail."""
    with without(rule):
        flaw = simulate(plan_of(seed, run)).flaw
    assert flaw is not None
    assert flaw.what == what


@pytest.mark.usefixtures("histories_only")
def test_a_wrong_history_is_found() -> None:
    """Without the other checks, what the programs saw is enough."""
    found = simulate(PLANS["QUARANTINE"])
    assert found.flaw is None
    assert found.histories == 1
    assert find_in_directed("QUARANTINE") is not None


def test_a_loss_that_the_block_keeps_to_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has interrupted the body, and the program must learn why that has ended."""
    leave = Lease.__aexit__

    async def leaves(lease: Lease, *error: Any) -> bool:
        with contextlib.suppress(LockLost):
            await leave(lease, *error)
        return True

    monkeypatch.setattr(Lease, "__aexit__", leaves)
    flaw = simulate(_lost()).flaw
    assert flaw is not None
    assert flaw.what == "a loss was not told"


def test_a_stopped_process_has_nothing_beyond_max_hold() -> None:
    """Its program does not know yet that its tenure has ended, but by its clock it has. The clock of the process
    counts: by another one this check was wrong."""
    stop = Fault(1.5, "stop", seconds=4.0)
    assert simulate(_lost(stop)).flaw is None


def test_a_break_ends_the_rest_of_a_name() -> None:
    """Its min_hold does not count any more, so the next program may enter."""
    plan = plan_of(1, DEPLOYMENTS.index("one"))
    lock = LockPlan("lock0", MUTEX, LockSettings(lease=20.0, min_hold=10.0))
    broken = replace(
        plan,
        safe=True,
        options=OPTIONS,
        locks=(lock,),
        jobs=(Job(0, 1.0, 0, lock, None, 0.3), Job(1, 3.0, 1, lock, None, 0.3)),
        faults=(Fault(2.0, "break", client=0, detail="0"),),
        seconds=6.0,
    )
    assert simulate(broken).flaw is None


@pytest.mark.parametrize("client", [0, 1])
def test_what_a_half_open_connection_delays(client: int) -> None:
    """A server stands still, and a client waits for it without a limit. A connection on which only notices come may
    excuse that, if it is a connection of this client."""
    plan = plan_of(1, DEPLOYMENTS.index("one"))
    lock = LockPlan("lock0", MUTEX, LockSettings(lease=20.0))
    jobs = ((1.0, 0, None), (1.5, 1, None), (4.5, 0, 0))
    late = replace(
        plan,
        options=OPTIONS,
        locks=(lock,),
        jobs=tuple(Job(number, at, where, lock, timeout, 0.1) for number, (at, where, timeout) in enumerate(jobs)),
        faults=(Fault(3.0, "half-open", client=client, detail="to"), Fault(4.0, "freeze", seconds=4.5)),
        seconds=12.0,
    )
    with without("NODE_TIMEOUT"):
        flaw = simulate(late).flaw
    assert (flaw is not None and flaw.what == "an acquire ended late") is (client == 1), flaw


def test_a_close_leaves_no_timer_behind() -> None:
    """A node is frozen while it measures the round trip of an op, and the client closes. The timer that ran beside the
    op went on for up to 2 s after the close, until a run of this simulation found it."""
    assert simulate(_closed_beside_a_frozen_node()).flaw is None


def test_a_process_that_was_stopped_while_its_server_restarted() -> None:
    """It reads late what the server sent before. So the old server seemed to have answered while the new one was up:
    two servers in turn, and a ConfigError, until a run of this simulation found that."""
    plan = plan_of(1, DEPLOYMENTS.index("one"))
    lock = LockPlan("lock0", MUTEX, LockSettings(lease=20.0))
    jobs = [(1.0, 0, 2.0), (1.5, 1, 1.0), (8.5, 1, 0.0)]
    stopped = replace(
        plan,
        safe=True,
        options=OPTIONS,
        locks=(lock,),
        jobs=tuple(Job(number, at, client, lock, None, holds) for number, (at, client, holds) in enumerate(jobs)),
        faults=(Fault(2.0, "stop", client=1, seconds=6.0), Fault(4.0, "crash", detail="refuses", seconds=0.1)),
        seconds=12.0,
    )
    assert simulate(stopped).flaw is None


def test_the_key_of_readers_that_outlives_them_is_no_other_programs() -> None:
    """Two readers have released, and their min_hold is over: the name is free, and its key is there until their leases
    would have ended. `break_lock` took it for the key of another program, until a run of this simulation found that."""
    plan = plan_of(1, DEPLOYMENTS.index("one"))
    lock = LockPlan("lock0", READ, LockSettings(lease=20.0, min_hold=1.0))
    left = replace(
        plan,
        options=OPTIONS,
        locks=(lock,),
        jobs=(Job(0, 1.0, 0, lock, None, 0.3), Job(1, 1.1, 1, lock, None, 0.3)),
        faults=(Fault(4.0, "break", client=0, detail="0"),),
        seconds=6.0,
    )
    assert simulate(left).flaw is None


def test_a_release_that_a_busy_server_refuses_as_its_client_closes() -> None:
    """Two of three nodes have answered the release, so the client closes. The third answers BUSY then, and until the
    client is gone. A task that would send the release again was left, until a run of this simulation found it."""
    busy = Fault(2.9, "errors", node=2, seconds=5.0, detail="busy")
    closes = Fault(3.0, "close", node=2, seconds=1.0, detail=NEXT)
    assert simulate(replace(_closed(busy, closes), seed="5/1")).flaw is None


def test_a_client_closes_as_a_server_closes_each_connection() -> None:
    """It is told that a node is up once the connection has lasted. The timer that waits for this went on after the
    close, until a run of this simulation found it."""
    replica = Fault(2.9, "errors", node=2, seconds=5.0, detail="readonly")
    assert simulate(_closed(replica, Fault(4.3, "close", seconds=1.0))).flaw is None


def test_an_op_beside_one_that_is_overdue_ends_in_time() -> None:
    """A node is frozen. A call with a shorter lease is overdue before one with a longer lease. So the node looked again
    only when it gave the connection up, and the second call ended after 3.3 s in place of 1.1 s, until a run of this
    simulation found that."""
    plan = plan_of(1, DEPLOYMENTS.index("one"))
    locks = tuple(LockPlan(f"lock{i}", MUTEX, LockSettings(lease=lease)) for i, lease in enumerate((11.0, 6.0)))
    jobs = ((1.0, locks[0], None), (4.0, locks[0], 0), (4.03, locks[1], 0.1))
    frozen = replace(
        plan,
        options={"lease": 11.0, "max_lease": 25.0, "patience": 5.0, "fence_memory": 60.0, "connect_timeout": 0.3},
        locks=locks,
        jobs=tuple(Job(number, at, 0, lock, timeout, 0.1) for number, (at, lock, timeout) in enumerate(jobs)),
        faults=(Fault(3.0, "freeze", seconds=20.0),),
        seconds=12.0,
    )
    assert simulate(frozen).flaw is None


def test_a_break_whose_first_look_is_not_answered() -> None:
    """A slot moves while an operator breaks a semaphore in it. The look at its kind was not answered, the break took it
    for a mutex, and said that its key is another program's, until a run of this simulation found that."""
    assert simulate(plan_of(654900219, DEPLOYMENTS.index("cluster"))).flaw is None


def test_a_failure_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """With its seed, the command that repeats it, and a shorter schedule; the exit code is 1."""
    rule, seed, run, what = FOUND[0]
    with without(rule):
        code = cli.main(["--base", str(seed), "--run", str(run), "--shrink", "1"])
    said = capsys.readouterr().out
    assert code == 1
    assert f"seed {seed}, run {run}: {what}" in said
    assert f"again: python -m simulation.stack --base {seed} --run {run}" in said


def _lost(*faults: Fault) -> StackPlan:
    """The max_hold of a tenure is over before its body."""
    plan = plan_of(1, DEPLOYMENTS.index("one"))
    lock = LockPlan("lock0", MUTEX, LockSettings(lease=20.0, max_hold=2.0))
    return replace(
        plan,
        options=OPTIONS,
        locks=(lock,),
        jobs=(Job(0, 1.0, 0, lock, None, 8.0),),
        faults=faults,
        seconds=12.0,
    )


def _closed(*faults: Fault) -> StackPlan:
    """A client releases a hold soon after the third second."""
    plan = plan_of(1, DEPLOYMENTS.index("three"))
    lock = LockPlan("lock0", MUTEX, LockSettings(lease=20.0))
    return replace(
        plan,
        options=OPTIONS,
        clients=plan.clients[:1],
        locks=(lock,),
        delay=0.004,
        jobs=(Job(0, 1.0, 0, lock, None, 2.0),),
        faults=faults,
        seconds=8.0,
    )


def _closed_beside_a_frozen_node() -> StackPlan:
    plan = plan_of(1, DEPLOYMENTS.index("three"))
    options = {name: value for name, value in plan.options.items() if name != "node_timeout"} | {"lease": 1.0}
    job = replace(
        plan.jobs[0], client=0, lock=plan.locks[0], timeout=0, holds_for=0.01, cancelled_after=None, extends_by=None
    )
    return replace(
        plan,
        options=options,
        delay=0.001,
        jobs=(replace(job, number=0, at=1.0), replace(job, number=1, at=3.0)),
        faults=(Fault(2.9, "freeze", node=0, seconds=9.0), Fault(3.02, "close", client=0, seconds=1.0)),
        seconds=8.0,
    )
