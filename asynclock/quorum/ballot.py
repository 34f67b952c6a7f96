"""One op sent to N nodes, and the count of their votes.

The rules:

1. A majority is N // 2 + 1 of the *configured* nodes. Each node has one vote per ballot: yes, no, or none (it failed,
   timed out, or is in quarantine). A vote that arrives after its node was counted as failed is dropped.
2. A ballot is settled as soon as its outcome is certain: WON with a majority of yes; UNREACHABLE when so many nodes
   cast no vote that no majority can answer; REFUSED when a majority has answered and a majority of yes is impossible.
   So unreachable nodes never make a name look held. Late votes are handled in the background.
3. An attempt that did not become a lease is undone on every node where it took effect or may still do so: where it was
   granted, where no answer has arrived, and where the failure is ambiguous.
4. The fencing token T is the greatest of the grants. It counts once a majority of nodes are witnesses: nodes whose
   fence counter F is >= T while they hold this id. Any later majority meets a witness, and so gets a greater token.
5. The end of a lease at one node is (send + lease - drift); the lease ends at the majority-th latest of these.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from asynclock.quorum.denials import holder_of, lost_to
from asynclock.stores.port import Reconnecting, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asynclock._errors import Reason
    from asynclock.rules.model import Op, Slots
    from asynclock.stores.port import Grant, Undone, Vote


DRIFT = 0.01
"""The drift allowance of the Redlock page: the clocks of servers and client may differ by this share of a lease ..."""
DRIFT_FLOOR = 0.002
"""... plus so many seconds, because Redis expires keys to the ms."""


class Outcome(Enum):
    """The result of a ballot."""

    WON = "won"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


WON, REFUSED, UNREACHABLE = Outcome
"""Faster to read than the members of the class, as in `model.py`."""


class Waiter(Protocol):
    """Something for which a task waits, such as a future."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...


def tally(nodes: int, yes: int, no: int, failed: int) -> Outcome | None:
    """The outcome; None while the ballot is open. Pure."""
    majority = nodes // 2 + 1
    if yes >= majority:
        return WON
    if failed > nodes - majority:
        return UNREACHABLE
    if nodes - no - failed < majority <= yes + no:
        return REFUSED
    return None


