"""DoneMarks: the marks of runs of `once` at the nodes that did not have the hold.

The release of a run that has returned leaves a mark at each node that had the hold. After a contested win that may be a
bare majority: the other nodes refuse the release, and have no mark. If one of that majority loses its data, the name
can be won again without a node that knows of the run.

The rules:

1. Once a majority has carried the release out, each other node gets it again with MARKS_FREE: it marks a free name, too
   (rule 12 in `rules/decide.py`). So it is if nodes are down, and neither a majority has carried it out nor a majority
   has refused it: marks at a minority would split the votes of all callers. Only the release of a hold that was neither
   lost nor broken is followed like this. The marks of a run end at the same moment everywhere.
2. A node that does not answer, or where another attempt has the name, is asked again, after pauses that double up to
   MOST_PAUSE. It is given up after TRIES pauses, and after one lease. It is also given up when one other id has had the
   name there for longer than an attempt lasts, because that id is an owner. A node that is down is not asked.
3. No node sends such an op again by itself (`Op.revoke`, and PendingRelease in `stores/undelivered.py`). This client
   sends no more of them once it knows that an operator broke the name, or once it holds the name again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock.rules.model import DONE, MARKS_FREE, RELEASE, Op
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock._time import Timer
    from asynclock.protocol.core import Core
    from asynclock.quorum.ballot import Ballot, Waiter
    from asynclock.stores.port import Vote

PAUSE = 0.02
"""Seconds before a node is asked again, at least. The first pause is no shorter than the round trip."""

MOST_PAUSE = 2.0

TRIES = 20
"""The greatest number of pauses of a run. Together they take half a minute, about one lease."""

MOST = 4096
"""The greatest number of runs that are followed at once. At one more the oldest is dropped: a majority has its mark."""


class DoneMarks:
    """The runs of one client that are followed. `holds`: what the client holds of a name now; None: nothing."""

    __slots__ = ("_closing", "_runs", "core", "holds")

    def __init__(self, core: Core, holds: Callable[[str], object]) -> None:
        self.core = core
        self.holds = holds
        self._runs: dict[str, _Run] = {}  # by name, the oldest first
        self._closing: Waiter | None = None  # of a client that closes

    def __len__(self) -> int:
        """The number of runs that are followed: some node lacks the mark."""
        return len(self._runs)

    def ask(self, op: Op, within: float, only: Sequence[int] | None, at_once: bool) -> Ballot:
        """Send the release of a run that has returned, as `Quorum.ask` does, and follow the run."""
        quorum = self.core.quorum
        if len(quorum.nodes) == 1:
            return quorum.ask(op, within, only=only, at_once=at_once)
        self.forget(op.name)
        if len(self._runs) >= MOST:
            self.forget(next(iter(self._runs)))
        run = self._runs[op.name] = _Run(self, op, within)
        return quorum.ask(op, within, only=only, at_once=at_once, on_vote=run.released)

    def broken(self, name: str, id: str) -> None:
        """A server says that an operator broke the hold of that id there, before it was released."""
        run = self._runs.get(name)
        if run is not None and run.id.startswith(id):
            self.forget(name)

    def forget(self, name: str) -> None:
        """Set no more marks of that name."""
        run = self._runs.pop(name, None)
        if run is not None:
            run.stop()
            self._look_at_close()

    def begin_close(self, waiter: Waiter) -> None:
        """The client closes. Complete the waiter when each node that is up has its marks, or was given up."""
        self._closing = waiter
        for name in [name for name, run in self._runs.items() if run.waits_for_nodes]:
            self.forget(name)
        self._look_at_close()

    def stop(self) -> None:
        """The client hangs up."""
        for name in list(self._runs):
            self.forget(name)

    def followed(self, run: _Run) -> None:
        """A vote on that run was counted."""
        if run.ended or (self._closing is not None and run.waits_for_nodes):
            self.forget(run.name)

    def _look_at_close(self) -> None:
        if self._closing is not None and not self._runs and not self._closing.done():
            self._closing.set_result(None)


class _Run:
    """A run that has returned: which nodes have its mark."""

    __slots__ = (
        "_asked", "_began", "_lacking", "_marks", "_op", "_others", "_over", "_pause", "_timer", "_tries", "_unread",
        "_until", "_within",
    )  # fmt: skip

    def __init__(self, marks: DoneMarks, op: Op, within: float) -> None:
        self._marks = marks
        self._op = op  # its release
        self._within = within
        self._began = marks.core.clock.now()
        self._until = self._began + op.rest  # when its marks end
        self._unread = (1 << len(marks.core.quorum.nodes)) - 1  # bit i: the release has no counted vote of node i
        self._lacking = 0  # bit i: node i has no mark, and is asked again
        self._asked = 0  # bit i: it was asked again, and has not answered yet
        self._others: dict[int, tuple[str, float]] = {}  # node -> the other id that has the name there, and since when
        self._pause: float  # before the next question, once a majority has voted
        self._tries = 0
        self._timer: Timer | None = None
        self._over = False

    @property
    def name(self) -> str:
        return self._op.name

    @property
    def id(self) -> str:
        return self._op.id

    @property
    def ended(self) -> bool:
        """Whether each node has the mark, or was given up."""
        return not (self._unread or self._asked or self._lacking)

    @property
    def waits_for_nodes(self) -> bool:
        """Whether it can do nothing before a node is up again."""
        return not (self._unread or self._asked or self._up(self._lacking))

    def stop(self) -> None:
        """Nothing more is sent."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def released(self, ballot: Ballot, index: int) -> None:
        """A node has voted on the release. The votes before the one that makes the majority are counted with it."""
        del index
        if self._over:
            return
        if ballot.no > ballot.nodes // 2:  # the hold was lost
            self._unread = 0
            self._marks.followed(self)
        elif ballot.yes > ballot.nodes // 2 or ballot.complete:
            if not self._tries:
                self._pause = max(PAUSE, self._marks.core.clock.now() - self._began)
            free = 0
            for each, vote in enumerate(ballot.votes):
                if vote is not None and self._unread >> each & 1:
                    self._unread &= ~(1 << each)
                    free |= self._lacks_and_is_free(each, vote) << each
            self._ask(free)
            self._go_on()

    def _voted(self, ballot: Ballot, index: int) -> None:
        """A node has voted on a later op."""
        if not self._over:
            self._asked &= ~(1 << index)
            self._lacks_and_is_free(index, ballot.votes[index])
            self._go_on()

    def _lacks_and_is_free(self, index: int, vote: Vote) -> bool:
        """Count the vote of a node. Returns whether it lacks the mark, and nobody has the name there."""
        bit = 1 << index
        if isinstance(vote, tuple):
            return False
        self._lacking |= bit
        if not isinstance(vote, Refused):
            return False
        if vote.left is None or vote.holder == DONE:
            return True
        now = self._marks.core.clock.now()
        other, since = self._others.get(index, ("", now))
        if other != vote.holder:
            self._others[index] = vote.holder, now
        elif now - since > self._within:
            self._lacking &= ~bit
        return False

    def _go_on(self) -> None:
        """Ask the nodes that lack the mark after a pause."""
        if self._lacking and self._timer is None:
            clock = self._marks.core.clock
            at = clock.now() + self._pause
            if self._tries == TRIES or at >= min(self._began + self._op.lease, self._until):
                self._lacking = 0
            else:
                self._tries += 1
                self._pause = min(2 * self._pause, MOST_PAUSE)
                self._timer = clock.call_at(at, self._due)
        self._marks.followed(self)

    def _due(self) -> None:
        self._timer = None
        if self._marks.holds(self.name) is not None:  # the marks were lost, or broken, and it has the name again
            self._marks.forget(self.name)
            return
        self._ask(self._lacking)
        self._go_on()

    def _up(self, nodes: int) -> list[int]:
        """Those that are up."""
        return [i for i, node in enumerate(self._marks.core.quorum.nodes) if nodes >> i & 1 and node.error is None]

    def _ask(self, nodes: int) -> None:
        """Ask those of these nodes that are up."""
        up, of, core = self._up(nodes), self._op, self._marks.core
        left = self._until - core.clock.now()
        if not up or left <= 0:
            return
        for index in up:
            self._lacking &= ~(1 << index)
            self._asked |= 1 << index
        # since=inf: a node that loses its connection does not keep it as a pending release.
        op = Op(
            RELEASE, of.kind, of.name, of.id, of.lease, of.fence, of.memory, left,
            queueing=of.queueing, done=MARKS_FREE, since=math.inf,
        )  # fmt: skip
        op.revoke()  # the node does not send it again: an operator may have broken the name by then
        core.quorum.ask(op, self._within, only=up, on_vote=self._voted)
