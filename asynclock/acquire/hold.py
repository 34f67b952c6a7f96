"""Hold: what the nodes keep under one id, from grant to release. Tasks of this process may have it in turn, each as a
Tenure of its own (`local_queue.py`); this class has what their tenures share.

The rules:

1. At each node the hold ends with the last send that the node answered with yes. It ends where it has lost a majority.
2. A node that answers a renewal with "no" counts no more from that answer on, whether or not the round is decided.
   Once a majority has done so the hold is lost. A node that lost its key is given it again after a round that had its
   majority without that node, and counts from the next. It is not given the key after a server said that an operator
   broke the hold: the key would come back that the operator deleted.
3. A node that missed the token is told it in the background.
4. Once a release is queued nothing follows that could bring the key back. So renewal stops before the release is sent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._options import RELEASE_TIMEOUT
from asynclock.acquire.renewal import RENEW_BELOW, Due, due, retry_after
from asynclock.acquire.tenure import DETACHED, LOST, RELEASED, Loss, Tenure
from asynclock.quorum.ballot import WON, Ballot, drift, valid_until
from asynclock.quorum.denials import lost_to
from asynclock.rules.model import ACQUIRE, EXTEND, RELEASE, Op, Queueing, Serve, Verb
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from weakref import ref

    from asynclock._options import LockSettings
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Terms

_QUIET = {serve: Queueing(serve) for serve in Serve}
_CONTENDED = {serve: Queueing(serve, contended=True) for serve in Serve}


class Hold:
    """Made of the ballot that won it. Times are seconds of the client's clock."""

    __slots__ = (
        "_ballot", "_broken", "_denials", "_ends", "_healed", "_promised", "_settings", "_tenures", "_watched_at",
        "contended", "last_fence", "last_round_trip", "names", "next_fence", "op", "over", "renew_at", "session",
        "valid_until",
    )  # fmt: skip

    def __init__(
        self, session: Session, settings: LockSettings, grant: Ballot, token: int, contended: bool = False
    ) -> None:
        self.session = session
        self.op = op = grant.op
        parts = op.kind.parts
        self.names = tuple([part.name for part in parts]) if parts else (op.name,)  # most holds have one name
        self.last_fence = token  # the last of the span that came with it, and the only one that nodes are told
        self.next_fence = token + 1 - op.queueing.span
        self.contended = contended  # a client elsewhere waits for it, as far as this client was told
        self.last_round_trip = session.clock.now()  # the time for which it may be passed on counts from here
        self.over = False  # given back, or lost
        self._tenures: list[ref[Tenure]] = []  # one, or those of an owner who entered again
        self._settings = settings
        self._watched_at = -math.inf  # when the watchdog looks at it
        self._ballot: Ballot | None = grant  # None: each node has answered, and none failed
        self._healed = 0  # bit i: node i may have it by another round than the one that won it
        self._broken = False  # a server said that an operator took it away there
        self._promised = math.inf  # when it would have ended without the answers of nodes that have lost it
        self._denials: dict[int, Refused] | None = None  # the last refusal of each node that refused and was not healed
        # All grants of one ballot end alike, counted from its one send; there is a majority of them.
        end = grant.sent + settings.lease - drift(settings.lease)
        self.valid_until = -math.inf
        self._ends = [-math.inf] * grant.nodes  # at each node
        for index, vote in enumerate(grant.votes):
            if vote.__class__ is tuple and vote == (token, False):
                self._ends[index] = end
            elif vote is not None:
                self.count(grant, index)
        self.valid_until = end
        self.renew_at = self._next_renewal()
        if grant.nodes > 1:
            grant.on_late_vote(self.count)

    @property
    def name(self) -> str:
        return self.op.name

    # -- its tenures ---------------------------------------------------------------------------------------------

    @property
    def tenures(self) -> list[Tenure]:
        """The tenures that have not ended."""
        return [tenure for known in self._tenures if (tenure := known()) is not None]

    def begin(self, terms: Terms) -> Tenure:
        """The tenure of its next owner, with the next fence of the span."""
        fence = self.next_fence
        self.next_fence = fence + 1
        # max_hold and min_hold count from here. A ticket may have been sent long before it was granted.
        tenure = Tenure(self, terms, fence, self.session.clock.now())
        self._tenures.append(tenure.own)
        if self._watched_at == -math.inf:  # the first one
            self.session.holds.add(self)
            self._watched_at = at = min(self.renew_at, self.valid_until, tenure.until)
            self.session.watchdog.watch(self, at)
        return tenure

    def enter_again(self, tenure: Tenure, terms: Terms) -> Tenure:
        """One more tenure for the same owner, with the same fence. The hold ends with the last of them."""
        again = Tenure(self, terms, tenure.fence, self.session.clock.now())
        self._tenures.append(again.own)
        if again.until < self._watched_at:
            self.watch_at(again.until)
        return again

    def end(self, tenure: Tenure) -> Ballot | None:
        """The owner gives its tenure back. None: the hold goes on, with another tenure of this owner or of a task that
        it was passed to. Else the ballot of the release. Of a tenure that was lost a release is sent, too: some node
        may still have the hold."""
        queues = self.session.local_queues
        if tenure.open:
            if len(self._tenures) > 1 or queues.pass_on(self, tenure):
                self._tenures.remove(tenure.own)
                tenure.end(RELEASED)
                return None
            ballot = self._release(tenure)
            self._give_up()
            tenure.end(RELEASED)
        else:
            ballot = self._release(tenure)
        queues.next_turn(self.names)
        return ballot

    def _release(self, tenure: Tenure) -> Ballot:
        """Send the release before anything else. If clients elsewhere wait for the hold it leaves at once, in one write
        with the next attempt of this process, which comes after theirs."""
        session, local = self.session, bool(self.session.local_queues)
        ballot = self.release(tenure.rest(), at_once=self.contended and not local, done=tenure.done_for > 0)
        if self.contended:
            if tenure.open:
                session.yielded.add(self.op.kind, self.name)
            if local:
                session.local_queues.next_turn(self.names)
                session.quorum.flush()
        return ballot

    def detach(self, tenure: Tenure) -> None:
        """Another process may adopt it from now on; this one does nothing more for it."""
        self._give_up()
        tenure.end(DETACHED)
        self.session.local_queues.next_turn(self.names)

    def lose(self, loss: Loss) -> None:
        """It is lost, and all its tenures are. Their owners are told."""
        if self.over:
            return
        tenures = self.tenures
        self._give_up()
        for tenure in tenures:
            tenure.end(LOST, loss)
        self.session.local_queues.next_turn(self.names)

    def close(self) -> None:
        """The client closes: release it, and tell its owners that it is lost."""
        tenures = self.tenures
        if not self.over:
            self.lose(Loss.CLOSED)
            done = any(tenure.done_for for tenure in tenures)
            self.release(max((tenure.rest() for tenure in tenures), default=0.0), done=done)

    def drop(self, tenure: Tenure) -> bool:
        """Nobody refers to the tenure any more. Whether it was the last one: then renewal stops, and the hold ends by
        time. A garbage collector calls this in any thread, so that it leaves the watchdog's wheel alone."""
        if tenure.own in self._tenures:
            self._tenures.remove(tenure.own)
        if self._tenures or self.over:
            return False
        self.over = True
        session = self.session
        session.holds.remove(self)
        if session.local_queues and not session.loop.is_closed():
            session.loop.call_soon_threadsafe(session.local_queues.next_turn, self.names)
        return True

    def _give_up(self) -> None:
        """This client has it no more."""
        self.over = True
        self._tenures.clear()
        self.session.holds.remove(self)
        if self._watched_at > -math.inf:
            self.session.watchdog.forget(self, self._watched_at)

    # -- what the watchdog asks ----------------------------------------------------------------------------------

    def due(self, now: float) -> Due:
        """What is due. Of something that is over nothing is, even if the watchdog still knows it."""
        return Due.NOTHING if self.over else due(now, self.valid_until, self.renew_at, self._until)

    @property
    def _until(self) -> float:
        """When max_hold ends the first of its tenures."""
        return min([tenure.until for tenure in self.tenures], default=math.inf)

    def renew(self, now: float) -> None:
        """Ask for another lease; without an answer soon again."""
        for tenure in self.tenures:
            tenure.log_unattended()
        self.renew_at = now + retry_after(self._settings.lease)
        self.extend(self._settings.lease)

    def watch(self) -> None:
        """Have the watchdog look at it when something may be due next."""
        if not self.over:
            self.watch_at(min(self.renew_at, self.valid_until, self._until))

    def watch_at(self, at: float) -> None:
        watchdog = self.session.watchdog
        if self._watched_at > -math.inf:
            watchdog.forget(self, self._watched_at)
        watchdog.watch(self, at)
        self._watched_at = at

    # -- asking the nodes ----------------------------------------------------------------------------------------

    def extend(self, length: float) -> Ballot:
        """Let it end `length` seconds from now, or later. Its tenures are told the outcome."""
        op = self._op(EXTEND, length)
        return self.session.quorum.ask(op, self._within, on_settled=self._extended, on_vote=self.count)

    def waited_for(self, id: str) -> None:
        """A server says that a client waits for the hold of that id."""
        self.contended = self.contended or self.op.id.startswith(id)

    def broken(self, id: str) -> None:
        """A server says that an operator took the hold of that id away there. The operator may have reached a minority
        of the nodes only, so all are asked."""
        if self.op.id.startswith(id):
            self._broken = True
            if not self.over:
                self.extend(0.0)

    def release(self, rest: float = 0.0, at_once: bool = False, done: bool = False) -> Ballot:
        """Give it back. The name stays taken for `rest` seconds, marked as done (`once`) or as resting (min_hold).
        `at_once` as in Quorum.ask."""
        self.over = True
        grant, quorum = self.op, self.session.quorum
        grant.revoke()
        op = Op(
            RELEASE, grant.kind, grant.name, grant.id, self._settings.lease, 0 if grant.plain else self.last_fence,
            grant.memory, rest, queueing=(_CONTENDED if self.contended or grant.plain else _QUIET)[quorum.serve],
            done=done,
        )  # fmt: skip
        within = min(self.session.within(self._settings), RELEASE_TIMEOUT)
        failed = self._ballot is not None and self._ballot.failed
        return quorum.ask(op, within, only=self._where() if failed else None, at_once=at_once)

    def _op(self, verb: Verb, length: float) -> Op:
        grant = self.op
        return Op(verb, grant.kind, grant.name, grant.id, length, 0 if grant.plain else self.last_fence, grant.memory)

    @property
    def _within(self) -> float:
        return self.session.within(self._settings)

    def may_be_at(self, nodes: Iterable[int]) -> None:
        """It is released at these nodes, too."""
        for index in nodes:
            self._healed |= 1 << index

    def _where(self) -> Sequence[int]:
        """The nodes that may have it: those that granted it or may have done so, and those that were given it again. (A
        node that is down must not be owed a release for each lock.)"""
        granted = self._ballot.traces() if self._ballot is not None else range(len(self._ends))
        return [i for i in range(len(self._ends)) if i in granted or self._healed >> i & 1]

    # -- counting their votes ------------------------------------------------------------------------------------

    def _extended(self, ballot: Ballot) -> None:
        """A renewal was decided; nodes that have not answered may yet."""
        if self.over:
            return
        if ballot.outcome is WON:
            self.renew_at = self._next_renewal()
            for index in range(ballot.nodes):
                self._mend(ballot, index)
        # A majority that says "not yours" was counted vote by vote: then the hold is lost already.
        for tenure in self.tenures:
            tenure.renewed(ballot.outcome is WON)

    def count(self, ballot: Ballot, index: int) -> None:
        """What a node's vote means: its end there, or a token or a key that the node has to learn."""
        vote = ballot.votes[index]
        if self.over or vote is None or isinstance(vote, Exception):
            return
        op = ballot.op
        end = ballot.sent + op.lease - drift(op.lease)
        if vote.__class__ is tuple:
            self.contended = self.contended or vote[1] is True
            if self._denials:
                self._denials.pop(index, None)
            if end > self._ends[index]:
                self._ends[index] = end
                if end > self.valid_until:
                    self.valid_until = valid_until(self._ends)
        elif isinstance(vote, Refused) and op.verb is EXTEND:
            self._refused_by(ballot, index, vote)
        self._mend(ballot, index)

    def _refused_by(self, ballot: Ballot, index: int, refusal: Refused) -> None:
        """Rule 2. The lease may end sooner by that than the watchdog was told: now, or if the round is undecided at its
        deadline, since a vote that is on its way may yet make up for this one. But the owner is told no later than the
        lease would have ended without this answer."""
        if self.valid_until > -math.inf:
            self._promised = self.valid_until
        self._ends[index] = -math.inf
        self.valid_until = valid_until(self._ends)
        self._denials = denials = self._denials or {}
        denials[index] = refusal
        now = self.session.clock.now()
        if len(denials) > len(self._ends) // 2 or (self._broken and self.valid_until <= now):
            self.lose(Loss(lost_to(denials.values(), len(self._ends), self._broken)))
            return
        soonest = ballot.deadline if ballot.outcome is None else now
        at = max(min(self.renew_at, self.valid_until, self._until), soonest)
        self.watch_at(max(now, min(at, self._promised, self._until)))

    def _mend(self, ballot: Ballot, index: int) -> None:
        """Rules 2 and 3: tell a node what it misses."""
        vote, op = ballot.votes[index], ballot.op
        if self.over or self.op.plain:
            return
        if isinstance(vote, Refused):
            if op.verb is not EXTEND:
                self._tell(index, EXTEND)
            elif ballot.outcome is WON and not self._broken and (vote.left is None or op.kind.shared):
                self._tell(index, ACQUIRE)  # where several may hold it, others that do are no reason not to
        elif vote.__class__ is tuple and op.verb is not EXTEND and vote[0] < self.last_fence:
            self._tell(index, EXTEND)

    def _tell(self, index: int, verb: Verb) -> None:
        """One node has to learn the token (extend), or is healed (acquire): it counts from the next round on."""
        grant, session = self.op, self.session
        lease = grant.lease if verb is ACQUIRE else 0.0
        op = Op(verb, grant.kind, grant.name, grant.id, lease, self.last_fence, grant.memory)
        if verb is ACQUIRE:
            self._healed |= 1 << index
            if self._denials:  # it may have the key again: its next reply decides
                self._denials.pop(index, None)
        op.revoke()  # a heal is never sent twice: the release may have overtaken it
        now = session.clock.now()
        session.quorum.nodes[index].send(op, Ballot(op, len(session.quorum.nodes), now, now + self._within))

    def _next_renewal(self) -> float:
        return self.valid_until - self._settings.lease * RENEW_BELOW if self._settings.renew else math.inf
