"""Which server answers at the address of a node: another one than before, or two in turn.

An address may lead to one server now and to another one later, for example by round robin over two masters. Then each
of the two grants the same locks. One node has no quarantine, so the client compares the run_id at each connection:

1. Another run_id is reported once. It may be a restart, a promoted replica, or a migration.
2. Two servers are proved if a run_id comes back after another one, or if the new server was up already when the old one
   answered last. Nothing is proved if a Sentinel or a cluster names the server, or if it is a replica that was promoted
   since it was met last. Such a replica names the replication id that it had before. That need not be the one of the
   server before: a master takes a new one when its first replica comes.
3. Two servers that are proved are a ConfigError. The next attempt to connect compares with the server that was found
   last, so a migration fails once, and goes on after the pause.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from asynclock._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROUNDING = 2.0
"""Seconds. A server says its uptime in whole seconds, from two times that are rounded down, too."""

_PAST = 16  # servers that are remembered


class Server(NamedTuple):
    """The identity of a server, as its INFO has it."""

    run_id: str
    replication_id: str = ""
    before_promotion: str = ""  # the replication id that it had as a replica
    uptime: float = 0.0  # seconds


def server_of(info: Mapping[str, str]) -> Server:
    """Read the fields of INFO server and INFO replication. Pure."""
    before = info.get("master_replid2", "")
    uptime = info.get("uptime_in_seconds", "")
    return Server(
        info.get("run_id", ""),
        info.get("master_replid", ""),
        before if before.strip("0") else "",
        float(uptime) if uptime.isdecimal() else 0.0,
    )


class Identity:
    """The servers that were found at one address. All event loops share it."""

    def __init__(self) -> None:
        self._server: Server | None = None  # the last one
        self._answered_at = -math.inf  # it was up then: a command was sent that it answered, on the client's clock
        self._past: dict[str, str] = {}  # run_ids that others have replaced -> what they had before their promotion

    def answered(self, at: float) -> None:
        """The last server was up then, on the client's clock. It answered a command that was sent at that time: the
        time at which the answer was read proves nothing, since the process may have been stopped in between."""
        self._answered_at = max(self._answered_at, at)

    def meet(self, server: Server, now: float, label: str, *, managed: bool) -> str:
        """A new connection reached this server. Returns the run_id of the one before, if it is another; else "".
        `managed`: a Sentinel or a cluster has named it. Raises ConfigError if two servers are proved."""
        if not server.run_id:
            return ""
        before, self._server = self._server, server
        if before is None or before.run_id == server.run_id:
            return ""
        answered_at, self._answered_at = self._answered_at, -math.inf
        promoted = managed or server.before_promotion not in ("", self._past.get(server.run_id, ""))
        came_back = server.run_id in self._past
        together = before.replication_id != "" and now - server.uptime + _ROUNDING < answered_at
        self._past.pop(server.run_id, None)
        self._past[before.run_id] = before.before_promotion
        while len(self._past) > _PAST:
            del self._past[next(iter(self._past))]
        if not promoted and (came_back or together):
            raise ConfigError(
                f"two servers answer at {label} in turn (run_id {before.run_id[:8]} and {server.run_id[:8]}), and each "
                "grants the same locks: let the address lead to one of them, or name each by its own address"
            )
        return before.run_id
