"""Health: whether an acquire would be decided now."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from asynclock._errors import LockError
from asynclock._untrusted import printable, said
from asynclock.info import Health, NodeHealth
from asynclock.runtime.opening import check_votes, judge_again, too_late
from asynclock.stores.port import Checked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.runtime.session import Session

LIMIT = 1.0
"""Seconds for which `health` waits for connections, and for answers; longer if the nodes are far away."""

_MARKS = 0.25
"""Seconds for which it waits for the marks of servers in quarantine, at most. The answers get the rest of the limit."""


async def health(session: Session) -> Health:
    """Check the vote of each node. Raises ConfigError if the client is closed, or a server is named twice."""
    if not session.opened:
        await session.open(session.settings.lock, min(LIMIT, session.settings.connect_timeout + 0.05), check=False)
    session.check_open()
    began = session.loop.time()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MARKS):
            await judge_again(session.quorum)
    nodes = session.quorum.nodes
    left = LIMIT - (session.loop.time() - began)
    found = await check_votes(nodes, max(left, session.quorum.limits.longest), session.clock, everyone=True)
    within = session.within(session.settings.lock)
    found = [too_late(node, each, within) for node, each in zip(nodes, found, strict=True)]
    errors = {index: each for index, each in enumerate(found) if isinstance(each, Exception)}
    majority = len(nodes) // 2 + 1
    spare = len(nodes) - len(errors) - majority
    reason = "" if spare >= 0 else str(session.quorum.unavailable_nodes(errors, ""))
    known = tuple(_of(node.label, each) for node, each in zip(nodes, found, strict=True))
    return Health(spare >= 0, reason, known, max(0, spare))


def unusable(labels: Sequence[str], error: Exception) -> Health:
    """The health of a client that cannot ask its nodes. Pure."""
    reason = str(error) if isinstance(error, LockError) else repr(error)
    return Health(False, reason, tuple(NodeHealth(label, False, None, reason) for label in labels))


def _of(label: str, found: Checked | Exception | None) -> NodeHealth:
    if isinstance(found, Checked):
        return NodeHealth(label, True, found.latency, printable(found.note))
    return NodeHealth(label, False, None, said(found) if isinstance(found, Exception) else "")
