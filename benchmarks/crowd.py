"""P9: very many tasks at once. It counts errors, and connections at each server, not speed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis import Redis

from benchmarks.goals import Verdict
from benchmarks.servers import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.sides import Cycle, Side

HANG = 120.0
"""A crowd that takes longer has hung, in seconds."""


@dataclass(slots=True)
class Crowd:
    """The result of `tasks` tasks, each with a few cycles of its own free lock, all started in one loop turn."""

    side: str
    nodes: int
    tasks: int
    cycles: int = 0
    wall: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    logged: int = 0  # warnings of asynclock, such as releases without an answer
    connections: int = 0  # ordinary ones after the crowd, at the server that has most
    subscriptions: int = 0  # the same for subscribed ones
    opened: int = 0  # in total, at the server that has most

    def verdicts(self) -> list[Verdict]:
        """The targets: no error, and at most one connection and one subscription per node."""
        who = f"{self.side}, {self.nodes} node{'s' * (self.nodes > 1)}, {self.tasks} tasks"
        few = self.connections <= 1 and self.subscriptions <= 1 and self.opened <= 2
        opened = f"{self.connections} + {self.subscriptions}, {self.opened} opened in all"
        return [
            Verdict(f"{who}: errors", "0", str(self.errors.total()), not self.errors),
            Verdict(f"{who}: connections + subscriptions per node", "<= 1 + 1", opened, few),
        ]


async def run(name: str, side: Side, nodes: int, tasks: int, each: int = 3) -> Crowd:
    """Run one crowd on fresh servers."""
    crowd = Crowd(name, nodes, tasks)
    with running(nodes) as servers, _counting_warnings(crowd):
        watchers = [Redis(unix_socket_path=str(server.path)) for server in servers]
        before = [_opened(watcher) for watcher in watchers]
        try:
            async with side(servers) as cycle:
                await _all_at_once(crowd, cycle, each)
                _count_connections(crowd, watchers, before)
        finally:
            for watcher in watchers:
                watcher.close()
    return crowd


@contextlib.contextmanager
def _counting_warnings(crowd: Crowd) -> Iterator[None]:
    """Count the warnings instead of printing them: there may be thousands."""

    def count(record: logging.LogRecord) -> bool:
        crowd.logged += record.levelno >= logging.WARNING
        return False

    log = logging.getLogger("asynclock")
    log.addFilter(count)
    try:
        yield
    finally:
        log.removeFilter(count)


async def _all_at_once(crowd: Crowd, cycle: Cycle, each: int) -> None:
    async def work(i: int) -> None:
        for _ in range(each):
            try:
                await cycle(i)
            except Exception as error:  # every error is counted
                crowd.errors[type(error).__name__] += 1
            else:
                crowd.cycles += 1

    began = time.perf_counter()
    try:
        async with asyncio.timeout(HANG):
            await asyncio.gather(*(work(i) for i in range(crowd.tasks)))
    except TimeoutError:
        crowd.errors["hung"] += 1
    crowd.wall = time.perf_counter() - began


def _count_connections(crowd: Crowd, watchers: Sequence[Redis], before: Sequence[int]) -> None:
    for watcher, already in zip(watchers, before, strict=True):
        clients: list[dict[str, Any]] = watcher.client_list()
        subscribed = sum(any(int(client.get(key, 0)) for key in ("sub", "psub", "ssub")) for client in clients)
        crowd.connections = max(crowd.connections, len(clients) - subscribed - 1)  # without the watcher's own
        crowd.subscriptions = max(crowd.subscriptions, subscribed)
        crowd.opened = max(crowd.opened, _opened(watcher) - already)


def _opened(watcher: Redis) -> int:
    stats: dict[str, Any] = watcher.info("stats")
    return int(stats["total_connections_received"])
