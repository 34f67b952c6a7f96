"""TCP ports for servers that a test starts."""

from __future__ import annotations

import contextlib
import random
import socket

_RANGE = range(10_000, 32_000)
"""Below the ports that a system gives to outgoing connections: none of these can take the port before its server has
started. The tests of all workers draw from it at random, so two of them hardly ever draw the same port."""
_chance = random.SystemRandom()


def free_port() -> int:
    """A port that no program uses now."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """So many ports that no program uses now."""
    found: list[int] = []
    with contextlib.ExitStack() as bound:
        while len(found) < number:
            port = _chance.choice(_RANGE)
            with contextlib.suppress(OSError):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    return found
