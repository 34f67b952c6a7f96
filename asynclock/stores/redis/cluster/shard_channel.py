"""Sharded pub/sub with one master of a cluster.

A notice that is sent with PUBLISH goes to every node of the cluster. With SPUBLISH it stays at the master, and reaches
the clients that have subscribed to a channel in one of its slots. So each client has one such channel at each master,
in a slot on which all clients agree (`keys.tag_within`). The scripts get its hash tag as one more argument. If a client
has another slot in mind than the master, for a moment after slots have moved, its scripts fall back to PUBLISH.
"""

from __future__ import annotations

import asyncio
from hashlib import sha1
from typing import TYPE_CHECKING, Any

from asynclock.stores.redis.connection import Connection
from asynclock.stores.redis.keys import channel
from asynclock.stores.redis.replies import ServerError
from asynclock.stores.redis.scripts import SCRIPTS, SHARDED_SCRIPTS

if TYPE_CHECKING:
    from asynclock.stores.port import ReplyHandler
    from asynclock.stores.redis.handlers import Ask, CommandReply

_EVALSHA = b"$7\r\nEVALSHA\r\n$40\r\n"


def _sha(script: str) -> bytes:
    return sha1(script.encode()).hexdigest().encode()  # noqa: S324 - Redis identifies scripts by their SHA-1


_SHARDED = {_sha(SCRIPTS[letter]): _sha(script) for letter, script in SHARDED_SCRIPTS.items()}


def with_tag(wire: bytes, tag: bytes) -> bytes:
    """The command with the sharded script in place of the usual one, and with the packed hash tag as its last argument;
    any other command as it is. Pure."""
    end = wire.index(b"\r\n") + 2
    at = end + len(_EVALSHA)
    if wire[end:at] != _EVALSHA or (sha := _SHARDED.get(wire[at : at + 40])) is None:
        return wire
    return b"*%d\r\n%b%b%b%b" % (int(wire[1 : end - 2]) + 1, _EVALSHA, sha, wire[at + 40 :], tag)


class ShardConnection(Connection):
    """The connection to one master."""

    tag = b""  # packed; empty: scripts send their notices with PUBLISH

    def send(self, wire: bytes, handler: ReplyHandler | CommandReply) -> None:
        super().send(with_tag(wire, self.tag) if self.tag else wire, handler)


async def subscribe(ask: Ask, client: str, tag: str) -> bytes:
    """Load the scripts and subscribe. Returns the packed hash tag; empty if the server has no sharded pub/sub, or
    forbids it."""
    asked = [ask("SCRIPT", "LOAD", script) for script in dict.fromkeys(SHARDED_SCRIPTS.values())]
    asked.append(ask("SSUBSCRIBE", channel(client, tag)))
    answers: list[Any] = await asyncio.gather(*(each.answer_of() for each in asked), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, ServerError):
            return b""
        if isinstance(answer, BaseException):
            raise answer
    return b"$%d\r\n%b\r\n" % (len(tag), tag.encode())
