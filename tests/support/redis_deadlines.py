"""When the client looks for overdue commands at a Redis server."""

from __future__ import annotations

import pytest

from asynclock import Redlock
from asynclock.stores.redis.node import RedisNode
from tests.support.probes import nodes_of


def answers_within(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for the answer to a command that is no op."""
    defaults = RedisNode._ask.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "within", seconds)


def next_look(client: Redlock) -> float:
    """On the clock of its first node; math.inf: nothing has a deadline."""
    when: float = nodes_of(client)[0]._deadlines.next
    return when
