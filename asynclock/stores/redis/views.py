"""Reads the state of names at a Redis server, for `inspect` and `holders`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynclock._options import RESERVED
from asynclock._untrusted import number_of
from asynclock.stores.port import NodeView, WaiterView
from asynclock.stores.redis.keys import keys
from asynclock.stores.redis.scripts import read

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    Command: TypeAlias = Callable[..., Awaitable[Any]]  # runs one command on the node's connection

_SCRIPT = read("inspect")

_PAGE = "500"
"""The number of keys that one SCAN visits. It keeps the server busy for well below 1 ms."""


async def view(run: Command, prefix: str, name: str) -> NodeView:
    """The state of one name."""
    at = keys(prefix, name)
    kind, holds, fence, waiters = await run("EVAL", _SCRIPT, "4", at.hold, at.fence, at.queue, at.tickets)
    return NodeView(
        _text(kind),
        tuple((_text(holder), None if left < 0 else float(left) / 1000) for holder, left in _pairs(holds)),
        _number(fence),
        tuple(_waiter(*each) for each in zip(waiters[::3], waiters[1::3], waiters[2::3], strict=True)),
    )


def _waiter(id: bytes, order: bytes, ticket: bytes) -> WaiterView:
    """A ticket that an older client has sent does not say how many tasks wait."""
    words = ticket.split()
    number, tasks = _number(words[0]) if words else 0, _number(words[4]) if len(words) > 4 else 1
    return WaiterView(_whole(order), _text(id), number, tasks)


async def names(run: Command, prefix: str, begin: str, cursor: str) -> tuple[str, list[str]]:
    """The next cursor ("0": the end), and some of the names that begin with `begin`."""
    where = prefix + begin
    pattern = "".join(f"\\{each}" if each in "*?[]\\" else each for each in where)
    after, found = await run("SCAN", cursor, "MATCH", f"{pattern}*", "COUNT", _PAGE)
    named = [_text(key)[len(prefix) :] for key in found]
    return after.decode(), [name for name in named if name and not name.startswith(RESERVED)]


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _number(raw: bytes) -> int:
    """0 for what other programs may have written there."""
    return number_of(raw.decode(errors="replace")) or 0


def _whole(score: bytes) -> int:
    """A score may be infinite, and large ones are written with an exponent."""
    try:
        return int(float(score))
    except (OverflowError, ValueError):
        return 0


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
