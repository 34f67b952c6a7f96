"""The protocol of Redis, on the side of a server."""

from __future__ import annotations

from typing import Any, NamedTuple


class Status(str):
    """A simple string."""

    __slots__ = ()


class Error(NamedTuple):
    """An error reply."""

    text: str


class Push(NamedTuple):
    """A message that answers no command."""

    words: tuple[Any, ...]


class Requests:
    """Reads the commands of one connection."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The commands that are complete now. Raises ValueError for what is none."""
        self._buffer += data
        found = []
        while (command := self._next()) is not None:
            found.append(command)
        return found

    def _next(self) -> list[bytes] | None:
        buffer = self._buffer
        if (end := buffer.find(b"\r\n")) < 0:
            return None
        if buffer[:1] != b"*":
            raise ValueError(f"no command: {buffer[:40]!r}")
        at, words = end + 2, []
        for _ in range(int(buffer[1:end])):
            if (end := buffer.find(b"\r\n", at)) < 0:
                return None
            begin, length = end + 2, int(buffer[at + 1 : end])
            if len(buffer) < begin + length + 2:
                return None
            words.append(buffer[begin : begin + length])
            at = begin + length + 2
        self._buffer = buffer[at:]
        return words


def encode(reply: Any, protocol: int) -> bytes:
    """A reply, as RESP2 or RESP3."""
    if reply is None:
        return b"_\r\n" if protocol == 3 else b"$-1\r\n"
    if isinstance(reply, Status):
        return b"+%b\r\n" % reply.encode()
    if isinstance(reply, Error):
        return b"-%b\r\n" % reply.text.encode()
    if isinstance(reply, Push):
        return b"%b%d\r\n%b" % (
            b">" if protocol == 3 else b"*", len(reply.words), b"".join(encode(each, protocol) for each in reply.words),
        )  # fmt: skip
    if isinstance(reply, str):
        reply = reply.encode()
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, dict):
        flat = [word for pair in reply.items() for word in pair]
        head = b"%%%d\r\n" % len(reply) if protocol == 3 else b"*%d\r\n" % len(flat)
        return head + b"".join(encode(each, protocol) for each in flat)
    return b"*%d\r\n%b" % (len(reply), b"".join(encode(each, protocol) for each in reply))
