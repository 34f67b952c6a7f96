"""The links between clients and servers, and the connections over them: in order within one connection, each message
with a delay of its own. What a cut connection had under way may still arrive, in its order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock.stores.port import Reconnecting

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from asynclock.rules.model import Op
    from simulation.loop import Event, Schedule
    from simulation.nodes import Waiting
    from simulation.servers import Server

LATE = 0.4
"""Seconds for which a request may still be under way after its connection was cut, at most. A tombstone has to last for
longer, so it is less than the shortest lease."""

SLOWEST = 9
"""A message takes at most so many times the mean delay of its link."""


class Request(NamedTuple):
    """A command to a server."""

    what: str  # "op", "hello", "mark": read the mark of first use; "set mark"
    op: Op | None = None
    value: str = ""


class Link:
    """The way between one client and one server."""

    def __init__(self, schedule: Schedule, random: Random, delay: float) -> None:
        self.schedule = schedule
        self.random = random
        self.delay = delay  # seconds, on average
        self.slow = 1.0  # a factor, while it is slow
        self.blocked = [0.0, 0.0]  # until when it carries nothing to the server, and nothing to the client
        self.connections: list[Connection] = []

    def block(self, direction: int, until: float) -> None:
        """What is sent meanwhile arrives after that, unless its connection is cut before."""
        self.blocked[direction] = max(self.blocked[direction], until)

    def arrival(self, direction: int) -> float:
        """When a message arrives that is sent now."""
        random = self.random.random
        delay = self.delay * self.slow * (0.5 + random())
        if random() < 0.02:
            delay *= 1 + (SLOWEST / 1.5 - 1) * random()
        return max(self.schedule.now, self.blocked[direction]) + delay

    @property
    def is_open(self) -> bool:
        return max(self.blocked) <= self.schedule.now


class Connection:
    """One connection. `received` gets each message at the client; `lost` learns that the other side has ended it."""

    def __init__(
        self,
        link: Link,
        server: Server,
        tag: str,
        received: Callable[[Any], object],
        lost: Callable[[Exception], object],
    ) -> None:
        self.link = link
        self.server = server
        self.tag = tag
        self.listens = False  # it has subscribed
        self.waiting: deque[Waiting] = deque()  # the handlers of the client, in the order of its requests
        self.moved_at = 0.0  # on the client's clock
        self.open_here = True
        self.open_there = True
        self.unread: deque[Request] = deque()  # of a server that is frozen
        self._received = received
        self._lost = lost
        self._under_way: tuple[deque[Event], deque[Event]] = deque(), deque()
        self._last = [0.0, 0.0]
        link.connections.append(self)

    # -- messages ------------------------------------------------------------------------------------------------

    def request(self, request: Request) -> None:
        self._send(0, self._at_server, request)

    def reply(self, message: Any) -> None:
        if self.open_here:
            self._send(1, self._at_client, message)

    def _send(self, direction: int, call: Callable[..., object], *args: Any) -> None:
        at = self._last[direction] = max(self._last[direction], self.link.arrival(direction))
        self._under_way[direction].append(self.link.schedule.at(at, call, *args))

    def _at_server(self, request: Request) -> None:
        self._under_way[0].popleft()
        if self.open_there and self.server.up:
            self.server.receive(self, request)
        elif self.open_here and not self.server.silent:
            self._send(1, self._reset)

    def _at_client(self, message: Any) -> None:
        self._under_way[1].popleft()
        if self.open_here:
            self._received(message)

    # -- its end -------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._under_way[1].popleft()
        self._hang_up()

    def _hang_up(self) -> None:
        if self.open_here:
            self._lost(Reconnecting(f"{self.server.label} hung up"))

    def abort(self) -> None:
        """The client ends it. Some of its requests that are under way still arrive; then the server learns of it."""
        self.open_here = False
        self._drop(1)
        at = self._keep_some()
        self.link.schedule.at(at, self._end_there)

    def cut(self) -> None:
        """The network resets it. Both sides learn of it soon; some requests and some replies were lost."""
        if self.open_here:
            self.link.schedule.at(self.link.schedule.now, self._hang_up)

    def end_at_server(self, silent: bool) -> None:
        """The server has gone; or, if that is `silent`, its machine."""
        self.open_there = False
        self.unread.clear()
        self._drop(0)
        if not silent and self.open_here:
            self._send(1, self._reset)

    def _end_there(self) -> None:
        self.open_there = False
        self.server.forget(self)
        if self in self.link.connections:
            self.link.connections.remove(self)

    def _drop(self, direction: int) -> None:
        for event in self._under_way[direction]:
            event.cancel()
        self._under_way[direction].clear()

    def _keep_some(self) -> float:
        """When the last of the requests arrives that are not lost; the first ones are kept."""
        schedule, under_way = self.link.schedule, self._under_way[0]
        random = self.link.random.random
        limit = max(schedule.now, self.link.blocked[0]) + LATE * random()
        kept = self.link.random.randint(0, len(under_way))
        while len(under_way) > kept:
            under_way.pop().cancel()
        late = random() < 0.5  # after what another connection brings
        for event in list(under_way):
            if late or event.when > limit:
                assert event.call is not None  # noqa: S101 - it has not happened yet
                call, args = event.call, event.args
                event.cancel()
                under_way[under_way.index(event)] = schedule.at(limit, call, *args)
        return limit
