"""TCP ports for servers that a test starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

_FIRST, _LAST = 10_000, 32_000
"""Below the ports that a system gives to outgoing connections: none of these can take the port before its server has
started."""

_SHARES = 16
"""Each worker of pytest-xdist has a share of the ports: no other worker draws a port whose server has not started yet.
With more workers than shares, some have the same share."""


def _own() -> Iterator[int]:
    """The ports of this worker, again and again. One that was drawn is not drawn again until all others were."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(_FIRST + worker % _SHARES, _LAST, _SHARES))
    random.SystemRandom().shuffle(ports)
    return itertools.cycle(ports)


_ports = _own()


def free_port() -> int:
    """A port that no program uses now."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """So many ports that no program uses now."""
    found: list[int] = []
    with contextlib.ExitStack() as bound:
        while len(found) < number:
            port = next(_ports)
            with contextlib.suppress(OSError):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    return found
