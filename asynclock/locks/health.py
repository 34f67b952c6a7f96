"""Health: whether an acquire would be decided now."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from asynclock._errors import LockError
from asynclock._untrusted import printable, said
from asynclock.info import Health, NodeHealth
from asynclock.locks.admin import view_at
from asynclock.rules.mutex import MUTEX
from asynclock.runtime.opening import check_votes, judge_again, too_late
from asynclock.stores.port import PROBE, Checked, Use, Wish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.runtime.session import Session
    from asynclock.stores.port import Node

LIMIT = 1.0
"""Seconds for which `health` waits for connections, and for answers; longer if the nodes are far away,
or if a check takes several round trips."""

_MARKS = 0.25
"""Seconds for which it waits for the marks of servers in quarantine, at most. The answers get the rest of the limit."""


async def health(session: Session) -> Health:
    """Check the vote of each node. Raises ConfigError if the client is closed, or a server is named twice."""
    await _open(session)
    began = session.loop.time()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MARKS):
            await judge_again(session.quorum)
    nodes = session.quorum.nodes
    left = LIMIT - (session.loop.time() - began)
    found = await check_votes(nodes, max(left, session.quorum.limits.longest), session.clock, everyone=True)
    within = session.within(session.settings.lock)
    judged = [too_late(node, each, within) for node, each in zip(nodes, found, strict=True)]
    return _judged(session, [_with_limits(session, node, each) for node, each in zip(nodes, judged, strict=True)])


def _with_limits(session: Session, node: Node, found: Checked | Exception | None) -> Checked | Exception | None:
    """With a note if the store cannot keep a lock with the options of the client. Locks with other options may work, so
    that is no failure."""
    lock = session.settings.lock
    wish = Wish(Use.LOCK, MUTEX, (), lock.lease, lock.min_hold, lock.fencing, session.settings.prefix)
    cannot = [why for store in session.limited if store.label == node.label and (why := store.cannot(wish))]
    if not cannot or not isinstance(found, Checked):
        return found
    note = f"a lock with the options of this client raises Unsupported: {cannot[0]}"
    return found._replace(note=f"{found.note}; {note}" if found.note else note)


async def answers(session: Session) -> Health:
    """The same, but a node counts if it answers a question that changes nothing: for a user who may only read. Raises
    ConfigError as `health` does."""
    await _open(session)

    async def ask(node: Node) -> Checked | Exception:
        began = session.clock.now()
        try:
            view = await view_at(session, node, PROBE)
        except Exception as error:
            return error
        return Checked(session.clock.now() - began, view.note)

    return _judged(session, await asyncio.gather(*map(ask, session.quorum.nodes)))


async def _open(session: Session) -> None:
    if not session.opened:
        await session.open(session.settings.lock, min(LIMIT, session.settings.connect_timeout + 0.05), check=False)
    session.check_open()


def _judged(session: Session, found: Sequence[Checked | Exception | None]) -> Health:
    nodes = session.quorum.nodes
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
