"""Rules of the shipped client and of the shipped nodes, each taken out by a patch. Walks through small worlds
(`spec/walks.py`), the model of restarts (`spec/restart.py`), the simulation, or a plan made by hand (`directed.py`)
find what breaks.

python -m simulation.ablations [NAME ...]     the table of docs/evidence.md
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from asynclock.protocol import hold, local_queue, planner, rounds
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.hold import Hold, Tenure
from asynclock.protocol.planner import Plan
from asynclock.protocol.rounds import Rounds, RoundsAtMany, RoundsAtOne, Ticket
from asynclock.quorum import quarantine
from asynclock.quorum.ballot import Ballot
from asynclock.quorum.quorum import Quorum
from asynclock.rules import decide
from asynclock.rules.decide import Decision
from asynclock.rules.model import RELEASE, Op, Queueing, Serve
from asynclock.rules.several import JointDecision
from simulation.directed import PLANS
from simulation.plan import RUNS, plan_of
from simulation.world import simulate
from spec import restart, several, walks
from spec.explorer import explore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulation.checks import Flaw

HOURS = 40
"""Seeds of the simulation that are tried for a rule, at most."""

WALKS = 100
"""Walks through each scene that are tried for a rule, at most."""


class Ablation(NamedTuple):
    """A rule, and what stands in its place."""

    rule: str
    owner: Any
    attribute: str
    instead: Any


def _nothing(*args: object, **options: object) -> None: ...


def _last_sending(ticket: Any) -> tuple[float, int] | None:
    if ticket._granted is None:
        return None
    (_, top), ticket._granted = ticket._granted, None
    return max(ticket._sent_at.values()), top


def _late_undo(self: Any, ballot: Any, back: Any = None) -> None:
    self._core.own_clock.call_at(self._core.clock.now() + 0.05, partial(_UNDO, self, ballot, back))


def _undo_that_serves(serve: Serve) -> Callable[..., Any]:
    def undo(self: Quorum, ballot: Any, within: float, ticket: Any = None, usual: Any = None) -> Any:
        del usual
        with mock.patch.object(Ballot, "traces", return_value=list(range(len(self.nodes)))):
            return _QUORUM_UNDO(self, ballot, within, ticket, serve)

    return undo


def _without_leave(self: Any, planner: Any, rounds: Any, ballot: Any, now: float) -> Any:
    with mock.patch.object(Acquisition, "_leave", _nothing):
        return _WITHOUT_MAJORITY(self, planner, rounds, ballot, now)


def _new_if(condition: Callable[[Any], bool]) -> Callable[..., Any]:
    def judge(facts: Any, now: float, length: float, *, complete: bool) -> Any:
        known = [each for each in facts if each is not None]
        if complete and known and all(now < each.started + length and condition(each) for each in known):
            return quarantine.Ruling((quarantine.VOTES,) * len(facts), new=True, doubtful=False)
        return _JUDGE(facts, now, length, complete=complete)

    return judge


def _own_counter(self: Any, seed: int | None, memory: float, span: int) -> None:
    self._put(fence=self.state.fence + span, fence_ends=self.now + memory)


class _Admitting:
    """A kind whose queue is always served."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def admits(self, holds: object, id: str) -> bool:
        del holds, id
        return True


def _serves_always(self: Any) -> bool:
    self.kind = _Admitting(self.kind)
    return True


def _any_hold(self: Any) -> Any:
    return next(iter(self.state.holds), None)


def _always_back(self: Any) -> Any:
    held = self._mine() is not None
    reply = _RELEASE(self)
    if held:
        return reply
    self._enqueue()
    return replace(reply, state=self.state, notices=tuple(self.notices))


def _releases_all(self: Any) -> Any:
    reply = _RELEASE(self)
    return replace(reply, state=replace(reply.state, holds=()))


def _adopt_beside(self: Any) -> Any:
    before = self.state.holds
    reply = _ADOPT(self)
    kept = [each for each in before if each.id == self.op.queueing.waiter]
    return replace(reply, state=replace(reply.state, holds=(*reply.state.holds, *kept)))


def _kept_for_longer(self: Any, id: str, ends: float) -> None:
    _HOLD(self, id, ends + 300.0)


def _tells_nobody(self: Any, task: object, on_lost: object) -> None:
    _ENTER(self, task, _nothing)


def _only_ticket_order(self: Any, serve: Any, fair: bool, span: int, fresh: float, tasks: int) -> Any:
    self.order = 0
    return _SEND(self, serve, fair, span, fresh, tasks)


def _fixed_end(self: Any, id: str, ends: float) -> None:
    if self._mine() is None:
        _HOLD(self, id, ends)


def _still_counts(self: Any, ballot: Any, index: int, refusal: Any) -> None:
    kept = list(self._ends)
    _REFUSED_BY(self, ballot, index, refusal)
    self._ends[:] = kept
    self._recount()


