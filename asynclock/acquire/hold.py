"""Hold: what the nodes keep under one id, from grant to release. Tasks of this process may have it in turn, each
by a Lease of its own (`local_queue.py`); here is what their tenures share.

The rules:

1. At each node it ends with the last send that the node answered with yes; it ends where it has lost a majority.
2. A node that answers a renewal with "no" counts no more from that answer on, whether or not the round is decided;
   once a majority has done so the hold is lost. A node that lost its key is given it again after a round that had its
   majority without that node, and counts from the next; but not once a server said that an operator broke the hold:
   the key would come back that the operator deleted.
3. A node that missed the token is told it in the background.
4. Once a release is queued nothing follows that could bring the key back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from asynclock._options import RELEASE_TIMEOUT
from asynclock.acquire.watchdog import RENEW_BELOW, Watched
from asynclock.quorum.ballot import WON, Ballot, drift, valid_until
from asynclock.quorum.denials import lost_to
from asynclock.rules.model import ACQUIRE, EXTEND, RELEASE, Op, Queueing, Serve, Verb
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable
    from weakref import ref

    from asynclock._errors import Reason
    from asynclock._options import LockSettings
    from asynclock.acquire.session import Session

_QUIET = {serve: Queueing(serve) for serve in Serve}
_CONTENDED = {serve: Queueing(serve, contended=True) for serve in Serve}


class Tenure(Watched, Protocol):
    """A Lease that has it now."""

    @property
    def _ends(self) -> float:
        """When it ends at the latest, unless it is renewed."""

    @property
    def _hold_until(self) -> float:
        """When max_hold ends it."""

    def _renewed(self, ballot: Ballot) -> None:
        """A renewal, or an extend, is decided."""

    def _lose(self, reason: Reason) -> None:
        """It is lost."""


class Hold:
    """Made of the ballot that won it. Times are seconds of the client's clock."""

    __slots__ = (
        "_ballot", "_broken", "_denials", "_ends", "_healed", "_promised", "_settings", "contended", "names", "op",
        "over", "renew_at", "session", "tenures", "token", "tripped", "valid_until",
    )  # fmt: skip

    def __init__(
        self, session: Session, settings: LockSettings, grant: Ballot, token: int, contended: bool = False
    ) -> None:
        self.session = session
        self.op = op = grant.op
        parts = op.kind.parts
        self.names = tuple([part.name for part in parts]) if parts else (op.name,)  # what it holds; mostly one
        self.token = token  # the last of the span that came with it; all that nodes hear of
        self.contended = contended  # somebody waits for it elsewhere, as far as we know
        self.tripped = session.clock.now()  # the last round trip that passing it on counts from
        self.over = False  # given back, or lost
        self.tenures: list[ref[Any]] = []  # whose it is now: one, or those of an owner who entered again
        self._settings = settings
        self._ballot = grant
        self._healed = 0  # bit i: node i may have it by another round than the one that won it
        self._broken = False  # a server said that an operator took it away there
        self._promised = math.inf  # when it would have ended without the answers of nodes that have lost it
        self._denials: dict[int, Refused] | None = None  # of the nodes whose last word was "no", but for those healed
        # One ballot's grants all end alike, counted from its one send; a majority of them there is.
        end = grant.sent + settings.lease - drift(settings.lease)
        self.valid_until = -math.inf
        self._ends = [-math.inf] * grant.nodes  # at each node
        for index, vote in enumerate(grant.votes):
            if vote == (token, False):
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

    def waited_for(self, id: str) -> None:
        """A server says that somebody waits for the hold of that id."""
        self.contended = self.contended or self.op.id.startswith(id)

    # -- whose it is ---------------------------------------------------------------------------------------------

    def leave(self, lease: ref[Any]) -> bool:
        """A tenure ends. Whether others go on."""
        if lease in self.tenures:
            self.tenures.remove(lease)
        return bool(self.tenures)

    def shared(self) -> list[Tenure]:
        """All tenures there are now."""
        return [lease for known in self.tenures if (lease := known()) is not None]

    # -- asking the nodes ----------------------------------------------------------------------------------------

    def extend(self, length: float) -> Ballot:
        """Let it end `length` seconds from now, or later. Whose it is then hears the outcome."""
        op = self._op(EXTEND, length)
        return self.session.quorum.ask(op, self._within, on_settled=self._extended, on_vote=self.count)

    def check(self) -> None:
        """Ask whether it is ours still."""
        if not self.over:
            self.extend(0.0)

    def broken(self, id: str) -> None:
        """A server says that an operator took the hold of that id away there. The operator may have reached a minority
        of the nodes only, so all are asked."""
        if self.op.id.startswith(id):
            self._broken = True
            self.check()

    def release(self, rest: float = 0.0, at_once: bool = False, done: bool = False) -> Ballot:
        """Give it back; the name stays taken for `rest` seconds, marked as done (`once`) or as resting (min_hold).
        `at_once` as in Quorum.ask."""
        self.over = True
        self.op.revoke()
        grant, quorum = self.op, self.session.quorum
        op = Op(
            RELEASE, grant.kind, grant.name, grant.id, self._settings.lease, 0 if grant.plain else self.token,
            grant.memory, rest, queueing=(_CONTENDED if self.contended or grant.plain else _QUIET)[quorum.serve],
            done=done,
        )  # fmt: skip
        within = min(self._within, RELEASE_TIMEOUT)
        return quorum.ask(op, within, only=self._where() if self._ballot.failed else None, at_once=at_once)

    def _op(self, verb: Verb, length: float) -> Op:
        grant = self.op
        return Op(verb, grant.kind, grant.name, grant.id, length, 0 if grant.plain else self.token, grant.memory)

    @property
    def _within(self) -> float:
        return self.session.within(self._settings)

    def may_be_at(self, nodes: Iterable[int]) -> None:
        """It is released there, too."""
        for index in nodes:
            self._healed |= 1 << index

    def _where(self) -> list[int]:
        """The nodes that may have it: those that let it in or may have done so, and those that were given it again. (A
        dead node must not be owed a release for each lock.)"""
        granted = self._ballot.traces()
        return [i for i in range(self._ballot.nodes) if i in granted or self._healed >> i & 1]

    # -- counting their votes ------------------------------------------------------------------------------------

    def _extended(self, ballot: Ballot) -> None:
        """A renewal was decided; nodes that have not answered may yet."""
        if self.over:
            return
        if ballot.outcome is WON:
            self.renew_at = self._next_renewal()
            for index in range(ballot.nodes):
                self._mend(ballot, index)
        for lease in self.shared():
            lease._renewed(ballot)

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
            self._forgotten_by(ballot, index, vote)
        self._mend(ballot, index)

    def _forgotten_by(self, ballot: Ballot, index: int, vote: Refused) -> None:
        """Rule 2. The lease may end sooner by that than the watchdog was told: now, or if the round is undecided at its
        deadline, since a vote that is on its way may yet make up for this one. But the owner is told no later than the
        lease would have ended without this answer."""
        if self.valid_until > -math.inf:
            self._promised = self.valid_until
        self._ends[index] = -math.inf
        self.valid_until = valid_until(self._ends)
        self._denials = denials = self._denials or {}
        denials[index] = vote
        now, tenures = self.session.clock.now(), self.shared()
        if len(denials) > len(self._ends) // 2 or (self._broken and self.valid_until <= now):
            if tenures:  # with the first all are lost
                tenures[0]._lose(lost_to(denials.values(), len(self._ends), self._broken))
            return
        watchdog, soonest = self.session.watchdog, ballot.deadline if ballot.outcome is None else now
        for lease in tenures:
            watchdog.forget(lease)
            look = max(min(self.renew_at, lease._ends), soonest)
            watchdog.watch(lease, max(now, min(look, self._promised, lease._hold_until)))

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
        elif vote.__class__ is tuple and op.verb is not EXTEND and vote[0] < self.token:
            self._tell(index, EXTEND)

    def _tell(self, index: int, verb: Verb) -> None:
        """One node has to learn the token (extend), or is healed (acquire): it counts from the next round on."""
        grant, session = self.op, self.session
        lease = grant.lease if verb is ACQUIRE else 0.0
        op = Op(verb, grant.kind, grant.name, grant.id, lease, self.token, grant.memory)
        if verb is ACQUIRE:
            self._healed |= 1 << index
            if self._denials:  # it may have the key again: its next reply decides
                self._denials.pop(index, None)
        op.revoke()  # a heal is never sent twice: the release may have overtaken it
        now = session.clock.now()
        session.quorum.nodes[index].send(op, Ballot(op, len(session.quorum.nodes), now, now + self._within))

    def _next_renewal(self) -> float:
        return self.valid_until - self._settings.lease * RENEW_BELOW if self._settings.renew else math.inf
