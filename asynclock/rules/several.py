"""Several names at once at one node: each name is decided by the rule of its own kind. Pure, as `decide`.

`decide_all` and multi.lua keep these rules:

1. All names are granted, or none. After a refusal the same step releases the names that were granted before it, and
   drops the tickets of an earlier try; the waiters for these names are served. So no attempt holds one name while it
   waits for another.
2. A refused attempt that waits leaves a ticket with the name that refused it, and with no other name. The ticket has
   span 0: it is woken and never becomes the holder, because that name alone is of no use. Its order key is that of the
   first try at any of the names. A try takes its place at each name by this key, also where it had no ticket before. So
   the first of all waiters for several names enters where nobody holds them. If it stood behind the tickets of a name
   where it has none, the waiters of two queues could keep each other out.
3. The fences of all names are raised to the greatest of them: one token above all fences that any of the names gave.
4. Extend, release and peek are for all names. The refusal is that of the first name that another id holds, or where a
   peek finds that a ticket goes first; else of the last name, which nobody holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.decide import HasListener, decide
from asynclock.rules.model import ALONE, Op, Queueing, Reply, Verb, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.rules.model import Notice, Part, State


class Several(NamedTuple):
    """The answer of a node, the next state of each name, and the notices to send."""

    reply: Reply  # of a refusal: the reply of one name, whose state and notices are also in the lists below
    part: int  # the number of that name
    states: list[State]
    notices: list[Notice]


def decide_all(
    parts: Sequence[Part], states: Sequence[State], op: Op, now: float, has_listener: HasListener
) -> Several:
    """The answer of a node to an op for several names, each with its state."""
    decision = JointDecision(parts, states, op, now, has_listener)
    reply, part = decision.acquire() if op.verb is Verb.ACQUIRE else decision.each()
    return Several(reply, part, decision.states, decision.notices)


class JointDecision:
    """The decision of one node on one op for several names: the states so far, and the notices to send."""

    def __init__(
        self, parts: Sequence[Part], states: Sequence[State], op: Op, now: float, has_listener: HasListener
    ) -> None:
        self.parts = parts
        self.states = list(states)
        self.notices: list[Notice] = []
        self._op = op
        self._now = now
        self._has_listener = has_listener

    def acquire(self) -> tuple[Reply, int]:
        ticket = replace(self._op.queueing, span=0)
        for index in range(len(self.parts)):
            reply = self._ask(index, Verb.ACQUIRE, fence=self._op.fence, ticket=ticket)
            if reply.verdict is not Verdict.YES:  # the ticket is at this name
                for other in range(len(self.parts)):
                    if other != index:
                        self._leave(other)
                return reply, index
        return self._yes(self._level())

    def each(self) -> tuple[Reply, int]:
        """Extend, release or peek at all names."""
        op = self._op
        alone = Queueing(op.queueing.serve, waiter=op.queueing.waiter, contended=op.queueing.contended)
        refused: tuple[Reply, int] | None = None
        least: list[int] = []
        for index in range(len(self.parts)):
            reply = self._ask(index, op.verb, fence=op.fence, ticket=alone if index else op.queueing)
            if reply.verdict is Verdict.YES:
                least.append(reply.fence)
            elif refused is None or _names_nobody(refused[0]):
                refused = reply, index
        return refused or self._yes(min(least))

    def _leave(self, index: int) -> None:
        """Remove the hold and the ticket of this op there. The release serves the waiters."""
        queueing = self._op.queueing
        for own in filter(None, (self._op.id, queueing.waiter)):
            self._ask(index, Verb.RELEASE, id=own, ticket=Queueing(queueing.serve))

    def _level(self) -> int:
        top = max(state.fence for state in self.states)
        for index, state in enumerate(self.states):
            if state.fence < top:
                self.states[index] = replace(state, fence=top, fence_ends=self._now + self._op.memory)
        return top

    def _ask(self, index: int, verb: Verb, *, id: str = "", fence: int = 0, ticket: Queueing = ALONE) -> Reply:
        part, op = self.parts[index], self._op
        own = part.named(id or op.id, waits=bool(id) and id == op.queueing.waiter)
        waiter = part.named(ticket.waiter, waits=True)
        mine = Op(verb, part.kind, part.name, own, op.lease, fence, op.memory, op.rest, tombstone=op.tombstone)
        fair = part.kind.fair or (op.queueing.fair and not part.kind.shared)
        mine.queueing = replace(ticket, fair=fair, waiter=waiter)
        reply = decide(part.kind, self.states[index], mine, self._now, self._has_listener)
        self.states[index] = reply.state
        self.notices += reply.notices
        return reply

    def _yes(self, fence: int) -> tuple[Reply, int]:
        return Reply(Verdict.YES, self.states[0], fence), 0


def _names_nobody(reply: Reply) -> bool:
    """Whether a refusal has neither a holder nor a place in the queue, so that the refusal of another name says more.
    An id that was undone is refused, whatever other names say."""
    return reply.verdict is Verdict.NO and reply.holder is None and reply.rank < 0
