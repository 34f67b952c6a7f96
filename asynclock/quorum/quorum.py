"""Sends ops to N nodes: one ballot for each op (`ballot.py`), the undo of an attempt, the quarantine of servers
(`quarantine.py`), and the error when there is no majority. On each node the undo of an attempt is sent before the next
attempt.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError, QuorumUnavailable, brief
from asynclock.quorum.ballot import Ballot
from asynclock.quorum.checks import check_votes
from asynclock.quorum.limits import Limits
from asynclock.quorum.quarantine import NO_QUARANTINE, Quarantine
from asynclock.rules.model import QUIET, RELEASE, Op, Serve
from asynclock.stores.port import (
    Buffered,
    Explaining,
    KeepsTickets,
    NodeConfig,
    Restartable,
    SameServer,
    WrongKind,
    is_standalone,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asynclock._clock import Clock
    from asynclock._options import ClientSettings
    from asynclock.events import Event
    from asynclock.quorum.quarantine import Ruling
    from asynclock.rules.model import Queueing
    from asynclock.stores.port import Node, NoticeListener, Store

_TROUBLED = 1.0
"""Seconds for which an error explains the silence of its node in later rounds of other acquires."""


class Quorum:
    """The nodes of one client in one event loop."""

    def __init__(
        self,
        nodes: Sequence[Node],
        clock: Clock,
        quarantine: Quarantine | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        self.limits = limits or Limits(len(nodes))
        self.clock = clock
        self._quarantine = quarantine
        self._restartable = [node for node in nodes if isinstance(node, Restartable)]
        self._flushes = [node.flush if isinstance(node, Buffered) else _nothing for node in nodes]
        self._troubled: dict[int, tuple[float, Exception]] = {}  # the last error of a node, and until when it counts
        # What a release does for the next waiter: over N nodes no single node can grant it the hold.
        self.serve = Serve.GRANT if len(self.nodes) == 1 else Serve.WAKE
        self.keeps_tickets = len(nodes) == 1 and isinstance(nodes[0], KeepsTickets) and nodes[0].keeps_tickets

    async def open(self, *, again: bool = False) -> None:
        """Connect to all nodes, and if a majority is up, decide which restarted servers may vote: without a majority
        the nodes that are up would be marked, and those that come up later would not. A node that is down is not an
        error here. `again`: servers may have come up since the last call, and other clients may have set marks."""
        majority = len(self.nodes) // 2 + 1
        opening = {asyncio.ensure_future(node.open()) for node in self.nodes}
        pending = opening
        try:
            await asyncio.sleep(0)  # they begin: a node that was never opened may have no error until then
            while pending and sum(node.error is None for node in self.nodes) < majority:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                # A majority is up, so the others get 0.2 s. But if the deployment looks new, wait for every node that
                # can answer, because a late one may have a mark.
                moment = None if self._judge().new else 0.2
                await asyncio.wait(pending, timeout=moment)
        finally:
            for task in opening:
                task.cancel()
        for node in self.nodes:
            if isinstance(node.error, SameServer):
                raise node.error
        current = await self._read_marks() if again else self._reaches_all_known()
        if sum(node.error is None for node in self.nodes) >= majority:
            await self._judge_restarts(current)

    async def _judge_restarts(self, current: bool) -> None:
        """End the quarantine of all servers if the deployment is new. `current`: see `_read_marks`."""
        for pause in (0.02, 0.05, 0.1, 0.2):
            ruling = self._judge()
            if ruling.new and current:
                for node in self._restartable:
                    node.end_quarantine()
            if not ruling.doubtful:
                return
            # Another client may be setting the marks of a new deployment. It sets them all within a short time.
            await asyncio.sleep(pause)
            current = await self._read_marks()

    async def judge_again(self) -> None:
        """End the quarantine of servers that may vote by now: they came up after `open`, and the deployment is new; or
        another client found that since, and set their marks. Only while every node is connected, because one that is
        out of reach may have a mark."""
        if self._quarantine is None:
            return
        current = await self._read_marks()
        facts_of_all = all(node.error is None for node in self.nodes) and all(node.facts for node in self._restartable)
        if facts_of_all and current and self._judge().new:
            for node in self._restartable:
                node.end_quarantine()

    async def _read_marks(self) -> bool:
        """Whether the marks are known as they are now, of all servers that this client has met. Another client may have
        used the deployment since, and a server that does not answer may be the only one that still has its mark."""
        found = await asyncio.gather(*(node.read_mark() for node in self._restartable), return_exceptions=True)
        return self._reaches_all_known() and not any(isinstance(each, BaseException) for each in found)

    def _reaches_all_known(self) -> bool:
        """Whether all servers that this client has met are connected."""
        return all(
            node.error is None for node in self.nodes if isinstance(node, Restartable) and node.facts is not None
        )

    def _judge(self) -> Ruling:
        facts = [node.facts for node in self._restartable]
        return self._quarantine.judge(facts) if self._quarantine is not None else NO_QUARANTINE

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
        because another client waits for it."""
        sent = self.clock.now()
        ballot = Ballot(op, len(self.nodes), sent, sent + within, on_settled, everyone, certain, on_vote, gives_up)
        if only is None and not at_once:
            for node in self.nodes:
                node.send(op, ballot)
            return ballot
        if only is not None:
            ballot.leave_out({i: node.error for i, node in enumerate(self.nodes) if i not in only})
        for index in range(len(self.nodes)) if only is None else only:
            self.nodes[index].send(op, ballot)
            if at_once:
                self._flushes[index]()
        return ballot

    def flush(self) -> None:
        """Write the ops that were sent now, not at the end of this turn."""
        for flush in self._flushes:
            flush()

    @property
    def listens(self) -> bool:
        """Whether a majority of the nodes sends notices."""
        if len(self.nodes) == 1:
            return self.nodes[0].listens
        return sum(node.listens for node in self.nodes) > len(self.nodes) // 2

    def undo(self, ballot: Ballot, within: float, ticket: Queueing | None = None) -> Ballot | None:
        """Undo an attempt where it took effect or may still do so (rule 3 of `ballot.py`), and put `ticket` in its
        place. The undo serves the queue only if the attempt had, or may have had, a majority: no waiter waits for a
        minority."""
        op = ballot.op
        op.revoke()
        traces = ballot.traces()
        if not traces:
            return None
        serve = self.serve if len(traces) > len(self.nodes) // 2 else Serve.NOBODY
        if ticket is not None:
            ticket.serve_as(serve)
        undo = Op(RELEASE, op.kind, op.name, op.id, op.lease, 0, op.memory, queueing=ticket or QUIET[serve])
        return self.ask(undo, within, everyone=True, only=traces)

    def unavailable(
        self, ballot: Ballot, name: str, before: Mapping[int, Exception] | None = None
    ) -> ConfigError | QuorumUnavailable:
        """The error for a ballot that was UNREACHABLE, or is still open. A node that is silent in this round is
        reported with its error of `before`. If these errors decide, the other silent nodes are not reported: the round
        may have been sent a moment ago."""
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
        return self._outage({self.nodes[i].label: errors[i] for i in sorted(errors)}, name)

    def unavailable_nodes(self, errors: Mapping[int, BaseException], name: str) -> ConfigError | QuorumUnavailable:
        """The same error from the errors of these nodes, without a ballot."""
        found = {self.nodes[i].label: e if isinstance(e, Exception) else Exception(repr(e)) for i, e in errors.items()}
        return self._outage(found, name)

    async def check(self, within: float) -> ConfigError | QuorumUnavailable | None:
        """Ask each node whether it would vote now, for at most `within` seconds. The error if no majority would; None:
        a majority would. A node that is silent is reported with its error of before, as in `unavailable`."""
        found = await check_votes(self.nodes, within, self.clock, everyone=False)
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

    def _outage(self, errors: dict[str, Exception], name: str) -> ConfigError | QuorumUnavailable:
        """The error to raise: a ConfigError if a majority has errors that only the user can solve."""
        hopeless = [error for error in errors.values() if isinstance(error, ConfigError)]
        if len(hopeless) > len(self.nodes) // 2:
            raised = WrongKind if isinstance(hopeless[0], WrongKind) else ConfigError
            return raised(str(hopeless[0]), name=name)
        reasons = "; ".join(_reason(label, error) for label, error in errors.items())
        about = f"{brief(name)}: " if name else ""
        return QuorumUnavailable(
            f"{about}{len(errors)} of {len(self.nodes)} nodes cast no vote: {reasons}", name=name, errors=errors
        )


