"""Reads the facts about a server: for the quarantine of servers that restarted (`quorum/quarantine.py` has the rules),
to check that each server has only one vote, and to warn of servers that may delete locks.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from asynclock.stores.port import Facts, SameServer
from asynclock.stores.redis.identity import Identity, server_of
from asynclock.stores.redis.replies import Fault, ServerError, code_of, config_error, fault_of

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.port import NodeConfig
    from asynclock.stores.reports import Reports

log = logging.getLogger("asynclock")

_FOR_NOW = frozenset({"LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "BUSY"})
"""The codes of a server that answers later. Without its facts it would vote at once, although it may have restarted."""


_ROUNDED = 2.0
"""Seconds by which two looks at the start of a server may differ: it counts whole seconds."""


class Dialer(Protocol):
    """A store that connects to one server. The nodes of all event loops share it."""

    label: str
    run_id: str  # of the server that the last connection reached
    identity: Identity
    replaced: tuple[str, float]  # the run_id of a server found in place of another one, and when, on the client's clock

    async def dial(self) -> AbstractConnection:
        """A new connection from the user's settings, not yet connected."""


class Restarts:
    """The facts about the server of one node, and its quarantine. `managed`: a Sentinel or a cluster names the
    server."""

    def __init__(self, dialer: Dialer, config: NodeConfig, reports: Reports, *, managed: bool) -> None:
        self.facts: Facts | None = None
        self._dialer = dialer
        self._servers = config.servers
        self._quarantine = config.quarantine
        self._now = config.clock.now
        self._until = -math.inf
        self._unchecked: ServerError | None = None  # the refusal of a check
        self._warned = False
        self._warned_of_eviction = False
        self._was_replica = False
        self._reports = reports
        self._managed = managed

    @property
    def left(self) -> float:
        """The seconds of quarantine that are left."""
        return max(0.0, self._until - self._now())

    def no_vote(self) -> ConnectionError:
        """The error of an op that a server in quarantine gets."""
        label = self._dialer.label
        return ConnectionError(f"{label} restarted a short while ago and casts no vote for another {self.left:.0f} s")

    def learn(self, info: Any, mark: Any) -> None:
        """Read the answers to INFO and to GET of the mark, on a new connection. Raises SameServer."""
        said = fields(info)
        run_id = said.get("run_id", "")
        started = self._now() - float(said.get("uptime_in_seconds", "inf"))
        if said and not run_id:
            self._unchecked = ServerError("INFO shows no run_id")
        self._refuse_double(run_id)
        if self._is_known(run_id, started):
            self._check_mark(mark)
            return
        before, self._dialer.run_id = self._dialer.run_id, run_id or self._dialer.run_id
        if run_id and before not in ("", run_id):
            self._dialer.replaced = run_id, self._now()
        self._decide(
            Facts(
                run_id=run_id,
                mark=mark.decode(errors="replace") if isinstance(mark, bytes) else "",
                started=started,
                replaced=self._replaced(run_id),
            )
        )

    def _check_mark(self, mark: Any) -> None:
        """The command that set it may have been lost with its connection."""
        if self.facts is not None and mark != self.facts.run_id.encode():
            self.facts = self.facts._replace(mark="")

    def _is_known(self, run_id: str, started: float) -> bool:
        """Whether this is the server of the last connection, which runs since. Without a run_id the start shows it."""
        before = self.facts
        if before is None or before.run_id != run_id or before.replaced != self._replaced(run_id):
            return False
        return run_id != "" or started <= before.started + _ROUNDED

    def _replaced(self, run_id: str) -> float | None:
        """When this server was found in place of another one; None: it was not."""
        replacement, since = self._dialer.replaced
        return since if run_id and replacement == run_id else None

    def refused_write(self) -> None:
        """The server proved to be a replica, or became one."""
        self._was_replica = True

    def check_role(self, role: str) -> None:
        """After a write was refused, a server is up only if it is a master by now: else each attempt would tell that it
        is up, and its first op that it is down. Raises ConnectionError."""
        if self._was_replica and role == "replica":
            label = self._dialer.label
            raise ConnectionError(f"{label}: {ServerError('READONLY It has the role of a replica')}")

    def check_memory(self, info: Any) -> None:
        """Read the answer to INFO memory. A full server must refuse new keys, not delete others: a lock that it deletes
        gets a second holder. Logs a warning once."""
        said = fields(info)
        policy, limit = said.get("maxmemory_policy", "noeviction"), said.get("maxmemory", "0")
        if policy != "noeviction" and limit != "0" and not self._warned_of_eviction:
            self._warned_of_eviction = True
            log.warning(
                "asynclock: %s has maxmemory-policy %s: when its memory is full, it deletes locks that are held, and "
                "another owner gets them; set noeviction, or keep locks and caches on different servers",
                self._dialer.label,
                policy,
            )

    def check_identity(self, server: Any, replication: Any, sent: float) -> None:
        """Read the answers to INFO server and INFO replication, which were sent at `sent`: the only node of a client
        has no quarantine. Raises ConfigError if two servers answer in turn."""
        said = fields(server) | fields(replication)
        if self._quarantine is None and said.get("role") != "slave":  # a replica grants nothing
            found, label = server_of(said), self._dialer.label
            if before := self._dialer.identity.meet(found, self._now(), label, managed=self._managed):
                self._reports.replaced(before, found.run_id)
            self._dialer.identity.answered(sent)

    def answered(self, at: float) -> None:
        """The server has answered a command that was sent then."""
        self._dialer.identity.answered(at)

    def learn_mark(self, mark: Any) -> None:
        """Read the answer to a later GET of the mark: another client may have found the deployment new."""
        if self.facts is not None and mark == self.facts.run_id.encode():
            self._decide(self.facts._replace(mark=self.facts.run_id))

    def _decide(self, facts: Facts) -> None:
        self.facts = facts
        self._until = self._quarantine(facts) if self._quarantine is not None else -math.inf
        self._reports.quarantine(self.left)

    def end_quarantine(self) -> str:
        """Let the server vote. Returns the mark to set there, "" if it has that mark already."""
        self._until = -math.inf
        self._reports.quarantine(0.0)
        if self.facts is None or self.facts.mark == self.facts.run_id:
            return ""
        self.facts = self.facts._replace(mark=self.facts.run_id)
        return self.facts.run_id

    def begin_checks(self) -> None:
        """The checks of a new connection begin."""
        self._unchecked = None

    def cannot_check(self, error: ServerError) -> None:
        """The server refuses INFO, SCRIPT LOAD or the mark, as some managed Redis services do. Locks work there, but
        these checks do not (`warn`). Raises ConfigError or ConnectionError if the refusal has another reason."""
        if fault_of(error) is Fault.CONFIG and "NOAUTH" in str(error):
            raise config_error(self._dialer.label, error)
        if code_of(error) in {"MOVED", "ASK"}:
            return  # the mark is at another node of the cluster
        if code_of(error) in _FOR_NOW:
            raise ConnectionError(f"{self._dialer.label}: {error}")
        self._unchecked = error

    def warn(self) -> None:
        """The server votes, although a check is not possible. Warns once."""
        if self._unchecked is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._dialer.label} forbids the check for servers that restarted or are named twice "
                f"({self._unchecked}); "
                "locks work, but such a server is not detected",
                RuntimeWarning,
                stacklevel=2,
            )

    def _refuse_double(self, run_id: str) -> None:
        """Raise SameServer if another node of the client has this server: it must not have two votes."""
        label = self._dialer.label
        for known in [known for known, whose in self._servers.items() if whose == label and known != run_id]:
            del self._servers[known]  # first: two servers may have swapped their addresses
        other = self._servers.setdefault(run_id, label) if run_id else label
        if other != label:
            raise SameServer(
                f"{other} and {label} are the same server: name each server once (its databases fail together)"
            )


def fields(info: Any) -> dict[str, str]:
    """The fields of an answer to INFO; none, if it is an error. Pure."""
    lines = info.decode(errors="replace").splitlines() if isinstance(info, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
