"""A sentinel that says what a test wants: real ones tell each other of a switch before a test can ask them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import hiredis


class LaggingSentinel:
    """Names the master at `port`, of `epoch`."""

    def __init__(self, port: int, epoch: int = 0) -> None:
        self.port = port
        self.epoch = epoch
        self.own_port = 0
        self.more: dict[str, object] = {}  # fields of its answer
        self.asked = 0  # so often for the master
        self._server: asyncio.Server | None = None
        self._listeners: list[asyncio.StreamWriter] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> LaggingSentinel:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.own_port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections of its clients."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self._listeners.clear()

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def publish_switch(self, old: int, new: int) -> None:
        """Tell the clients of a switch."""
        text = f"mymaster 127.0.0.1 {old} 127.0.0.1 {new}"
        for writer in self._listeners:
            writer.write(_array("message", "+switch-master", text))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        parser = hiredis.Reader()
        with suppress(OSError):
            while data := await reader.read(4096):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    writer.write(self._answer([word.decode().upper() for word in command], writer))

    def _answer(self, command: list[str], writer: asyncio.StreamWriter) -> bytes:
        match command:
            case ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", _]:
                return _array("127.0.0.1", str(self.port))
            case ["SENTINEL", "MASTER", _]:
                self.asked += 1
                fields = {"ip": "127.0.0.1", "port": self.port, "config-epoch": self.epoch, "role-reported-time": 1000}
                return _array(*(str(word) for field in {**fields, **self.more}.items() for word in field))
            case ["SUBSCRIBE", _]:
                self._listeners.append(writer)
                return b"*3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n"
            case ["PING"]:
                return _array("pong", "")
            case _:
                return b"+OK\r\n"


def _array(*words: Any) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word.encode()) for word in words)
