"""In a forked child: what takes the place of the nodes of its parent.

The child has copies of the parent's sessions, with their holds, and with claims that are under way. It may even run a
copy of the parent's event loop: `asyncio.run` does so where the program leaves it in the child, to cancel the tasks and
to close the async generators. None of that may send anything, since the ids are those of the parent: a release would
free the lock that the parent holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynclock._errors import OF_PARENT, ConfigError
from asynclock.quorum.quorum import Quorum

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.rules.model import Op
    from asynclock.stores.port import Checked, NodeView, ReplyHandler


def of_parent(what: str = "this call of a client, such as a wait for a lock,") -> ConfigError:
    """The error for the use of what was begun before the fork."""
    return ConfigError(f"{what} was begun before a fork: {OF_PARENT}")


def silent(quorum: Quorum, later: Callable[..., object]) -> Quorum:
    """A quorum that sends nothing, in place of that of an inherited session. Each op fails at once. `later` calls in
    the next turn of the loop."""
    nodes = [_SilentNode(node.label, index) for index, node in enumerate(quorum.nodes)]
    return Quorum(nodes, quorum.clock, later, limits=quorum.limits)


class _SilentNode:
    """A `Node` that sends nothing."""

    listens = False

    def __init__(self, label: str, index: int) -> None:
        self.label = label
        self.error: Exception | None = of_parent()
        self._index = index

    async def open(self) -> None: ...

    def send(self, op: Op, handler: ReplyHandler) -> None:
        del op
        handler.fail(self._index, of_parent(), maybe=False)

    async def check_vote(self) -> Checked:
        raise of_parent()

    async def probe(self, name: str) -> NodeView:
        raise of_parent()

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        raise of_parent()

    async def aclose(self) -> None: ...
