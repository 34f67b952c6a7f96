"""Asks each node whether it would vote now."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asynclock._clock import running_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock.stores.port import Checked, Node


async def check_votes(nodes: Sequence[Node], within: float, *, everyone: bool) -> list[Checked | Exception | None]:
    """The result of `Node.check_vote` at each node, after at most `within` seconds. A node that is silent for so long
    gets a TimeoutError. Unless `everyone` is to answer, the check ends as soon as a majority would vote, or cannot; the
    other nodes get None."""
    found: list[Checked | Exception | None] = [None] * len(nodes)
    asked = {asyncio.ensure_future(node.check_vote()): index for index, node in enumerate(nodes)}
    pending = set(asked)
    try:
        async with running_for(within):
            while pending and (everyone or not is_decided(found)):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                _note_answers(asked, found)
    except TimeoutError:
        _note_answers(asked, found)
        for index in [index for index, each in enumerate(found) if each is None]:
            found[index] = TimeoutError(f"{nodes[index].label} did not answer within {within:.3g} s")
    finally:
        for task in pending:
            task.cancel()
    return found


def _note_answers(asked: Mapping[asyncio.Task[Checked], int], found: list[Checked | Exception | None]) -> None:
    for task, index in asked.items():
        if task.done() and found[index] is None:
            error = task.exception()
            found[index] = task.result() if error is None else _as_exception(error)


def is_decided(found: Sequence[Checked | Exception | None]) -> bool:
    """Whether the open results cannot change the outcome. Pure."""
    failed = sum(isinstance(each, Exception) for each in found)
    votes = sum(each is not None for each in found) - failed
    return votes > len(found) // 2 or failed >= len(found) - len(found) // 2


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
