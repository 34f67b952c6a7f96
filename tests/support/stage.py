"""The server on which histories are played, and the connection that receives its notices."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings

from asynclock.stores.redis.keys import channel
from tests.support.histories import MUTE, TAGS
from tests.support.servers import Server, Servers

EXAMPLES = int(os.environ.get("ASYNCLOCK_EXAMPLES", "0"))

Published = list[tuple[str, bytes]]
"""What was published: channel and payload, in order."""


class Stage:
    """A server to play on: a connection that may publish, one that may not, and one that listens for all clients."""

    _LAST = "last"  # the channel of the message after all others

    def __init__(self, server: Server) -> None:
        self.cli = server.cli(protocol=2)
        self.cli.execute_command(*f"ACL SETUSER hushed reset on nopass ~* +@all &{self._LAST}".split())  # type: ignore[no-untyped-call]
        self.hushed = server.cli(protocol=2, username="hushed", password="any")
        self.tags: set[str] = set()
        listener: Any = self.cli.connection_pool.make_connection()
        self._listener = listener
        self._listener.connect()
        self._listener.send_command("SUBSCRIBE", self._LAST)
        self._listener.read_response()
        self._numbers = count(1)

    def reset(self) -> None:
        """Empty the server. All clients listen but the one of MUTE."""
        self.cli.flushall()
        self.listen({*TAGS} - {TAGS[MUTE]})
        self.cli.publish(*self.last())
        self.published()

    def listen(self, tags: Collection[str]) -> None:
        """Subscribe for these, and no others."""
        for verb, some in ("SUBSCRIBE", set(tags) - self.tags), ("UNSUBSCRIBE", self.tags - set(tags)):
            if some:
                self._listener.send_command(verb, *map(channel, some))
                for _ in some:
                    while self._listener.read_response()[0] != verb.lower().encode():
                        pass  # notices of a step that failed
        self.tags = set(tags)

    def last(self) -> tuple[str, int]:
        """What to publish after all else."""
        self._last = next(self._numbers)
        return self._LAST, self._last

    def published(self) -> Published:
        """All that was received before `last`."""
        found: Published = []
        while True:
            _, where, text = self._listener.read_response()
            if where != self._LAST.encode():
                found.append((where.decode(), text))
            elif int(text) == self._last:
                return found

    def close(self) -> None:
        self._listener.disconnect()
        self.hushed.close()
        self.cli.close()


@contextmanager
def staged() -> Iterator[Stage]:
    """A stage on a server of its own."""
    pool = Servers()
    try:
        stage = Stage(pool.start())
        yield stage
        stage.close()
    finally:
        pool.stop()


def playing(examples: int) -> settings:
    """The same histories each time, unless ASYNCLOCK_EXAMPLES asks for more. A busy machine is slow, and spoils some of
    those that are played in real time: that is no fault."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
