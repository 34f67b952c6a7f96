"""ThreadedHold: a hold with renew="thread". Two threads count votes for it: that of the event loop, as for each hold,
and the renewal thread (`renewal_thread.py`) while the loop is blocked.

The rules:

1. The thread only extends. It sends no fencing token, does not heal a node without the key, and does not release. Its
   connection has no order with that of the loop. So an extend of the thread may arrive after the release: then the node
   refuses it, because an extend checks the owner and never creates a key, and a later hold has another id.
2. A grant moves `valid_until` at once, so `held` and `remaining` are right for code that blocks the loop. Reading them
   needs no lock: `valid_until` is one float. A lock guards its computation from the ends at the nodes, so that neither
   thread overwrites the result of the other with an older one. No other code runs under that lock.
3. The order of two replies of one node is unknown if they came on different connections. So a grant counts only if it
   was sent after the node's last refusal had arrived.
4. A majority that refuses ends the hold: `held` is False at once, and the loop learns of the loss when it runs again.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING

from asynclock.acquire.hold import Hold
from asynclock.acquire.renewal import retry_after, thread_extends_by
from asynclock.acquire.tenure import Loss
from asynclock.quorum.ballot import drift
from asynclock.rules.model import EXTEND, Op
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from asynclock._options import LockSettings
    from asynclock.acquire.causes import Cause
    from asynclock.acquire.session import Session
    from asynclock.acquire.tenure import Tenure, Terms
    from asynclock.quorum.ballot import Ballot
    from asynclock.quorum.quorum import Quorum


PATIENCE = 1 / 4
"""A vote counts if it comes within this share of the lease. No task waits for it, and a blocked loop slows the
thread."""


class ThreadedHold(Hold):
    """See the module."""

    __slots__ = ("_guard", "_lost_in", "_refused_at", "_retry_at")

    def __init__(
        self, session: Session, settings: LockSettings, grant: Ballot, token: int, contended: bool = False
    ) -> None:
        self._guard = threading.Lock()
        self._refused_at = [-math.inf] * grant.nodes  # when the last refusal of each node arrived
        self._retry_at = -math.inf  # when the thread may extend it again; only the thread uses it
        self._lost_in: Ballot | None = None  # the round of the thread that a majority refused
        super().__init__(session, settings, grant, token, contended)

    def begin(self, terms: Terms) -> Tenure:
        tenure = super().begin(terms)
        self.session.use_renewal_thread()
        return tenure

    def lose(self, loss: Loss) -> None:
        super().lose(self._seen(loss))

    def _why(self, loss: Loss) -> Cause:
        cause, ballot = super()._why(self._seen(loss)), self._lost_in
        if ballot is None:
            return cause
        denials = {index: vote for index, vote in enumerate(ballot.votes) if isinstance(vote, Refused)}
        return cause._replace(errors=dict(ballot.errors()), denials=denials)

    def _seen(self, loss: Loss) -> Loss:
        """What the thread found out about a hold that seems to have expired."""
        ballot = self._lost_in
        return loss if ballot is None or loss is not Loss.EXPIRED else Loss(ballot.loss_reason())

    # -- in the event loop ---------------------------------------------------------------------------------------

    def count(self, ballot: Ballot, index: int) -> None:
        super().count(ballot, index)
        if ballot.votes[index].__class__ is tuple and ballot.sent <= self._refused_at[index]:
            with self._guard:  # rule 3: drop its end, unless a later grant has moved it since
                if self._ends[index] <= _end_of(ballot):
                    self._ends[index] = -math.inf
                    super()._recount()

    def _recount(self) -> None:
        with self._guard:
            super()._recount()

    def _refused_by(self, ballot: Ballot, index: int, refusal: Refused) -> None:
        with self._guard:
            self._refused_at[index] = self.session.clock.now()
            self._ends[index] = -math.inf
        super()._refused_by(ballot, index, refusal)

    def _lose_after_notices(self) -> None:
        """The thread found the loss. In this turn the loop reads what the servers have sent while it was blocked: who
        broke the lock, for example. So the loss is told in the next turn."""
        self.session.loop.call_soon(self.lose, Loss.EXPIRED)

    # -- in the renewal thread -----------------------------------------------------------------------------------

    def extend_in_thread(self, quorum: Quorum, within: float, limit: float) -> None:
        """Ask the nodes of the thread to extend it, if that is due, so that it ends by `limit`."""
        now, lease = quorum.clock.now(), self._settings.lease
        length = thread_extends_by(now, self.valid_until, lease, min(limit, self._until))
        if self.over or not (length and self.tenures) or now < self._retry_at:  # the loop has not ended it if dropped
            return
        self._retry_at = now + retry_after(lease)
        grant = self.op
        op = Op(EXTEND, grant.kind, grant.name, grant.id, length, 0, grant.memory)
        quorum.ask(op, max(within, lease * PATIENCE), on_vote=self.count_in_thread)

    def count_in_thread(self, ballot: Ballot, index: int) -> None:
        """Count one node's vote on an extend of the thread."""
        vote = ballot.votes[index]
        if self.over:
            return
        if isinstance(vote, Exception):
            self._errors = {**(self._errors or {}), index: vote}
        elif vote.__class__ is tuple:
            end = _end_of(ballot)
            with self._guard:
                if ballot.sent > self._refused_at[index] and end > self._ends[index]:
                    self._ends[index] = end
                    super()._recount()
            if ballot.yes > ballot.nodes // 2:
                self._renewed_at, self._errors = ballot.sent, None
        elif isinstance(vote, Refused):
            lost = ballot.no > ballot.nodes // 2 and self._lost_in is None
            if lost:
                self._lost_in = ballot  # first, so that code that then finds `held` False can learn the reason
            with self._guard:
                self._refused_at[index] = self.session.clock.now()
                self._ends[index] = -math.inf
                super()._recount()
            if lost:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self.session.loop.call_soon_threadsafe(self._lose_after_notices)


def _end_of(ballot: Ballot) -> float:
    """When the grants of a ballot end."""
    return ballot.sent + ballot.op.lease - drift(ballot.op.lease)
