"""Asks each node whether it would vote now."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.stores.port import Checked, Node


async def check_votes(nodes: Sequence[Node], within: float, *, everyone: bool) -> list[Checked | Exception | None]:
    """The result of `Node.check_vote` at each node, after at most `within` seconds. A node that is silent for so long
    gets a TimeoutError. Unless `everyone` is to answer, the check ends as soon as a majority would vote, or cannot; the
    other nodes get None."""
    found: list[Checked | Exception | None] = [None] * len(nodes)
    asked = {asyncio.ensure_future(node.check_vote()): index for index, node in enumerate(nodes)}
    pending = set(asked)
    loop = asyncio.get_running_loop()
    until = loop.time() + within
    try:
        while pending and (everyone or not is_decided(found)):
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                for task in pending:
                    index = asked[task]
                    found[index] = TimeoutError(f"{nodes[index].label} did not answer within {within:.3g} s")
                break
            for task in done:
                error = task.exception()
                found[asked[task]] = task.result() if error is None else _as_exception(error)
    finally:
        for task in pending:
            task.cancel()
    return found


def is_decided(found: Sequence[Checked | Exception | None]) -> bool:
    """Whether the open results cannot change the outcome. Pure."""
    failed = sum(isinstance(each, Exception) for each in found)
    votes = sum(each is not None for each in found) - failed
    return votes > len(found) // 2 or failed >= len(found) - len(found) // 2


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
