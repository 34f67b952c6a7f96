"""A node as its client sees it: the port of `stores/port.py` over simulated connections, as `stores/redis/node.py`
keeps it. The pending releases, and when a command is overdue, are those that are shipped."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from asynclock._clock import LATE
from asynclock.rules.model import ACQUIRE, EXTEND, RELEASE, Notice, Op
from asynclock.stores.deciding import copy_of
from asynclock.stores.port import Facts
from asynclock.stores.redis.handlers import overdue_at, patience
from asynclock.stores.redis.pending import PendingReleases
from asynclock.stores.reports import Reports
from simulation.network import Connection, Request
from simulation.servers import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.stores.port import ReplyHandler
    from simulation.clients import Client
    from simulation.loop import Result, Timer
    from simulation.network import Link
    from simulation.servers import Server

_PAUSES = (0.05, 2.0)  # seconds between two attempts to connect: the first and the longest
_BUSY = 0.1  # seconds after which a release that was refused with an error is sent again
_SLICE = 256


class Waiting(Protocol):
    """A handler in the queue of a connection."""

    sent: float
    deadline: float

    def answer(self, index: int, reply: Any, /) -> None: ...

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None: ...


class Ignored:
    """The handler of an op, or of a command without one, whose reply nobody waits for. `then` gets the reply."""

    def __init__(self, sent: float, op: Op | None = None, then: Callable[[Any], object] | None = None) -> None:
        self.op = op
        self.sent = sent
        self.deadline = sent + 5.0
        self._then = then

    def answer(self, index: int, reply: Any, /) -> None:
        del index
        if self._then is not None:
            self._then(reply)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        del index, maybe
        if self._then is not None:
            self._then(error)


class SimulatedNode:
    """See the module."""

    listens = False

    def __init__(self, client: Client, server: Server, link: Link) -> None:
        self.index, self.label = server.index, server.label
        self.error: Exception | None = ConnectionError(f"{self.label} is not connected yet")
        self.facts: Facts | None = None
        self.tried = False  # the first attempt to connect has ended
        self.closed = False
        self._client, self._server, self._link = client, server, link
        self._clock = client.clock.beside()
        self._connection: Connection | None = None
        self._dialled: Connection | None = None  # under way
        self._pending = PendingReleases()
        self._reports = Reports(self.label, client.reported, self._clock)
        self.answered_at = -math.inf  # when an op got an answer last
        self._lost_at = -math.inf
        self._connected_at = -math.inf
        self._listened = False
        self._quarantined_until = self._votes_since = -math.inf
        self._pause = _PAUSES[0]
        self._looks_again = False
        self._timer: Timer | None = None  # of the deadlines
        self._timer_at = math.inf
        self._dialling: Timer | None = None

    # -- ops -----------------------------------------------------------------------------------------------------

    def send(self, op: Op, handler: ReplyHandler) -> None:
        if op.verb is ACQUIRE and op.queueing.heals:
            self._client.check_heal(op)
        connection = self._connection
        if connection is None:
            if op.verb is RELEASE and op.since <= self._lost_at:
                now = self._clock.now()
                self._pending.add(op, now, now)
            handler.fail(self.index, self.error or ConnectionError("not connected"), maybe=False)
            return
        if op.verb is not RELEASE and self.quarantined:
            if op.verb is EXTEND:  # the server may have the key, and must keep it
                self._send(connection, Request("op", copy_of(op)), Ignored(self._clock.now(), op))
                self._watch(handler.deadline)
            handler.fail(self.index, ConnectionError(f"{self.label} restarted a short while ago"), maybe=False)
            return
        wire = copy_of(op)
        if op.verb is RELEASE:
            op.sent = handler.sent
            self._pending.sent.append(op)
            wire.tombstone = wire.tombstone or op.id in self._pending.unanswered
        self._send(connection, Request("op", wire), handler)
        self._watch(handler.deadline)

    def _send(self, connection: Connection, request: Request, handler: Waiting) -> None:
        if not connection.waiting:
            connection.moved_at = self._clock.now()
        connection.waiting.append(handler)
        connection.request(request)

    def _ask(self, request: Request, then: Callable[[Any], object] | None = None) -> None:
        """Send a command that is no op."""
        if self._connection is not None:
            handler = Ignored(self._clock.now(), then=then)
            self._send(self._connection, request, handler)
            self._watch(handler.deadline)
        elif then is not None:
            then(self.error)

    def _received(self, connection: Connection, message: Any) -> None:
        """A reply or a notice."""
        connection.moved_at = self._clock.now()
        if connection is self._dialled:
            self._greeted(connection, message)
            return
        if connection is not self._connection:
            return
        if isinstance(message, Notice):
            self._client.noticed(self.index, message)
            return
        handler = connection.waiting.popleft()
        if isinstance(message, ServerError):
            self._refused(connection, handler, message)
        elif isinstance(message, Exception):  # WrongKind
            handler.fail(self.index, message, maybe=False)
        else:
            if not isinstance(handler, Ignored):
                self.answered_at = connection.moved_at
            handler.answer(self.index, message)

    def _refused(self, connection: Connection, handler: Any, error: ServerError) -> None:
        op = handler.op
        if error.resend and op is not None and not op.revoked:
            self._send(connection, Request("op", copy_of(op)), handler)
            return
        if op is not None and op.verb is RELEASE:
            self._pending.add(op, self._clock.now(), handler.sent)
            self._clock.call_at(self._clock.now() + _BUSY, partial(self._deliver, connection))
        handler.fail(self.index, error, maybe=False)

    def _deliver(self, connection: Connection) -> None:
        """Send the pending releases."""
        while connection is self._connection and self._pending.to_send:
            now = self._clock.now()
            for release in self._pending.drain(now, _SLICE):
                self._send(connection, Request("op", copy_of(release)), Ignored(now, release))
                self._watch(now + 5.0)

    # -- deadlines -----------------------------------------------------------------------------------------------

    def _watch(self, at: float) -> None:
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = self._clock.call_at(at, self._due)

    def _due(self) -> None:
        """Fail what is overdue, and give up a connection that is silent."""
        due, self._timer, self._timer_at = self._timer_at, None, math.inf
        connection, now = self._connection, self._clock.now()
        if connection is None or not connection.waiting:
            return
        waiting, limit = connection.waiting, self._time_limit(connection)
        if now - due > LATE and not self._looks_again:  # read first what came while the loop was blocked
            self._looks_again = True
            self._watch(now + min(now - due, limit))
            return
        self._looks_again = False
        if now - connection.moved_at >= patience(limit):
            self._lost(connection, TimeoutError(f"{self.label} has been silent for {now - connection.moved_at:.3g} s"))
            return
        overdue = [each for each in waiting if overdue_at(each, connection.moved_at) <= now]  # type: ignore[arg-type]
        late = (overdue_at(each, connection.moved_at) for each in waiting)  # type: ignore[arg-type]
        again = min([connection.moved_at + patience(limit), *(at for at in late if at > now)])
        self._watch(max(again, now + 0.001))
        for handler in overdue:
            handler.fail(self.index, TimeoutError(f"{self.label} did not answer in time"), maybe=True)

    def _time_limit(self, connection: Connection) -> float:
        ops = (each for each in connection.waiting if not isinstance(each, Ignored))
        oldest = next(ops, connection.waiting[0])
        return oldest.deadline - oldest.sent

    # -- connections ---------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Begin an attempt."""
        if self.closed or self._connection is not None or self._dialled is not None:
            return
        within = self._client.settings.connect_timeout
        self._dialling = self._clock.call_at(self._clock.now() + within, self._dial_failed)
        link = self._link
        if not self._server.up and self._server.silent:
            return

        def received(message: Any) -> None:
            self._client.loop.post(self._received, connection, message)

        def lost(error: Exception) -> None:
            self._client.loop.post(self._lost, connection, error)

        connection = Connection(link, self._server, self._client.tag, received, lost)
        self._dialled = connection
        there = link.arrival(0)
        link.schedule.at(there, self._accepted, connection, link.arrival(1) - link.schedule.now)

    def _accepted(self, connection: Connection, back: float) -> None:
        """The server's kernel takes it. Then the client sends the handshake."""
        at = self._link.schedule.now + back
        if not connection.open_here:
            return
        if self._server.up:
            self._server.accept(connection)
            self._link.schedule.at(at, self._client.loop.post, self._greet, connection)
        elif not self._server.silent:
            self._link.schedule.at(at, self._client.loop.post, self._dial_failed)

    def _greet(self, connection: Connection) -> None:
        if connection is self._dialled:
            connection.request(Request("hello"))

    def _dial_failed(self) -> None:
        if self._dialling is None:
            return
        self._dialling.cancel()
        self._dialling = None
        dialled, self._dialled = self._dialled, None
        if dialled is not None:
            dialled.abort()
        if self.closed or self._connection is not None:
            return
        self.error = ConnectionError(f"{self.label} is out of reach")
        self._pending.prune(self._clock.now())
        self.tried = True
        self._reports.down(self.error)
        self._client.node_tried()
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSES[1])
        self._clock.call_at(self._clock.now() + pause * (0.5 + self._client.random() / 2), self.connect)

    def _greeted(self, connection: Connection, answer: tuple[str, float, str]) -> None:
        """The handshake has its answer: the node is connected."""
        if self._dialling is not None:
            self._dialling.cancel()
        self._dialling = self._dialled = None
        self._connection = connection
        self._connected_at = now = self._clock.now()
        connection.moved_at = now
        self._learn(*answer)
        self._deliver(connection)
        self.error, self.listens, self.tried = None, connection.listens, True
        self._pause = _PAUSES[0]
        self._reports.up()
        missed, self._listened = self.listens or self._listened, self.listens
        self._client.node_connected(missed)
        if not self.quarantined:
            self.end_quarantine()
        self._client.node_tried()

    def _lost(self, connection: Connection, error: Exception) -> None:
        """The connection is of no use any more."""
        if connection is self._dialled:
            self._dial_failed()
            return
        connection.abort()
        if connection is not self._connection:
            return
        now = self._clock.now()
        ops: list[Any] = [each for each in connection.waiting if getattr(each, "op", None) is not None]
        self._pending.cut_off(ops, now, connection.moved_at)
        self._connection, self._lost_at = None, now
        self.listens, self.error = False, error
        self._reports.down(error)
        waiting = list(connection.waiting)
        connection.waiting.clear()
        for handler in waiting:
            handler.fail(self.index, error, maybe=True)
        pause = 0.0 if now - self._connected_at >= 1.0 else self._pause
        if pause:
            self._pause = min(2 * self._pause, _PAUSES[1])
        self._clock.call_at(now + pause, self.connect)

    def close(self) -> None:
        """The client closes: what is under way may still arrive."""
        self.closed = True
        self.error = ConnectionError(f"{self.label} was closed")
        self._reports.stop()
        connection = self._connection or self._dialled
        self._connection = self._dialled = None
        if connection is not None:
            waiting = list(connection.waiting)
            connection.waiting.clear()
            for handler in waiting:
                handler.fail(self.index, self.error, maybe=True)
            connection.abort()
        for timer in (self._timer, self._dialling):
            if timer is not None:
                timer.cancel()

    @property
    def awaits_releases(self) -> bool:
        """Whether a release has no answer yet."""
        waiting = self._connection.waiting if self._connection is not None else ()
        return any(getattr(each, "op", None) is not None and each.op.verb is RELEASE for each in waiting)  # type: ignore[attr-defined]

    @property
    def is_settled(self) -> bool:
        """Whether it is connected, and nothing is under way."""
        return self._connection is not None and not self._connection.waiting and not self._pending.to_send

    # -- restarted servers ---------------------------------------------------------------------------------------

    @property
    def votes_since(self) -> float:
        """The time at which the last quarantine of its client ends, by the client's clock; -inf: there was none."""
        return self._votes_since

    @property
    def quarantined(self) -> bool:
        """Whether its server casts no vote."""
        if self._quarantined_until > self._clock.now():
            return True
        if self._quarantined_until > -math.inf:
            self.end_quarantine()
        return False

    def _learn(self, run_id: str, uptime: float, mark: str) -> None:
        before = self._client.servers.get(self.index)
        now = self._clock.now()
        if self.facts is not None and self.facts.run_id == run_id:
            if mark != run_id:
                self.facts = self.facts._replace(mark="")
            return
        if before is not None and before[0] != run_id:
            self._client.servers[self.index] = run_id, now
        elif before is None:
            self._client.servers[self.index] = run_id, None
        self._decide(Facts(run_id, mark, now - math.floor(uptime), self._client.servers[self.index][1]))

    def _decide(self, facts: Facts) -> None:
        self.facts = facts
        until = self._client.quarantine
        self._quarantined_until = until.until(facts) if until is not None else -math.inf
        self._votes_since = max(self._votes_since, self._quarantined_until)

    def end_quarantine(self) -> None:
        self._quarantined_until = -math.inf
        if self.facts is not None and self.facts.mark != self.facts.run_id:
            self.facts = self.facts._replace(mark=self.facts.run_id)
            self._ask(Request("set mark", value=self.facts.run_id))

    def read_mark(self, result: Result) -> None:
        """Complete `result` when the mark is read again."""

        def read(mark: Any) -> None:
            if self.facts is not None and mark == self.facts.run_id:
                self._decide(self.facts._replace(mark=mark))
            if not result.done():
                result.set_result()

        if self._connection is not None and self.quarantined:
            self._ask(Request("mark"), read)
        else:
            result.set_result()
