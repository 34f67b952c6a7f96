"""A Redis cluster as one node: urls and clients, which master is asked, several names, operators."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode as StartupNode

from asynclock import ConfigError, QuorumUnavailable, Redlock, Unsupported
from asynclock.events import Event, NodeUp
from asynclock.rules.model import ID_LENGTH, Op, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis.cluster import masters
from asynclock.stores.redis.cluster.store import ClusterStore
from asynclock.stores.redis.keys import channel, slot_of, tag_within
from tests.support.commands import answered, json_of
from tests.support.connect_probes import before_use
from tests.support.ports import free_port
from tests.support.probes import (
    break_connection,
    connection_of,
    look,
    nodes_of,
    pool_of,
    redirected,
    tag_of,
    without_slots,
)
from tests.support.servers import Servers
from tests.support.services.cluster import Cluster
from tests.support.waiters import LIMIT, PATIENT, healthy, until, works

PREFIX = "lock:"


@pytest.fixture
async def redlock(shared_cluster: Cluster) -> AsyncIterator[Redlock]:
    async with Redlock(shared_cluster.url, **PATIENT) as client:
        yield client


def some_names(name: str, cluster: Cluster) -> list[str]:
    """A name at each master."""
    found: dict[int, str] = {}
    for number in range(100):
        each = f"{name}:{number}"
        found.setdefault(slot_of(PREFIX, each) * len(cluster.masters) // 16384, each)
    return list(found.values())


# -- urls and clients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+cluster://a:x", r"redis\+cluster://host:port"),
        ("redis+cluster://a:1/3", "only the db 0"),
        ("redis+cluster://a:1?db=3", "only the db 0"),
        ("redis+cluster://a:1,redis+cluster://b:2", "several nodes"),
        ("redis+cluster://me:sec#ret@a:1", "percent-encoded"),
        ("redis+cluster://a:1?min_replicas=1", "not supported on a cluster"),
    ],
)
def test_a_bad_url(url: str, says: str) -> None:
    """It is refused when the client is made, and shows no secret."""
    with pytest.raises(ConfigError, match=says) as caught:
        Redlock(url)
    assert "ret" not in str(caught.value).replace("secret", "")
    assert "sec#" not in str(caught.value)


def test_a_comma_at_the_end() -> None:
    """An empty host is no node: redis-py would take it for localhost, where another cluster may be."""
    assert ClusterStore("redis+cluster://a:1, b:2,").seeds == (("a", 1), ("b", 2))


def test_its_name_shows_no_secret() -> None:
    """In messages a cluster has the address of its first node."""
    assert repr(Redlock("redis+cluster://me:secret@a:1,b:2")) == "<Redlock cluster://a:1>"


async def test_the_first_node_is_down(shared_cluster: Cluster, name: str) -> None:
    """One node of the url is enough to find all others."""
    async with Redlock(f"redis+cluster://127.0.0.1:1,{shared_cluster.members[2].address}", **PATIENT) as client:
        for each in some_names(name, shared_cluster):
            async with client(each, timeout=LIMIT):
                pass


async def test_no_node_is_reachable(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log says that the node is down, as for each other store."""
    async with aclosing(Redlock(f"redis+cluster://127.0.0.1:{free_port()}", patience=0.1)) as client:
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire(timeout=0)
    (line,) = [each.getMessage() for each in caplog.records if " is down: " in each.getMessage()]
    assert line.startswith("asynclock: the node cluster://127.0.0.1:")


async def test_a_client_of_redis_py(shared_cluster: Cluster, name: str) -> None:
    """It is used for its settings and its nodes, and stays the user's."""
    node = StartupNode("127.0.0.1", shared_cluster.members[1].port)
    theirs = RedisCluster(startup_nodes=[node], decode_responses=True)
    async with Redlock(theirs) as client, client(name, lease=10) as lease:
        assert await theirs.get(PREFIX + name) is not None
        assert lease.held
    assert await theirs.get(PREFIX + name) is None
    await theirs.aclose()