def quorum_over(
    stores: Sequence[Store],
    settings: ClientSettings,
    clock: Clock,
    listener: NoticeListener,
    tell: Callable[[Event], object],
    waits: Callable[[], bool] = lambda: False,
) -> Quorum:
    """The quorum of a client for the running loop: each store opens a node there, without connecting."""
    length = 0.0 if settings.trust_restarts else settings.max_lease + 1.0
    quarantine = None if len(stores) == 1 else Quarantine(length, clock)
    until = None if quarantine is None else quarantine.until
    connect, longest, servers = settings.connect_timeout, settings.max_lease, dict[str, str]()
    prefix = "" if is_standalone(stores[0]) else settings.prefix
    limits = Limits(len(stores))
    measured = [partial(limits.measured, i) if len(stores) > 1 else None for i in range(len(stores))]
    nodes = [
        store.open(NodeConfig(i, prefix, clock, listener, servers, until, connect, longest, tell, waits, measured[i]))
        for i, store in enumerate(stores)
    ]
    return Quorum(nodes, clock, quarantine, limits)


def _silent(node: Node, name: str) -> TimeoutError:
    """For a node whose time is not over, where that of the caller is."""
    why = node.delay(math.inf, name) if isinstance(node, Explaining) else ""
    return TimeoutError(f"{node.label} has not answered yet" + (f": {why}" if why else ""))


def _nothing() -> None: ...


def _reason(label: str, error: Exception) -> str:
    """The reason of one node, with its name."""
    reason = str(error) or repr(error)
    return reason if label in reason else f"{label}: {reason}"
