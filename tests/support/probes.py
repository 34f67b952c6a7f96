"""The only place where tests read or change private parts of the package.

When an attribute of the package is renamed or moves to another object, this file changes and the tests do not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest
import redis
from redis.asyncio import ConnectionPool

from asynclock import Lease, Lock, Redlock
from asynclock.locks import lease as lease_module
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.handover import Adoption
from asynclock.protocol.rounds import Wake
from asynclock.protocol.states import OwnerEntering, Pausing, Queued
from asynclock.protocol.terms import Terms
from asynclock.rules.model import Kind, Notice, State
from asynclock.stores.memory import MemoryStore
from asynclock.stores.redis import encoding
from asynclock.stores.redis.cluster.node import ClusterNode
from asynclock.stores.redis.node import RedisNode
from asynclock.stores.transactional import TransactionalNode
from tests.support.default_keys import key_of

Receive: TypeAlias = Callable[[int, Notice], object]
"""Takes a notice, with the number of its node."""


# -- the client --------------------------------------------------------------------------------------------------------


def session_of(client: Redlock) -> Any:
    """The client's session in this event loop. Tests compare it; for all else there is a function below."""
    return client._session()


def loops_of(client: Redlock) -> Iterable[object]:
    """The event loops in which the client is in use."""
    return client._sessions._by_loop


def stores_of(client: Redlock) -> tuple[Any, ...]:
    return tuple(client._stores)


def pool_of(store: Any) -> Any:
    """The redis-py connection pool that a Redis store was made of; for a Sentinel deployment, one of its master."""
    if store.sentinels is None:
        return store._pool
    sentinel = store.sentinels.endpoints[0].dial()
    with redis.Redis(host=sentinel.host, port=sentinel.port) as cli:
        host, port = cli.sentinel_get_master_addr_by_name(store.sentinels.name)
    return ConnectionPool(host=host, port=port)


def marks_under_way(client: Redlock) -> int:
    """The number of runs of `once` whose marks are not at all nodes yet."""
    return len(session_of(client).machine.holds.done_marks)


def clock_of(client: Redlock) -> Any:
    return session_of(client).clock


def tag_of(client: Redlock) -> str:
    """The random tag with which all ids of this client begin, and its channel."""
    return session_of(client).tag


def listens(client: Redlock) -> bool:
    """Whether a majority of the nodes can send notices to this client."""
    return bool(session_of(client).quorum.listens)


def connecting(client: Redlock) -> asyncio.Task[None] | None:
    """The task of a first connect under way."""
    return session_of(client)._opening


def replace_ask(client: Redlock, ask: Callable[..., Any]) -> Callable[..., Any]:
    """Put another function in the place of the one that asks all nodes; answers the one that was there."""
    quorum = session_of(client).quorum
    before: Callable[..., Any] = quorum.ask
    quorum.ask = ask
    return before


async def settled(client: Redlock, ballot: Any) -> None:
    """Wait for the outcome of a ballot of that client."""
    await session_of(client).settled(ballot)


def new_id(client: Redlock, seed: int) -> str:
    return session_of(client).new_id(seed, "")


def undo(client: Redlock, ballot: Any) -> None:
    """Take an attempt back."""
    quorum = session_of(client).quorum
    quorum.undo(ballot, 3.0)


def ask_nodes(client: Redlock, op: Any, within: float, undone: bool = False) -> Any:
    """Send an op to all nodes; returns its ballot. Where `undone`, it is undone as soon as it is decided."""
    session = session_of(client)
    return session.quorum.ask(op, within, **({"on_settled": lambda ballot: undo(client, ballot)} if undone else {}))


# -- acquires under way, and their tickets -----------------------------------------------------------------------------


def acquisitions_of(client: Redlock) -> set[Any]:
    """Acquires and adoptions under way."""
    return set(session_of(client).machine.under_way)


def tickets_of(client: Redlock) -> dict[str, Any]:
    """The random part of each ticket's id -> the acquisition that sent it."""
    return dict(session_of(client).machine.tickets._by_id)


def forget_tickets(client: Redlock) -> None:
    """From now on the client ignores notices for its tickets."""
    session_of(client).machine.tickets._by_id.clear()


def waits_for_notice(acquisition: Any) -> bool:
    """Whether it sleeps until a notice or a timer, or waits in the local queue."""
    if isinstance(acquisition, Adoption):
        return False
    return isinstance(acquisition.state, Queued | OwnerEntering) or pauses(acquisition)