def _behind_all(self: Any) -> Any:
    decision = several.BehindAll(self.parts, self.states, self._op, self._now, self._has_listener)
    reply, part = decision.acquire()
    self.states, self.notices = decision.states, decision.notices
    return reply, part


def _leaves_quietly(self: Any, index: int) -> None:
    for own in filter(None, (self._op.id, self._op.queueing.waiter)):
        self._ask(index, RELEASE, id=own, ticket=Queueing())


def _serves_one(self: Any, until: str, entering: Any) -> bool:
    with mock.patch.object(decide, "SERVED", 1), mock.patch.object(decide, "LAST", 0):
        return _SERVE_ALL(self, until, entering)


def _by_this_clock(self: Any) -> None:
    self.op.queueing.order = 0
    _ENQUEUE(self)


def _to_the_front(self: Any) -> None:
    _ENQUEUE(self)
    queue = self.state.queue
    self._put(queue=tuple(sorted(queue, key=lambda each: each.id != self.waiter)))


_SERVE_ALL, _ENQUEUE = Decision._serve_all, Decision._enqueue
_UNDO, _QUORUM_UNDO, _SEND = Rounds._undo, Quorum.undo, Ticket.send
_WITHOUT_MAJORITY, _JUDGE = Acquisition._plan_without_majority, quarantine.judge
_HOLD, _RELEASE, _ADOPT, _REFUSED_BY = Decision._hold, Decision.release, Decision.adopt, Hold._refused_by
_ENTER = Tenure.enter

