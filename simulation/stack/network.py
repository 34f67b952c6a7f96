"""Simulated TCP between processes and servers: bytes in order, with delays, and the faults of connections.

A connection is reset, half-open (what is sent vanishes, without an error), slow, or cut in odd pieces; a link between
one process and one server is blocked in one direction or in both (TCP sends again when it is over). A server accepts,
refuses, or is silent. Bytes that were sent stay sent: a server may read them after the client has given up."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextvars import copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from simulation.loop import Event, Schedule
    from simulation.stack.loop import StackLoop

Address = tuple[str, int]

_FIRST_NUMBER = 1_000_000
"""The numbers of sockets begin here: the process that simulates has no such file."""

_MOST_PIECES = 64
"""Into which one write is cut."""

TO, FROM = 0, 1
"""The directions of a link, seen from the client."""


class Accepts(Protocol):
    """A server, for the network."""

    @property
    def reachable(self) -> str:
        """ "up", "refuses", or "silent"."""

    def accept(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, data: bytes) -> None: ...

    def hung_up(self, connection: Connection) -> None: ...


class Link:
    """Between one process and one server."""

    def __init__(self, schedule: Schedule, random: Random, delay: float) -> None:
        self.slow = 1.0
        self.pieces_until = 0.0
        self.connections: dict[Connection, None] = {}
        self._armed: list[Callable[[], object]] = []
        self._schedule = schedule
        self._random = random
        self._delay = delay
        self._blocked = [0.0, 0.0]  # until when, by direction
        self._blocks: list[tuple[int, float, float]] = []  # all so far: direction, begin and end
        self._unheard: dict[Connection, float] = {}  # half-open ones, and until when what the server sends arrives

    def block(self, direction: int, until: float) -> None:
        self._blocked[direction] = max(self._blocked[direction], until)
        self._blocks.append((direction, self._schedule.now, until))

    def half_open(self, connection: Connection) -> None:
        """In one direction or in both."""
        if connection.to_client.swallows:
            self.ended(connection)
        else:
            self._unheard.setdefault(connection, math.inf)

    def ended(self, connection: Connection) -> None:
        """Nothing more comes to the process."""
        if connection in self._unheard:
            self._unheard[connection] = min(self._unheard[connection], self._schedule.now)

    def was_unheard_since(self, then: float) -> bool:
        """Whether at some time since then what the process sent did not arrive, while what the server sent may have
        arrived."""
        to_server, to_client = ([each[1:] for each in self._blocks if each[0] == way] for way in (TO, FROM))
        one_way = (
            end
            for begin, end in to_server
            if not any(earlier <= begin and end <= later for earlier, later in to_client)
        )
        return any(end >= then for end in (*one_way, *self._unheard.values()))

    def heal(self) -> None:
        self._blocked = [0.0, 0.0]
        self.slow, self.pieces_until = 1.0, 0.0
        self._armed.clear()

    def arm(self, call: Callable[[], object]) -> None:
        """Call it at a random moment of the round trip of the next write, or of one that follows it."""
        self._armed.append(call)

    def written(self) -> None:
        """The client has written."""
        if self._armed and self._random.random() < 0.5:
            moment = self._random.uniform(0.0, 3.0) * self._delay
            self._schedule.at(self._schedule.now + moment, self._armed.pop())

    def arrival(self, direction: int) -> float:
        """The time at which what is sent now arrives."""
        now, random = self._schedule.now, self._random
        delay = self._delay * random.uniform(0.5, 1.5) * self.slow
        if random.random() < 0.002:
            delay += random.expovariate(20)  # a packet was lost
        if (until := self._blocked[direction]) > now:
            return until + random.uniform(0.0, 0.2) + delay
        return now + delay

    def lateness(self) -> float:
        """Seconds by which a server reads late what came on a connection that was reset."""
        return self._random.choice((0.0, self._random.expovariate(10)))

    def cut(self, data: bytes) -> list[bytes]:
        """The pieces in which it arrives."""
        random = self._random
        if self._schedule.now < self.pieces_until:
            if len(data) <= _MOST_PIECES:
                return [data[at : at + 1] for at in range(len(data))]
            places = sorted(random.sample(range(1, len(data)), _MOST_PIECES // 2))
        elif len(data) > 1 and random.random() < 0.02:
            places = [random.randrange(1, len(data))]
        else:
            return [data]
        return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]


class _Stream:
    """One direction of a connection."""

    def __init__(
        self, link: Link, schedule: Schedule, direction: int, arrive: Callable[[bytes | None], object]
    ) -> None:
        self.swallows = False  # half-open: what is sent from now on vanishes
        self.broken = False
        self._link = link
        self._schedule = schedule
        self._direction = direction
        self._arrive = arrive
        self._last = 0.0
        self._flying: deque[tuple[Event, bytes | None]] = deque()

    def send(self, data: bytes | None, *, late: float = 0.0) -> None:
        """None: the end of the stream."""
        if self.swallows or self.broken:
            return
        for piece in self._link.cut(data) if data else [data]:
            self._last = max(self._last, self._link.arrival(self._direction) + late) + 1e-9
            self._flying.append((self._schedule.at(self._last, self._deliver, piece), piece))

    def postpone(self, seconds: float) -> None:
        """What is under way arrives later."""
        flying, self._flying = self._flying, deque()
        for event, piece in flying:
            event.cancel()
            self._last = max(self._last, event.when + seconds)
            self._flying.append((self._schedule.at(event.when + seconds, self._deliver, piece), piece))

    def _deliver(self, piece: bytes | None) -> None:
        self._flying.popleft()
        if not self.broken:
            self._arrive(piece)


class Connection:
    """The two ends of a connection."""

    def __init__(self, network: Network, number: int, sock: Socket, server: Accepts, link: Link) -> None:
        self.number = number
        self.sock = sock
        self.server = server
        self.link = link
        self.server_open = True
        self._network = network
        self.to_server = _Stream(link, network.schedule, TO, self._at_server)
        self.to_client = _Stream(link, network.schedule, FROM, self._at_client)
        link.connections[self] = None

    def _at_server(self, data: bytes | None) -> None:
        if not self.server_open:
            if data is not None:  # the server knows nothing of this connection
                self._reset_client()
        elif self.server.reachable == "silent":
            return
        elif data is None:
            self.server.hung_up(self)
        else:
            self.server.received(self, data)

    def _at_client(self, data: bytes | None) -> None:
        if data is None:
            self.sock.ended(None)
        else:
            self.sock.arrived(data)

    def _reset_client(self) -> None:
        network = self._network
        network.schedule.at(
            network.schedule.now + 1e-4, self.sock.ended, ConnectionResetError(104, "Connection reset by peer")
        )

    def client_closed(self) -> None:
        """The client closes its end. What it has sent arrives nevertheless."""
        self.to_client.broken = True
        self.to_server.send(None)
        self._ended()

    def close(self) -> None:
        """The server closes its end."""
        if self.server_open:
            self.server_open = False
            self.to_client.send(None)
            self._ended()

    def send(self, data: bytes) -> None:
        """The server sends."""
        if self.server_open:
            self.to_client.send(data)

    def reset(self, *, keeps_requests: bool) -> None:
        """RST on both sides. With `keeps_requests` the server reads what is under way, though it learns of the reset
        after that."""
        self._ended()
        self.to_client.broken = True
        self._reset_client()
        if not keeps_requests:
            self.to_server.broken = True
        elif self.server_open and self.server.reachable == "up":
            self.to_server.postpone(self.link.lateness())
            self.to_server.send(None)
            return
        if self.server_open and self.server.reachable == "up":
            self.server.hung_up(self)

    def _ended(self) -> None:
        self.link.connections.pop(self, None)
        self.link.ended(self)

    def vanish(self, direction: int | None) -> None:
        """Half-open from now on, in one direction or (None) in both."""
        if direction in (TO, None):
            self.to_server.swallows = True
        if direction in (FROM, None):
            self.to_client.swallows = True
        self.link.half_open(self)


class Socket(asyncio.Transport):
    """The end of a connection in a process: a socket, and the transport that asyncio makes of it."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._number = next(network.numbers)
        self._network = network
        network.sockets[self._number] = self
        self.loop: StackLoop | None = None
        self.connection: Connection | None = None
        self._protocol: Any = None
        self._context = copy_context()
        self._inbox: list[bytes] = []
        self._end: list[Exception | None] = []  # the stream has ended: with that error, or without one
        self._reads = True
        self._posted = False
        self._closing = self._gone = False

    # -- as a socket -----------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._number

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *args: object) -> None: ...

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox or self._end)

    # -- from the network ------------------------------------------------------------------------------------------

    def arrived(self, data: bytes) -> None:
        self._inbox.append(data)
        self._post()

    def ended(self, error: Exception | None) -> None:
        self._end = self._end or [error]
        self._post()

    def _post(self) -> None:
        loop = self.loop
        if self._posted or not self._reads or self._protocol is None or loop is None or self._closing or loop.dead:
            return
        self._posted = True
        loop.call_soon(self._ready, context=self._context)

    def _ready(self) -> None:
        """The loop reads what has come."""
        self._posted = False
        if not self._reads or self._closing:
            return
        if self._inbox:
            data, self._inbox = b"".join(self._inbox), []
            self._protocol.data_received(data)
            if self._end:
                self._post()
        elif self._end and not self._closing:
            error = self._end[0]
            if error is None and self._protocol.eof_received():
                return
            self._close(error)

    # -- as a transport --------------------------------------------------------------------------------------------

    def become_transport(self, protocol: Any) -> Socket:
        self._protocol = protocol
        self._context = copy_context()
        if self.is_readable:
            self._post()
        return self

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def is_closing(self) -> bool:
        return self._closing

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        if self.is_readable:
            self._post()

    def is_reading(self) -> bool:
        return self._reads

    def write(self, data: Any) -> None:
        if self.connection is not None and not self._closing:
            self.connection.to_server.send(bytes(data))
            self.connection.link.written()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.connection is not None and not self._closing:
            self.connection.to_server.send(None)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def close(self) -> None:
        self._close(None)

    def abort(self) -> None:
        self._close(None)

    def _close(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._network.sockets.pop(self._number, None)
        if self.connection is not None:
            self.connection.client_closed()
        if self._protocol is not None and self.loop is not None:
            self.loop.call_soon(self._lost, error, context=self._context)

    def _lost(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        if not self._gone:
            self._gone = True
            protocol.connection_lost(error)


class Network:
    """All links."""

    def __init__(self, schedule: Schedule, random_of: Callable[[str], Random], delay: float) -> None:
        self.schedule = schedule
        self.numbers = count(_FIRST_NUMBER)
        self.sockets: dict[int, Socket] = {}  # that are open
        self.listeners: dict[Address, Accepts] = {}
        self.links: dict[tuple[str, str], Link] = {}  # process and host
        self._connections = count(1)
        self._random_of = random_of
        self._delay = delay

    def links_of(self, process: str) -> list[Link]:
        """The links of that process that it has used."""
        place = process.partition("#")[0]
        return [link for (where, _), link in self.links.items() if where == place]

    def link(self, process: str, host: str) -> Link:
        process = process.partition("#")[0]  # the next process at the same place has the same links
        known = self.links.get((process, host))
        if known is None:
            known = self.links[process, host] = Link(
                self.schedule, self._random_of(f"link {process} {host}"), self._delay
            )
        return known

    async def connect(self, loop: StackLoop, sock: Socket, host: str, port: int) -> None:
        """As `loop.sock_connect`."""
        link, done = self.link(loop.name, host), loop.create_future()
        sock.loop = loop
        self.schedule.at(link.arrival(TO), self._syn, loop, sock, (host, port), link, done)
        await done

    def _syn(self, loop: StackLoop, sock: Socket, address: Address, link: Link, done: asyncio.Future[None]) -> None:
        server = self.listeners.get(address)
        state = "silent" if server is None else server.reachable
        if sock.is_closing() or loop.dead or server is None or state == "silent":
            return
        if state == "refuses":
            error = ConnectionRefusedError(111, f"Connect call failed {address}")
            self.schedule.at(link.arrival(FROM), loop.post, _fail, done, error)
            return
        connection = Connection(self, next(self._connections), sock, server, link)
        sock.connection = connection
        server.accept(connection)
        self.schedule.at(link.arrival(FROM), loop.post, _settle, done)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
