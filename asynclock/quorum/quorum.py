"""Sends ops to N nodes: one ballot for each op (`ballot.py`), the undo of an attempt, the quarantine of servers
(`quarantine.py`), and the error when there is no majority. On each node the undo of an attempt is sent before the next
attempt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError, QuorumUnavailable, brief
from asynclock.quorum.ballot import Ballot
from asynclock.quorum.limits import Limits
from asynclock.quorum.quarantine import NO_QUARANTINE
from asynclock.rules.model import CONTENDED, QUIET, RELEASE, Op, Serve
from asynclock.stores.port import Buffered, Explaining, KeepsTickets, Restartable, WrongKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asynclock._time import Clock
    from asynclock.quorum.quarantine import Quarantine, Ruling
    from asynclock.rules.model import Queueing
    from asynclock.stores.port import Checked, Node

_TROUBLED = 1.0
"""Seconds for which an error explains the silence of its node in later rounds of other acquires."""


class Quorum:
    """The nodes of one client in one event loop. `runtime/opening.py` opens them."""

    def __init__(
        self,
        nodes: Sequence[Node],
        clock: Clock,
        later: Callable[..., object],
        quarantine: Quarantine | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        self.limits = limits or Limits(len(nodes))
        self.clock = clock
        self._later = later  # calls in the next turn
        self._quarantine = quarantine
        self.quarantines = quarantine is not None  # else no restarted server is kept from voting
        self.restartable = [node for node in nodes if isinstance(node, Restartable)]
        self._flushes = [node.flush if isinstance(node, Buffered) else _nothing for node in nodes]
        self._troubled: dict[int, tuple[float, Exception]] = {}  # the last error of a node, and until when it counts
        # What a release does for the next waiter: over N nodes no single node can grant it the hold.
        self.serve = Serve.GRANT if len(self.nodes) == 1 else Serve.WAKE
        self.keeps_tickets = len(nodes) == 1 and isinstance(nodes[0], KeepsTickets) and nodes[0].keeps_tickets

    def reaches_all_known(self) -> bool:
        """Whether all servers that this client has met are connected."""
        return all(
            node.error is None for node in self.nodes if isinstance(node, Restartable) and node.facts is not None
        )

    def judge(self) -> Ruling:
        """Which restarted servers may vote, by what the nodes know of them now."""
        facts = [node.facts for node in self.restartable]
        return self._quarantine.judge(facts) if self._quarantine is not None else NO_QUARANTINE

    def end_quarantine(self) -> None:
        """The deployment is new: all its servers may vote."""
        for node in self.restartable:
            node.end_quarantine()

    @property
    def is_up(self) -> bool:
        """Whether a majority of the nodes can be asked."""
        return sum(node.error is None for node in self.nodes) > len(self.nodes) // 2

    def ask(
        self,
        op: Op,
        within: float,
        *,
        on_settled: Callable[[Ballot], object] | None = None,
        everyone: bool = False,
        certain: bool = False,
        only: Sequence[int] | None = None,
        at_once: bool = False,
        on_vote: Callable[[Ballot, int], object] | None = None,
        gives_up: float = math.inf,
    ) -> Ballot:
        """Send `op` to all nodes, or `only` to some. Each has `within` seconds to answer, and the caller waits until
        `gives_up`. The op leaves at the end of this turn of the loop; with `at_once` it leaves now, node by node,
        because the name is contended. The ballot settles by an event: never inside this call, also where no node can be
        asked."""
        sent = self.clock.now()
        ballot = Ballot(
            op, len(self.nodes), sent, sent + within, on_settled, everyone, certain, on_vote, gives_up, True
        )
        if only is None and not at_once:
            for node in self.nodes:
                node.send(op, ballot)
        else:
            if only is not None:
                ballot.leave_out({i: node.error for i, node in enumerate(self.nodes) if i not in only})
            for index in range(len(self.nodes)) if only is None else only:
                self.nodes[index].send(op, ballot)
                if at_once:
                    self._flushes[index]()
        early, ballot.early = ballot.early, None  # a method of the ballot would be one more call for each op
        if early:
            self._later(ballot.count_early, early)
        return ballot

    def flush(self) -> None:
        """Write now the ops that were sent in this turn, instead of at its end."""
        for flush in self._flushes:
            flush()

    @property
    def listens(self) -> bool:
        """Whether a majority of the nodes sends notices."""
        if len(self.nodes) == 1:
            return self.nodes[0].listens
        return sum(node.listens for node in self.nodes) > len(self.nodes) // 2

    def undo(self, ballot: Ballot, within: float, ticket: Queueing | None = None, serve: Serve | None = None) -> None:
        """Undo an attempt where it took effect or may still do so (rule 3 of `ballot.py`), and put `ticket` in its
        place. The undo serves the queue, or does what `serve` says, only if the attempt had, or may have had, a
        majority: no waiter waits for a minority."""
        op = ballot.op
        op.revoke()
        traces = ballot.traces()
        if not traces:
            return
        # NOBODY: the client closes, and the withdrawal of its last ticket serves the queue (`Tickets.serve_at`). This
        # undo must be carried out before that. So it is a script: a server's own command does not match a marked hold,
        # and the script would follow too late.
        queueing = CONTENDED if serve is Serve.NOBODY else QUIET
        serve = (self.serve if serve is None else serve) if len(traces) > len(self.nodes) // 2 else Serve.NOBODY
        if ticket is not None:
            ticket.serve_as(serve)
        undo = Op(RELEASE, op.kind, op.name, op.id, op.lease, 0, op.memory, queueing=ticket or queueing[serve])
        self.ask(undo, within, only=traces)

    def unavailable(
        self, ballot: Ballot, name: str, before: Mapping[int, Exception] | None = None
    ) -> ConfigError | QuorumUnavailable:
        """The error for a ballot that was UNREACHABLE, or is still open. A node that is silent in this round is
        reported with its error of `before`. If the errors known so far already prevent a majority, the other silent
        nodes are not reported: they may have been asked only a moment ago."""
        errors, silent, now = dict(ballot.errors()), ballot.silent(), self.clock.now()
        for i in [i for i in self._troubled if ballot.votes[i] is not None and i not in errors]:  # it has answered
            del self._troubled[i]
        own = dict(before or {})
        before = {i: error for i, (until, error) in self._troubled.items() if now < until} | own
        self._troubled.update((i, (now + _TROUBLED, error)) for i, error in errors.items())
        if ballot.deferred is not None:
            before = {i: own.get(i) or ballot.deferred() for i in silent}
        errors |= {i: before[i] for i in silent if i in before}
        if len(errors) < len(self.nodes) - len(self.nodes) // 2:
            unknown = (i for i in silent if i not in before)
            errors |= {i: _silent(self.nodes[i], name) for i in unknown}
        if not errors:  # the answers came when the time was up, and before its task woke
            errors = {i: TimeoutError(f"{node.label} answered too late") for i, node in enumerate(self.nodes)}
        refused = ballot.no if len(errors) < len(self.nodes) - len(self.nodes) // 2 else 0
        return self._outage({self.nodes[i].label: errors[i] for i in sorted(errors)}, name, refused)

    def unavailable_nodes(self, errors: Mapping[int, BaseException], name: str) -> ConfigError | QuorumUnavailable:
        """The same error from the errors of these nodes, without a ballot."""
        found = {self.nodes[i].label: e if isinstance(e, Exception) else Exception(repr(e)) for i, e in errors.items()}
        return self._outage(found, name)

    def unavailable_by_checks(
        self, found: Sequence[Checked | Exception | None]
    ) -> ConfigError | QuorumUnavailable | None:
        """The same error, from the result of a check of each node; None: a majority would vote. A node that is silent
        is reported with its error of before, as in `unavailable`."""
        errors, now = dict[int, BaseException](), self.clock.now()
        for i, each in enumerate(found):
            until, before = self._troubled.get(i, (0.0, None))
            if isinstance(each, TimeoutError) and before is not None and now < until:
                errors[i] = before
            elif isinstance(each, Exception):
                errors[i] = each
                self._troubled[i] = now + _TROUBLED, each
        refusals = len(self.nodes) - len(self.nodes) // 2
        return self.unavailable_nodes(errors, "") if len(errors) >= refusals else None

    def _outage(self, errors: dict[str, Exception], name: str, refused: int = 0) -> ConfigError | QuorumUnavailable:
        """The error to raise: a ConfigError if a majority has errors that only the user can solve. `refused`: so many
        other nodes have refused, without which the errors would not prevent a majority."""
        hopeless = [error for error in errors.values() if isinstance(error, ConfigError)]
        if len(hopeless) > len(self.nodes) // 2:
            raised = WrongKind if isinstance(hopeless[0], WrongKind) else ConfigError
            return raised(str(hopeless[0]), name=name)
        reasons = "; ".join(_reason(label, error) for label, error in errors.items())
        about = f"{brief(name)}: " if name else ""
        beside = f", and {refused} refused" if refused else ""
        return QuorumUnavailable(
            f"{about}{len(errors)} of {len(self.nodes)} nodes cast no vote{beside}: {reasons}", name=name, errors=errors
        )


def _silent(node: Node, name: str) -> TimeoutError:
    """For a node that may still answer, although the caller's time is up."""
    why = node.delay(math.inf, name) if isinstance(node, Explaining) else ""
    return TimeoutError(f"{node.label} has not answered yet" + (f": {why}" if why else ""))


def _nothing() -> None: ...


def _reason(label: str, error: Exception) -> str:
    """The reason of one node, with its name."""
    reason = str(error) or repr(error)
    return reason if label in reason else f"{label}: {reason}"
