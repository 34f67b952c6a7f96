"""What a closed node of Redis has left."""

from __future__ import annotations

from typing import Any

from tests.support.fake_clock import FakeTimer


def timer_of(node: Any) -> bool:
    """Whether the timer of its commands is armed."""
    timer = node._deadlines._timer
    return timer is not None and not (timer.callback is None if isinstance(timer, FakeTimer) else timer.cancelled())


def is_cut(connection: Any) -> bool:
    """Whether the socket is closed."""
    return bool(connection._gone.is_set())


async def hang_up(connection: Any) -> None:
    """Close it, as a node does at the end."""
    await connection.hang_up()