def valid_until(ends: Sequence[float]) -> float:
    """When a lease ends, from its ends at the nodes: the majority-th latest of these. Pure."""
    return sorted(ends, reverse=True)[len(ends) // 2]


def drift(lease: float) -> float:
    """The seconds to subtract from a lease of so many seconds, because clocks run at different speeds."""
    return lease * DRIFT + DRIFT_FLOOR


_NOT_ASKED = LookupError("not asked")


class Ballot:
    """One op, sent to all nodes or to some. Handles the replies, also once the task that waits for it was cancelled."""

    __slots__ = (
        "_certain", "_done", "_least", "_maybe", "_on_vote", "_waiter", "deadline", "deferred", "early", "failed",
        "gives_up", "late", "no", "nodes", "on_settled", "op", "outcome", "sent", "votes", "yes",
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
        gives_up: float = math.inf,
        sending: bool = False,
    ) -> None:
        self.op = op
        self.nodes = nodes
        self.sent = sent
        self.deadline = deadline
        self.gives_up = gives_up  # when its caller stops waiting
        self.deferred: Callable[[], Exception] | None = None  # why it was not sent yet
        self.votes: list[Vote] = [None] * nodes
        self.yes = 0
        self.no = 0
        self.failed = 0
        self.outcome: Outcome | None = None
        self.on_settled = on_settled
        self.late: tuple[Callable[[Ballot, int], object], ...] = ()  # called with each vote after the outcome
        self._least = nodes if everyone else nodes - nodes // 2  # fewer votes leave the outcome open
        self._certain = certain  # REFUSED only if one holder has a majority, or all nodes have answered or failed
        self._on_vote = on_vote  # called with each vote, before the vote can settle the ballot
        # Answers and failures that came inside the call that sends the op (`sending`); None: it has been sent.
        self.early: tuple[tuple[int, Any, bool], ...] | None = () if sending else None
        self._maybe = 0  # bit i: node i cast no vote, but may carry the op out
        self._done = 0  # bit i: node i cast no vote, but has answered since, or was not asked
        self._waiter: Waiter | None = None

    def __repr__(self) -> str:
        outcome = self.outcome.value if self.outcome else "open"
        votes = f"{self.yes} yes, {self.no} no, {self.failed} failed of {self.nodes}"
        return f"<Ballot {self.op.verb.value} {outcome}: {votes}>"

    def answer(self, index: int, reply: Grant | Refused | Undone) -> None:
        if self.early is not None:
            self.early += ((index, reply, False),)
            return
        if self.votes[index] is not None:
            self._done |= isinstance(self.votes[index], Exception) << index
            return
        granted = isinstance(reply, tuple)
        if granted:
            self.yes += 1
        else:
            self.no += 1
        self.votes[index] = reply
        if self.outcome is None and self._on_vote is None:
            if self.nodes == 1:  # as for most ballots of a single node
                self._settle(WON if granted else REFUSED)
            elif self.yes + self.no + self.failed >= self._least:
                self._count(index)
        elif self.late or self._on_vote is not None:
            self._count(index)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        if self.early is not None:
            self.early += ((index, error, maybe),)
            return
        if self.votes[index] is not None:
            return
        self.votes[index] = error
        self.failed += 1
        if maybe:
            self._maybe |= 1 << index
        self._count(index)

    def count_early(self, early: Sequence[tuple[int, Any, bool]]) -> None:
        """Count what came inside the call that sent the op. The quorum calls this in the next turn, because no event is
        delivered inside a call of the machine. Store all of them before counting the first, so that the error of an
        outage names each node."""
        counted: list[int] = []
        for index, vote, maybe in early:
            if self.votes[index] is None:
                self.votes[index] = vote
                self.failed += isinstance(vote, Exception)
                self.yes += isinstance(vote, tuple)
                self._maybe |= maybe << index
                counted.append(index)
        self.no = sum(vote is not None for vote in self.votes) - self.yes - self.failed
        for index in counted:
            self._count(index)

    def take_back(self, index: int, refusal: Refused) -> None:
        """A node that has granted the op refuses a later op of its id: it has lost the hold since."""
        if isinstance(self.votes[index], tuple):
            self.votes[index] = refusal
            self.yes -= 1
            self.no += 1

    def defer(self, why: Callable[[], Exception]) -> None:
        """It waits in the queue of the only node."""
        self.deferred = why

    def begin(self, now: float) -> None:
        """It leaves that queue: its time counts from now."""
        self.deferred = None
        self.sent, self.deadline = now, now + self.deadline - self.sent

    def leave_out(self, nodes: Mapping[int, Exception | None]) -> None:
        """These nodes are not asked. `nodes`: node -> the error that makes it unavailable now, or None."""
        for index, error in nodes.items():
            self.votes[index] = error or _NOT_ASKED
            self._done |= 1 << index
        self.failed += len(nodes)

    def _count(self, index: int) -> None:
        if self._on_vote is not None:
            self._on_vote(self, index)
        nodes, counted = self.nodes, self.yes + self.no + self.failed
        if self.outcome is not None:
            for late in self.late:
                late(self, index)
            if counted == nodes:
                self.late = ()  # so that the owner of the callback can be collected
            return
        if counted < self._least:
            return
        outcome = tally(nodes, self.yes, self.no, self.failed)
        if outcome is REFUSED and self._certain and counted < nodes and self.holder() is None:
            return
        if outcome is not None:
            self._settle(outcome)

    @property
    def complete(self) -> bool:
        """Whether each node has answered or failed."""
        return self.yes + self.no + self.failed == self.nodes

    @property
    def answered(self) -> bool:
        """Whether a majority has answered, also if the ballot is still open."""
        return self.yes + self.no > self.nodes // 2

    @property
    def carried_out(self) -> bool:
        """Of a release: whether a majority of the nodes is without its id. These are the nodes that have answered, too
        late to vote or not, and those that were not asked."""
        return self.yes + self.no + self._done.bit_count() > self.nodes // 2

    @property
    def denied(self) -> bool:
        """Whether a majority has refused, also if the last answers came after `expire`."""
        return self.no > self.nodes // 2

    @property
    def may_be_granted(self) -> bool:
        """Whether a majority would grant it if all nodes that cast no vote did."""
        return self.nodes - self.no > self.nodes // 2

    def on_late_vote(self, late: Callable[[Ballot, int], object]) -> None:
        """Call `late` with each vote that has not arrived yet."""
        if not self.complete:
            self.late += (late,)

    def expire(self) -> None:
        """The caller stops waiting: settle with the votes so far."""
        if self.outcome is None:
            self._settle(REFUSED if self.answered else UNREACHABLE)

    def _settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(outcome)
        on_settled, self.on_settled = self.on_settled, None  # the hold keeps this ballot, but not the waiter
        if on_settled is not None:
            on_settled(self)

    def when_settled(self, call: Callable[[Ballot], object] | None) -> None:
        """Call it with this ballot once there is an outcome; None: nothing."""
        self.on_settled = call

    def wakes(self, waiter: Waiter) -> None:
        """Complete it with the outcome. If the caller stops waiting, the ballot goes on."""
        self._waiter = waiter

    def traces(self) -> list[int]:
        """The nodes where the op took effect or may still do so (rule 3)."""
        return [
            i for i, vote in enumerate(self.votes) if vote is None or isinstance(vote, tuple) or self._maybe >> i & 1
        ]

    @property
    def left_nothing(self) -> bool:
        """Whether it is certain that no node has carried the op out, or will: then not even a ticket is left."""
        return self.failed == self.nodes and not self._maybe

    def nodes_without_grant(self) -> list[int]:
        """The nodes that answered no or failed."""
        return [i for i, vote in enumerate(self.votes) if vote is not None and not isinstance(vote, tuple)]

    def fences(self) -> list[int]:
        """The fence F of each node that answered yes."""
        return [vote[0] for vote in self.votes if isinstance(vote, tuple)]

    def token(self) -> tuple[int, bool]:
        """The fencing token of the grants, and whether a majority of nodes are witnesses of it (rule 4)."""
        if self.nodes == 1:
            return self.votes[0][0], True  # type: ignore[index]  # a Grant
        top = max(fences := self.fences())
        return top, fences.count(top) > self.nodes // 2

    def witnesses(self, token: int) -> bool:
        """Whether a majority of nodes have this hold and an F of at least `token` (rule 4)."""
        return sum(f >= token for f in self.fences()) > self.nodes // 2

    def errors(self) -> list[tuple[int, Exception]]:
        """The nodes that cast no vote, each with its error. A node that was not asked, and is up, has none."""
        return [
            (i, vote) for i, vote in enumerate(self.votes) if isinstance(vote, Exception) and vote is not _NOT_ASKED
        ]

    @property
    def may_be_reached_soon(self) -> bool:
        """For a ballot that no majority answered: whether the nodes that answered, together with those whose connection
        was lost a moment ago, are a majority."""
        soon = sum(isinstance(vote, Reconnecting) for vote in self.votes)
        return bool(soon) and self.yes + self.no + soon > self.nodes // 2

    def silent(self) -> list[int]:
        """The nodes that have not answered, if that leaves the outcome open; none if the votes of the other nodes
        decide."""
        if tally(self.nodes, self.yes, self.no, self.failed) is not None:
            return []
        return [i for i, vote in enumerate(self.votes) if vote is None]

    def denials(self) -> list[Refused]:
        """The refusals."""
        return [vote for vote in self.votes if isinstance(vote, Refused)]

    def holder(self) -> Refused | None:
        """The holder on a majority of the nodes, with the time for which it holds there at least; None: there is
        none."""
        return holder_of(self.denials(), self.nodes)

    def free(self) -> int:
        """The number of nodes that refuse although nobody holds the name there."""
        return sum(vote.left is None for vote in self.denials())

    def rank(self) -> int:
        """The median rank of the ticket at the nodes that keep it; 0 if none does."""
        ranks = sorted(vote.rank for vote in self.denials() if vote.rank >= 0)
        return ranks[len(ranks) // 2] if ranks else 0

    def orders(self) -> list[int]:
        """The order keys of the ticket at the nodes that keep it, sorted."""
        return sorted(vote.order for vote in self.denials() if vote.rank >= 0)

    def taken(self) -> dict[int, Slots]:
        """The slots in use at each node that refuses, for a kind that has slots."""
        found = enumerate(self.votes)
        return {i: vote.slots for i, vote in found if isinstance(vote, Refused) and vote.slots is not None}

    def loss_reason(self) -> Reason:
        """Why the hold is lost, after a majority refused it."""
        return lost_to(self.denials(), self.nodes, broken=False)
