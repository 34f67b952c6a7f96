"""Opens the nodes of a client, decides which restarted servers may vote, and asks each node whether it would vote now.

`quorum/quarantine.py` has the decision; here is the order of the questions to the servers.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING

from asynclock._clock import running_for
from asynclock.quorum.limits import Limits
from asynclock.quorum.quarantine import Quarantine
from asynclock.quorum.quorum import Quorum
from asynclock.stores.distance import Distance, advice, late
from asynclock.stores.port import Checked, Distant, Explaining, Lengthy, NodeConfig, SameServer, is_standalone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asynclock._errors import ConfigError, QuorumUnavailable
    from asynclock._options import ClientSettings
    from asynclock._time import Clock
    from asynclock.events import Event
    from asynclock.stores.port import Node, NoticeListener, Store

_MOMENT = 0.2
"""Seconds for which a client waits for the other nodes, once a majority is connected."""


def quorum_over(
    stores: Sequence[Store],
    settings: ClientSettings,
    clock: Clock,
    listener: NoticeListener,
    tell: Callable[[Event], object],
    waits: Callable[[], bool] = lambda: False,
) -> Quorum:
    """The quorum of a client for the running loop: each store opens a node there, without connecting."""
    length = 0.0 if settings.trust_restarts else settings.max_lease + 1.0
    quarantine = None if len(stores) == 1 else Quarantine(length, clock)
    until = None if quarantine is None else quarantine.until
    connect, longest, servers = settings.connect_timeout, settings.max_lease, dict[str, str]()
    prefix = "" if is_standalone(stores[0]) else settings.prefix
    limits = Limits(len(stores))
    measured = [partial(limits.measured, i) if len(stores) > 1 else None for i in range(len(stores))]
    nodes = [
        store.open(NodeConfig(i, prefix, clock, listener, servers, until, connect, longest, tell, waits, measured[i]))
        for i, store in enumerate(stores)
    ]
    loop = asyncio.get_running_loop()

    def later(call: Callable[..., object], *args: object) -> None:
        loop.call_soon(call, *args, context=Context())

    return Quorum(nodes, clock, later, quarantine, limits)


async def open_nodes(quorum: Quorum, *, again: bool = False) -> None:
    """Connect to all nodes, and if a majority is up, decide which restarted servers may vote: without a majority
    the nodes that are up would be marked, and those that come up later would not. A node that is down is not an
    error here. `again`: servers may have come up since the last call, and other clients may have set marks."""
    opening = {asyncio.ensure_future(node.open()) for node in quorum.nodes}
    pending = opening
    try:
        await asyncio.sleep(0)  # let them begin: a node that was never opened may have no error yet, and count as up
        while pending and not quorum.is_up:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            # A majority is up, so the others get a moment. But if the deployment looks new, wait for every node that
            # can answer, because a late one may have a mark.
            await asyncio.wait(pending, timeout=None if quorum.judge().new else _MOMENT)
    finally:
        for task in opening:
            task.cancel()
    for node in quorum.nodes:
        if isinstance(node.error, SameServer):
            raise node.error
    current = await _read_marks(quorum) if again else quorum.reaches_all_known()
    if quorum.is_up:
        await _judge_restarts(quorum, current)


async def _judge_restarts(quorum: Quorum, current: bool) -> None:
    """End the quarantine of all servers if the deployment is new. `current`: see `_read_marks`."""
    for pause in (0.02, 0.05, 0.1, 0.2):
        ruling = quorum.judge()
        if ruling.new and current:
            quorum.end_quarantine()
        if not ruling.doubtful:
            return
        # Another client may be setting the marks of a new deployment. It sets them all within a short time.
        await asyncio.sleep(pause)
        current = await _read_marks(quorum)


async def judge_again(quorum: Quorum) -> None:
    """End the quarantine of servers that may vote by now: they came up after `open`, and the deployment is new; or
    another client has found it new since then, and has set their marks. Only while every node is connected, because one
    that is out of reach may have a mark."""
    if not quorum.quarantines:
        return
    current = await _read_marks(quorum)
    facts_of_all = all(node.error is None for node in quorum.nodes) and all(node.facts for node in quorum.restartable)
    if facts_of_all and current and quorum.judge().new:
        quorum.end_quarantine()


async def _read_marks(quorum: Quorum) -> bool:
    """Read the marks. Returns whether the current mark of each server that this client has met is known. Another client
    may have used the deployment since, and a server that does not answer may be the only one that still has its
    mark."""
    found = await asyncio.gather(*(node.read_mark() for node in quorum.restartable), return_exceptions=True)
    return quorum.reaches_all_known() and not any(isinstance(each, BaseException) for each in found)


async def check(quorum: Quorum, within: float) -> ConfigError | QuorumUnavailable | None:
    """Ask each node whether it would vote now, for at most `within` seconds. The error if no majority would; None: a
    majority would."""
    return quorum.unavailable_by_checks(await check_votes(quorum.nodes, within, quorum.clock, everyone=False))


async def check_votes(
    nodes: Sequence[Node], within: float, clock: Clock, *, everyone: bool
) -> list[Checked | Exception | None]:
    """The result of `Node.check_vote` at each node, after at most `within` seconds, or the `check_limit` of a node, if
    that is more: a far-away database, of which an acquire is one round trip, would else count as silent. A node that is
    silent for so long gets a TimeoutError. Unless `everyone` is to answer, the check ends as soon as a majority would
    vote, or cannot; the other nodes get None."""
    within = max([within, *(node.check_limit for node in nodes if isinstance(node, Lengthy))])
    found: list[Checked | Exception | None] = [None] * len(nodes)
    began = clock.now()
    asked = {asyncio.ensure_future(node.check_vote()): index for index, node in enumerate(nodes)}
    pending = set(asked)
    try:
        async with running_for(within, clock):
            while pending and (everyone or not is_decided(found)):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                _note_answers(nodes, asked, found)
    except TimeoutError:
        _note_answers(nodes, asked, found)
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


def _note_answers(
    nodes: Sequence[Node], asked: Mapping[asyncio.Task[Checked], int], found: list[Checked | Exception | None]
) -> None:
    for task, index in asked.items():
        if task.done() and found[index] is None:
            if task.cancelled():  # by a program that cancels all tasks of its loop: no cancel of the caller
                found[index] = RuntimeError(f"the check of {nodes[index].label} was cancelled")
                continue
            error = task.exception()
            found[index] = task.result() if error is None else _as_exception(error)


def is_decided(found: Sequence[Checked | Exception | None]) -> bool:
    """Whether the open results cannot change the outcome. Pure."""
    failed = sum(isinstance(each, Exception) for each in found)
    votes = sum(each is not None for each in found) - failed
    return votes > len(found) // 2 or failed >= len(found) - len(found) // 2


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
