"""A proxy before a real server, which holds back, drops or cuts the traffic; and a way to cancel at each await."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from tests.support.servers import Server

T = TypeVar("T")


RELEASE = (b"release", b"DELIFEQ", b"DELEX")
"""How a release looks on its way: the script's, or the server's own."""


class Proxy:
    """On a unix socket of its own. Requests pass by default; replies pass, are held, or are dropped."""

    def __init__(self, front: Path, back: Path) -> None:
        self.path = front
        self.back = back
        self._server: asyncio.AbstractServer | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[Any]] = set()  # one for each connection
        self._ended = False
        self._flow = asyncio.Event()
        self._flow.set()
        self.held = 0  # replies that wait here
        self.drop_replies = False
        self.drop_requests = False
        self._wanted: list[tuple[bytes, asyncio.Event]] = []
        self._frozen: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    @property
    def connections(self) -> int:
        return len(self._pairs)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._ended = True
        self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, *self._serving, return_exceptions=True)

    def hold_replies(self) -> None:
        """From now on replies wait."""
        self._flow.clear()

    def let_go(self) -> None:
        """Held replies go on."""
        self._flow.set()

    def freeze(self) -> None:
        """The connections that are open now carry nothing any more, and stay open, as behind a network that drops
        packets. New ones work."""
        self._frozen = {writer for pair in self._pairs for writer in pair}

    def cut(self) -> None:
        """Close all connections, as a network does."""
        for front, back in list(self._pairs):
            front.transport.abort()
            back.transport.abort()

    def request(self, *parts: bytes) -> asyncio.Event:
        """Set once a request that contains one of these parts has gone to the server."""
        event = asyncio.Event()
        self._wanted.extend((part, event) for part in parts)
        return event

    def forget_requests(self) -> None:
        """Watch for none any more."""
        self._wanted.clear()

    async def _to_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self.back))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        server_reader, server_writer = await self._to_server()
        if self._ended:  # a client connected in the last moment
            writer.transport.abort()
            server_writer.transport.abort()
            return
        pair = (writer, server_writer)
        self._pairs.add(pair)
        pumps = [
            asyncio.create_task(self._requests(reader, server_writer)),
            asyncio.create_task(self._replies(server_reader, writer)),
        ]
        self._pumps.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._pairs.discard(pair)
        for pump in pumps:
            pump.cancel()
            self._pumps.discard(pump)
        writer.transport.abort()
        server_writer.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.drop_requests and writer not in self._frozen:
                writer.write(data)
            for part, event in self._wanted:
                if part in data:
                    event.set()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.held += 1
            try:
                await self._flow.wait()
            finally:
                self.held -= 1
            if not self.drop_replies and writer not in self._frozen:
                writer.write(data)


class OneWayProxy(Proxy):
    """A link that can be cut in one direction. TCP keeps what it could not deliver: when the link heals, it arrives, or
    the connection is reset."""

    def __init__(self, front: Path, back: Path) -> None:
        super().__init__(front, back)
        self._requests_flow = asyncio.Event()
        self._requests_flow.set()

    @classmethod
    def before(cls, server: Server, number: int) -> Self:
        """One of several links to a server."""
        return cls(server.path.with_suffix(f".{number}"), server.path)

    def cut_one_way(self, direction: str) -> None:
        """From now on "requests" or "replies" do not arrive."""
        (self._requests_flow if direction == "requests" else self._flow).clear()

    def heal(self, *, reset: bool) -> None:
        if reset:
            self.cut()
        self._flow.set()
        self._requests_flow.set()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._requests_flow.wait()
            writer.write(data)


class RewritingProxy(Proxy):
    """Before a server that gives odd replies: in each reply it replaces text by other text of the same length."""

    def __init__(self, front: Path, back: Path, *replaced: tuple[bytes, bytes]) -> None:
        super().__init__(front, back)
        assert all(len(before) == len(after) for before, after in replaced)
        self._replaced = replaced

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            for before, after in self._replaced:
                data = data.replace(before, after)
            writer.write(data)


class KeepingProxy(Proxy):
    """It can keep a request from the server, which the test sends there later: as if the server read it late from a
    connection that was cut."""

    def __init__(self, front: Path, back: Path) -> None:
        super().__init__(front, back)
        self.has_kept = asyncio.Event()
        self._part = b""
        self._kept = b""

    def keep(self, part: bytes) -> None:
        """Keep the next request with that part. Cut the connection then: the server answers the next one in its
        place."""
        self._part = part

    async def arrives(self) -> bytes:
        """The server reads what was kept. Returns its reply."""
        reader, writer = await self._to_server()
        writer.write(self._kept)
        reply = await reader.read(65536)
        writer.close()
        return reply

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self._part and self._part in data:
                self._part, self._kept = b"", data
                self.has_kept.set()
            else:
                writer.write(data)


class TcpProxy(Proxy):
    """On a port of this machine, before another port. While it is `away`, it accepts no connection. A new connection
    reaches the server after `delay` seconds."""

    def __init__(self, back: int) -> None:
        super().__init__(Path(), Path())
        self.port = 0
        self.away = False
        self.delay = 0.0
        self._back_port = back

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _to_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await asyncio.sleep(self.delay)
        return await asyncio.open_connection("127.0.0.1", self._back_port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.away:
            writer.transport.abort()
        else:
            await super()._serve(reader, writer)


@types.coroutine
def stepped(coro: Coroutine[Any, Any, T], reached: Callable[[int, Any], object]) -> Generator[Any, Any, T]:
    """Run `coro`, and call `reached(n, future)` at its n-th suspension."""
    step: Callable[[Any], Any] = coro.send
    argument: Any = None
    number = 0
    while True:
        try:
            future = step(argument)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        reached(number, future)
        number += 1
        try:
            argument = yield future
            step = coro.send
        except BaseException as error:  # goes into the coroutine, as the loop would throw it
            step, argument = coro.throw, error


async def cancelled_at(make: Callable[[], Coroutine[Any, Any, T]], index: int, *, late: bool) -> bool:
    """Run it in a task that is cancelled at its `index`-th suspension; `late`: when the awaited future is done already,
    before the task runs again. False: it has fewer suspensions."""
    hit = False
    loop = asyncio.get_running_loop()

    def reached(number: int, future: Any) -> None:
        nonlocal hit
        if number == index:
            hit = True
            if late and future is not None:
                future.add_done_callback(lambda _: task.cancel())
            else:
                loop.call_soon(task.cancel)

    async def run() -> T:
        return await stepped(make(), reached)

    task = asyncio.create_task(run())
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return hit
