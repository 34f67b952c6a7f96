"""One op asked of N nodes, and what their votes amount to.

The rules:

1. A majority is N // 2 + 1 of the *configured* nodes. Each node has one vote per ballot: yes, no, or none (it failed,
   timed out, or restarted lately). A vote that comes after its node was counted out is dropped.
2. A ballot is settled as soon as its outcome is certain: WON with a majority of yes, UNREACHABLE once so many nodes
   cast no vote that no majority can answer, REFUSED once a majority has answered and a majority of yes is impossible
   ("held" is never said of nodes that are out of reach). Late votes are handled in the background.
3. An attempt that did not become a lease is undone on every node where its id may be or come to be: where it was
   granted, where the answer is out, where it is ambiguous.
4. The fencing token T is the greatest of the grants. It counts once a majority of nodes are witnesses: their F >= T
   while they hold this id. Any later majority meets a witness, and so gets a greater token.
5. The end of a lease at one node is (send + lease - drift); the lease ends at the majority-th latest of these.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from asynclock.quorum.denials import holder_of, lost_to
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from asynclock._errors import Reason
    from asynclock.rules.model import Op, Slots
    from asynclock.stores.port import Grant, Undone, Vote


DRIFT = 0.01
"""Clocks of servers and ours may run this much faster or slower (of the lease) ..."""
DRIFT_FLOOR = 0.002
"""... and Redis ends keys to the ms: the drift allowance of the Redlock page, in seconds."""


class Outcome(Enum):
    """What a ballot came to."""

    WON = "won"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


WON, REFUSED, UNREACHABLE = Outcome
"""Quicker to read than from the class, as those of `model.py`."""


def tally(nodes: int, yes: int, no: int, failed: int) -> Outcome | None:
    """The outcome, or None while it is open. Pure."""
    majority = nodes // 2 + 1
    if yes >= majority:
        return WON
    if failed > nodes - majority:
        return UNREACHABLE
    if nodes - no - failed < majority <= yes + no:
        return REFUSED
    return None


def valid_until(ends: Sequence[float]) -> float:
    """When a lease ends that ends at each node then: the majority-th latest. Pure."""
    return sorted(ends, reverse=True)[len(ends) // 2]


def drift(lease: float) -> float:
    """What to take off a lease of so many seconds, since no two clocks run alike."""
    return lease * DRIFT + DRIFT_FLOOR


_NOT_ASKED = LookupError("not asked")


class Ballot:
    """One op asked of all nodes; it handles their replies. It goes on if the task that awaits it is cancelled."""

    __slots__ = (
        "_certain", "_everyone", "_maybe", "_on_vote", "_waiter", "deadline", "failed", "late", "no", "nodes",
        "on_settled", "op", "outcome", "sent", "votes", "yes",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        nodes: int,
        sent: float,
        deadline: float,
        on_settled: Callable[[Ballot], object] | None = None,
        everyone: bool = False,
        certain: bool = False,
        on_vote: Callable[[Ballot, int], object] | None = None,
    ) -> None:
        self.op = op
        self.nodes = nodes
        self.sent = sent
        self.deadline = deadline
        self.votes: list[Vote] = [None] * nodes
        self.yes = 0
        self.no = 0
        self.failed = 0
        self.outcome: Outcome | None = None
        self.on_settled = on_settled
        self.late: tuple[Callable[[Ballot, int], object], ...] = ()  # called with each later vote
        self._everyone = everyone  # settle only when each node has answered or failed
        self._certain = certain  # a refusal is certain once one holder is known to have a majority, or all have spoken
        self._on_vote = on_vote  # called with each vote, before that may decide the ballot
        self._maybe = 0  # bit i: node i cast no vote, yet may carry the op out
        self._waiter: asyncio.Future[Outcome] | None = None

    def __repr__(self) -> str:
        outcome = self.outcome.value if self.outcome else "open"
        votes = f"{self.yes} yes, {self.no} no, {self.failed} failed of {self.nodes}"
        return f"<Ballot {self.op.verb.value} {outcome}: {votes}>"

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        if self.votes[index] is not None:
            return
        granted = reply.__class__ is tuple
        if granted:
            self.yes += 1
        else:
            self.no += 1
        self.votes[index] = reply
        if self.nodes == 1 and self.outcome is None and self._on_vote is None:  # as for most ballots of a single node
            self._settle(WON if granted else REFUSED)
        else:
            self._count(index)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        if self.votes[index] is not None:
            return
        self.votes[index] = error
        self.failed += 1
        if maybe:
            self._maybe |= 1 << index
        self._count(index)

    def leave_out(self, indices: set[int]) -> None:
        """These nodes are not asked."""
        for index in indices:
            self.votes[index] = _NOT_ASKED
        self.failed += len(indices)

    def _count(self, index: int) -> None:
        if self._on_vote is not None:
            self._on_vote(self, index)
        if self.outcome is not None:
            for late in self.late:
                late(self, index)
            if self.late and self.complete:
                self.late = ()  # its owner can be collected
            return
        if self._everyone and not self.complete:
            return
        outcome = tally(self.nodes, self.yes, self.no, self.failed)
        if outcome is REFUSED and self._certain and not self.complete and self.holder() is None:
            return
        if outcome is not None:
            self._settle(outcome)

    @property
    def complete(self) -> bool:
        """Whether each node has answered or failed."""
        return self.yes + self.no + self.failed == self.nodes

    def on_late_vote(self, late: Callable[[Ballot, int], object]) -> None:
        """Tell of each vote that is still to come."""
        if not self.complete:
            self.late += (late,)

    def expire(self) -> None:
        """The caller can wait no longer: a node that has not answered counts as silent."""
        if self.outcome is None:
            answered = self.yes + self.no > self.nodes // 2
            self._settle(REFUSED if answered else UNREACHABLE)

    def _settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(outcome)
        told, self.on_settled = self.on_settled, None  # the hold keeps this ballot, not the waiter
        if told is not None:
            told(self)

    async def settled(self, loop: asyncio.AbstractEventLoop) -> Outcome:
        """Wait for the outcome. A cancel ends the waiting, not the ballot."""
        return self.outcome or await self.waiter(loop)

    def waiter(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Outcome]:
        """What to await while there is no outcome; a coroutine less than `settled`."""
        self._waiter = loop.create_future()
        return self._waiter

    def traces(self) -> list[int]:
        """The nodes where the op took effect, or may yet (rule 3)."""
        return [
            i
            for i, vote in enumerate(self.votes)
            if vote is None or vote.__class__ is tuple or (self._maybe >> i & 1 and isinstance(vote, Exception))
        ]

    def refused_nodes(self) -> list[int]:
        """The nodes that did not say yes; without those that have not answered."""
        return [i for i, vote in enumerate(self.votes) if vote is not None and vote.__class__ is not tuple]

    def fences(self) -> list[int]:
        """F of each node that said yes."""
        return [vote[0] for vote in self.votes if vote.__class__ is tuple]  # type: ignore[misc]  # a Grant

    def token(self) -> tuple[int, bool]:
        """The fencing token of the grants, and whether a majority is witness of it (rule 4)."""
        if self.nodes == 1:
            return self.votes[0][0], True  # type: ignore[index,return-value]  # it said yes
        fences = self.fences()
        top = max(fences)
        return top, fences.count(top) > self.nodes // 2

    def witnesses(self, token: int) -> bool:
        """Whether a majority of nodes hold for us and have an F that is as great (rule 4)."""
        return sum(f >= token for f in self.fences()) > self.nodes // 2

    def errors(self) -> list[tuple[int, Exception]]:
        """Why nodes cast no vote."""
        return [(i, vote) for i, vote in enumerate(self.votes) if isinstance(vote, Exception)]

    def silent(self) -> list[int]:
        """The nodes whose silence leaves the outcome open. A node that has not answered yet is none of them where the
        failures of others decide."""
        if tally(self.nodes, self.yes, self.no, self.failed) is not None:
            return []
        return [i for i, vote in enumerate(self.votes) if vote is None]

    def denials(self) -> list[Refused]:
        """What each node says that refuses."""
        return [vote for vote in self.votes if isinstance(vote, Refused)]

    def holder(self) -> Refused | None:
        """The holder on a majority of the nodes, with the time that it has there at least; None: there is none."""
        return holder_of(self.denials(), self.nodes)

    def free(self) -> int:
        """How many nodes say that nobody holds it."""
        return sum(vote.left is None for vote in self.denials())

    def rank(self) -> int:
        """Where our ticket stands in the middle of the nodes that keep one; 0 where none does."""
        ranks = sorted(vote.rank for vote in self.denials() if vote.rank >= 0)
        return ranks[len(ranks) // 2] if ranks else 0

    def orders(self) -> list[int]:
        """The order keys of our ticket there."""
        return sorted(vote.order for vote in self.denials() if vote.rank >= 0)

    def taken(self) -> dict[int, Slots]:
        """The slots in use at each node that said no, of a kind that has slots."""
        found = enumerate(self.votes)
        return {i: vote.slots for i, vote in found if isinstance(vote, Refused) and vote.slots is not None}

    def who_took(self) -> Reason:
        """Why a majority said that the hold is not ours."""
        return lost_to(self.denials(), self.nodes, broken=False)