async def test_no_cluster(servers: Servers, name: str) -> None:
    """A server that is no node of a cluster: the error says what to write."""
    port = free_port()
    servers.start("--port", str(port), "--bind", "127.0.0.1")
    with pytest.raises(ConfigError, match="is no node of a cluster: write redis://"):
        await Redlock(f"redis+cluster://127.0.0.1:{port}", **PATIENT)(name).acquire(timeout=LIMIT)


async def test_nobody_there(name: str) -> None:
    """The outage names the node that was tried."""
    client = Redlock("redis+cluster://127.0.0.1:1", patience=0.2, connect_timeout=LIMIT)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(QuorumUnavailable, match=r"127.0.0.1:1 .*refused"):
            await client(name).acquire()
        await client.aclose()


# -- the masters -----------------------------------------------------------------------------------------------------


async def test_each_name_is_at_its_master(shared_cluster: Cluster, redlock: Redlock, name: str) -> None:
    """All keys of a name are at the master that has its slot; the client has one connection to each master."""
    for each in some_names(name, shared_cluster):
        async with redlock(each):
            owner = shared_cluster.owner(slot_of(PREFIX, each))
            assert owner.cli("EXISTS", PREFIX + each) == 1
    (node,) = nodes_of(redlock)
    assert len(node.shards) == 3
    assert all(shard.up for shard in node.shards)


async def test_d8_any_name(redlock: Redlock) -> None:
    """Braces, spaces and other characters: each name has all its keys in one slot."""
    for name in ("{a}b", "a}b", "{}a", "a{b", "a b", "\u00e9\u4e2d", "{a}{b}", "x" * 3000):
        async with redlock(name), redlock.read(f"{name}r"):
            assert await redlock(name).locked()


def test_several_names_in_several_slots(shared_cluster: Cluster) -> None:
    """No command reaches several slots: the error shows the names to use instead."""
    redlock = Redlock(shared_cluster.url)
    with pytest.raises(Unsupported, match=r'redlock\.multi\("\{order\}:a", "\{order\}:b"\)'):
        redlock.multi("order:a", "order:b")
    with pytest.raises(Unsupported, match=r'redlock\.multi\("\{together\}:a", "\{together\}:b"\)'):
        redlock.multi("a", "b")
    redlock.multi("{order}:a", redlock.read("{order}:b"))
    Redlock(shared_cluster.url, prefix="{all}:").multi("a", "b")


async def test_several_names_in_one_slot(shared_cluster: Cluster, redlock: Redlock, name: str) -> None:
    """They are held together."""
    async with redlock.multi(f"{{{name}}}:a", f"{{{name}}}:b") as lease:
        assert await redlock(f"{{{name}}}:b").acquire(timeout=0) is None
        assert lease.fence > 0


async def test_a_prefix_in_one_slot(shared_cluster: Cluster, name: str) -> None:
    """A prefix with a hash tag has all names in one slot: only its master is asked."""
    async with Redlock(shared_cluster.url, prefix="{app}:") as client:
        async with client(name):
            assert [holder.name async for holder in client.holders()] == [name]
        assert len(nodes_of(client)[0].shards) == 1
        await healthy(client)


# -- notices ---------------------------------------------------------------------------------------------------------


