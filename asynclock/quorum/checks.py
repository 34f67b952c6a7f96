"""Asks each node whether it would vote now."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asynclock._clock import running_for
from asynclock.stores.distance import Distance, advice, late
from asynclock.stores.port import Checked, Distant, Explaining

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asynclock._clock import Clock
    from asynclock.stores.port import Node


async def check_votes(
    nodes: Sequence[Node], within: float, clock: Clock, *, everyone: bool
) -> list[Checked | Exception | None]:
    """The result of `Node.check_vote` at each node, after at most `within` seconds. A node that is silent for so long
    gets a TimeoutError. Unless `everyone` is to answer, the check ends as soon as a majority would vote, or cannot; the
    other nodes get None."""
    found: list[Checked | Exception | None] = [None] * len(nodes)
    began = clock.now()
    asked = {asyncio.ensure_future(node.check_vote()): index for index, node in enumerate(nodes)}
    pending = set(asked)
    try:
        async with running_for(within, clock):
            while pending and (everyone or not is_decided(found)):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                _note_answers(asked, found)
    except TimeoutError:
        _note_answers(asked, found)
        for index in [index for index, each in enumerate(found) if each is None]:
            found[index] = _late(nodes[index], within, began)
    finally:
        for task in pending:
            task.cancel()
    return found


def _late(node: Node, within: float, began: float) -> TimeoutError:
    """For a node that was silent."""
    if isinstance(node, Explaining) and (why := node.delay(began)):
        return TimeoutError(f"{node.label} did not answer within {within:.3g} s: {why}")
    return late(node.label, within, within, node.distance if isinstance(node, Distant) else Distance())


def too_late(node: Node, found: Checked | Exception | None, within: float) -> Checked | Exception | None:
    """The result of a check, as an acquire would see it: a node whose answers take longer than `within` seconds casts
    no vote. One answer may be late because the program was busy, so the distance decides, too."""
    if not (isinstance(found, Checked) and isinstance(node, Distant)) or found.latency <= within:
        return found
    usual = node.distance.usual
    if usual is None or usual <= within:
        return found
    return TimeoutError(
        f"{node.label} casts no vote: its answers take {usual:.3g} s, and node_timeout is {within:.3g} s; "
        f"{advice(usual)}"
    )


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
