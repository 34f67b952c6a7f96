"""Rules of the shipped stores, each taken out by a patch. The simulation of the whole stack, or a plan made by hand
(`directed.py`), finds what breaks.

python -m simulation.stack.ablations [NAME ...]     the table of docs/evidence.md
"""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from asynclock.locks.cancellation import Block
from asynclock.protocol import planner, watchdog
from asynclock.protocol.hold import Tenure
from asynclock.rules.model import Op
from asynclock.stores.redis import encoding, node, replies
from asynclock.stores.redis.cluster.node import ClusterNode
from asynclock.stores.redis.connection import Connection
from asynclock.stores.redis.deadlines import Deadlines
from asynclock.stores.redis.handlers import overdue_at
from asynclock.stores.redis.pending import PendingReleases
from asynclock.stores.redis.replies import Fault, ServerError
from asynclock.stores.redis.restarts import Restarts
from asynclock.stores.redis.scripts import SCRIPTS
from asynclock.stores.redis.sentinel.node import SentinelNode
from simulation.stack.directed import PLANS
from simulation.stack.plan import DEPLOYMENTS, plan_of
from simulation.stack.world import simulate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from simulation.checks import Flaw

SEEDS = 60
"""That are tried for a rule, at most."""


class Ablation(NamedTuple):
    """A rule, and what stands in its place."""

    rule: str
    owner: Any
    attribute: str
    instead: Any
    deployment: str = ""  # in which it matters; "": in each
    also: tuple[tuple[Any, str, Any], ...] = ()  # other places of the same rule


def _nothing(*args: object, **options: object) -> None: ...


@asynccontextmanager
async def _without_limit(limit: float) -> AsyncIterator[None]:
    del limit
    yield


def _drops_overdue(self: Any, now: float) -> None:
    left = [each for each in self.waiting if overdue_at(each, self.moved_at) > now]
    _FAIL_OVERDUE(self, now)
    self.waiting.clear()
    self.waiting.extend(left)


def _fails(self: Any, shard: Any, handler: Any, error: Any) -> None:
    del shard
    handler.fail(self.index, error, maybe=False)


def _no_reconnect(error: ServerError) -> Fault:
    found = _FAULT_OF(error)
    return Fault.DOWN if found is Fault.RECONNECT else found


def _without_tombstone(op: Op, prefix: str, *, tombstone: bool = False) -> bytes:
    del tombstone
    return _ENCODE_WHOLE(op, prefix)


def _know_rights_silently(self: Any) -> None:
    listener = mock.Mock(connected=_nothing)
    with mock.patch.object(self, "_config", self._config._replace(listener=listener)):
        _KNOW_RIGHTS(self)


def _stop(facts: object) -> planner.Next:
    del facts
    return planner.Next.STOP


def _forgets_unanswered(self: Any, handlers: Any, now: float, moved_at: float = math.inf) -> None:
    _CUT_OFF(self, handlers, now, moved_at)
    self.unanswered.clear()


async def _keeps_its_cancel(self: Any, e: BaseException | None, cancel: Any) -> tuple[bool, Any]:
    del self, e
    return False, cancel


_ADOPTED = "if f == 0 or not holder or adopted then"
_SCRIPTS = {letter: text.replace(_ADOPTED, "if f == 0 or not holder then") for letter, text in SCRIPTS.items()}

_NEVER = property(lambda self: False, _nothing)
_CUT_OFF = PendingReleases.cut_off
_FAIL_OVERDUE = Connection.fail_overdue
_FAULT_OF = replies.fault_of
_ENCODE_WHOLE = encoding.encode_whole
_KNOW_RIGHTS = node.RedisNode._know_rights

