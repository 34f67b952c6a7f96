"""When an acquisition asks next, after a round that brought no hold. The planner collects the facts of this round and
of earlier ones. `transitions.py` decides what to do next, and `backoff.py` and `obstacles.py` decide when."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError
from asynclock._options import longest_node_timeout
from asynclock.acquire.backoff import (
    COLLISIONS,
    HEAD_POLLS,
    Pace,
    Plan,
    after_notice_to_another,
    after_split,
    confirm_from,
    next_question,
)
from asynclock.acquire.causes import NoLease
from asynclock.acquire.obstacles import Obstacles, notifies
from asynclock.acquire.transitions import Next, Refusal, after_refusal
from asynclock.quorum.ballot import UNREACHABLE
from asynclock.quorum.denials import is_held, most_named, soonest
from asynclock.rules.model import WAIT
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from asynclock._errors import LockError, QuorumUnavailable
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Terms
    from asynclock.quorum.ballot import Ballot

NO_HOLDER = Refused(None, "")
"""A refusal without a holder: no majority of the nodes names the same one."""


class Planner:
    """The planner of one acquisition, made at its first round without a hold."""

    def __init__(self, session: Session, terms: Terms, began: float) -> None:
        self.began = began  # when the first round was sent
        self._session = session
        self._terms = terms
        self._pace = Pace(session.settings.patience, session.quorum.limits.longest)
        self._obstacles: Obstacles | None = None
        self._slot: int | None = None  # the one to ask for next; None: any
        self._splits = 0  # split votes, or tries of another slot, in a row
        self.refused: Refused | None = None  # the last refusal by a majority; None after an outage
        self.answered_at = -math.inf  # when a majority answered last; -math.inf after an outage
        # The error of the last round, if nodes lost their idle connections. None again once a majority answers, and in
        # an outage.
        self.interrupted: LockError | None = None
        self._interrupted_until = 0.0
        self._refused_at = began
        self.rtt = 0.0  # seconds that the last round took

    # -- a majority is out of reach ------------------------------------------------------------------------------

    def check_outage(self, now: float, give_up: float) -> None:
        """Raise the error of the outage if it has lasted for too long."""
        if self.interrupted is not None and now >= give_up:
            raise self.interrupted
        if self._pace.outage is not None and now >= self._pace.outage_limit(now, give_up):
            raise self._pace.outage

    @property
    def in_outage(self) -> bool:
        """Whether it waits for the end of an outage."""
        return self._pace.outage is not None

    def join_outage(self, error: LockError, patience_ends: float) -> None:
        """The task that asked before met an outage, and this one has waited behind it."""
        self._pace.join(error, patience_ends)

    @property
    def reasons(self) -> dict[int, Exception]:
        """The last error of each node in this outage."""
        return self._pace.reasons

    @property
    def patience_ends(self) -> float:
        """When the patience for this outage ends; math.inf: there is no outage."""
        return self._pace.ends

    def error(self, ballot: Ballot) -> ConfigError | QuorumUnavailable:
        """The error of a round without a majority. For a node that was silent in it, this is its last error in this
        outage."""
        error = self._session.quorum.unavailable(ballot, self._terms.name, self._pace.reasons)
        self._pace.reasons.update(ballot.errors())
        return error

    def may_be_interrupted(self, now: float) -> bool:
        """Whether a round that failed with its connections is asked again when they are back: for as long as an attempt
        to connect may take. After that a server that hangs up on each op is an outage."""
        if self.in_outage or (self.refused is None and self._terms.timeout != 0):
            return False
        return self.interrupted is None or now < self._interrupted_until

    def confirm_from(self, give_up: float) -> float:
        """See `backoff.confirm_from`."""
        within = self._session.within(self._terms.settings)
        return confirm_from(give_up, self._terms.timeout, within, self.rtt)

    def must_confirm_by(self, give_up: float) -> float:
        """When it must ask, for an answer that is new enough when its time is up; math.inf: it has one, or an outage
        decides."""
        if self.refused is None or self.interrupted is not None:
            return math.inf
        by = self.confirm_from(give_up)
        return by if self.answered_at < by else math.inf

    def after_interruption(self, error: LockError, now: float, give_up: float) -> Plan:
        """When to ask again, at the latest: connections that were closed while they were idle are made again."""
        if self.interrupted is None:
            self._interrupted_until = now + self._session.settings.connect_timeout
        self.interrupted = error
        return Plan(min(self._interrupted_until, give_up), probe=self.refused is not None)

    def after_outage(self, error: ConfigError | QuorumUnavailable, ballot: Ballot, now: float, give_up: float) -> Plan:
        """When to ask again. Raises the error if the time is over, or if it is a ConfigError."""
        self.refused = self.interrupted = None
        self.answered_at = -math.inf
        crowd, began = len(self._session.under_way), ballot.sent
        again = None if self._terms.timeout == 0 else self._pace.after_outage(now, give_up, crowd, began=began)
        try:
            if again is None or isinstance(error, ConfigError):
                raise error
            self._pace.outage = error
        finally:  # it refers to this frame, too: as in the caller, a cycle would stay
            del error
        return again

    # -- a majority has refused ----------------------------------------------------------------------------------

    def after_refusal(self, ballot: Ballot, now: float, give_up: float) -> Next:
        """The next step after a refusal by a majority, in this round or, if the time is over, lately."""
        if ballot.outcome is not UNREACHABLE:
            self.answered_at, self.rtt, self.interrupted = now, now - ballot.sent, None
        if ballot.no > ballot.nodes // 2 or self.refused is None:  # not a round that the end of the time cut short
            self.refused, self._refused_at = ballot.holder() or self._one_of(ballot) or NO_HOLDER, now
        nodes, kind = ballot.nodes, self._terms.kind
        one_try, time_up = self._terms.timeout == 0, now >= give_up
        tries_on = self._splits < COLLISIONS if one_try else not time_up
        vote = ballot.votes[0]
        denied = nodes > 1 or vote.__class__ is Refused
        step = after_refusal(
            Refusal(
                nodes=nodes,
                time_up=time_up,
                one_try=one_try,
                other_slot=nodes > 1 and kind.slots > 0 and tries_on and self._choose_slot(ballot),
                denied=denied,
                has_ticket=ballot.op.queueing.number > 0 if nodes > 1 else vote.__class__ is Refused and vote.rank >= 0,
                notices=self._session.quorum.listens,
                plain=ballot.op.plain,
                probe=ballot.op.verb is WAIT,
                rank=ballot.rank(),
                free=ballot.free() > nodes // 2,
                one_holder=ballot.holder() is not None,
                several_holders=kind.shared and is_held(ballot.denials(), nodes),
                in_order=kind.respects_queue(ballot.op.id),
            )
        )
        # A server that writes nothing, such as one without memory, refuses in this way, too. The next round, with a
        # ticket, shows it.
        if ballot.op.queueing.number or step not in (Next.TRY, Next.TRY_WITH_NEW_ID):
            self._pace.reached()
        return step

    def _one_of(self, ballot: Ballot) -> Refused | None:
        """One of the holders, of a kind that several may hold: the nodes may name different ones."""
        return most_named(ballot.denials()) if self._terms.kind.shared else None

    def no_lease(self, now: float, waited: float, ballot: Ballot | None) -> NoLease:
        """An acquire that ends without a lease after `waited` seconds: the hold in the way, as a majority named it
        last. `ballot`: its last round; None: another task asked for it."""
        free = ballot is not None and ballot.free() > ballot.nodes // 2
        if self.refused is None or self.refused.left is None:
            return NoLease(waited=waited, free=free)
        age = now - self._refused_at
        return NoLease(self.refused.holder, max(0.0, self.refused.left - age), age, waited, free)

    def plan(self, step: Next, ballot: Ballot, now: float) -> Plan:
        """When to do that step."""
        sent, lease, rank = ballot.sent, self._terms.settings.lease, ballot.rank()
        if step in (Next.WAIT_FOR_HOLDER, Next.WAIT_FOR_HOLDERS):
            self._splits = 0
        elif step in (Next.TRY_ANOTHER_SLOT, Next.BACK_OFF_AFTER_SPLIT):
            self._splits += 1
        match step:
            case Next.WAIT_FOR_HOLDER:
                holder = ballot.holder() or NO_HOLDER
                return next_question(now, sent, lease, rank, holder.left, notifies(holder.holder))
            case Next.WAIT_FOR_HOLDERS:
                return self._known_obstacles.plan(ballot, now, self.rtt, rank)
            case Next.WAIT_FOR_TURN:
                return next_question(now, sent, lease, rank, None, True)
            case Next.LET_EARLIER_TRY:
                return after_notice_to_another(now, self.rtt)
            case Next.BACK_OFF_AFTER_SPLIT:
                return after_split(now, self.rtt, rank, self._splits)
            case Next.TRY_ANOTHER_SLOT if self._splits > 1:
                return after_split(now, self.rtt, 0, self._splits)
            case Next.POLL:
                head = HEAD_POLLS if rank == 0 else math.inf  # the next hold may be its own
                return self._pace.after_refusal(now, min(soonest(ballot.denials()), head))
            case Next.POLL_WITH_NEW_ID:
                return self._pace.after_refusal(now)
        return Plan(now)

    @property
    def _known_obstacles(self) -> Obstacles:
        if self._obstacles is None:
            session, settings = self._session, self._terms.settings
            longest = longest_node_timeout(session.settings, settings)
            self._obstacles = Obstacles(2 * session.within(settings), 2 * longest)
        return self._obstacles

    def _choose_slot(self, ballot: Ballot) -> bool:
        """Choose a slot that a majority may grant; False: none is known."""
        spare = ballot.nodes - ballot.nodes // 2 - 1
        self._slot = self._terms.kind.choose(self._known_obstacles.taken(ballot), spare)
        return self._slot is not None

    def take_slot(self) -> int | None:
        """The slot that was chosen for the next attempt; None: any slot."""
        slot, self._slot = self._slot, None
        return slot