def published(cluster: Cluster, command: str) -> int:
    """How often the masters have carried out that command."""
    found = [each.info("commandstats").get(f"cmdstat_{command}", "calls=0") for each in cluster.masters]
    return sum(int(each.partition("=")[2].partition(",")[0]) for each in found)


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("sharded", [True, False])
async def test_a_waiter_is_notified(shared_cluster: Cluster, name: str, sharded: bool) -> None:
    """By the master of the slot: by sharded pub/sub alone, or if the user may not use that, by the message that each
    node of the cluster passes on. Its ticket would be renewed long after this test."""
    for each in shared_cluster.members:
        rules = () if sharded else ("-ssubscribe",)
        each.cli("ACL", "SETUSER", "waits", "reset", "on", ">secret", "~*", "&*", "+@all", *rules)
    url = shared_cluster.url.replace("//", "//waits:secret@")
    long: Any = {**PATIENT, "lease": 600.0, "max_lease": 600.0}
    async with Redlock(url, **long) as redlock, Redlock(url, **long) as other:
        before = published(shared_cluster, "publish")
        for each in some_names(name, shared_cluster):
            lease = await redlock(each).acquire()
            assert lease
            waiting = asyncio.create_task(other(each).acquire(timeout=LIMIT))
            while not (await redlock.inspect(each)).waiters:
                await asyncio.sleep(0.005)
            await lease.release()
            got = await waiting
            assert got
            await got.release()
        assert (published(shared_cluster, "publish") == before) is sharded


# -- operators -------------------------------------------------------------------------------------------------------


async def test_operators(shared_cluster: Cluster, redlock: Redlock, name: str) -> None:
    """`holders` walks all masters, `inspect` and `break_lock` ask the right one."""
    names = some_names(name, shared_cluster)
    leases = [await redlock(each).acquire() for each in names]
    assert {holder.name async for holder in redlock.holders(name)} == set(names)
    assert [(await redlock.inspect(each)).kind for each in names] == ["mutex"] * 3
    assert await redlock.break_lock(names[0])
    lost, *others = leases
    assert lost is not None
    assert await lost.wait_lost()
    for lease in others:
        assert lease is not None
        await lease.release()
    assert [holder async for holder in redlock.holders(name)] == []


async def test_health_and_events(shared_cluster: Cluster) -> None:
    """All masters vote; the cluster is told to be up, once."""
    told: list[Event] = []
    client = Redlock(shared_cluster.url)
    client.subscribe(told.append)
    async with client:
        async with asyncio.timeout(LIMIT):
            while not (health := await client.health()).ok:
                await asyncio.sleep(0.01)
        assert (health.nodes[0].error, len(health.nodes)) == ("", 1)
    assert [each for each in told if isinstance(each, NodeUp)] == [
        NodeUp(f"cluster://{shared_cluster.masters[0].address}")
    ]


async def test_an_acl_user(shared_cluster: Cluster, name: str) -> None:
    """The error names the command that the user lacks."""
    rules = ("reset", "on", ">secret", "~*", "&*", "+@all")
    for each in shared_cluster.members:
        each.cli("ACL", "SETUSER", "lockuser", *rules)
        each.cli("ACL", "SETUSER", "blind", *rules, "-cluster")
    url = shared_cluster.url.replace("//", "//lockuser:secret@")
    async with Redlock(url) as client, client(name):
        pass
    with pytest.raises(ConfigError, match=r"\+cluster\|slots"):
        await Redlock(url.replace("lockuser", "blind"), **PATIENT)(name).acquire(timeout=LIMIT)


def test_doctor(shared_cluster: Cluster) -> None:
    """It examines each master. A cluster without replicas, whose masters do not wait for the disk, and refuse all
    commands while one of them is down."""
    done = answered("doctor", "--json", "--prefix", "of this test:", ASYNCLOCK_URLS=shared_cluster.url)
    answer = json_of(done)
    assert {each["check"] for each in answer["findings"]} == {"persistence", "replicas", "coverage"}
    assert [each["node"].partition(" ")[0] for each in answer["nodes"]] == [
        each.address for each in shared_cluster.masters
    ]
    assert done.returncode == 1


