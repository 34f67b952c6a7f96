"""The nodes of a contender at the servers: created, found again, looked at, deleted."""

from __future__ import annotations

import asyncio
import math
import secrets
from typing import TYPE_CHECKING

from kazoo.exceptions import NodeExistsError, NoNodeError, NotEmptyError, SessionExpiredError

from asynclock.rules.model import ID_LENGTH
from asynclock.stores.port import Refused
from asynclock.stores.zookeeper.client import LONGEST_TTL
from asynclock.stores.zookeeper.contender import Own, data_of_mark
from asynclock.stores.zookeeper.errors import HOPELESS
from asynclock.stores.zookeeper.layout import (
    done_mark_of,
    escaped,
    holders,
    may_wait,
    prefix_of,
    queue_of,
    random_of,
    ticket_prefix_of,
    tickets_of,
)
from asynclock.stores.zookeeper.looks import Looks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynclock._time import Clock
    from asynclock.rules.model import Part
    from asynclock.stores.zookeeper.connection import Connection, Stat
    from asynclock.stores.zookeeper.contender import Contender
    from asynclock.stores.zookeeper.layout import Child, Obstacle
    from asynclock.stores.zookeeper.settings import Settings

_TRIES = 5
"""So often a create is tried again: the name's node may lack, others may create or delete it between two requests, and
its numbers may have ended."""

_SOON = 1.0
"""Seconds until a waiter asks again for a name whose mark has ended: the servers delete it up to a minute later, and
notify the waiter."""


