"""A cluster, as one event loop sees it: one node of the quorum, and inside one connection to each of its masters.

1. Each op goes to the master that has the slot of its name. All keys of a name are in one slot (`keys.py`).
2. MOVED, ASK, TRYAGAIN and CLUSTERDOWN mean that the server did nothing. The op is sent again within its deadline, by
   the new master or after a pause (`parked.py`), unless its id was undone meanwhile: then it could create a key that
   nothing deletes. The ops of one slot stay in their order, so a later attempt does not overtake an undo.
3. When a slot gets another master, the pending releases of its names go to that master (`pending.py`).
4. The client asks the cluster for its slots when it opens, when a master is lost or silent, and after each MOVED; again
   and again until all slots have a master that is up.
5. PUBLISH reaches every node of a cluster, and each of them passes a notice on to its clients. So a notice arrives once
   on each connection. The one from the master of the slot counts, because it comes behind the replies of that master.
   If it does not come, the slot may have another master, and another one counts after a moment.
6. A server counts only the clients that are connected to it as receivers. A waiter that is connected to the old master
   of a slot gets the notice from there, although the new master did not count it, and gave the hold to another. So a
   notice does not grant a hold here: it wakes the waiter, whose next try finds out.
7. In a quorum of clusters a master that this client finds in place of another one is in quarantine, as a server that
   restarted: it may be a replica that did not have all holds when it was promoted. A slot that moves to a master which
   this client knew before takes its keys along.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock.events import NodeDown, NodeUp, Quarantined, QuarantineEnded
from asynclock.rules.model import RELEASE
from asynclock.stores.port import PROBE, Checked, Facts, SameServer
from asynclock.stores.redis.keys import mark, only_slot, slot_of, tag_within
from asynclock.stores.redis.parked import Parked
from asynclock.stores.redis.replies import ServerError, clear, is_redirect
from asynclock.stores.redis.shard import Shard
from asynclock.stores.redis.topology import SLOTS, Address, redirect_of, span_of
from asynclock.stores.redis.views import names, view
from asynclock.stores.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from asynclock._clock import Timer
    from asynclock.events import Event
    from asynclock.rules.model import Op
    from asynclock.stores.port import NodeConfig, NodeView, Notice, ReplyHandler
    from asynclock.stores.redis.cluster import ClusterStore
    from asynclock.stores.redis.parked import Entry
    from asynclock.stores.redis.topology import Range

log = logging.getLogger("asynclock")

_PAUSES = (0.1, 1.0)  # seconds between two questions for the slots while a master is missing: first, and at most
_ANSWER = 0.5  # seconds for the answer of one master to that question
_SILENT = 0.25  # seconds after which the cluster is asked whether a master that does not answer still has its slots
_SETTLED = 0.02  # seconds; a slot that moves twice within this time is asked again after a pause
_STRAY = 0.05  # seconds for which a notice from another node waits for the one from the master of its slot
_GUEST = 30.0  # seconds after its last ASK for which the client stays connected to a node without slots
_ADMIN = 0.9  # seconds for a command of an operator
_OTHERS = 0.03  # seconds for the votes of the other masters after the first one
_FAREWELL = 1.0  # seconds for which a client that closes waits for slots that are being moved


class ClusterNode:
    """One cluster. The rules are in the docstring of this module."""

    def __init__(self, store: ClusterStore, config: NodeConfig) -> None:
        self.label = store.label
        self.index = config.position
        self.listens = False
        self.watches = False
        self.clock = config.clock
        self._store = store
        self._slot = only_slot(config.prefix)  # a prefix with a hash tag has all names in one slot
        self._config = config
        self._owners: list[Shard | None] = [None] * SLOTS
        self._shards: dict[Address, Shard] = {}
        self._known: tuple[Range, ...] = ()  # the last answer about the slots
        self._moved: dict[int, float] = {}  # slot -> when a redirection changed its master
        self._strays: dict[Notice, bool] = {}  # the latest notices, and whether they were received
        self._unanswered: OrderedDict[str, float] = OrderedDict()
        self._parked = Parked(config.clock, self._send_parked)
        self._reports = Reports(store.label, config.tell, config.clock)
        self._error: Exception | None = ConnectionError(f"{store.label} is not connected yet")
        self._met = asyncio.Event()  # the first attempt to connect has ended
        self._again = False  # ask for the slots once more
        self._watching: Timer | None = None
        self._looking: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<ClusterNode {self.label} {len(self._masters())} masters>"

    # -- commands ------------------------------------------------------------------------------------------------

    def send(self, op: Op, handler: ReplyHandler) -> None:
        self._send(slot_of(self._config.prefix, op.name), op, handler)

    def _send(self, slot: int, op: Op, handler: ReplyHandler) -> None:
        shard = self._owners[slot]
        if shard is None:
            self._look()
            handler.fail(self.index, self._uncovered(slot), maybe=False)
        elif slot in self._parked or shard.connecting:
            self._parked.add(slot, handler, shard.error or ConnectionError(f"{shard.label} is not connected"))
        else:
            shard.send(op, handler)

    def flush(self) -> None:
        for shard in self._shards.values():
            shard.flush()

    def rtt(self) -> float | None:
        """The rtt of `port.Measured`: the longest of the masters."""
        return max((rtt for each in list(self._shards.values()) if (rtt := each.rtt()) is not None), default=None)

    # -- redirections (rule 2) -----------------------------------------------------------------------------------

    def redirected(self, shard: Shard, handler: ReplyHandler, error: ServerError) -> None:
        """A shard did nothing, because it does not have the slot of the op, or not all of its keys."""
        slot = slot_of(self._config.prefix, handler.op.name)
        where = redirect_of(str(error), shard.address)
        to = self._shard(where.to) if where.to is not None else None
        if where.code != "ASK":
            self._look()
        if where.code == "MOVED" and to is not None:
            bounced = self.clock.now() - self._moved.get(slot, -math.inf) < _SETTLED
            if self._owners[slot] is not to:
                self._move(slot, to)
                if bounced:
                    to = None
        if handler.op.revoked:
            handler.fail(self.index, error, maybe=False)
        elif to is None or slot in self._parked or to.connecting:
            self._parked.add(slot, handler, error)
        elif where.code == "ASK":
            to.asked_at = self.clock.now()
            handler.op.forget_packed()
            to.send_asking(handler.op, handler)
        else:
            self._resend(slot, handler)

    def _send_again(self, handler: ReplyHandler) -> None:
        """Its master has lost its slots, and did not answer."""
        if handler.op.revoked:
            handler.fail(self.index, ConnectionError("its master was replaced"), maybe=True)
        else:
            self._resend(slot_of(self._config.prefix, handler.op.name), handler)

    def _resend(self, slot: int, handler: ReplyHandler) -> None:
        handler.op.forget_packed()  # the ticket of the op may have been withdrawn since it was packed
        self._send(slot, handler.op, handler)

    def _send_parked(self, slot: int, entries: list[Entry]) -> None:
        """The pause of a slot is over: send its ops, in order."""
        now, owner = self.clock.now(), self._owners[slot]
        for handler, error in entries:
            if now >= handler.deadline or handler.op.revoked or self._closed:
                if handler.op.verb is RELEASE and owner is not None:
                    owner.keep(handler.op, handler.sent)
                handler.fail(self.index, error, maybe=False)
            elif owner is not None and owner.connecting:
                self._parked.add(slot, handler, error)
            else:
                self._resend(slot, handler)

    def _move(self, slot: int, to: Shard) -> None:
        """A redirection names another master of one slot."""
        before, self._owners[slot] = self._owners[slot], to
        self._moved[slot] = self.clock.now()
        self._again = True
        if before is not None and before.has_pending:
            self._hand_over(before)

    def _hand_over(self, shard: Shard) -> None:
        """Rule 3."""
        prefix, owners = self._config.prefix, self._owners
        moved = shard.take_pending(lambda name: owners[slot_of(prefix, name)] not in (shard, None))
        for op in moved:
            owner = owners[slot_of(prefix, op.name)]
            assert owner is not None  # noqa: S101 - as was asked above
            owner.deliver([op])

    def _uncovered(self, slot: int) -> Exception:
        if self._error is not None:
            return self._error
        return ConnectionError(f"{self.label}: no master has slot {slot}, in which the name is: add one, or its slots")

    # -- notices (rules 5 and 6) ---------------------------------------------------------------------------------

    def received(self, shard: Shard, notice: Notice) -> None:
        """A notice came on the connection to this shard."""
        owner = self._owners[slot_of(self._config.prefix, notice.name)]
        if shard is owner or owner is None or not owner.listens:
            self._strays[notice] = True
            self._config.listener.received(self.index, notice._replace(fence=0))
        else:
            self._strays.setdefault(notice, False)
        if len(self._strays) == 1:
            self.clock.call_at(self.clock.now() + _STRAY, self._receive_strays)

    def _receive_strays(self) -> None:
        """Rule 5: these notices did not come from the master that has the slot, as far as this client knows."""
        strays, self._strays = self._strays, {}
        for notice, was_received in strays.items():
            if not (was_received or self._closed):
                self._look()
                self._config.listener.received(self.index, notice._replace(fence=0))

    def connected(self, shard: Shard) -> None:
        """The shard is connected (again): its notices may be lost, and its slots can be asked."""
        self._update()
        self._parked.release_all(lambda slot: self._owners[slot] is shard)
        self._config.listener.connected(self.index)

    def watch(self) -> None:
        """Rule 4: look from time to time whether a master that has commands to answer is silent."""
        self.watches = True
        self._watching = self.clock.call_at(self.clock.now() + _SILENT, self._watch)

    def _watch(self) -> None:
        self.watches = False
        busy = [shard for shard in self._shards.values() if shard.busy]
        if busy and not self._closed:
            self.watch()
        if any(shard.silent_for > _SILENT for shard in busy):
            self._look()

    # -- the slots (rule 4) --------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._look()
        await self._met.wait()

    def _look(self) -> None:
        """Ask for the slots, in the background."""
        if self._looking is None and not self._closed:
            self._looking = asyncio.get_running_loop().create_task(self._follow(), name=f"asynclock {self.label}")
            self._looking.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        self._met.set()
        if not task.cancelled() and (error := task.exception()):
            log.error("asynclock: reading the slots of %s failed", self.label, exc_info=error)
        elif self._again and not task.cancelled():
            self._look()

    async def _follow(self) -> None:
        pause = _PAUSES[0]
        while not self._closed:
            self._again, began = False, self.clock.now()
            try:
                ranges = await self._ranges()
            except Exception as error:  # any failure: `error` keeps it for messages, and the next attempt follows
                self._error = error if not self._known else self._error
            else:
                self._use(ranges, began)
            if not self._met.is_set():
                await asyncio.gather(*(shard.open() for shard in self._masters()))
                self._update()
                self._met.set()
            if self._error is None and not self._bare() and all(each.up for each in self._masters()):
                if not self._again:
                    return
                pause = _PAUSES[0]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause = min(2 * pause, _PAUSES[1])

    async def _ranges(self) -> tuple[Range, ...]:
        """Ask two masters that are up; if none answers, all known nodes. Raises the error of one of them."""
        up = [shard for shard in self._shards.values() if shard.up and shard.silent_for < _SILENT]
        if up:
            try:
                return await _first(self._store.ranges_by(each) for each in random.sample(up, min(len(up), 2)))
            except Exception:
                log.debug("asynclock: no master of %s answered CLUSTER SLOTS", self.label, exc_info=True)
        known = {address for each in self._known for address in (each.master, *each.replicas)}
        return await _first(
            self._store.ranges_at(each, self._config.connect_timeout)
            for each in dict.fromkeys([*self._store.seeds, *known])
        )

    def _use(self, ranges: tuple[Range, ...], began: float) -> None:
        """These are the masters. A redirection that came after the question is newer."""
        first, self._known = not self._known, ranges
        owners: list[Shard | None] = [None] * SLOTS
        for each in ranges:
            if self._slot is not None and not each.first <= self._slot <= each.last:
                continue  # no name is there
            owners[each.first : each.last + 1] = [self._shard(each.master, first=first)] * (each.last - each.first + 1)
        for slot, at in list(self._moved.items()):
            if at >= began:
                owners[slot] = self._owners[slot]
            elif self.clock.now() - at > _GUEST:
                del self._moved[slot]
        self._owners, self._error = owners, None
        masters = set(self._masters())
        for shard in list(self._shards.values()):
            if shard not in masters and shard.silent_for > _SILENT:
                for handler in shard.give_up():
                    self._send_again(handler)
            if shard.has_pending:
                self._hand_over(shard)
            if shard not in masters and self.clock.now() - shard.asked_at > _GUEST and not shard.has_pending:
                del self._shards[shard.address]
                self._run_in_background(shard.aclose())
        for shard in masters:
            self._choose_keys(shard)
        self._update()

    def _shard(self, address: Address, *, first: bool = False) -> Shard:
        """The shard at this address. `first`: nothing was known of the cluster before (else rule 7)."""
        shard = self._shards.get(address)
        if shard is None:
            dialer = self._store.dialer(address)
            if not first:
                dialer.run_id = "the master before it"
            config = self._config._replace(tell=self._told)
            shard = self._shards[address] = Shard(dialer, config, self, address, self._unanswered)
            shard.mark = mark(self._config.prefix, str(address))
            self._run_in_background(self._open(shard))
        return shard

    async def _open(self, shard: Shard) -> None:
        await asyncio.sleep(0)  # the caller chooses its keys first
        await shard.open()
        self._parked.release_all(lambda slot: self._owners[slot] is shard)

    def _choose_keys(self, shard: Shard) -> None:
        """The keys with which the shard is marked and checked, in one of its slots."""
        if self._slot is None:
            tag = tag_within(lambda slot: self._owners[slot] is shard)
            shard.mark, shard.probe_name = mark(self._config.prefix, tag), f"{PROBE}{{{tag}}}"
        else:
            shard.mark = mark(self._config.prefix)

    def _masters(self) -> list[Shard]:
        """The shards in which names can be, by address."""
        found = set(self._owners) if self._slot is None else {self._owners[self._slot]}
        return sorted((each for each in found if each is not None), key=lambda each: each.address)

    def _bare(self) -> bool:
        """Whether names can be in a slot that no master has."""
        return None in (self._owners if self._slot is None else (self._owners[self._slot],))

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- the state of the whole ----------------------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """Why no name can be asked; None: some can."""
        errors = [each.error for each in self._masters()]
        double = next((each for each in errors if isinstance(each, SameServer)), None)
        if self._error is not None or double is not None:
            return double or self._error
        return errors[0] if errors and None not in errors else None

    def _told(self, event: Event) -> None:
        """A shard tells something: the events of a cluster carry its own label."""
        if isinstance(event, (NodeUp, NodeDown)):
            self._update()
        elif isinstance(event, (Quarantined, QuarantineEnded)):
            self._reports.quarantine(max((each.quarantine_left for each in self._masters()), default=0.0))
        else:
            self._config.tell(event)

    def _update(self) -> None:
        masters = self._masters()
        up = [each for each in masters if each.up]
        self.listens = bool(up) and all(each.listens for each in up)
        if self._closed or not (self._met.is_set() or len(up) == len(masters)):
            return
        down = next((each for each in masters if not each.up and not each.connecting), None)
        if down is not None:
            self._reports.down(self._unavailable([down]))
            self._look()
        elif up:
            self._reports.up()

    def _unavailable(self, shards: Sequence[Shard]) -> Exception:
        """Which slots cannot be asked, and why."""
        whys = [f"slots {self._slots_of(each)}: {each.error}" for each in shards if each.error is not None]
        if self._bare():
            whys.append(f"slots {self._slots_of(None)}: no master has them")
        return ConnectionError(f"{self.label} serves no names in {'; in '.join(whys)}")

    def _slots_of(self, shard: Shard | None) -> str:
        if self._slot is not None:
            return str(self._slot)
        return span_of([slot for slot, owner in enumerate(self._owners) if owner is shard])

    async def check_vote(self) -> Checked:
        """Whether some master votes. The note names the slots of the masters that do not."""
        if self._error is not None:
            self._look()
            raise self._error
        masters = self._masters()
        if not masters:
            raise self._unavailable([])
        asked = {asyncio.ensure_future(each.check_vote()): each for each in masters}
        try:
            done, pending = set[asyncio.Future[Checked]](), set(asked)
            while pending and all(each.exception() for each in done):
                more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            if pending:
                slowest = max(each.result().latency for each in done if not each.exception())
                done |= (await asyncio.wait(pending, timeout=max(10 * slowest, _OTHERS)))[0]
        finally:
            for task in asked:
                task.cancel()
        votes = [task.result() for task in done if not task.exception()]
        if not votes:
            self._look()
            if self._bare():
                raise self._unavailable(masters)
            raise next(error for task in done if (error := task.exception()) is not None)
        notes = [each.note for each in votes if each.note]
        silent = [f"slots {self._slots_of(asked[task])}: {_why(task)}" for task in asked if not _voted(task)]
        if self._bare():
            silent.append(f"slots {self._slots_of(None)}: no master has them")
        if silent:
            notes.insert(0, f"names in some slots cannot be locked; {'; '.join(silent)}")
        return Checked(max(each.latency for each in votes), "; ".join(notes))

    # -- restarted and promoted servers (rule 7) -----------------------------------------------------------------

    @property
    def facts(self) -> Facts | None:
        """The facts about all masters in one: the cluster is new if each of them is."""
        known = [facts for each in self._masters() if (facts := each.facts) is not None]
        if not known:
            return None
        ids = "+".join(sorted(each.run_id for each in known))
        if all(each.mark == each.run_id for each in known):
            used = ids
        else:
            used = "in part" if any(each.mark for each in known) else ""
        replaced = [each.replaced for each in known if each.replaced is not None]
        return Facts(ids, used, min(each.started for each in known), max(replaced, default=None))

    def end_quarantine(self) -> None:
        for shard in self._masters():
            shard.end_quarantine()

    async def read_mark(self) -> None:
        await asyncio.gather(*(shard.read_mark() for shard in self._masters()), return_exceptions=True)

    # -- operators -----------------------------------------------------------------------------------------------

    async def probe(self, name: str) -> NodeView:
        return await view(partial(self._run, slot_of(self._config.prefix, name)), self._config.prefix, name)

    async def _run(self, slot: int, *command: str) -> Any:
        """The answer of the master of a slot to a command that only reads."""
        until = self.clock.now() + _ADMIN
        while True:
            shard = self._owners[slot]
            if shard is None:
                self._look()
                raise self._uncovered(slot)
            try:
                return await clear(shard.label, shard.run(*command), command, redirects=True)
            except ServerError as error:
                where = redirect_of(str(error), shard.address)
                if not is_redirect(error) or self.clock.now() > until:
                    raise
                if where.code == "MOVED" and where.to is not None:
                    self._move(slot, self._shard(where.to))
                self._look()
            await asyncio.sleep(_SETTLED)

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        """One master after the other: the cursor is the number of the master, and its own cursor."""
        masters = self._masters()
        if self._bare():
            raise self._unavailable([])
        number, _, inner = cursor.rpartition("/")
        nth = int(number or 0)
        if nth >= len(masters):  # the cluster has fewer masters than when the listing began
            return "0", []
        shard = masters[nth]
        after, found = await names(partial(self._ask, shard), self._config.prefix, begin, inner)
        if after == "0":
            return (f"{nth + 1}/0" if nth + 1 < len(masters) else "0"), found
        return f"{nth}/{after}", found

    async def _ask(self, shard: Shard, *command: str) -> Any:
        return await clear(shard.label, shard.run(*command), command, redirects=True)

    # -- the end -------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        until = self.clock.now() + _FAREWELL
        while len(self._parked) and self.clock.now() < until:  # noqa: ASYNC110 - releases whose slot is being moved
            await asyncio.sleep(_SETTLED)
        self._closed = True
        self._parked.release_all()
        tasks = [*self._background, *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._watching is not None:
            self._watching.cancel()
        self._reports.stop()
        await asyncio.gather(*(shard.aclose() for shard in list(self._shards.values())))
        self._error = ConnectionError(f"{self.label} was closed")
        self._met.set()


def _voted(task: asyncio.Future[Checked]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _why(task: asyncio.Future[Checked]) -> str:
    if not task.done() or task.cancelled():
        return "the master has not answered yet"
    error = task.exception()
    return str(error) or repr(error)


async def _first(asks: Iterable[Coroutine[Any, Any, tuple[Range, ...]]]) -> tuple[Range, ...]:
    """The first answer. Raises the first error if there is none."""
    pending = {asyncio.ensure_future(each) for each in asks}
    errors: list[BaseException] = []
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is None:
                    return task.result()
                errors.append(error)
        raise errors[0]
    finally:
        for task in pending:
            task.cancel()
