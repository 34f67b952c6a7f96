"""The questions and commands of operators: holders and waiters of a name, the names that are held, break_lock."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from asynclock._clock import running_for
from asynclock._errors import ConfigError, brief
from asynclock._options import RESERVED
from asynclock._untrusted import printable, said
from asynclock.events import Broken
from asynclock.info import LockInfo, Waiter
from asynclock.protocol.causes import holder_of_id, note_of
from asynclock.quorum.ballot import Outcome
from asynclock.quorum.denials import is_held
from asynclock.rules.model import ANY, ID_LENGTH, Op, Queueing, Verb, is_made_by_asynclock
from asynclock.rules.mutex import MUTEX
from asynclock.rules.registry import FAMILIES, RULES_BY_FAMILY, family_of, rule_of
from asynclock.stores.port import Explaining, NodeView, WaiterView, WrongKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from asynclock.info import Holder
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind, Part
    from asynclock.runtime.session import Session
    from asynclock.stores.port import Node


async def inspect(session: Session, name: str) -> LockInfo:
    """Ask all nodes, for at most 1 s, or the node timeout if that is longer. Raises QuorumUnavailable, ConfigError."""
    views = await _views(session, name)
    known, majority = _known(session, name, views), len(views) // 2 + 1
    kinds = Counter(_kind(view) for view in known)
    return LockInfo(
        name,
        kinds.most_common(1)[0][0],
        max(view.fence for view in known),
        merged_holders(name, known, majority),
        merged_waiters(known),
        free_permits(_merged(known, majority)),
        {node.label: _describe(view) for node, view in zip(session.quorum.nodes, views, strict=True)},
    )


def _known(session: Session, name: str, views: Sequence[NodeView | BaseException]) -> list[NodeView]:
    """The views of the nodes that answered. Raises QuorumUnavailable, ConfigError if they are no majority."""
    known = [view for view in views if isinstance(view, NodeView)]
    if len(known) <= len(views) // 2:
        session.check_open()  # a closed client raises ConfigError: its nodes are silent because it closed
        raise session.quorum.unavailable_nodes({i: v for i, v in enumerate(views) if not isinstance(v, NodeView)}, name)
    return known


async def wrong_kind(session: Session, parts: Sequence[Part]) -> ConfigError:
    """The error for a request in which one of the names is in use as another kind. It names both kinds."""
    error = ConfigError(f"{brief(parts[0].name)} was in use as another kind just now: try again", name=parts[0].name)
    for part in parts:
        views = await _views(session, part.name)
        asked = FAMILIES[part.kind.letter]
        others = [view for view in views if isinstance(view, NodeView) and _kind(view) not in ("", asked)]
        if others:
            known = " and ".join(sorted({_use(view) for view in others}))
            advice = "give each kind of lock names of its own"
            if _OTHERS in known:
                advice = "rename the lock, or give all clients of the deployment another prefix"
            return ConfigError(
                f"{brief(part.name)} is in use as {known}, and was asked for as a {asked}: {advice}",
                name=part.name,
            )
    return error


async def holders(session: Session, begin: str) -> AsyncIterator[Holder]:
    """Each hold of each name that begins with `begin`, once, if it `is_listed`. A name that is acquired or released
    meanwhile may be missing. Raises QuorumUnavailable, ConfigError."""
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
                    for holder in await _listed(session, name):
                        yield holder
            if cursor == "0":
                break
    if len(nodes) - len(errors) <= len(nodes) // 2:
        raise session.quorum.unavailable_nodes(errors, "")


async def _listed(session: Session, name: str) -> tuple[Holder, ...]:
    """The holders of a name that are shown in a list."""
    views = await _views(session, name)
    prefix = session.settings.prefix
    known = [
        view._replace(holds=tuple(hold for hold in view.holds if is_listed(prefix, name, *hold)))
        for view in _known(session, name, views)
    ]
    return merged_holders(name, known, len(views) // 2 + 1)


def is_listed(prefix: str, name: str, id: str, left: float | None) -> bool:
    """Whether `holders` shows this value of a key as a hold. Pure.

    All holds that asynclock made are shown. Under a prefix, other strings are shown, too: they keep the names taken.
    Without a prefix, the database may have strings of the application. Then another program's string is shown only if
    it expires and looks like the token of a lock library.
    """
    if is_made_by_asynclock(id):
        return True
    if RESERVED in name:  # a counter or a tombstone of a client whose prefix is longer
        return False
    return bool(prefix) or (left is not None and _TOKEN.fullmatch(id) is not None)


_TOKEN = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9+/=_-]{16,64}")
"""A token of redis-py (32 hexadecimal digits), redsync (base64), redis-semaphore (a UUID) and others."""


def _merged(views: Sequence[NodeView], majority: int) -> dict[str, float | None]:
    """The ids that hold the name on a majority of the nodes, each with the seconds that it has left: the majority-th
    longest time that a node names (None: it never ends). Pure."""
    ends: dict[str, list[float]] = {}
    for view in views:
        for hold_id, left in view.holds:
            ends.setdefault(hold_id, []).append(math.inf if left is None else left)
    merged: dict[str, float | None] = {}
    for hold_id, lefts in ends.items():
        if len(lefts) >= majority:
            left = sorted(lefts, reverse=True)[majority - 1]
            merged[hold_id] = None if left == math.inf else left
    return merged


def merged_holders(name: str, views: Sequence[NodeView], majority: int) -> tuple[Holder, ...]:
    """The holders on a majority of the nodes, oldest first. Pure."""
    found = [holder_of_id(name, hold_id, left) for hold_id, left in _merged(views, majority).items()]
    return tuple(sorted(found, key=lambda holder: holder.since))


def free_permits(ids: Iterable[str]) -> int | None:
    """The largest permit count of these holders, minus the number of holders; None unless they hold a semaphore.
    Pure."""
    permits = [rule_of(each[ID_LENGTH + 1 :]).slots for each in ids]
    return max(0, max(permits) - len(permits)) if any(permits) else None


def merged_waiters(views: Sequence[NodeView]) -> tuple[Waiter, ...]:
    """Each process once, in the order in which its first ticket is served. For each ticket, the latest sending that any
    node has is used. Pure."""
    tickets: dict[str, WaiterView] = {}
    for each in sorted((each for view in views for each in view.waiters), key=lambda each: each.number):
        tickets[each.id] = each
    processes: dict[tuple[str, int], Waiter] = {}
    for each in sorted(tickets.values()):
        note = note_of(each.id)
        first = processes.get((note.host, note.pid), Waiter(note.host, note.pid, note.since, 0))
        processes[note.host, note.pid] = replace(
            first, tasks=first.tasks + each.tasks, since=min(first.since, note.since)
        )
    return tuple(processes.values())


BREAK_FOREIGN = "break_lock(name, foreign=True)"
"""What deletes the key of another program, as the message of `break_lock` names it."""


async def break_lock(session: Session, name: str, foreign: bool) -> bool:
    """Delete the hold on each node that can be reached. Each node notifies the holder and serves the next waiter. A key
    of another program is deleted only if `foreign`, whatever its type. Returns whether there was a hold. Raises
    QuorumUnavailable, ConfigError."""
    tried: set[str] = set()
    broken = refused = False
    for _ in range(2):  # twice, since a node may not answer the first probe, or the name may change hands after it
        views = await _views(session, name)
        session.check_open()
        seen = [view for view in views if isinstance(view, NodeView)]
        found = {_kind(view) for view in seen} & RULES_BY_FAMILY.keys() or {"mutex"}
        for kind in sorted(found - tried):
            try:
                ballot = await _break(session, name, RULES_BY_FAMILY[kind], "")
            except WrongKind:
                refused = True
            else:
                broken = broken or ballot.yes > 0
                refused = refused or is_held(ballot.denials(), ballot.nodes)
        tried |= found
        if broken or foreign or not refused:
            break
    if foreign:
        broken = (await _break(session, name, MUTEX, ANY)).yes > 0 or broken
    elif refused and not broken and not seen:
        raise session.quorum.unavailable_nodes({i: v for i, v in enumerate(views) if not isinstance(v, NodeView)}, name)
    elif refused and not broken and (len(seen) < len(views) or any(_kind(view) for view in seen)):
        # If all nodes answer and none shows a kind, the name is free: the key of readers or permits may outlive the
        # last of them.
        uses = {_use(view) for view in seen} - {""}
        raise ConfigError(
            f"{brief(name)} is no hold of asynclock, but {' and '.join(sorted(uses)) or 'a key of another program'}: "
            f"if nothing else needs it, {BREAK_FOREIGN} deletes it",
            name=name,
        )
    if broken:
        session.tell(Broken(name))
    return broken


async def _break(session: Session, name: str, kind: Kind, id: str) -> Ballot:
    memory = session.settings.lock.lease + session.settings.fence_memory
    queueing = Queueing(session.quorum.serve, waiter=session.introduction(session.settings.lock.metadata))
    op = Op(Verb.BREAK, kind, name, id, 0.0, memory=memory, queueing=queueing)
    session.machine.holds.done_marks.forget(name)  # else a mark that is set later would outlive the break
    ballot = session.quorum.ask(op, session.within(session.settings.lock), everyone=True)
    if await session.settled(ballot) is Outcome.UNREACHABLE:
        session.check_open()
        raise session.quorum.unavailable(ballot, name)
    return ballot


_OTHERS = "of another program"

_LOOK = 1.0
"""Seconds that each node has to answer, at least. It is the node timeout, if that is more."""


def _kind(view: NodeView) -> str:
    """The family of a hold; "" if there is none; the type of a key that is no lock."""
    if view.holds:
        return family_of(view.holds[0][0]) or view.type
    return "" if view.type == "none" else view.type


def _use(view: NodeView) -> str:
    """What the key is used as, for a message; "" if there is none."""
    kind = _kind(view)
    if not kind or kind not in FAMILIES.values() or not is_made_by_asynclock(view.holds[0][0]):
        return kind and f"a {view.type} {_OTHERS}"
    return f"a {kind}"


async def _views(session: Session, name: str) -> list[NodeView | BaseException]:
    asked = [view_at(session, node, name) for node in session.quorum.nodes]
    return await asyncio.gather(*asked, return_exceptions=True)


async def view_at(session: Session, node: Node, name: str) -> NodeView:
    """What the node knows of a name. Raises its error, and TimeoutError."""
    within, began = max(_LOOK, session.within(session.settings.lock)), session.clock.now()
    try:
        async with running_for(within, session.clock):
            return await node.probe(name)
    except TimeoutError as error:
        if str(error):
            raise
        why = node.delay(began, name) if isinstance(node, Explaining) else ""
        said = f"{node.label} did not answer within {within:.3g} s"
        raise TimeoutError(f"{said}: {why}" if why else said) from None


def _describe(view: NodeView | BaseException) -> str:
    if isinstance(view, BaseException):
        return said(view)
    if not view.holds:
        held = f"in use as {_use(view)}" if _kind(view) else "free"
    else:
        found = [_describe_hold(*hold) for hold in view.holds]
        held = "held by " + ", ".join(found)
    note = f"; {view.note}" if view.note else ""
    return f"{printable(held)}; {sum(each.tasks for each in view.waiters)} waiting; fence {view.fence}{note}"


def _describe_hold(id: str, left: float | None) -> str:
    note = note_of(id)
    owner = f"{note.host}:{note.pid}" if note.host else note.metadata or "another program"
    return f"{owner}, without an expiry" if left is None else f"{owner}, {left:.1f} s left"