class Places:
    """Of one store, over the connection that there is now. All raise kazoo's exceptions."""

    def __init__(self, settings: Settings, servers: Callable[[], Connection], clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._layout = settings.layout
        self._connection = servers
        self._random = secrets.token_hex(ID_LENGTH // 2)

    @property
    def servers(self) -> Connection:
        """Raises ConnectionError if there is none."""
        return self._connection()

    @property
    def looks(self) -> Looks:
        """Over the same connection."""
        return Looks(self.servers, self._settings, self._random)

    def path(self, name: str) -> str:
        """The node of a lock."""
        return f"{self._settings.root}/{escaped(name)}"

    async def children(self, name: str) -> list[str]:
        """The names of all nodes of a lock."""
        return await self.servers.children(self.path(name))

    async def queue(self, name: str) -> list[Child]:
        """Those that hold a lock or wait for it, in order."""
        return queue_of(self._layout, await self.children(name))

    async def refused(self, part: Part, queue: Sequence[Child], rank: int, found: Obstacle) -> Refused:
        """The refusal of a contender with so many others before it, with the id of a holder."""
        inside, uncertain = holders(queue[:rank]), may_wait(queue)
        first = next((child for child in inside if child.name not in uncertain), None) or next(
            iter(inside), found.child
        )
        holder, left = await self.looks.holder(part.name, first, self._clock)
        left = math.inf if left is None else max(left, _SOON)
        return Refused(left, holder, rank, found.child.number + 1)

    async def create(self, contender: Contender) -> bool:
        """Create its nodes, all or none, each as the last one of its queue. Returns whether it created the name's node,
        too: then nobody can be before it."""
        nodes = [
            (
                f"{self.path(part.name)}/{prefix_of(self._layout, contender.id, part.kind)}",
                contender.data_at(part),
            )
            for part in contender.parts
        ]
        is_new = False
        for again in range(_TRIES, -1, -1):
            contender.doubtful = True
            try:
                paths, stat = await self._create(nodes, is_new=is_new)
            except NoNodeError:
                contender.doubtful = False
                if not again:
                    raise
                is_new = await self._prepare(contender, was_new=is_new)
            except Exception as error:
                if is_new and again and isinstance(error, NodeExistsError):  # another client was first to create it
                    is_new = False
                    continue
                contender.doubtful = not isinstance(error, (*HOPELESS, SessionExpiredError))
                raise
            else:
                if stat is None:  # still doubtful: if an operator deleted the first one, the others are there
                    stat = await self._stat(paths[0])
                self._check_session(contender, stat)
                contender.doubtful = False
                contender.keep(paths, stat.czxid)
                if not (unordered := [own.part for own in contender.nodes if not own.is_ordered]):
                    return is_new
                await self.delete(contender)
                for part in unordered:
                    await self._number_anew(part)
        return False

    async def _create(self, nodes: Sequence[tuple[str, bytes]], *, is_new: bool) -> tuple[list[str], Stat | None]:
        """The paths, and the stat of the only one; None: it came of a transaction, whose answer has paths alone."""
        if len(nodes) > 1:
            return await self.servers.create_all(nodes), None
        if is_new:
            return [await self.servers.create_first(*nodes[0])], None
        path, stat = await self.servers.create(*nodes[0])
        return [path], stat

    async def _prepare(self, contender: Contender, *, was_new: bool) -> bool:
        """A name has no node. Returns whether the next create is to create it, too."""
        if contender.several:
            await asyncio.gather(*(self.servers.ensure(self.path(part.name)) for part in contender.parts))
        elif was_new:  # nor has the path of the url
            await self.servers.ensure(self._settings.root)
        return not contender.several

    async def _number_anew(self, part: Part) -> None:
        """Delete the node of a lock whose numbers have ended: those of the next one begin with 0. The servers delete it
        only while it has no children, so nobody holds the lock or waits for it."""
        path = self.path(part.name)
        try:
            await self.servers.delete(path)
        except NotEmptyError:
            raise ConnectionError(
                f"{self._settings.label}: the servers have numbered 2^31 nodes of {path}, and cannot say the order of "
                "more. They begin with 0 again once nobody holds the lock or waits for it"
            ) from None

    async def tell_tasks(self, contender: Contender, tasks: int) -> None:
        """So many tasks of this process wait now: for the look of an operator."""
        contender.tasks = tasks
        waiting = contender.nodes or ((contender.ticket,) if contender.ticket is not None else ())
        await asyncio.gather(*(self.servers.touch(own.path, contender.data_at(own.part)) for own in waiting))

    async def tell_waits(self, contender: Contender, part: Part) -> None:
        """Say for the look of an operator that its node at that name has the place of a holder, and waits for holders
        behind it. A grant writes the data once more."""
        contender.waits_at = part
        for own in contender.nodes:
            if own.part is part:
                await self.servers.touch(own.path, contender.data_at(part))

    async def leave_ticket(self, contender: Contender, part: Part, *, closes: bool) -> None:
        """A waiter without nodes has a place in the order of those that wait so for one of its names. It is in nobody's
        way. `closes`: those that arrive later wait behind it."""
        if (ticket := contender.ticket) is not None and ticket.part is part and ticket.closes == closes:
            return
        await self.withdraw(contender)
        prefix = ticket_prefix_of(self._layout, contender.id, closes=closes)
        contender.doubtful = True
        path, stat = await self.servers.create(f"{self.path(part.name)}/{prefix}", contender.data_at(part))
        self._check_session(contender, stat)
        contender.doubtful = False
        contender.ticket = Own(path, path.rpartition("/")[2], stat.czxid, part, closes)

    async def find(self, contender: Contender) -> None:
        """Find the nodes of a create without a reply. Those of an earlier session are deleted: they end with that one,
        and would be in the way until then. A mark of `once` belongs to no session, and stays."""
        if not contender.doubtful or contender.nodes:
            return
        nodes, others, stat = list[str](), list[str](), None
        for part in contender.parts:
            path = self.path(part.name)
            await self.servers.sync(path)
            random = random_of(self._layout, contender.id)
            for name in await self.servers.children(path):
                if not name.startswith(random) or (found := await self.servers.exists(f"{path}/{name}")) is None:
                    continue
                if self.servers.owns(found) and not tickets_of(self._layout, [name]):
                    nodes.append(f"{path}/{name}")
                    stat = found
                elif found.owner:
                    others.append(f"{path}/{name}")
        if len(nodes) != len(contender.parts):  # an operator deleted one of them
            others, nodes = [*others, *nodes], []
        for path in others:
            await self.servers.delete(path)
        contender.ticket = None
        if nodes and stat is not None:  # one transaction created all of them
            self._check_session(contender, stat)
            contender.keep(nodes, stat.czxid)
        contender.doubtful = False

    async def are_there(self, contender: Contender) -> bool:
        """Whether it has nodes, and they are there. The leader of the ensemble answers behind this: a hold is extended
        by it. A follower that is cut off from the leader answers reads for `syncLimit` ticks more, while the leader
        ends the session."""
        if not contender.nodes:
            return False
        stats = await self.servers.confirmed([own.path for own in contender.nodes])
        return all(
            stat is not None and stat.czxid == own.czxid for stat, own in zip(stats, contender.nodes, strict=True)
        )

    async def release(self, contender: Contender) -> bool:
        """Delete what it has, after a mark has taken the place of its node if the name is to stay taken. Returns
        whether its nodes were there. Raises the error of servers that refuse the mark, and the name is free then."""
        if contender.rest and contender.granted and len(contender.nodes) == 1:
            (own,) = contender.nodes
            mark = f"{self.path(own.part.name)}/{done_mark_of(self._layout, own.name)}"
            rest = min(contender.rest, LONGEST_TTL)
            if await self.are_there(contender):
                try:
                    await self.servers.create_for(mark, data_of_mark(rest), rest)
                except HOPELESS:  # else the name would stay taken for as long as the session
                    await self.delete(contender)
                    raise
        return await self.delete(contender)

    async def delete(self, contender: Contender, *, keep_ticket: bool = False) -> bool:
        """Delete what it has. Returns whether its nodes were there."""
        contender.unwatch()
        paths = [own.path for own in contender.nodes]
        if len(paths) == 1:
            found = await self.servers.delete(paths[0])
        elif paths:
            found = await self._delete_all(paths)
        else:
            found = False
        contender.nodes, contender.waits_at = (), None
        if not keep_ticket:
            await self.withdraw(contender)
            contender.forget()
        return found

    async def _delete_all(self, paths: Sequence[str]) -> bool:
        try:
            await self.servers.delete_all(paths)
        except NoNodeError:  # an operator deleted one
            await asyncio.gather(*(self.servers.delete(path) for path in paths))
            return False
        return True

    async def withdraw(self, contender: Contender) -> None:
        """Delete its ticket."""
        if contender.ticket is not None:
            await self.servers.delete(contender.ticket.path)
            contender.ticket = None

    def _check_session(self, contender: Contender, stat: Stat) -> None:
        """Raise SessionExpiredError if a new node belongs to a session that has ended while its answer was on its way.
        The servers may still have it: `find` deletes it."""
        if not self.servers.owns(stat):
            contender.doubtful = True
            raise SessionExpiredError("the session of this attempt has expired")
        if contender.session != self.servers.session:  # a ticket of an earlier one has ended with that
            contender.ticket, contender.session = None, self.servers.session

    async def _stat(self, path: str) -> Stat:
        stat = await self.servers.exists(path)
        if stat is None:
            raise SessionExpiredError("the node of this attempt is gone")
        return stat