def in_outage(acquisition: Any) -> bool:
    return acquisition.planner is not None and bool(acquisition.planner.in_outage)


def asks_again_at(acquisition: Any) -> float:
    """When its timer is due."""
    return acquisition.state.until if pauses(acquisition) else float("inf")


def sleeps_until(acquisition: Any) -> float:
    """When it asks again, if no notice comes before; -inf: it does not sleep."""
    return asks_again_at(acquisition) if pauses(acquisition) else -float("inf")


def times_sent(acquisition: Any) -> int:
    """How often its ticket was sent."""
    rounds = acquisition._rounds
    if rounds is None:
        return 0
    return rounds.ticket.number if rounds.ticket is not None else rounds.op.queueing.number


def asked_id(acquisition: Any) -> str:
    """The id of the hold that it asks for."""
    return str(acquisition._rounds.op.id)


def send_ticket_again(acquisition: Any) -> None:
    acquisition.wake(0.05, Wake.MISSED)


def ballot_of(acquisition: Any) -> Any:
    """The round that is under way, if one is."""
    return acquisition._rounds.ballot if acquisition._rounds is not None else None


def pauses(acquisition: Any) -> bool:
    """Whether it pauses between two rounds."""
    return isinstance(acquisition.state, Pausing)


def states_of(store: MemoryStore) -> dict[str, State]:
    """Key -> the state of its name."""
    return store._states


def set_fence(store: MemoryStore, name: str, fence: int) -> None:
    """The counter of a name there, as if others had held it."""
    store._states[key_of(name)] = State(fence=fence, fence_ends=float("inf"))


def after_grant(acquisition: Any, then: Callable[[], object]) -> None:
    """Call `then` in the turn in which the acquire gets its hold, before its task wakes."""
    made_as = type(acquisition)

    def succeeds(self: Any, tenure: Any) -> None:
        made_as._succeed(self, tenure)
        then()

    acquisition.__class__ = type(made_as.__name__, (made_as,), {"__slots__": (), "_succeed": succeeds})


def nesting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How deep outcomes of rounds were handled inside each other, at most, in this test."""
    handled, depths = Acquisition.settled, [0]
    depth = 0

    def nested(acquisition: Acquisition, ballot: Any) -> None:
        nonlocal depth
        depth += 1
        depths.append(depth)
        handled(acquisition, ballot)
        depth -= 1

    monkeypatch.setattr(Acquisition, "settled", nested)
    return lambda: max(depths)


def local_queues_of(client: Redlock) -> Mapping[str, Any]:
    """Name -> its waiters in this process, or the task that asks alone."""
    queues = session_of(client).machine.queues
    return {**queues._alone, **queues.by_name}


def holds_of(client: Redlock) -> dict[str, Any]:
    """Name -> the holds that this process has of it."""
    return session_of(client).machine.holds._by_name


def left_over(client: Redlock) -> dict[str, Any]:
    """All that a client still keeps of its locks."""
    found = {
        "acquisitions": acquisitions_of(client), "tickets": tickets_of(client), "queues": local_queues_of(client),
        "holds": holds_of(client), "leases": watched_by(client),
    }  # fmt: skip
    return {each: what for each, what in found.items() if what}


def most_known_ids(obstacles: Any) -> int:
    """How many ids it remembers."""
    return len(obstacles._since)


# -- notices -----------------------------------------------------------------------------------------------------------


def deliver_notice(client: Redlock, index: int, notice: Notice) -> None:
    """As if the node had sent it."""
    session_of(client).received(index, notice)


def intercept_notices(client: Redlock, receive: Receive) -> Receive:
    """From now on `receive` gets the client's notices; returns the previous receiver."""
    session = session_of(client)
    before: Receive = session.received
    session.received = receive
    return before


def reconnected(client: Redlock, index: int) -> None:
    """As if the connection on which the node sends notices were a new one."""
    session_of(client).connected(index)


# -- nodes and connections ---------------------------------------------------------------------------------------------


