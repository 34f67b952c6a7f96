"""A cluster, as one event loop sees it: one node of the quorum, and inside one connection to each of its masters.

1. Each op goes to the master that has the slot of its name. All keys of a name are in one slot (`keys.py`).
2. MOVED, ASK, TRYAGAIN and CLUSTERDOWN mean that the server did nothing. The op is sent again within its deadline, by
   the new master or after a pause (`parked.py`), unless its id was undone meanwhile: then it could create a key that
   nothing deletes. It is sent after a pause, too, if two masters send it to each other. The ops of one slot stay in
   their order, so a later attempt does not overtake an undo.
3. When a slot gets another master, the pending releases of its names go to that master, and so do those that the old
   master got lately (`pending.py`). While it has none, the releases of its names are kept.
4. The client asks the cluster for its slots when it opens, when a master is lost or silent, and after each MOVED; again
   and again until all slots have a master that is up. A lost master is reported as down only if it still has slots:
   one that an operator removed has none. Ops for its slots wait for that answer.
5. A notice comes from the master that has the slot, by sharded pub/sub (`shard_channel.py`), behind the replies of that
   master. A server without it, and one on whose channel nobody listens, sends it with PUBLISH. That reaches every node
   of a cluster, and each of them passes it on to its clients. The one from the master of the slot counts.
   If it does not come, the slot may have another master, and another one counts after a moment.
6. A server counts only the clients that are connected to it as receivers. With PUBLISH, a waiter that is connected to
   the old master of a slot gets a notice from there, although the new master did not count it, and gave the hold to
   another. So such a notice does not grant a hold: it wakes the waiter, whose next try finds out.
7. In a quorum of clusters a master that this client finds in place of another one is in quarantine, as a server that
   restarted: it may be a replica that did not have all holds when it was promoted. A slot that moves to a master which
   this client knew before takes its keys along.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from asynclock._options import BROKEN_BY
from asynclock.events import NodeDown, NodeUp, Quarantined, QuarantineEnded
from asynclock.rules.model import BREAK, RELEASE
from asynclock.stores.port import Checked, Facts, SameServer
from asynclock.stores.redis.cluster.masters import Masters, Source
from asynclock.stores.redis.cluster.parked import Parked
from asynclock.stores.redis.cluster.topology import one_address, redirect_of
from asynclock.stores.redis.handlers import Doubtful
from asynclock.stores.redis.keys import slot_of, slot_of_op
from asynclock.stores.redis.replies import ServerError, clear, is_redirect
from asynclock.stores.redis.views import names, view
from asynclock.stores.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.events import Event
    from asynclock.rules.model import Op
    from asynclock.stores.distance import Distance
    from asynclock.stores.port import NodeConfig, NodeView, Notice, ReplyHandler
    from asynclock.stores.redis.cluster.parked import Entry
    from asynclock.stores.redis.cluster.shard import Shard

_SETTLED = 0.02  # seconds; a slot that moves twice within this time is asked again after a pause
_STRAY = 0.05  # seconds for which a notice from another node waits for the one from the master of its slot
_ADMIN = 0.9  # seconds for a command of an operator
_OTHERS = 0.03  # seconds for the votes of the other masters after the first one
_FAREWELL = 1.0  # seconds for which a client that closes waits for slots that are being moved, to release names there


class ClusterNode:
    """One cluster. The rules are in the docstring of this module."""

    def __init__(self, source: Source, config: NodeConfig) -> None:
        self.label = source.label
        self.index = config.position
        self.listens = False
        self.watches = False
        self.clock = config.clock
        self._config = config
        self._prefix = config.prefix
        self._masters = Masters(source, config._replace(tell=self._told), self)
        self._parked = Parked(config.clock, self._send_parked)
        self._strays: dict[Notice, bool] = {}  # the latest notices, and whether they were received
        self._reports = Reports(source.label, config.tell, config.clock)
        self._closed = False

    def __repr__(self) -> str:
        return f"<ClusterNode {self.label} {len(self._masters.all)} masters>"

    @property
    def shards(self) -> list[Shard]:
        """The nodes of its masters."""
        return self._masters.shards

    # -- commands ------------------------------------------------------------------------------------------------

    def send(self, op: Op, handler: ReplyHandler) -> None:
        self._send(slot_of_op(self._prefix, op), op, handler)

    def _send(self, slot: int, op: Op, handler: ReplyHandler) -> None:
        shard = self._masters.by_slot[slot]
        if shard is None:
            if op.verb is RELEASE and op.since <= self._masters.bared_at:  # else nothing of its id was sent
                self._masters.keep(op, handler.sent)
            self._masters.look()
            handler.fail(self.index, self._uncovered(slot), maybe=False)
        elif slot in self._parked or shard.connecting or self._masters.may_have_left(shard):
            if not shard.connecting:
                self._masters.look()
            self._parked.add(slot, handler, shard.error or ConnectionError(f"{shard.label} is not connected"))
        else:
            if not shard.up:
                self._masters.look()  # its task ended if the program cancelled all tasks, as after Ctrl-C, and went on
            shard.send(op, handler if op.verb is not RELEASE else self._masters.acknowledged.by(shard, slot, handler))

    def _uncovered(self, slot: int) -> Exception:
        if self._masters.error is not None:
            return self._masters.error
        return self._masters.nameless(slot) or ConnectionError(
            f"{self.label}: no master has slot {slot}, in which the name is: give it to one"
        )

    def flush(self) -> None:
        for shard in self.shards:
            shard.flush()

    def rtt(self) -> float | None:
        """The rtt of `port.Measured`: the longest of the masters."""
        return max((rtt for each in self.shards if (rtt := each.rtt()) is not None), default=None)

    @property
    def distance(self) -> Distance:
        return self._masters.distance

    # -- redirections (rule 2) -----------------------------------------------------------------------------------

    def redirected(self, shard: Shard, handler: ReplyHandler, error: ServerError) -> None:
        """A shard did nothing, because it does not have the slot of the op, or not all of its keys."""
        masters, slot, now = self._masters, slot_of_op(self._prefix, handler.op), self.clock.now()
        where = redirect_of(str(error), shard.address)
        to = masters.at(where.to) if where.to is not None else None
        why: Exception = error if to is not shard else one_address(shard.label, str(error))
        if where.code != "ASK":
            masters.look()
        if to is shard:  # it would send the op back each time
            to = None
        if where.code == "MOVED" and to is not None:
            bounced = now - shard.asked_at < _SETTLED  # an ASK named it, and it sends the op back
            if masters.by_slot[slot] is not to:
                bounced |= now - masters.moved.get(slot, -math.inf) < _SETTLED
                masters.move(slot, to)
            to = None if bounced else to
        if handler.op.revoked:
            handler.fail(self.index, why, maybe=False)
        elif to is None or slot in self._parked or to.connecting or now >= handler.deadline:
            self._parked.add(slot, handler, why)  # it fails after the pause if its time is over
        elif where.code == "ASK":
            to.asked_at = now
            handler.op.forget_packed()
            to.send_asking(handler.op, handler)
        else:
            self._resend(slot, handler)

    def replaced(self, handlers: Sequence[ReplyHandler]) -> None:
        """Their master is silent and has lost its slots: the new one gets these ops. Each of them is harmless if it is
        carried out twice, and the old master forgets what it still does. But a second break would break the next
        hold."""
        error, slots = ConnectionError(f"{self.label}: its master was replaced"), set[int]()
        for handler in handlers:
            if handler.op.revoked or handler.op.verb is BREAK:
                handler.fail(self.index, error, maybe=True)
            else:
                slots.add(slot := slot_of_op(self._prefix, handler.op))
                self._parked.add(slot, Doubtful(handler), error)
        self._parked.release_all(slots.__contains__)

    def _resend(self, slot: int, handler: ReplyHandler) -> None:
        handler.op.forget_packed()  # the ticket of the op may have been withdrawn since it was packed
        self._send(slot, handler.op, handler)

    def _send_parked(self, slot: int, entries: list[Entry]) -> None:
        """The pause of a slot is over: send its ops, in order."""
        now, owner = self.clock.now(), self._masters.by_slot[slot]
        for handler, error in entries:
            if now >= handler.deadline or handler.op.revoked or self._closed:
                if handler.op.verb is RELEASE:
                    (owner or self._masters).keep(handler.op, handler.sent)
                handler.fail(self.index, error, maybe=False)
            elif owner is not None and owner.connecting:
                self._parked.add(slot, handler, error)
            else:
                self._resend(slot, handler)

    # -- notices (rules 5 and 6) ---------------------------------------------------------------------------------

    def received(self, shard: Shard, notice: Notice, *, certain: bool = False) -> None:
        """A notice came on the connection to this shard. `certain`: from this shard itself, so a grant counts."""
        owner = self._masters.by_slot[slot_of(self._prefix, notice.name.partition(BROKEN_BY)[0])]
        if certain:
            self._config.listener.received(self.index, notice if shard is owner else notice._replace(fence=0))
            return
        if shard is owner or owner is None or not owner.listens:
            self._strays[notice] = True
            self._config.listener.received(self.index, notice._replace(fence=0))
        else:
            self._strays.setdefault(notice, False)
        if len(self._strays) == 1:
            self.clock.call_at(self.clock.now() + _STRAY, self._receive_strays)

    def _receive_strays(self) -> None:
        """These notices did not come from the master that has the slot, as far as this client knows."""
        strays, self._strays = self._strays, {}
        for notice, was_received in strays.items():
            if not (was_received or self._closed):
                self._masters.look()
                self._config.listener.received(self.index, notice._replace(fence=0))

    def channel_lost(self, shard: Shard) -> None:
        """The slot of its channel has moved, or it forgot its scripts."""
        self._masters.look()
        self._masters.subscribe(shard)

    # -- the masters (rule 4) ------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._masters.look()
        await self._masters.met.wait()

    def watch(self) -> None:
        """A shard has a command to answer."""
        self._masters.watch()

    def connected(self, shard: Shard, *, missed: bool) -> None:
        """The shard is connected (again), so its slots can be asked. `missed`: notices may be lost."""
        self.update()
        self.ready(shard)
        self._config.listener.connected(self.index, missed=missed)

    def ready(self, shard: Shard) -> None:
        """The ops that waited for the shard wait no longer."""
        self._parked.release_all(lambda slot: self._masters.by_slot[slot] is shard)

    def moved(self, before: Sequence[Shard | None]) -> None:
        """The ops in slots that have other masters than `before` wait no longer."""
        now = self._masters.by_slot
        self._parked.release_all(lambda slot: now[slot] is not before[slot])

    # -- the state of the whole ----------------------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """Why no name can be asked; None: some can."""
        errors = [each.error for each in self._masters.all]
        double = next((each for each in errors if isinstance(each, SameServer)), None)
        if self._masters.error is not None or double is not None:
            return double or self._masters.error
        return errors[0] if errors and None not in errors else None

    def _told(self, event: Event) -> None:
        """A shard tells something: the events of a cluster carry its own label."""
        if isinstance(event, (NodeUp, NodeDown)):
            self.update()
        elif isinstance(event, (Quarantined, QuarantineEnded)):
            self._reports.quarantine(max((each.quarantine_left for each in self._masters.all), default=0.0))
        else:
            self._config.tell(event)

    def update(self) -> None:
        """Masters came or went, up or down."""
        masters = self._masters.all
        up = [each for each in masters if each.up]
        self.listens = bool(up) and all(each.listens for each in up)
        if self._closed or not (self._masters.met.is_set() or len(up) == len(masters)):
            return
        if not masters and self._masters.met.is_set():
            self._reports.down(self._masters.error or self._unavailable())
        elif down := [each for each in masters if not (each.up or each.connecting)]:
            if any(not (self._masters.may_have_left(each) or each.reconnecting) for each in down):
                self._reports.down(self._unavailable())
            self._masters.look()
        elif any(each.refusal is not None for each in up):
            self._reports.down(self._unavailable())
        elif up and len(up) == len(masters):
            self._reports.up()

    def _unavailable(self) -> Exception:
        """Which slots cannot be asked, and why."""
        masters = self._masters
        whys = [f"slots {masters.slots_of(each)}: {why}" for each in masters.all if (why := each.error or each.refusal)]
        if masters.bare:
            whys.append(f"slots {masters.slots_of(None)}: no master has them")
        return ConnectionError(f"{self.label} serves no names in {'; in '.join(whys)}")

    async def check_vote(self) -> Checked:
        """Whether some master votes. The note names the slots of the masters that do not."""
        masters = self._masters
        if masters.error is not None:
            masters.look()
            raise masters.error
        if not masters.all:
            raise self._unavailable()
        found = await _votes(masters.all)
        votes = [vote for vote in found if isinstance(vote, Checked)]
        if not votes:
            masters.look()
            raise self._unavailable() if masters.bare else next(each for each in found if isinstance(each, Exception))
        silent = [
            f"slots {masters.slots_of(shard)}: {vote or 'the master has not answered yet'}"
            for shard, vote in zip(masters.all, found, strict=True)
            if not isinstance(vote, Checked)
        ]
        if masters.bare:
            silent.append(f"slots {masters.slots_of(None)}: no master has them")
        notes = [f"some names cannot be locked; {'; '.join(silent)}"] if silent else []
        notes += [each.note for each in votes if each.note]
        return Checked(max(each.latency for each in votes), "; ".join(notes))

    # -- restarted and promoted servers (rule 7) -----------------------------------------------------------------

    @property
    def facts(self) -> Facts | None:
        """The facts about all masters in one: the cluster is new if each of them is."""
        known = [facts for each in self._masters.all if (facts := each.facts) is not None]
        if not known:
            return None
        ids = "+".join(sorted(each.run_id for each in known))
        in_part = "in part" if any(each.mark for each in known) else ""
        used = ids if all(each.is_marked for each in known) else in_part
        replaced = [each.replaced for each in known if each.replaced is not None]
        return Facts(ids, used, min(each.started for each in known), max(replaced, default=None))

    def end_quarantine(self) -> None:
        for shard in self._masters.all:
            shard.end_quarantine()

    async def read_mark(self) -> None:
        found = await asyncio.gather(*(shard.read_mark() for shard in self._masters.all), return_exceptions=True)
        if errors := [each for each in found if isinstance(each, BaseException)]:
            raise errors[0]

    # -- operators -----------------------------------------------------------------------------------------------

    async def probe(self, name: str) -> NodeView:
        return await view(partial(self._run, slot_of(self._prefix, name)), self._prefix, name)

    async def _run(self, slot: int, *command: str) -> Any:
        """The answer of the master of a slot to a command that only reads."""
        until = self.clock.now() + _ADMIN
        while True:
            shard = self._masters.by_slot[slot]
            if shard is None:
                self._masters.look()
                raise self._uncovered(slot)
            try:
                return await self._ask(shard, *command)
            except ServerError as error:
                where = redirect_of(str(error), shard.address)
                if not is_redirect(error) or self.clock.now() > until:
                    raise
                if where.code == "MOVED" and where.to is not None:
                    self._masters.move(slot, self._masters.at(where.to))
                self._masters.look()
            await asyncio.sleep(_SETTLED)

    async def _ask(self, shard: Shard, *command: str) -> Any:
        if shard.connecting:
            await shard.open()
        return await clear(shard.label, shard.run(*command), command, redirects=True)

    async def names(self, begin: str, cursor: str) -> tuple[str, list[str]]:
        """One master after the other. One that does not answer is asked again after all others: then its error is
        raised. The cursor: the numbers of the masters that are left, "!" before one that is asked again, and the cursor
        of the first of them."""
        masters = self._masters.all
        numbers, _, inner = cursor.rpartition("/")
        nth, *others = numbers.split(",") if numbers else list(map(str, range(len(masters)))) or ["0"]
        after, found = "0", list[str]()
        if (number := int(nth.removeprefix("!"))) < len(masters):  # else the cluster has lost masters meanwhile
            try:
                after, found = await names(partial(self._ask, masters[number]), self._prefix, begin, inner or "0")
            except Exception:
                if nth.startswith("!"):
                    raise
                others.append(f"!{nth}")
        if left := others if after == "0" else [nth, *others]:
            return f"{','.join(left)}/{after}", found
        if self._masters.bare:
            raise self._masters.error or self._unavailable()
        return "0", found

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def _releases(self) -> bool:
        """Whether a release waits for its slot, or for an answer: that may be a redirection, after which it waits."""
        return self._parked.releases or self._masters.releases

    async def aclose(self) -> None:
        until = self.clock.now() + _FAREWELL
        try:
            while self._releases and self.clock.now() < until:  # noqa: ASYNC110 - until their slot has moved
                await asyncio.sleep(_SETTLED)
            self._end()
            await self._masters.aclose()
        finally:  # also where it is cancelled
            self._end()
            self._masters.abort(ConnectionError(f"{self.label} was closed"))

    def _end(self) -> None:
        self._closed = True
        self._parked.end()
        self._reports.stop()


async def _votes(shards: Sequence[Shard]) -> list[Checked | Exception | None]:
    """The vote of each shard, or its error. None: it has not answered a moment after another one voted."""
    tasks = [asyncio.ensure_future(each.check_vote()) for each in shards]
    try:
        pending, votes = set(tasks), list[Checked]()
        while pending and not votes:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            votes = [each.result() for each in done if each.exception() is None]
        if pending:
            await asyncio.wait(pending, timeout=max(10 * votes[0].latency, _OTHERS))
        return [_vote(each) if each.done() else None for each in tasks]
    finally:
        for each in tasks:
            each.cancel()


def _vote(task: asyncio.Future[Checked]) -> Checked | Exception:
    error = task.exception()
    return task.result() if error is None else error if isinstance(error, Exception) else RuntimeError(repr(error))