async def test_doctor_and_a_user_without_asking(shared_cluster: Cluster, name: str) -> None:
    """Locks work until a slot is moved: a warning, with a line to copy after which nothing is left to say of it."""

    def examined() -> dict[str, Any]:
        url = shared_cluster.url.replace("//", "//worker:secret@")
        done = answered("doctor", "--json", "--prefix", "unused:", ASYNCLOCK_URLS=url)
        return {each["check"]: each for each in json_of(done)["findings"] if each["check"] in ("acl", "commands")}

    for each in shared_cluster.masters:
        each.cli("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~*", "&*", "+@all", "-asking")
    try:
        said = examined()["acl"]
        assert said["severity"] == "warning"
        assert "forbids ASKING to the user worker" in said["what"]
        assert "While a slot is moved" in said["risk"]
        async with Redlock(shared_cluster.url.replace("//", "//worker:secret@")) as client, client(name):
            pass
        for each in shared_cluster.masters:
            each.cli("ACL", "SETUSER", "worker", "reset", "on", ">secret", "+config|get", "+acl|whoami")
            each.cli(*said["advice"].split())
        assert examined() == {}
    finally:
        for each in shared_cluster.masters:
            each.cli("ACL", "DELUSER", "worker")


# -- host names --------------------------------------------------------------------------------------------------------


async def test_nodes_without_a_host_name(name: str) -> None:
    """A cluster that gives host names to its clients, and knows none: a ConfigError says what to set, at once. The same
    client works when that is done."""
    cluster = Cluster(1, 0, "--cluster-preferred-endpoint-type", "hostname")
    try:
        (member,) = cluster.ready().members
        async with aclosing(Redlock(f"redis+cluster://{member.address}", **PATIENT)) as client:
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"slots 0-16383 .* set cluster-announce-hostname on each node"):
                    await client(name).acquire(timeout=LIMIT)
            done = answered("doctor", on=(), ASYNCLOCK_URLS=f"redis+cluster://{member.address}")
            assert done.returncode == 2
            assert "set cluster-announce-hostname" in done.stdout
            assert "give" not in done.stdout, "its master has all slots"
            member.cli("CONFIG", "SET", "cluster-announce-hostname", "localhost")
            async with asyncio.timeout(LIMIT):
                while not (await client.health()).ok:
                    await asyncio.sleep(0.05)
            await works(client, name)
    finally:
        cluster.stop()


class Told:
    """The handler of an op: whether its failure leaves in doubt that it was carried out."""

    def __init__(self, name: str, verb: Verb = Verb.ACQUIRE) -> None:
        self.op = Op(verb, MUTEX, name, "0" * ID_LENGTH, LIMIT)
        self.sent, self.deadline = 0.0, math.inf
        self.maybe: list[bool] = []

    def answer(self, index: int, reply: object) -> None:
        raise AssertionError(reply)

    def fail(self, index: int, error: Exception, *, maybe: bool) -> None:
        self.maybe.append(maybe)


async def test_an_op_that_goes_to_the_new_master_stays_in_doubt(shared_cluster: Cluster, name: str) -> None:
    """Its old master is silent, and may have carried it out. It cannot be sent to the new one, so it fails; a failure
    without a doubt would leave the old hold without an undo. An op that was never sent before is in no doubt."""
    async with Redlock(shared_cluster.url, **PATIENT) as client:
        (node,) = nodes_of(client)
    sent_before, new = Told(name), Told(name)
    node.replaced([sent_before])
    node.send(new.op, new)
    await until(lambda: bool(sent_before.maybe and new.maybe))
    assert (sent_before.maybe, new.maybe) == ([True], [False])


async def test_a_break_does_not_go_to_the_new_master(shared_cluster: Cluster, name: str) -> None:
    """Its old master is silent. It may have carried it out, and its replica knows that: a second break would end the
    hold of the next owner. So it fails, in doubt."""
    async with Redlock(shared_cluster.url, **PATIENT) as client:
        await works(client, name)
        (node,) = nodes_of(client)
        handler = Told(name, Verb.BREAK)
        node.replaced([handler])
        assert handler.maybe == [True]


async def test_a_master_that_is_found_as_the_program_cancels_all_tasks(shared_cluster: Cluster, name: str) -> None:
    """A redirection names it, and the program cancels all tasks of its loop in the same turn, and goes on. The client
    connects to it."""
    async with Redlock(shared_cluster.url, **PATIENT) as client:
        await works(client, name)
        (node,) = nodes_of(client)
        (host, port), *_ = (shard.address for shard in node.shards)
        assert host != "localhost"
        found = redirected(node, ("localhost", port))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await until(lambda: found.up)


