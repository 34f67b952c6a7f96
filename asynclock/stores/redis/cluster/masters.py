"""The masters of a cluster, as one event loop sees them: which has which slot, and the connections to them. The rules
are in `node.py`; this is rule 4."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from asynclock._loop import AGAIN, own_task
from asynclock.stores.closing import CANCELLING
from asynclock.stores.distance import Distance
from asynclock.stores.forks import Origin
from asynclock.stores.port import PROBE
from asynclock.stores.redis.cluster.acknowledged import AcknowledgedReleases
from asynclock.stores.redis.cluster.shard import Router, Shard
from asynclock.stores.redis.cluster.topology import SLOTS, Address, span_of, without_host_name
from asynclock.stores.redis.keys import mark, only_slot, slot_of_op, tag_of, tag_within
from asynclock.stores.redis.pending import PendingReleases

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from asynclock._errors import ConfigError
    from asynclock._time import Timer
    from asynclock.rules.model import Op
    from asynclock.stores.port import NodeConfig, ReplyHandler
    from asynclock.stores.redis.cluster.topology import Range
    from asynclock.stores.redis.restarts import Dialer
    from asynclock.stores.undelivered import PendingRelease

log = logging.getLogger("asynclock")

_PAUSES = (0.1, 1.0)  # seconds between two questions for the slots while a master is missing: first, and at most
_LEAST = 0.05  # seconds between two questions for the slots, at least: a cluster may redirect or refuse all ops for now
_SILENT = 0.25  # seconds after which the cluster is asked whether a master that does not answer still has its slots
_GUEST = 30.0  # seconds after its last ASK for which the client stays connected to a node without slots
_RECENT = 30.0  # seconds for which a redirection is remembered


class Source(Protocol):
    """A store that knows how to connect to the nodes of one cluster."""

    label: str
    seeds: tuple[Address, ...]

    def dialer(self, address: Address) -> Dialer:
        """Makes connections to one node."""

    async def ranges_by(self, shard: Shard) -> tuple[Range, ...]:
        """What a master says about the slots, on its connection."""

    async def ranges_at(self, address: Address, limit: float) -> tuple[Range, ...]:
        """What the node at this address says, on a connection of its own, within `limit` seconds."""


class Owner(Router, Protocol):
    """The node of the whole cluster, for its masters."""

    def ready(self, shard: Shard) -> None:
        """The first attempt to connect to the shard has ended."""

    def replaced(self, handlers: Sequence[ReplyHandler]) -> None:
        """These ops went to a master that is silent and has lost its slots."""

    def moved(self, before: Sequence[Shard | None]) -> None:
        """Slots have other masters than `before`."""

    def update(self) -> None:
        """Masters came or went, up or down."""


class Masters:
    """The masters of one cluster."""

    def __init__(self, source: Source, config: NodeConfig, owner: Owner) -> None:
        self.only = only_slot(config.prefix)  # a prefix with a hash tag has all names in one slot
        self.by_slot: list[Shard | None] = [None] * SLOTS
        self.all: list[Shard] = []  # those in which names can be, by address
        self.bare = True  # a slot in which names can be has no master
        self.error: Exception | None = ConnectionError(f"{source.label} is not connected yet")
        self.met = asyncio.Event()  # the first attempt to connect has ended
        self.moved: dict[int, float] = {}  # slot -> when a redirection changed its master
        self._source = source
        self._measured = config.measured
        self._config = config._replace(measured=None if config.measured is None else self._distance_changed)
        self._owner = owner
        self._now = config.clock.now
        self._shards: dict[Address, Shard] = {}
        self._leaving: set[Shard] = set()  # that have no slot any more, and are being closed
        self._known: tuple[Range, ...] = ()  # the last answer about the slots
        self._looked_at = -math.inf  # when the last task that asks for the slots has ended
        self._asked_at = -math.inf  # when the last question for the slots was sent that has ended
        self._unanswered: OrderedDict[str, float] = OrderedDict()
        self.acknowledged = AcknowledgedReleases(config.clock.now)
        self._chosen: list[Shard | None] = []  # the masters when the keys of each were chosen
        self.bared_at = -math.inf  # when a slot lost its master last, and had no other one
        self._ownerless = PendingReleases()  # of names whose slots have no master
        self._again = False  # ask for the slots once more
        self._watching: Timer | None = None
        self._looking: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None  # looks again
        self._background: set[asyncio.Task[Any]] = set()
        self._ended = False  # the client closes
        self._origin = Origin()

    @property
    def shards(self) -> list[Shard]:
        """All nodes to which there is a connection, or should be."""
        return list(self._shards.values())

    @property
    def releases(self) -> bool:
        """Whether a master has yet to answer a release, also one that has no slot any more."""
        return any(shard.releases for shard in (*self.shards, *self._leaving))

    @property
    def distance(self) -> Distance:
        """That of the farthest one."""
        return max((each.distance for each in self.shards), key=lambda each: each.limit, default=Distance())

    def _distance_changed(self, limit: float) -> None:
        del limit  # of one of them
        if self._measured is not None:
            self._measured(self.distance.limit)

    def slots_of(self, shard: Shard | None) -> str:
        """The slots of a shard in words; None: those that no master has."""
        if self.only is not None:
            return str(self.only)
        return span_of([slot for slot, its in enumerate(self.by_slot) if its is shard])

    def nameless(self, slot: int) -> ConfigError | None:
        """The error for a slot whose master has no host name; None: it has one, or there is no master."""
        for each in self._known:
            if each.master is None and each.first <= slot <= each.last:
                return without_host_name(self._source.label, f"{each.first}-{each.last}")
        return None

    @property
    def _closed(self) -> bool:
        """Whether the client closes, or this is a forked child: its parent has the connections."""
        return self._ended or not self._origin.is_here

    def may_have_left(self, shard: Shard) -> bool:
        """Whether it is not connected, and the cluster has not said since whether it still has slots."""
        return not shard.up and shard.lost_at >= self._asked_at

    # -- what the cluster says -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask for the slots, in the background."""
        if self._looking is None and not self._closed:
            self._looking = own_task(self._follow(), f"asynclock {self._source.label}", self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking, self._looked_at = None, self._now()
        self.met.set()
        if task.cancelled():  # by a close, or by the program (AGAIN)
            if not self._closed:
                self._later = task.get_loop().call_later(AGAIN, self.look)
        elif error := task.exception():
            log.error("asynclock: reading the slots of %s failed", self._source.label, exc_info=error)
        elif self._again:
            self.look()

    async def _follow(self) -> None:
        pause = _PAUSES[0]
        if (left := self._looked_at + _LEAST - self._now()) > 0:
            await asyncio.sleep(left)
        while not self._closed:
            self._again, began = False, self._now()
            try:
                ranges = await self._ranges()
            except Exception as error:  # any failure: `error` keeps it for messages, and the next attempt follows
                self.error = error if not self._known else self.error
                self._asked_at = began
                self._owner.update()
            else:
                self._asked_at = began
                self._use(ranges, began)
            if not self.met.is_set():
                await asyncio.gather(*(shard.open() for shard in self.all))
                self.met.set()
                self._owner.update()
            if self.error is None and not self.bare and all(each.up for each in self.all):
                if not self._again:
                    return
                pause = _PAUSES[0]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause = min(2 * pause, _PAUSES[1])

    async def _ranges(self) -> tuple[Range, ...]:
        """Ask two masters that are up; if none names a slot, all known nodes. Raises the error of one of them. A node
        that was reset, or has lost its nodes.conf, knows nothing of its cluster."""
        up = [shard for shard in self._shards.values() if shard.up and shard.silent_for < _SILENT]
        if up:
            try:
                asked = random.sample(up, min(len(up), 2))
                if found := await first_answer(self._source.ranges_by(each) for each in asked):
                    return found
            except Exception:
                log.debug("asynclock: no master of %s answered CLUSTER SLOTS", self._source.label, exc_info=True)
        known = {address for each in self._known for address in (each.master, *each.replicas) if address is not None}
        limit = self._config.connect_timeout
        return await first_answer(
            self._source.ranges_at(each, limit) for each in dict.fromkeys([*self._source.seeds, *known])
        )

    def _use(self, ranges: tuple[Range, ...], began: float) -> None:
        """These are the masters. A redirection that came after the question is newer."""
        first, self._known = not self._known, ranges
        owners: list[Shard | None] = [None] * SLOTS
        for each in ranges:
            if each.master is None or (self.only is not None and not each.first <= self.only <= each.last):
                continue  # nobody can reach it, or no name is there
            owners[each.first : each.last + 1] = [self.at(each.master, first=first)] * (each.last - each.first + 1)
        for slot, when in list(self.moved.items()):
            if when >= began:
                owners[slot] = self.by_slot[slot]
            elif self._now() - when > _RECENT:
                del self.moved[slot]
        changed = owners != self.by_slot
        # Without a shard before, no slot had a master. The comparison takes a millisecond.
        if changed and self.all and any(new is None is not old for new, old in zip(owners, self.by_slot, strict=True)):
            self.bared_at = self._now()
        before, self.by_slot, self.error = self.by_slot, owners, None
        if ranges and all(each.master is None for each in ranges):
            self.error = self.nameless(ranges[0].first)
        used = set(owners) if self.only is None else {owners[self.only]}
        self.bare = None in used
        self.all = sorted((each for each in used if each is not None), key=lambda each: each.address)
        for shard in self.shards:
            self._settle(shard)
        self._hand_over(None)
        if changed:
            self.acknowledged.hand_over(owners)
            self._owner.moved(before)
        if owners != self._chosen:
            self._chosen = list(owners)
            for shard in self.all:
                self._choose_keys(shard)
        self._owner.update()

    def _settle(self, shard: Shard) -> None:
        """After the slots are known: what a shard does not have to do any more goes to others."""
        lost = shard not in self.all
        if lost and shard.silent_for > _SILENT:
            self._owner.replaced(shard.give_up())
        if shard.has_pending:
            self._hand_over(shard)
        if lost and self._now() - shard.asked_at > _GUEST and not shard.has_pending:
            del self._shards[shard.address]
            servers = self._config.servers  # its server may be known by another address now
            for run_id in [each for each, whose in servers.items() if whose == shard.label]:
                del servers[run_id]
            self._leaving.add(shard)
            self._run_in_background(self._close(shard))

    async def _close(self, shard: Shard) -> None:
        try:
            await shard.leave()
        finally:  # also where the client closes meanwhile
            self._left(shard)

    def _left(self, shard: Shard) -> None:
        """It is closed. It may have stood still, or died, before it answered a release."""
        self._leaving.discard(shard)
        self._hand_over(shard)

    def _choose_keys(self, shard: Shard) -> None:
        """The keys with which the shard is marked and checked, in one of its slots."""
        before = shard.tag
        if self.only is None:
            shard.tag = tag_within(lambda slot: self.by_slot[slot] is shard)
            shard.mark, shard.probe_name = mark(self._config.prefix, shard.tag), f"{PROBE}{{{shard.tag}}}"
        else:
            shard.tag, shard.mark = tag_of(self._config.prefix), mark(self._config.prefix)
        if shard.tag != before:
            self.subscribe(shard)

    def subscribe(self, shard: Shard) -> None:
        """The channel of a shard is in another slot. A shard that is not up subscribes when it is."""
        if shard.up:
            self._run_in_background(shard.subscribe())

    # -- what redirections say -----------------------------------------------------------------------------------

    def move(self, slot: int, to: Shard) -> None:
        """A redirection names another master of one slot."""
        before, self.by_slot[slot] = self.by_slot[slot], to
        self.moved[slot] = self._now()
        self._again = True
        if to not in self.all:
            self.all = sorted([*self.all, to], key=lambda each: each.address)
        if before is None or before.has_pending:
            self._hand_over(before)
        self.acknowledged.hand_over(self.by_slot, slot)

    def keep(self, op: Op, sent: float) -> None:
        """A release of a name whose slot has no master is delivered to the next one. It was first sent at `sent`."""
        self._ownerless.add(op, self._now(), sent)

    def _hand_over(self, shard: Shard | None) -> None:
        """Rule 3. None: slots without a master may have one again."""
        prefix, owners = self._config.prefix, self.by_slot
        take = self._ownerless.take if shard is None else shard.take_pending
        by_owner: dict[Shard, list[PendingRelease]] = {}
        for op in take(lambda op: owners[slot_of_op(prefix, op)] not in (shard, None)):
            if (owner := owners[slot_of_op(prefix, op)]) is not None:
                by_owner.setdefault(owner, []).append(op)
        for owner, releases in by_owner.items():
            owner.deliver(releases)

    def at(self, address: Address, *, first: bool = False) -> Shard:
        """The shard at this address. `first`: nothing was known of the cluster before (else rule 7)."""
        shard = self._shards.get(address)
        if shard is None:
            dialer = self._source.dialer(address)
            if not first:
                dialer.run_id = "the master before it"
            shard = self._shards[address] = Shard(dialer, self._config, self._owner, address, self._unanswered)
            shard.mark = mark(self._config.prefix, str(address))
            if self._closed:  # a redirection that came as the client closed
                shard.abort()
            else:
                asyncio.get_running_loop().call_soon(self._begin, shard)  # the caller chooses its keys first
        return shard

    def _begin(self, shard: Shard) -> None:
        if not self._closed:
            shard.begin()  # not in the task, which the program may cancel before its first step
            self._run_in_background(self._open(shard))

    async def _open(self, shard: Shard) -> None:
        await shard.open()
        self._owner.ready(shard)

    # -- silent masters ------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look from time to time whether a master that has commands to answer is silent."""
        self._owner.watches = True
        self._watching = self._config.clock.call_at(self._now() + _SILENT, self._watch)

    def _watch(self) -> None:
        self._owner.watches = False
        busy = [shard for shard in self._shards.values() if shard.busy]
        if busy and not self._closed:
            self.watch()
        if any(shard.silent_for > _SILENT for shard in busy):
            self.look()

    # -- the end -------------------------------------------------------------------------------------------------

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        self._background.add(own_task(work, ended=self._background.discard))

    async def aclose(self) -> None:
        """Close all connections."""
        if tasks := self._stop():
            await asyncio.wait(tasks, timeout=CANCELLING)
        for shard in list(self._leaving):  # the task that closes it was cancelled before its first step
            shard.abort()
            self._left(shard)
        await asyncio.gather(*(shard.aclose() for shard in self.shards))

    def _stop(self) -> list[asyncio.Task[Any]]:
        """End what runs in the background. Returns the tasks that are cancelled."""
        self._ended = True
        for timer in (self._watching, self._later):
            if timer is not None:
                timer.cancel()
        tasks = [*self._background, *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        return tasks

    def abort(self, error: Exception) -> None:
        """Cut the connections that are left. `error` is what later calls get."""
        self._stop()
        for shard in (*self.shards, *self._leaving):  # the task that closes one may be cancelled before its first step
            shard.abort()
        self.error = error
        self.met.set()


async def first_answer(asks: Iterable[Coroutine[Any, Any, tuple[Range, ...]]]) -> tuple[Range, ...]:
    """The first answer that names a slot; () if none of them does. Raises the first error if there is one, and no such
    answer. No question is under way after it."""
    asked = pending = {asyncio.ensure_future(each) for each in asks}
    errors: list[BaseException] = []
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    errors.append(error)
                elif found := task.result():
                    return found
        if errors:
            raise errors[0]
        return ()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)  # asyncio logs an error that nobody reads