ABLATIONS = {
    "NUMBERED_VALIDITY": Ablation(
        "validity counts from when the granted number of the ticket was sent", Ticket, "take_grant", _last_sending
    ),
    "OWN_ID_MOVES_END": Ablation(
        "the end of a hold moves with the answer to its own id", Decision, "_hold", _fixed_end
    ),
    "FREER_SERVES": Ablation(
        "the command that frees the name serves the queue", Decision, "_may_serve", lambda self: False
    ),
    "ONLY_FREER_SERVES": Ablation(
        "no other command serves the queue of a name that is held", Decision, "_may_serve", _serves_always
    ),
    "LEAVING_TAKES_TICKET": Ablation("a release deletes the ticket of its id", Decision, "_drop", _nothing),
    "ONLY_OWN_HOLD": Ablation("a release deletes the hold only if it is the id's", Decision, "_mine", _any_hold),
    "TOMBSTONE": Ablation(
        "an undo on another connection leaves a tombstone, which counts", Decision, "_is_undone", lambda self: False
    ),
    "NEVER_AFTER_UNDO": Ablation("after the undo of an id nothing of it is sent again", Op, "revoke", _nothing),
    "BACK_WHERE_IT_HELD": Ablation(
        "an undo puts a ticket back only where it removes a hold", Decision, "release", _always_back
    ),
    "UNDO_FIRST": Ablation("undo k is sent before round k + 1", Rounds, "_undo", _late_undo),
    "QUIET_UNDO": Ablation("an undo of a minority serves nobody", Quorum, "undo", _undo_that_serves(Serve.WAKE)),
    "WAKING_UNDO": Ablation(
        "an undo that may have had a majority serves the queue", Quorum, "undo", _undo_that_serves(Serve.NOBODY)
    ),
    "UNDO": Ablation("a round that was refused or had no answer is undone", Rounds, "_undo", _nothing),
    "BACK_OFF": Ablation(
        "after split votes the pause is random and grows",
        planner,
        "after_split",
        lambda random, now, rtt, rank, splits: Plan(now + planner.round_trip(rtt)),
    ),
    "ORDER_KEY": Ablation(
        "the order key is the same at every node and in every renewal", Ticket, "send", _only_ticket_order
    ),
    "TICKET_NEEDS_MAJORITY": Ablation(
        "a ticket is kept only while its owner reaches a majority",
        Acquisition,
        "_plan_without_majority",
        _without_leave,
    ),
    "DELAYED_RESTART": Ablation(
        "a restarted server casts no vote for a time", quarantine, "_until", lambda each, now, length: quarantine.VOTES
    ),
    "MARK": Ablation(
        "a deployment is new only if no server that answers has a mark",
        quarantine,
        "judge",
        _new_if(lambda facts: facts.replaced is None),
    ),
    "SEEN_OTHER": Ablation(
        "... and this client has met no other server there",
        quarantine,
        "judge",
        _new_if(lambda facts: facts.mark == ""),
    ),
    "WITNESSES": Ablation(
        "a token counts once a majority has it", Ballot, "token", lambda self: (max(self.fences()), True)
    ),
    "STAYS_IN_SPAN": Ablation("no tenure leaves the span of its hold", local_queue, "may_pass", lambda *args: True),
    "CLOCK_SEEDS": Ablation(
        "a new hold's fence is not below its client's clock", Decision, "_next_fences", _own_counter
    ),
    "LEAVE": Ablation("a client that gives up takes back what it sent", Acquisition, "_leave", _nothing),
    "ROUND_SERVES": Ablation(
        "the acquire of a round serves: only a hold goes before the queue",
        rounds,
        "no_ticket",
        lambda serve, fair, span: Queueing(Serve.NOBODY, fair, span),
    ),
    "DRIFT": Ablation("the drift allowance is subtracted", hold, "drift", lambda lease: 0.0),
    "REFUSAL_COUNTS": Ablation("a node that refuses a renewal no longer counts", Hold, "_refused_by", _still_counts),
    "RAISE": Ablation("a release and an extend raise the counter", Decision, "_raise", _nothing),
    "WITHDRAW": Ablation("the winner withdraws its other tickets", Rounds, "withdraw_ticket", _nothing),
    "MERGED_ENDS": Ablation("a lease ends at the majority-th latest of its ends", hold, "valid_until", max),
    "LOSS_IS_TOLD": Ablation("a loss interrupts the body", Tenure, "enter", _tells_nobody),
    "OTHERS_STAY": Ablation("a release deletes no other hold", Decision, "release", _releases_all),
    "HANDLE_ONCE": Ablation("an adoption ends the hold that it takes over", Decision, "adopt", _adopt_beside),
    "EXPIRES": Ablation("a server keeps a hold for its lease", Decision, "_hold", _kept_for_longer),
    "IN_ORDER": Ablation("the queue is in the order of the order keys", Decision, "_enqueue", _to_the_front),
    "OWN_ORDER": Ablation("a ticket keeps its order key at a node", Decision, "_enqueue", _by_this_clock),
    "BATCHES": Ablation("an op serves all who can enter together", Decision, "_serve_all", _serves_one),
    "PLACES": Ablation(
        "a try for several names takes its place at each by its first one", JointDecision, "acquire", _behind_all
    ),
    "LEAVING_SERVES": Ablation(
        "a refused try for several names serves those that it leaves", JointDecision, "_leave", _leaves_quietly
    ),
    "ONE_TOKEN": Ablation(
        "the token of several names is above the fences of all",
        JointDecision,
        "_level",
        lambda self: min(state.fence for state in self.states),
    ),
    "ADOPT_ONCE": Ablation("a claim that is given up withdraws its id", rounds, "withdraw", _nothing),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """The shipped code without that rule."""
    ablation = ABLATIONS[name]
    owners = [ablation.owner]
    if ablation.attribute in ("may_pass", "withdraw", "after_split") and ablation.owner is not hold:
        from asynclock.protocol import handover

        owners += [each for each in (hold, handover) if hasattr(each, ablation.attribute)]
    if ablation.owner is Rounds:  # with the strategies that have a method of their own
        owners += [each for each in (RoundsAtOne, RoundsAtMany) if ablation.attribute in vars(each)]
    patches = [mock.patch.object(owner, ablation.attribute, ablation.instead) for owner in owners]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def find(name: str, base: int = 0, hours: int = HOURS) -> tuple[int, int, Flaw] | None:
    """The first seed and run with a flaw."""
    with without(name):
        for seed in range(base, base + hours):
            for run in range(RUNS):
                flaw = simulate(plan_of(seed, run)).flaw
                if flaw is not None:
                    return seed, run, flaw
    return None


def find_in_small(name: str, number: int = WALKS) -> tuple[str, str] | None:
    """The first scene of a walk with a flaw, and the flaw. Also the scene of the model of restarts that needs the rule,
    if there is one."""
    with without(name):
        if name in restart.Rule.__members__:
            scene, _ = restart.BREAKS[restart.Rule[name]]
            flaw = explore(restart.scene(scene)).flaw
            return None if flaw is None else (f"restart: {scene}", flaw.what)
        for seed in range(number):
            for scene, each in walks.scenes():
                if (flaw := walks.walk(each, seed).flaw) is not None:
                    return f"{scene}; seed {seed}", flaw.what
    return None


def find_in_directed(name: str) -> Flaw | None:
    """The flaw of the plan that was made for it."""
    with without(name):
        return simulate(PLANS[name]).flaw if name in PLANS else None


def main() -> None:
    for name in sys.argv[1:] or ABLATIONS:
        small, hour = find_in_small(name) or ("-", ""), find(name, hours=4)
        place, what = ("-", "") if hour is None else (f"{hour[0]}, {hour[1]}", hour[2].what)
        if hour is None and (flaw := find_in_directed(name)) is not None:
            place, what = "made by hand", flaw.what
        rule = ABLATIONS[name].rule
        print(f"| {rule} | `{name}` | {small[0]} | {small[1]} | {place} | {what} |", flush=True)


if __name__ == "__main__":
    main()
