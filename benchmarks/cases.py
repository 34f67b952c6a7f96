"""P1 to P4: the contests, their sides and their targets. P5 to P10 are no contests of cycles: they are in waiting.py,
holding.py, crowd.py and imports.py."""

from __future__ import annotations

from benchmarks import goals, sides
from benchmarks.bare import bare
from benchmarks.runner import Contest

ASYNCLOCK, FRESH, BARE, REDIS_PY = "asynclock", "fresh names", "bare protocol", "redis-py Lock"
POTTERY, AIOREDLOCK, GATHER = "pottery AIORedlock", "aioredlock", "gather over redis-py"
HEALTHY, STOPPED = "five healthy", "two of five stopped"

NODE_TIMEOUT = 0.05
"""asynclock's default on a quorum, in seconds. A task that noticed a dead node by its silence would wait for it."""

_ALONE = {ASYNCLOCK: sides.asynclock, BARE: bare, REDIS_PY: sides.redis_py}
_ONE = {**_ALONE, FRESH: sides.fresh_names}
_FIVE = {
    ASYNCLOCK: sides.asynclock,
    FRESH: sides.fresh_names,
    BARE: bare,
    GATHER: sides.gathered,
    POTTERY: sides.pottery,
    AIOREDLOCK: sides.aioredlock,
}
_FAULTS = {HEALTHY: sides.asynclock, STOPPED: sides.two_stopped}
_NODE = "not run here: a Node.js program"


def _faults(tasks: int) -> Contest:
    return Contest(
        f"asynclock on two sets of five nodes, one with two stopped, {tasks} task{'s' * (tasks > 1)}",
        servers=5,
        tasks=tasks,
        sides=_FAULTS,
        goals=(goals.p50(STOPPED, HEALTHY, 1.1), goals.none_slower(STOPPED, NODE_TIMEOUT, "waits for no node timeout")),
        apart=True,
    )


CONTESTS: dict[str, tuple[Contest, ...]] = {
    "P1": (
        Contest(
            "free lock, 1 node, 64 tasks, fencing on",
            servers=1,
            tasks=64,
            sides=_ONE,
            goals=(
                goals.rate(ASYNCLOCK, REDIS_PY, 8),
                goals.rate(ASYNCLOCK, BARE, 0.6),
                goals.cpu(FRESH, ASYNCLOCK, 1.1),
                goals.elsewhere("cycles/s, asynclock / redis-semaphore", "> 1", _NODE),
            ),
        ),
    ),
    "P2": (
        Contest(
            "free lock, 1 node, 1 task",
            servers=1,
            tasks=1,
            sides=_ALONE,
            goals=(goals.p50(ASYNCLOCK, BARE, 1.25), goals.p50(ASYNCLOCK, REDIS_PY, 1)),
        ),
    ),
    "P3": (
        Contest(
            "free lock, 5 nodes, 64 tasks",
            servers=5,
            tasks=64,
            sides=_FIVE,
            goals=(
                goals.rate(ASYNCLOCK, POTTERY, 10),
                goals.rate(ASYNCLOCK, AIOREDLOCK, 10),
                goals.rate(ASYNCLOCK, GATHER, 10),
                goals.rate(ASYNCLOCK, BARE, 0.5),
                goals.cpu(FRESH, ASYNCLOCK, 1.1),
                goals.elsewhere("cycles/s, asynclock / node-redlock", "> 2", _NODE),
            ),
        ),
    ),
    "P4": (_faults(1), _faults(64)),
}

CROWDS = tuple((nodes, tasks) for nodes in (1, 5) for tasks in (512, 5000))
"""P9: nodes, tasks."""

NAMES = (*CONTESTS, "P5", "P6", "P7", "P8", "P9", "P10")