def resends(client: Redlock, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry for each time when the client sends all tickets again, or may do so, from now on."""
    found = list[bool]()
    when_connected(client, monkeypatch, found.append)
    return found


def when_connected(client: Redlock, monkeypatch: pytest.MonkeyPatch, call: Callable[[bool], object]) -> None:
    """Call it in the turn in which a node is connected, before the node has ended its attempt to connect."""
    machine = session_of(client).machine
    real = machine.connected
    monkeypatch.setattr(machine, "connected", lambda missed: (call(missed), real(missed)))


def switched(node: Any, old: tuple[str, int], new: tuple[str, int]) -> None:
    """As if a sentinel had told the node of this switch."""
    node._switched(old, new)


async def run_on(connection: Any, *command: str) -> Any:
    """The answer to a command on this connection, which the node may have lost."""
    return await connection._node._ask(connection, *command).answer_of()


def nodes_of(client: Redlock) -> tuple[Any, ...]:
    return tuple(session_of(client).quorum.nodes)


def doubts_of(client: Redlock) -> int:
    """The acquires of a TransactionalStore whose outcome is unknown, as its node remembers them."""
    return len(nodes_of(client)[0]._doubts)


def backlog_of(client: Redlock) -> int:
    """The acquires that wait in the queue of the client, over a database or ZooKeeper."""
    return len(queue_of(client))


def queue_of(client: Redlock) -> Any:
    """That queue."""
    (node,) = nodes_of(client)
    return node._jobs.backlog if isinstance(node, TransactionalNode) else node._backlog


async def ping(node: Any, name: str = "any") -> None:
    """Wait until the server has answered behind all that the node sent; of a cluster, all masters have; of a database,
    behind all about that name."""
    if isinstance(node, ClusterNode):
        await asyncio.gather(*(shard.run("PING") for shard in node.shards))
    elif isinstance(node, RedisNode):
        await node._run("PING")
    else:
        await node.probe(name)


@contextmanager
def without_questions_for_slots(node: Any) -> Iterator[None]:
    """The node of a cluster does not ask for the slots inside, as if that took so long."""
    node._masters.look = lambda: None
    try:
        yield
    finally:
        del node._masters.look


async def look(node: Any) -> None:
    """The node of a cluster asks for the slots, and uses the answer."""
    while node._masters._looking is not None:
        await asyncio.sleep(0)
    node._masters.look()
    while node._masters._looking is not None:
        await asyncio.sleep(0)


def without_slots(node: Any) -> Any:
    """The node of a cluster finds out that one of its masters has no slots any more, and closes it: that master."""
    masters = node._masters
    shard = masters.all.pop()
    shard.asked_at = -math.inf
    masters._settle(shard)
    return shard


def without_slots_from_now(node: Any, shard: Any) -> None:
    """The node of a cluster finds out that another master has all slots of this one, and closes it."""
    masters = node._masters
    other = next(each for each in masters.all if each is not shard)
    masters.by_slot = [other if each is shard else each for each in masters.by_slot]
    masters.all.remove(shard)
    shard.asked_at = -math.inf
    masters._settle(shard)


def redirected(node: Any, address: tuple[str, int]) -> Any:
    """The node of a cluster is redirected to this address."""
    return node._masters.at(address)


def connection_of(node: Any) -> Any:
    """The connection of a node; None while it has none."""
    return node._connection


def node_of(connection: Any) -> Any:
    return connection._node


def unanswered(connection: Any) -> list[Any]:
    """The commands that wait for a reply, oldest first; `op` is what they ask."""
    return list(connection.waiting)


def unsent(connection: Any) -> bool:
    """Whether data waits to be written to the socket."""
    return bool(connection._out or connection.transport.get_write_buffer_size())


def break_connection(connection: Any) -> None:
    connection.transport.abort()


def feed(connection: Any, reply: bytes) -> None:
    """As if the server had sent these bytes."""
    connection.data_received(reply)


def socket_of(connection: Any) -> Any:
    return connection.transport.get_extra_info("socket")


def pending_releases_of(node: Any) -> Any:
    """The releases that the client sends to the node once that is within reach."""
    return node._pending


def never_granted(node: Any) -> Collection[str]:
    """The ids that the server of a node has refused from the first."""
    refused: Collection[str] = node._rights._refused
    return refused


def in_quarantine(node: Any) -> bool:
    """Whether the node's votes do not count yet, because its server restarted."""
    return bool(getattr(node, "_quarantined", False))


def release_by_script(client: Redlock, nodes: Iterable[int] | None = None) -> None:
    """From now on as on servers without a compare-and-delete command of their own."""
    for index, node in enumerate(nodes_of(client)):
        if nodes is None or index in nodes:
            node._native = ()


def release_by(node: Any, command: tuple[str, ...]) -> None:
    """From now on as on a server with this compare-and-delete command."""
    node._native = command


def native_release(node: Any) -> Any:
    """The compare-and-delete command of the node's server; empty if it has none."""
    return node._native


# -- leases and holds --------------------------------------------------------------------------------------------------


def hold_of(lease: Lease) -> Any:
    """The hold behind a lease. Leases to which it was passed on have the same."""
    return lease._tenure.hold


def id_of(lease: Lease) -> str:
    """The id under which the nodes keep it."""
    return hold_of(lease).op.id


def last_fence(lease: Lease) -> int:
    """The last fence of the span that came with its hold."""
    return hold_of(lease).last_fence


def valid_until(lease: Lease) -> float:
    return hold_of(lease).valid_until


def contended(lease: Lease) -> bool:
    """Whether the holder knows of a remote waiter."""
    return bool(hold_of(lease).contended)


def denied_by(lease: Lease) -> int:
    """The number of nodes at which its holder knows that the hold is gone."""
    return len(hold_of(lease)._denials or ())


def said_to_be_broken(lease: Lease) -> bool:
    """Whether a server said that an operator broke it."""
    return hold_of(lease)._broken is not None


def grant_of(lease: Lease) -> Any:
    """The ballot that won its hold."""
    return hold_of(lease)._ballot


def check(lease: Lease) -> None:
    """Ask the nodes whether it is held still."""
    hold_of(lease).extend(0.0)


def extend(lease: Lease, seconds: float) -> Any:
    """Send a renewal; answers its ballot."""
    return hold_of(lease).extend(seconds)


def lose(lease: Lease) -> None:
    """Let it be lost, as expired."""
    hold_of(lease).lose("expired")


def settings_of(lease: Lease) -> Any:
    """The options that it was acquired with."""
    return lease._tenure.terms.settings


def enter_again(lease: Lease, lock: Lock) -> Lease:
    """A second tenure of the lease's hold, as a reentrant lock makes one."""
    terms = Terms(lock.name, lock._kind, lock._options.settings, None, None)
    return Lease(hold_of(lease).enter_again(lease._tenure, terms), lock._kept)


def watched_by(client: Redlock) -> list[Any]:
    """The holds that the client's watchdog renews."""
    return [hold for slot in session_of(client).machine.watchdog._wheel.values() for hold in slot if not hold.over]


def in_wheel(watchdog: Any) -> list[Any]:
    """The holds that a watchdog has to check."""
    return [each for slot in watchdog._wheel.values() for each in slot]


def renew_now(lease: Lease) -> None:
    """Let the watchdog find at its next turn that the lease is due."""
    hold = hold_of(lease)
    hold.renew_at = hold.core.clock.now()
    hold.watch()


def stop_renewals(client: Redlock) -> None:
    """The client renews nothing any more."""
    session_of(client).machine.watchdog.stop()


def stop_renewals_of(lease: Lease) -> None:
    """The client of the lease renews nothing any more."""
    hold_of(lease)._holds.watchdog.stop()


async def end_of(tenure: Any) -> None:
    """Wait until it ends, in the turn in which it does."""
    ended = asyncio.get_running_loop().create_future()
    tenure.add_waiter(ended)
    await ended


def waiting_for_loss(lease: Lease) -> Any:
    """The tasks that wait for its loss."""
    return lease._tenure._waiters


# -- locks -------------------------------------------------------------------------------------------------------------


def kind_of(lock: Lock) -> Kind:
    return lock._kind


def client_of(lock: Lock) -> Redlock:
    return lock._session_of.__self__  # type: ignore[attr-defined]


def parts_of(lock: Lock) -> tuple[Any, ...]:
    """The locks that a multi lock is made of."""
    return tuple(lock._parts)


def tenures_of(lock: Lock) -> int:
    """How many leases the lock remembers."""
    return sum(len(tenures) for tenures in lock._kept._all().values())


def probe_nodes(lock: Lock) -> Coroutine[Any, Any, Any]:
    """The nodes' views of the name, as `locked` asks for them."""
    return lock._peek()


def plain_arguments(op: Any, prefix: str, tombstone: bool) -> list[Any]:
    """The arguments of an op, built without the cached parts."""
    return list(encoding._arguments(op, prefix, tombstone))


def undelivered_by(client: Redlock) -> int:
    """The releases that its node, of a transactional store, sends again."""
    (node,) = nodes_of(client)
    return len(node._redelivery)


def entered_blocks() -> int:
    """The number of blocks that this context remembers."""
    entered, count = lease_module._ENTERED.get(), 0
    while entered is not None:
        entered, count = entered[2], count + 1
    return count


def transport_of(connection: Any) -> asyncio.Transport:
    """That of a connection of redis-py, which is connected."""
    transport: asyncio.Transport = connection._writer.transport
    return transport
