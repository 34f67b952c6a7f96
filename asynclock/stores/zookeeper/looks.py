"""What operators ask of the servers: holders and waiters, the names, break a lock, and whether locks work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kazoo.exceptions import NoNodeError

from asynclock.rules.model import ANY, DONE
from asynclock.rules.mutex import MUTEX
from asynclock.stores.port import PROBE, Checked, NodeView, WaiterView
from asynclock.stores.zookeeper.contender import Data, read
from asynclock.stores.zookeeper.layout import escaped, holders, may_wait, prefix_of, queue_of, tickets_of, unescaped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock._time import Clock
    from asynclock.rules.model import Op
    from asynclock.stores.zookeeper.connection import Connection, Stat
    from asynclock.stores.zookeeper.layout import Child
    from asynclock.stores.zookeeper.settings import Settings

_MOST = 1000
"""So many waiters of a name are shown."""

_PAGE = 500
"""So many names are looked at together."""


class Looks:
    """Over one connection. All raise kazoo's exceptions."""

    def __init__(self, servers: Connection, settings: Settings, random: str) -> None:
        self._servers = servers
        self._settings = settings
        self._random = random  # the beginning of the names of all nodes of checks

    def _path(self, name: str) -> str:
        return f"{self._settings.root}/{escaped(name)}"

    async def holder(self, name: str, child: Child, clock: Clock) -> tuple[str, float | None]:
        """The id in the data of a child (if another program made it, or it is gone: a substitute), and how long it
        holds the name if its client is dead; None: for ever."""
        known, stat = await self._read(name, child)
        if not child.random:
            stat = await self._servers.exists(f"{self._path(name)}/{child.name}")  # its data may be forbidden
        return known.id, self._left(known, stat, clock)

    async def _read(self, name: str, child: Child) -> tuple[Data, Stat | None]:
        """The data of its node; and what the server says about it, unless another program made it, or it is gone."""
        if not child.random:
            return Data(child.foreign_id), None
        data, stat = await self._servers.data(f"{self._path(name)}/{child.name}")
        known = read(data)
        ours = known.id == DONE or known.id.startswith(child.random)
        return (known if ours else Data(f"{child.random}|")), stat

    async def _holders(self, name: str, queue: Sequence[Child]) -> list[Child]:
        """Those that hold a name."""
        inside, uncertain = holders(queue), may_wait(queue)
        asked = [child for child in inside if child.name in uncertain]
        known = await asyncio.gather(*(self._read(name, child) for child in asked))
        waiting = {child.name for child, (data, _) in zip(asked, known, strict=True) if data.waits}
        return [child for child in inside if child.name not in waiting]

    async def view(self, name: str, clock: Clock) -> NodeView:
        """The holders and the waiters of a name."""
        path = self._path(name)
        stat, names = await asyncio.gather(self._servers.exists(path), self._servers.children(path))
        queue = queue_of(self._settings.layout, names)
        inside = await self._holders(name, queue)
        held = {child.name for child in inside}
        waiting = [child for child in queue if child.name not in held]
        enqueued = {child.random for child in waiting}  # a waiter may have a ticket as well
        tickets = [child for child in tickets_of(self._settings.layout, names) if child.random not in enqueued]
        waiting = sorted([*waiting, *tickets])[:_MOST]
        ids = [known for known, _ in await asyncio.gather(*(self._read(name, each) for each in (*inside, *waiting)))]
        fence = 0 if stat is None else stat.pzxid
        stats = await asyncio.gather(*(self._servers.exists(f"{path}/{child.name}") for child in inside))
        fence = max((each.czxid for each in stats if each is not None), default=fence)
        lefts = [self._left(*each, clock) for each in zip(ids, stats, strict=False)]
        return NodeView(
            "string" if inside else "none",
            tuple((known.id, left) for known, left in zip(ids, lefts, strict=False)),
            fence,
            tuple(
                WaiterView(child.number, known.id, tasks=known.tasks)
                for child, known in zip(waiting, ids[len(inside) :], strict=True)
            ),
        )

    def _left(self, known: Data, stat: Stat | None, clock: Clock) -> float | None:
        """How long a holder lives, if its client is dead: for a session timeout; the mark of a run of `once` for its
        TTL, which is counted by the clock of the server; a node that belongs to no session for ever."""
        if known.id == DONE:
            return 0.0 if stat is None else max(0.0, stat.written + known.tasks / 1000 - clock.wall())
        return self._settings.session_timeout if stat is None or stat.owner else None

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        """A page of the names that are held and begin so. The cursor is the last node of the page before, so that no
        name is left out if nodes are deleted meanwhile."""
        after = "" if cursor == "0" else cursor.removeprefix(">")
        nodes = sorted(node for node in await self._servers.children(self._settings.root or "/") if node > after)
        page: dict[str, str] = {}  # node -> name
        for node in nodes:
            if (name := unescaped(node)).startswith(begin) and name != PROBE:
                page[node] = name
            if len(page) == _PAGE:
                break
        stats = await asyncio.gather(*(self._servers.exists(f"{self._settings.root}/{node}") for node in page))
        held = [name for name, stat in zip(page.values(), stats, strict=True) if stat is not None and stat.children]
        return f">{next(reversed(page))}" if len(page) == _PAGE else "0", held

    async def break_lock(self, op: Op) -> tuple[set[str], str | None]:
        """Delete the nodes of the holders, with the id ANY also those of other programs. The paths that were deleted;
        and the id of a holder that was not, or None."""
        path = self._path(op.name)
        queue = queue_of(self._settings.layout, await self._servers.children(path))
        inside = await self._holders(op.name, queue)
        mine = [child for child in inside if child.random or op.id == ANY]
        paths = [f"{path}/{child.name}" for child in mine]
        gone = await asyncio.gather(*(self._servers.delete(each) for each in paths))
        kept = next((child.foreign_id for child in inside if child not in mine), None)
        return {each for each, was in zip(paths, gone, strict=True) if was}, kept

    async def check_vote(self, clock: Clock) -> Checked:
        """Create a node of the reserved name, and delete it, as an acquire and its release do; and those that are left
        of checks without an answer, which would stay with the session."""
        began, path = clock.now(), self._path(PROBE)
        prefix = prefix_of(self._settings.layout, self._random, MUTEX)
        node, data = f"{path}/{prefix}", self._random.encode()
        try:
            made, _ = await self._servers.create(node, data)
        except NoNodeError:
            await self._servers.ensure(path)
            made, _ = await self._servers.create(node, data)
        mine = [each for each in await self._servers.children(path) if each.startswith(prefix)]
        await asyncio.gather(*(self._servers.delete(f"{path}/{each}") for each in mine))
        if self._settings.ttl_nodes:
            await self._servers.create_for(f"{made}-ttl", b"", 1.0)
            await self._servers.delete(f"{made}-ttl")
        return Checked(clock.now() - began)
