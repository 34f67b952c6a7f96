"""Whether a contender enters, and what it watches if it does not.

A waiter watches the last child that is in its way, and looks again when that has gone. So each release wakes one
waiter; of readers, all that wait for the same writer. A waiter for a permit watches an earlier waiter, and the first
one watches all children. A holder watches its own node, so that it learns at once that an operator deleted it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kazoo.exceptions import SessionExpiredError

from asynclock._errors import brief
from asynclock.stores.port import Refused, WrongKind
from asynclock.stores.zookeeper.hold_and_wait import HoldAndWaitLimits
from asynclock.stores.zookeeper.layout import (
    Child,
    Obstacle,
    closing_before,
    is_of,
    obstacle,
    queue_of,
    tickets_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from asynclock.rules.model import Part
    from asynclock.stores.port import Grant
    from asynclock.stores.zookeeper.contender import Contender
    from asynclock.stores.zookeeper.layout import Layout
    from asynclock.stores.zookeeper.places import Places

_CLOSES = 4
"""After so many refusals in a row the ticket of a waiter for several names closes the name that refused it."""

_SETTLED = 0.05
"""Seconds after a grant until the holder watches its own node. A shorter hold saves that."""


class Host(Protocol):
    """The node that a contender belongs to."""

    error: Exception | None

    def spawn(self, build: Callable[[], Coroutine[Any, Any, None]]) -> object:
        """Do it in the background, and again if its task is cancelled."""

    def ends_at(self, contender: Contender, ends: float) -> None:
        """The hold ends then, unless it is extended."""

    def notify(self, contender: Contender, number: int = 0, fence: int = 0, *, broken: bool = False) -> None:
        """Send a notice to its owner."""


class Blocked(NamedTuple):
    """A name that refuses a contender."""

    part: Part
    queue: list[Child]
    rank: int  # of the contender there
    found: Obstacle  # what is in its way
    closed: bool  # an earlier arrival closed the name


class Turns:
    """Of one node. All raise kazoo's exceptions."""

    def __init__(self, layout: Layout, places: Places, host: Host) -> None:
        self._layout = layout
        self._places = places
        self._host = host
        self._hold_and_wait = HoldAndWaitLimits(layout, places, host.spawn, self.look_again)

    async def refusal_before(self, contender: Contender) -> Refused | None:
        """A try that leaves no ticket looks before it writes."""
        for part in contender.parts:
            queue = await self._places.queue(part.name)
            _check_kind(queue, part)
            if (blocked := obstacle(queue, part.kind)) is not None:
                return await self._places.refused(part, queue, len(queue), blocked)
        return None

    async def judge(self, contender: Contender, *, waits: bool) -> Grant | Refused:
        """Whether a contender that has its nodes holds the lock now."""
        while (blocked := await self._blocked(contender, waits=waits)) is not None:
            part, queue, rank, found, closed = blocked
            leaves = not waits or closed or (contender.several and self._hold_and_wait.ends(contender, part))
            if leaves:
                contender.refusals, contender.hold_and_wait = contender.refusals + 1, None
                refused, _ = await asyncio.gather(
                    self._places.refused(part, queue, rank, found), self._places.delete(contender, keep_ticket=waits)
                )
            else:
                refused = await self._places.refused(part, queue, rank, found)
            if not waits:
                return refused
            contender.waits = True
            if not leaves and rank < part.kind.slots and contender.waits_at is not part:
                self._host.spawn(partial(self._places.tell_waits, contender, part))
            if leaves:
                closes = not contender.several or contender.refusals >= _CLOSES
                await self._places.leave_ticket(contender, part, closes=closes)
            elif not contender.several:
                # It has its place in the queue, so the next one may enqueue. It keeps in mind when it arrived: the
                # tickets behind it, which close the name, were created before its node.
                if contender.ticket is not None and contender.ticket.closes:
                    contender.arrived = contender.ticket.number
                await self._places.withdraw(contender)
            if await (self._watch_as_ticket if leaves else self._watch)(contender, part, found):
                return refused
            if leaves:  # the name may be free by now: the owner tries again
                asyncio.get_running_loop().call_soon(self._fired, contender, contender.watch)
                return refused
        return self.grant(contender)

    async def _blocked(self, contender: Contender, *, waits: bool) -> Blocked | None:
        """The name that refuses a contender. None: no name does. Raises WrongKind, and then deletes its nodes."""
        known = await asyncio.gather(*(self._places.children(part.name) for part in contender.parts))
        if not contender.nodes:  # the session has expired meanwhile
            raise SessionExpiredError("the session of this attempt has expired")
        ticket, blocked, contender.is_followed = contender.ticket, list[Blocked](), False
        for part, own, names in zip(contender.parts, contender.nodes, known, strict=True):
            queue = queue_of(self._layout, names)
            rank = next((rank for rank, child in enumerate(queue) if child.name == own.name), None)
            if rank is None or not own.is_ordered:  # the latter if it could not be deleted when it was created
                await self._places.delete(contender)
                raise SessionExpiredError("the node of this attempt is gone")
            try:
                _check_kind(queue[:rank], part)
            except WrongKind:
                await self._places.delete(contender)
                raise
            contender.is_followed |= rank + 1 < len(queue)
            if ticket is not None and ticket.part is part:
                arrived = ticket.number
            else:
                arrived = own.number if contender.arrived is None else contender.arrived
            closing = closing_before(self._layout, names, arrived) if waits else None
            found = obstacle(queue[:rank], part.kind, queue[rank + 1 :])
            if closing is not None:
                blocked.append(Blocked(part, queue, rank, found or Obstacle(closing), True))
            elif found is not None:
                blocked.append(Blocked(part, queue, rank, found, False))
        # The name where its ticket is comes first: there later arrivals may wait behind it.
        return min(blocked, key=lambda each: ticket is None or ticket.part is not each.part, default=None)

    def grant(self, contender: Contender) -> Grant:
        """Make it a holder. Nobody is in its way."""
        contender.granted, waited = True, contender.waits
        contender.waits, contender.waits_at = False, None
        contender.unwatch()
        contender.refusals, contender.hold_and_wait, contender.rounds = 0, None, 0
        self._host.ends_at(contender, contender.sent + contender.lease)
        asyncio.get_running_loop().call_later(_SETTLED, self.watch_own, contender)
        if contender.ticket is not None:
            self._host.spawn(partial(self._places.withdraw, contender))
        if waited or contender.is_followed:
            for own in contender.nodes:
                # Those behind watch it, until it waits no more. They may have taken it for a waiter although it did not
                # wait: they read the children before a holder left, and it read them after that.
                if own.part.kind.letter == "s":
                    self._host.spawn(partial(self._places.servers.touch, own.path, contender.data_at(own.part)))
        return contender.czxid, False

    # -- watches -------------------------------------------------------------------------------------------------

    async def _watch(self, contender: Contender, part: Part, found: Obstacle) -> bool:
        """Watch what is in the way of a waiter. False: it is gone already, so look again."""
        fired = self._watcher_of(contender)
        path = self._places.path(part.name)
        if found.any_child:
            names = await self._places.servers.children(path, fired)
            return self._obstacle_of(contender, part, names) is not None
        if not await self._places.servers.watch(f"{path}/{found.child.name}", fired):
            return False
        if found.child.letter != "s":
            return True
        # It may have entered before it was watched. Then it does not change any more until it leaves.
        return self._obstacle_of(contender, part, await self._places.children(part.name)) == found

    def _obstacle_of(self, contender: Contender, part: Part, names: Sequence[str]) -> Obstacle | None:
        """What is in its way at a name with these children."""
        queue, own = queue_of(self._layout, names), {each.name for each in contender.nodes}
        rank = next((rank for rank, child in enumerate(queue) if child.name in own), len(queue))
        return obstacle(queue[:rank], part.kind, queue[rank + 1 :])

    async def _watch_as_ticket(self, contender: Contender, part: Part, found: Obstacle) -> bool:
        """Watch the ticket before its own; the first one watches what was in the way. So a release wakes one of those
        that have a ticket. Behind a ticket that closes the name, only such tickets count. False: look again."""
        own = contender.ticket
        if own is None:
            return False
        tickets = tickets_of(self._layout, await self._places.children(part.name))
        before = [each for each in tickets if each.number < own.number and (each.closes or not own.closes)]
        return await self._watch(contender, part, Obstacle(before[-1]) if before else found)

    def _watcher_of(self, contender: Contender) -> Callable[[], object]:
        """The callback of its next watch."""
        contender.unwatch()
        contender.watcher = partial(self._fired, contender, contender.watch)
        return contender.watcher

    def _fired(self, contender: Contender, watch: int) -> None:
        """What a waiter watched has changed."""
        if contender.watch == watch:
            self._host.spawn(partial(self.look_again, contender, watch))

    async def look_again(self, contender: Contender, watch: int = -1) -> None:
        """A waiter enters if it can, and its owner is notified. A holder is notified if its node is gone."""
        async with contender.turn:
            if contender.is_unwanted or (watch >= 0 and contender.watch != watch):
                return
            if contender.granted:
                if not await self._places.are_there(contender):
                    await self._places.delete(contender)
                    self._host.notify(contender, broken=True)
                    return
                self.watch_own(contender)  # also after another program has written into the node
                if watch < 0:
                    await self._places.withdraw(contender)  # a ticket that was not withdrawn at the grant
                return
            if not contender.waits:
                return
            if contender.ticket is not None and not contender.nodes:
                self._host.notify(contender, number=contender.number)
                return
            if contender.nodes and not contender.doubtful:
                try:
                    vote = await self.judge(contender, waits=True)
                except (WrongKind, SessionExpiredError):  # its place is gone: its owner asks, and gets a new one or why
                    self._host.notify(contender, number=contender.number)
                    raise
                if not isinstance(vote, Refused):
                    self._host.notify(contender, number=contender.number, fence=vote[0])

    def watch_own(self, contender: Contender) -> None:
        """A holder watches its own node."""
        if contender.granted and not contender.is_unwanted and self._host.error is None:
            self._host.spawn(partial(self._watch_nodes, contender, self._watcher_of(contender)))

    async def _watch_nodes(self, contender: Contender, fired: Callable[[], object]) -> None:
        found = await asyncio.gather(*(self._places.servers.watch(own.path, fired) for own in contender.nodes))
        if not all(found):
            fired()

    async def peek(self, parts: Sequence[Part]) -> Refused:
        """Whether an attempt would enter now: then the refusal has no holder."""
        for part in parts:
            queue = await self._places.queue(part.name)
            _check_kind(queue, part)
            if (found := obstacle(queue, part.kind)) is not None:
                refused = await self._places.refused(part, queue, len(queue), found)
                return replace(refused, rank=0)
        return Refused(None)


def _check_kind(before: Sequence[Child], part: Part) -> None:
    """Raise WrongKind where the name is held as another kind."""
    for child in before[:1]:  # it holds the name, whatever its kind is
        if not is_of(child, part.kind):
            raise WrongKind(f"{brief(part.name)} is in use as another kind")
