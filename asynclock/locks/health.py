"""Health: whether an acquire would be decided now."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from asynclock._errors import LockError
from asynclock.info import Health, NodeHealth
from asynclock.quorum.checks import check_votes
from asynclock.stores.port import Checked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.acquire.session import Session

LIMIT = 1.0
"""Seconds for which `health` waits for connections and for answers, together."""

_LEAST = 0.25
"""Seconds for which it waits for answers at least, if connecting took the whole limit. Also the most for which it waits
for the marks of servers in quarantine."""


async def health(session: Session) -> Health:
    """Check the vote of each node. Raises ConfigError if the client is closed, or a server is named twice."""
    began = session.loop.time()
    if not session.opened:
        await session.open(session.settings.lock, min(LIMIT, session.settings.connect_timeout + 0.05), check=False)
    session.check_open()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAST):
            await session.quorum.judge_again()
    nodes = session.quorum.nodes
    left = LIMIT - (session.loop.time() - began)
    found = await check_votes(nodes, max(left, _LEAST), everyone=True)
    errors = {index: each for index, each in enumerate(found) if isinstance(each, Exception)}
    ok = len(nodes) - len(errors) > len(nodes) // 2
    reason = "" if ok else str(session.quorum.unavailable_nodes(errors, ""))
    return Health(ok, reason, tuple(_of(node.label, each) for node, each in zip(nodes, found, strict=True)))


def unusable(labels: Sequence[str], error: Exception) -> Health:
    """The health of a client that cannot ask its nodes. Pure."""
    reason = str(error) if isinstance(error, LockError) else repr(error)
    return Health(False, reason, tuple(NodeHealth(label, False, None, reason) for label in labels))


def _of(label: str, found: Checked | Exception | None) -> NodeHealth:
    if isinstance(found, Checked):
        return NodeHealth(label, True, found.latency, found.note)
    return NodeHealth(label, False, None, str(found) or repr(found))