ABLATIONS = {
    "NODE_TIMEOUT": Ablation("a command has a time limit, and a silent server is left", Deadlines, "arm", _nothing),
    "CONNECT": Ablation("an attempt to connect has a time limit", node, "running_for", _without_limit),
    "LATE_REPLY": Ablation(
        "the handler of an overdue command keeps its place", Connection, "fail_overdue", _drops_overdue
    ),
    "CUT_OFF": Ablation("what was in flight on a lost connection is taken back", PendingReleases, "cut_off", _nothing),
    "PENDING": Ablation("a release that did not arrive is kept", PendingReleases, "add", _nothing),
    "TOMBSTONE": Ablation(
        "a release on a later connection leaves a tombstone",
        node,
        "encode_whole",
        _without_tombstone,
        also=((Op, "tombstone", _NEVER),),
    ),
    "UNANSWERED": Ablation(
        "an id whose acquire was not answered is remembered", PendingReleases, "cut_off", _forgets_unanswered, "three"
    ),
    "REVOKED": Ablation("an op that was undone is not sent again", Op, "revoked", _NEVER),
    "QUARANTINE": Ablation("a restarted server casts no vote for a time", Restarts, "left", 0.0, "three"),
    "MOVED": Ablation("a redirection is followed", ClusterNode, "redirected", _fails, "cluster"),
    "READONLY": Ablation("a server that says READONLY is left", replies, "fault_of", _no_reconnect, "sentinel"),
    "SWITCH": Ablation(
        "an old master is left when a sentinel has switched", SentinelNode, "_leave", _nothing, "sentinel"
    ),
    "MISSED": Ablation("a new connection makes all waiters ask", node.RedisNode, "_know_rights", _know_rights_silently),
    "TIMEOUT": Ablation("a refused acquire asks again until its timeout", planner, "after_refusal", _stop),
    "PATIENCE": Ablation(
        "an outage ends an acquire after its patience", planner.Pace, "outage_limit", lambda pace, began, give_up: began
    ),
    "LOSS_IS_TOLD": Ablation("a loss interrupts the body", Block, "__call__", _nothing),
    "IN_TIME": Ablation("the watchdog looks every 0.01 s", watchdog, "TICK", 0.3),
    "OWN_CANCEL": Ablation("a block takes its own cancel back", Block, "leave", _keeps_its_cancel),
    "MIN_HOLD": Ablation("a name stays taken for min_hold", Tenure, "rest", lambda tenure: tenure.done_for),
    "MAX_HOLD": Ablation("max_hold ends a tenure", Tenure, "until", property(lambda tenure: math.inf, _nothing)),
    "ADOPTED": Ablation(
        "an adoption has a new token",
        encoding,
        "SCRIPTS",
        _SCRIPTS,
        "one",
        also=((encoding, "_sha", encoding._sha.__wrapped__), (encoding, "_frame", encoding._frame.__wrapped__)),
    ),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """The rule is taken out."""
    ablation = ABLATIONS[name]
    with ExitStack() as stack:
        for owner, attribute, instead in ((ablation.owner, ablation.attribute, ablation.instead), *ablation.also):
            stack.enter_context(mock.patch.object(owner, attribute, instead))
        yield


def find(name: str, seeds: int = SEEDS, first: int = 0) -> tuple[int, int, Flaw] | None:
    """The first run with a flaw: its seed, its number, and the flaw."""
    deployment = ABLATIONS[name].deployment
    runs = range(len(DEPLOYMENTS)) if not deployment else (DEPLOYMENTS.index(deployment),)
    with without(name):
        for seed in range(first, first + seeds):
            for run in runs:
                flaw = simulate(plan_of(seed, run)).flaw
                if flaw is not None:
                    return seed, run, flaw
    return None


def find_in_directed(name: str) -> Flaw | None:
    """The flaw of the plan that was made for it."""
    with without(name):
        return simulate(PLANS[name]).flaw if name in PLANS else None


def main(names: list[str]) -> None:
    print("| rule that is taken out | seed, run | violation |\n|---|---|---|")
    for name in names or list(ABLATIONS):
        by_hand = find_in_directed(name)
        found = find(name) if by_hand is None else None
        where = "not found" if found is None else f"{found[0]}, {found[1]} | {found[2].what}"
        where = where if by_hand is None else f"made by hand | {by_hand.what}"
        print(f"| {ABLATIONS[name].rule} | {where} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
