"""Contender: what this process has at the servers under one id: a hold, a place in the queue, or nothing yet."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.model import parts_of

if TYPE_CHECKING:
    from asynclock.rules.model import Op, Part


class Own(NamedTuple):
    """The node of a contender at one name."""

    path: str
    name: str  # its last part
    czxid: int
    session: int  # that created it; 0: not known


class Contender:
    """Its ops, and the looks of a waiter, are carried out one after the other (`turn`)."""

    __slots__ = (
        "czxid", "doubtful", "ends", "given_up", "granted", "id", "lease", "name", "nodes", "number", "parts", "sent",
        "turn", "users", "waits", "watch",
    )  # fmt: skip

    def __init__(self, op: Op) -> None:
        self.id = op.id
        self.name = op.name
        self.parts: tuple[Part, ...] = parts_of(op)
        self.lease = op.lease
        self.turn = asyncio.Lock()
        self.users = 0  # ops that are under way
        self.nodes: tuple[Own, ...] = ()  # one for each part; (): none, as far as this client knows
        self.doubtful = False  # a create had no reply: there may be nodes that `nodes` does not have
        self.granted = False
        self.given_up = False  # its release was sent: nodes that are found are deleted
        self.czxid = 0  # of the nodes: the fencing token
        self.waits = False  # a ticket was stored, and its owner waits for a notice
        self.number = 0  # of the last sending of the ticket
        self.sent = 0.0  # when that was sent
        self.ends = math.inf  # when the hold ends, unless it is extended
        self.watch = 0  # of several watches only the last one counts

    def forget(self) -> None:
        """Its nodes are gone."""
        self.nodes = ()
        self.doubtful = self.granted = self.waits = False
        self.ends = math.inf
        self.watch += 1

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is at the servers."""
        return not self.nodes and not self.doubtful