async def test_a_master_without_slots_as_its_client_closes(shared_cluster: Cluster) -> None:
    """The client finds out that a master has no slots, and closes in the same turn of the loop: no connection is left,
    although the task that would close it is cancelled before its first step."""
    client = Redlock(shared_cluster.url, **PATIENT)
    await healthy(client)
    (node,) = nodes_of(client)
    shard = without_slots(node)
    connection = connection_of(shard)
    await node.aclose()
    assert connection.transport.is_closing()
    await client.aclose()


async def test_a_redirection_as_its_client_closes(shared_cluster: Cluster) -> None:
    """The client is closed as it learns the address of another master: it does not connect any more."""
    before = asyncio.all_tasks()
    client = Redlock(shared_cluster.url, **PATIENT)
    await healthy(client)
    await client.aclose()
    (node,) = nodes_of(client)
    shard = redirected(node, ("127.0.0.1", 1))
    with pytest.raises(ConnectionError):
        await shard.check_vote()
    assert asyncio.all_tasks() == before


async def test_the_keys_of_a_master_are_chosen_once(
    shared_cluster: Cluster, redlock: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They depend on its slots. For a master with few slots that takes thousands of tries, in one turn of the loop."""
    await healthy(redlock)
    (node,) = nodes_of(redlock)
    await look(node)
    tags, tries = [each.tag for each in node.shards], list[int]()
    real = masters.tag_within
    monkeypatch.setattr(masters, "tag_within", lambda owned: (tries.append(1), real(owned))[1])
    await look(node)
    assert not tries
    assert [each.tag for each in node.shards] == tags
    assert all(tags)


async def test_a_channel_that_changes_during_a_connect(
    shared_cluster: Cluster, redlock: Redlock, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of the channel leaves the master after the handshake. The client subscribes to the next one, since it
    would get no notices with a grant on the old one."""
    await works(redlock, name)
    (node,) = nodes_of(redlock)
    shard = node.shards[0]
    (member,) = [each for each in shared_cluster.masters if each.port == shard.address.port]
    first, at = slot_of("", f"{{{shard.tag}}}"), shared_cluster.masters.index(member)
    other = tag_within(lambda slot: slot * len(shared_cluster.masters) // 16384 == at and slot != first)
    before_use(shard, monkeypatch, lambda: setattr(shard, "tag", other))
    break_connection(connection_of(shard))
    await until(lambda: channel(tag_of(redlock), other).encode() in member.cli("PUBSUB", "SHARDCHANNELS"))


async def test_names_in_one_slot_without_a_hash_tag(shared_cluster: Cluster, redlock: Redlock, name: str) -> None:
    """They share it by chance. The ops of a lock of both go to the master of that slot at once, and not to that of the
    slot of their joined text."""
    seen = dict[int, str]()
    for number in count():
        each = f"{name}:{number}"
        slot = slot_of(PREFIX, each)
        if slot in seen and _master(slot) != _master(slot_of(PREFIX, ", ".join(sorted([seen[slot], each])))):
            break
        seen.setdefault(slot, each)
    await works(redlock, each)
    before = shared_cluster.refusals("MOVED")
    async with redlock.multi(seen[slot], each) as lease:
        await lease.extend()
    assert shared_cluster.refusals("MOVED") == before


def _master(slot: int) -> int:
    return slot * 3 // 16384


@pytest.mark.filterwarnings("ignore:.*read_from_replicas:DeprecationWarning")
def test_a_client_that_reads_from_replicas() -> None:
    """Its connections send READONLY. Those of the locks do not: they read and write at masters."""
    theirs = RedisCluster("a", 6379, read_from_replicas=True)
    store = ClusterStore(theirs)
    assert "redis_connect_func" not in pool_of(store.dialer(store.seeds[0])).connection_kwargs
