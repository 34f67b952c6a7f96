"""The questions and commands of operators: holders and waiters of a name, the names that are held, break_lock."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import TYPE_CHECKING

from asynclock._errors import ConfigError, brief
from asynclock.acquire.tags import holder_of_id, tag_of
from asynclock.events import Broken
from asynclock.info import LockInfo, Waiter
from asynclock.quorum.ballot import Outcome
from asynclock.rules.model import Op, Queueing, Verb
from asynclock.rules.registry import FAMILIES, RULES_BY_FAMILY, family_of
from asynclock.stores.port import NodeView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from asynclock.acquire.session import Session
    from asynclock.info import Holder
    from asynclock.rules.model import Kind, Part
    from asynclock.stores.port import Node


async def inspect(session: Session, name: str) -> LockInfo:
    """Ask all nodes, for at most 1 s. Raises QuorumUnavailable, ConfigError."""
    nodes = session.quorum.nodes
    views = await _views(session, name)
    known = [view for view in views if isinstance(view, NodeView)]
    majority = len(nodes) // 2 + 1
    if len(known) < majority:
        session.check_open()  # a closed client raises ConfigError: its nodes are silent because it closed
        raise session.quorum.unavailable_nodes({i: v for i, v in enumerate(views) if not isinstance(v, NodeView)}, name)
    kinds = Counter(_kind(view) for view in known)
    return LockInfo(
        name,
        kinds.most_common(1)[0][0],
        max(view.fence for view in known),
        merged_holders(name, known, majority),
        merged_waiters(known),
        {node.label: _describe(view) for node, view in zip(nodes, views, strict=True)},
    )


async def wrong_kind(session: Session, parts: Sequence[Part]) -> ConfigError:
    """The error for a request of names of which one is in use as another kind. It names both kinds."""
    error = ConfigError(f"{brief(parts[0].name)} was in use as another kind just now: try again", name=parts[0].name)
    for part in parts:
        views = await _views(session, part.name)
        asked = FAMILIES[part.kind.letter]
        found = sorted({kind for view in views if isinstance(view, NodeView) and (kind := _kind(view))} - {asked})
        if found:
            known = " and ".join(
                f"a {kind}" if kind in FAMILIES.values() else f"no lock, but a {kind}" for kind in found
            )
            return ConfigError(
                f"{brief(part.name)} is in use as {known}, and was asked for as a {asked}: "
                "give each kind of lock names of its own",
                name=part.name,
            )
    return error


async def holders(session: Session, begin: str) -> AsyncIterator[Holder]:
    """Each hold of each name that begins with `begin`, once. A name that is acquired or released meanwhile may be
    missing. Raises QuorumUnavailable, ConfigError."""
    seen: set[str] = set()
    errors: dict[int, BaseException] = {}
    nodes = session.quorum.nodes
    for index, node in enumerate(nodes):
        cursor = "0"
        while index not in errors:
            try:
                cursor, found = await node.names(begin, cursor)
            except Exception as error:  # each name is found if a majority of the nodes answers
                errors[index] = error
                break
            for name in found:
                if name not in seen:
                    seen.add(name)
                    for holder in (await inspect(session, name)).holders:
                        yield holder
            if cursor == "0":
                break
    if len(nodes) - len(errors) <= len(nodes) // 2:
        raise session.quorum.unavailable_nodes(errors, "")


def merged_holders(name: str, views: Sequence[NodeView], majority: int) -> tuple[Holder, ...]:
    """The holders on a majority of the nodes; the hold ends at the majority-th latest of its ends. Pure."""
    ends: dict[str, list[float | None]] = {}
    for view in views:
        for hold_id, left in view.holds:
            ends.setdefault(hold_id, []).append(left)
    found: list[Holder] = []
    for hold_id, lefts in ends.items():
        if len(lefts) >= majority:
            left = sorted((math.inf if left is None else left for left in lefts), reverse=True)[majority - 1]
            until = None if left == math.inf else left
            found.append(holder_of_id(name, hold_id, until))
    return tuple(sorted(found, key=lambda holder: holder.since))


def merged_waiters(views: Sequence[NodeView]) -> tuple[Waiter, ...]:
    """Each ticket once, in the order in which it is served. Pure."""
    tickets = sorted({ticket for view in views for ticket in view.waiters})
    tags = [tag_of(ticket_id) for _, ticket_id in tickets]
    return tuple(Waiter(tag.host, tag.pid, tag.since) for tag in tags)


async def break_lock(session: Session, name: str) -> bool:
    """Delete the hold on each node that can be reached. Each node notifies the holder and serves the next waiter.
    Returns whether there was a hold. Raises QuorumUnavailable, ConfigError."""
    views = await _views(session, name)
    session.check_open()
    found = {_kind(view) for view in views if isinstance(view, NodeView)} & RULES_BY_FAMILY.keys() or {"mutex"}
    broken = any([await _break(session, name, RULES_BY_FAMILY[kind]) for kind in found])
    if broken:
        session.tell(Broken(name))
    return broken


async def _break(session: Session, name: str, kind: Kind) -> bool:
    memory = session.settings.lock.lease + session.settings.fence_memory
    op = Op(Verb.BREAK, kind, name, "", 0.0, memory=memory, queueing=Queueing(session.quorum.serve))
    ballot = session.quorum.ask(op, session.within(session.settings.lock), everyone=True)
    if await ballot.settled(session.loop) is Outcome.UNREACHABLE:
        session.check_open()
        raise session.quorum.unavailable(ballot, name)
    return ballot.yes > 0


def _kind(view: NodeView) -> str:
    if view.type not in ("string", "zset"):
        return "" if view.type == "none" else view.type
    return family_of(view.holds[0][0]) or view.type if view.holds else ""


async def _views(session: Session, name: str) -> list[NodeView | BaseException]:
    async def ask(node: Node) -> NodeView:
        async with asyncio.timeout(1.0):
            return await node.probe(name)

    return await asyncio.gather(*(ask(node) for node in session.quorum.nodes), return_exceptions=True)


def _describe(view: NodeView | BaseException) -> str:
    if isinstance(view, BaseException):
        return str(view) or repr(view)
    if not view.holds:
        held = "free"
    else:
        found = [_describe_hold(*hold) for hold in view.holds]
        held = "held by " + ", ".join(found)
    return f"{held}; {len(view.waiters)} wait; fence {view.fence}"


def _describe_hold(id: str, left: float | None) -> str:
    tag = tag_of(id)
    owner = f"{tag.host}:{tag.pid}" if tag.host else tag.metadata or "another program"
    return f"{owner} for ever (no expiry)" if left is None else f"{owner} for {left:.3g} s"
