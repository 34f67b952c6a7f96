"""A simulated Redis server: its connections, its commands, pub/sub, restarts, and the errors that it may answer.

It speaks RESP and runs the shipped scripts. A server may crash (with its data, without, or without the last writes),
freeze, refuse commands, or be a replica. What a connection has sent stays readable after its client has gone."""

from __future__ import annotations

import math
import re
from hashlib import sha1
from typing import TYPE_CHECKING, Any

from redis.crc import key_slot

from simulation.loop import WALL
from simulation.stack.keyspace import OK, Keyspace, Scores, Value
from simulation.stack.resp import Error, Push, Requests, Status, encode
from simulation.stack.scripts import scripts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from simulation.stack.network import Connection
    from simulation.stack.world import World

_ALWAYS = frozenset([b"HELLO", b"CLIENT", b"COMMAND", b"INFO", b"PING", b"AUTH"])
_QUIET = frozenset([b"HELLO", b"CLIENT", b"COMMAND", b"INFO", b"SCRIPT"])
"""Commands of each new connection, which are not in the trace."""

READ_ONLY = "READONLY You can't write against a read only replica."
_ERRORS = {
    "readonly": READ_ONLY,
    "oom": "OOM command not allowed when used memory > 'maxmemory'.",
    "loading": "LOADING Redis is loading the dataset in memory",
    "busy": "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "misconf": "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
}
_ID = re.compile(rb"\+?([0-9a-f]{32})[|!]")
_PONG = Status("PONG")
_NO_SCRIPT = Error("NOSCRIPT No matching script. Please use EVAL.")


class _Peer:
    """A connection at a server."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.requests = Requests()
        self.protocol = 2
        self.channels: dict[bytes, None] = {}
        self.shard_channels: dict[bytes, None] = {}
        self.asking = False
        self.ended = False


class Server:
    """See the module."""

    mode = "standalone"

    def __init__(
        self, world: World, host: str, port: int, node: int, random: Random, rate: float, offset: float
    ) -> None:
        self.world = world
        self.host, self.port = host, port
        self.node = self.index = node
        self.label = f"{host}:{port}"
        self.state = "up"  # as the network sees it: "refuses" or "silent" after a crash
        self.role = "master"
        self.switched_at = math.inf  # an old master: when the last sentinel has learnt of the new one
        self.errs = ""  # the key of _ERRORS that it answers now
        self.native = False  # it knows DELIFEQ
        self.keys = Keyspace(self.now_ms)
        self.replication = (f"{random.getrandbits(160):040x}", "0" * 40)
        self._random = random
        self._rate, self._offset = rate, offset
        self._peers: dict[Connection, _Peer] = {}
        self._pending: dict[_Peer, bytes] = {}  # what it writes after the commands that it has read
        self._frozen = 0
        self._inbox: list[tuple[Connection, bytes | None]] = []  # while it is frozen
        self._scripts: set[bytes] = set()
        self._snapshot: dict[bytes, Value] = {}
        self._start()
        world.network.listeners[host, port] = self

    def __repr__(self) -> str:
        return f"<{self.label} {self.state} {self.role}>"

    def _start(self) -> None:
        self.run_id = f"{self._random.getrandbits(160):040x}"
        self.started = self.world.schedule.now
        self._scripts.clear()

    # -- clocks ----------------------------------------------------------------------------------------------------

    def now_ms(self) -> float:
        return (WALL + self._offset + self._rate * self.world.schedule.now) * 1000

    def true_time(self, ms: float) -> float:
        return (ms / 1000 - WALL - self._offset) / self._rate

    # -- as the judge sees it ----------------------------------------------------------------------------------------

    def holders(self, key: bytes) -> dict[str, float]:
        """The ids that hold a name, each with the true time of its end."""
        value = self.keys.get(key)
        if value is None:
            return {}
        if isinstance(value.data, bytes):
            match = _ID.match(value.data)
            return {} if match is None else {match[1].decode(): self.true_time(value.ends)}
        if not isinstance(value.data, Scores):
            return {}
        found = {}
        for member, score in value.data.items():
            if (match := _ID.match(member)) is not None and score > self.now_ms():
                found[match[1].decode()] = self.true_time(min(score, value.ends))
        return found

    def ids(self, key: bytes) -> list[str]:
        """The ids of holders and waiters in a key."""
        value = self.keys.get(key)
        if value is None or key.endswith(b"fence"):
            return []
        if isinstance(value.data, Scores):
            found = [_ID.match(each) for each in value.data if value.data[each] > self.now_ms() or b"queue" in key]
        elif isinstance(value.data, bytes):
            found = [_ID.match(value.data)]
        else:
            return [each.decode() for each in value.data]
        return [match[1].decode() for match in found if match is not None]

    def left(self) -> list[str]:
        """The keys beside counters and marks of first use."""
        return [
            key.decode()
            for key in list(self.keys.values)
            if self.keys.get(key) is not None and b"fence" not in key and not key.endswith(b"used")
        ]

    # -- the network -----------------------------------------------------------------------------------------------

    @property
    def reachable(self) -> str:
        return self.state

    def accept(self, connection: Connection) -> None:
        self._peers[connection] = _Peer(connection)

    def received(self, connection: Connection, data: bytes) -> None:
        if self._frozen:
            self._inbox.append((connection, data))
        elif (peer := self._peers.get(connection)) is not None:
            self._read(peer, data)

    def hung_up(self, connection: Connection) -> None:
        if self._frozen:
            self._inbox.append((connection, None))
        else:
            self._peers.pop(connection, None)
            connection.close()

    def _read(self, peer: _Peer, data: bytes) -> None:
        for words in peer.requests.feed(data):
            self._write(peer, self._answer(peer, words))
        self._flush()

    def _write(self, peer: _Peer, data: bytes) -> None:
        self._pending[peer] = self._pending.get(peer, b"") + data

    def _flush(self) -> None:
        """Redis writes first to the connection that had output last."""
        pending, self._pending = self._pending, {}
        for peer, data in reversed(pending.items()):
            peer.connection.send(data)

    def _answer(self, peer: _Peer, words: list[bytes]) -> bytes:
        world, asking = self.world, peer.asking
        peer.asking = False
        world.counts["commands"] += 1
        reply = self._do(peer, words, asking)
        if world.tracing and words[0].upper() not in _QUIET:
            world.trace(self.label, f"{_shown(words)} -> {_brief(reply)} (connection {peer.connection.number})")
        if isinstance(reply, list) and reply and isinstance(reply[0], Push):
            return b"".join(encode(each, peer.protocol) for each in reply)
        return encode(reply, peer.protocol)

    # -- commands --------------------------------------------------------------------------------------------------

    def _do(self, peer: _Peer, words: list[bytes], asking: bool) -> Any:
        command = words[0].upper()
        if self.errs in ("loading", "busy") and command not in _ALWAYS:
            return Error(_ERRORS[self.errs])
        if (redirection := self._elsewhere(command, words, asking)) is not None:
            return redirection
        if command in (b"EVALSHA", b"EVAL"):
            return self._script(command, words)
        handler = getattr(self, f"_do_{command.decode().lower()}", None)
        if handler is not None:
            return handler(peer, words)
        refused = self._refuses(words)
        if refused is not None:
            return refused
        reply = self.keys.do(words)
        self._observe(words, reply)
        return reply

    def _elsewhere(self, command: bytes, words: Sequence[bytes], asking: bool) -> Error | None:
        """Of a cluster: another node has the slot."""
        del command, words, asking
        return None

    def _refuses(self, words: Sequence[bytes]) -> Error | None:
        word = words[0]
        if self.role == "replica" and self.keys.is_write(word):
            return Error(READ_ONLY)
        if self.errs in ("oom", "misconf", "readonly"):
            refused = self.keys.needs_memory(word) if self.errs == "oom" else self.keys.is_write(word)
            return Error(_ERRORS[self.errs]) if refused else None
        return None

    def _script(self, command: bytes, words: Sequence[bytes]) -> Any:
        if command == b"EVAL":
            sha = scripts().sha(words[1])
            self._scripts.add(sha)
        elif (sha := words[1].lower()) not in self._scripts:
            return _NO_SCRIPT
        count = int(words[2])
        keys, arguments = words[3 : 3 + count], words[3 + count :]
        wrote = False

        def do(call: Sequence[bytes]) -> Any:
            nonlocal wrote
            word = call[0].upper()
            if word == b"PUBLISH":
                return self.publish(call[1], call[2])
            if word == b"SPUBLISH":
                return self._publish_in_shard(call[1], call[2])
            if word == b"PUBSUB":
                return [call[2], len(self._listeners(call[2], shard=True))]
            if (not wrote or self.role == "replica") and (refused := self._refuses(call)) is not None:
                return refused
            wrote |= self.keys.is_write(word)
            return self.keys.do(call)

        reply = scripts().run(sha, keys, arguments, do)
        self._observe(words, reply)
        return reply

    def _observe(self, words: Sequence[bytes], reply: Any) -> None:
        """Let the judge see what the command has changed."""
        changed = list(self.keys.changed)
        self.keys.changed.clear()
        self.world.judge.carried_out_at(self, words, reply, changed)

    def _do_ping(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del words
        subscribed = peer.protocol == 2 and peer.channels
        return [b"pong", b""] if subscribed else _PONG

    def _do_hello(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        if len(words) > 1:
            peer.protocol = int(words[1])
        return {
            b"server": b"redis", b"version": b"7.4.0", b"proto": peer.protocol, b"id": peer.connection.number,
            b"mode": self.mode.encode(), b"role": self.role.encode(), b"modules": [],
        }  # fmt: skip

    def _do_client(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del peer, words
        return OK

    def _do_command(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del peer
        return [[word.lower(), 3] if self.native and word.upper() == b"DELIFEQ" else None for word in words[2:]]

    def _do_info(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del peer
        up = self.world.schedule.now - self.started
        fields = {
            b"memory": {"maxmemory": "0", "maxmemory_policy": "noeviction"},
            b"server": {"run_id": self.run_id, "uptime_in_seconds": str(int(up)), "redis_version": "7.4.0"},
            b"replication": {
                "role": "slave" if self.role == "replica" else "master", "master_replid": self.replication[0],
                "master_replid2": self.replication[1], "connected_slaves": "0",
            },
        }  # fmt: skip
        section = words[1].lower() if len(words) > 1 else b"server"
        return "".join(f"{name}:{value}\r\n" for name, value in fields.get(section, {}).items())

    def _do_script(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del peer
        sha = scripts().sha(words[2])
        self._scripts.add(sha)
        return sha

    def forget_scripts(self) -> None:
        self._scripts.clear()

    # -- pub/sub ---------------------------------------------------------------------------------------------------

    def _do_subscribe(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        for channel in words[1:]:
            peer.channels[channel] = None
        return [Push((b"subscribe", channel, len(peer.channels))) for channel in words[1:]]

    def _do_ssubscribe(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        for channel in words[1:]:
            peer.shard_channels[channel] = None
        return [Push((b"ssubscribe", channel, len(peer.shard_channels))) for channel in words[1:]]

    def _do_publish(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del peer
        return self.publish(words[1], words[2])

    def _listeners(self, channel: bytes, *, shard: bool = False) -> list[_Peer]:
        return [each for each in self._peers.values() if channel in (each.shard_channels if shard else each.channels)]

    def publish(self, channel: bytes, message: bytes) -> int:
        return self.send_to_listeners(channel, message)

    def send_to_listeners(self, channel: bytes, message: bytes, *, shard: bool = False) -> int:
        found = self._listeners(channel, shard=shard)
        for peer in found:
            push = Push((b"smessage" if shard else b"message", channel, message))
            self._write(peer, encode(push, peer.protocol))
        if self.world.tracing and message:
            self.world.trace(self.label, f"notice {message.decode(errors='replace')} to {len(found)}")
        return len(found)

    def _publish_in_shard(self, channel: bytes, message: bytes) -> int:
        return self.send_to_listeners(channel, message, shard=True)

    # -- what happens to it ----------------------------------------------------------------------------------------

    def freeze(self, seconds: float) -> None:
        """SIGSTOP: the kernel accepts and acknowledges, and the server does nothing."""
        self._frozen += 1
        self.world.schedule.at(self.world.schedule.now + seconds, self._thaw)

    def _thaw(self) -> None:
        self._frozen -= 1
        if self._frozen or self.state != "up":
            return
        inbox, self._inbox = self._inbox, []
        for connection, data in inbox:
            if data is None:
                self.hung_up(connection)
            else:
                self.received(connection, data)

    def snapshot(self) -> None:
        """What is on its disk, or at a replica."""
        self._snapshot = self.keys.copy()

    def crash(self, *, silent: bool) -> None:
        """The process ends: the kernel resets its connections. With `silent` the host has gone, too."""
        self.state = "silent" if silent else "refuses"
        self._inbox.clear()
        peers, self._peers = self._peers, {}
        for connection in peers:
            if silent:
                connection.to_client.broken = True
                connection.server_open = False
            else:
                connection.reset(keeps_requests=False)
                connection.server_open = False

    def crash_now(self, detail: str) -> None:
        if self.state == "up":
            self.crash(silent=detail == "silent")

    def age(self, seconds: float, *, mark: bool) -> None:
        """It has run for so long, and was used."""
        self.started -= seconds
        if mark:
            self.keys.values[b"lock:asynclock~used"] = Value(self.run_id.encode())

    def restart(self, lost: str) -> None:
        """`lost`: "" (nothing), "empty", or "rewound" (to its snapshot)."""
        if self.state == "up":
            return
        if lost:
            self.keys.values = {} if lost == "empty" else {key: value.copy() for key, value in self._snapshot.items()}
            self.world.judge.forgot(self)
            self.world.judge.came_back(self)
        self.replication = (f"{self._random.getrandbits(160):040x}", "0" * 40)
        self.state = "up"
        self._start()

    def promote(self, master: Server) -> None:
        """It takes the place of this master, with the data of the master's snapshot."""
        self.keys.values = {key: value.copy() for key, value in master._snapshot.items()}
        self.role = "master"
        self.replication = (f"{self._random.getrandbits(160):040x}", master.replication[0])
        self.world.judge.forgot(self)

    def demote(self) -> None:
        """It becomes a replica: its clients are disconnected."""
        self.role = "replica"
        for connection in list(self._peers):
            self._peers.pop(connection)
            connection.close()

    def heal(self) -> None:
        self.errs = ""
        if self._frozen:
            self._frozen = 1
            self._thaw()
            self._frozen = 0
        self.restart("")


class ClusterServer(Server):
    """A master of a cluster."""

    mode = "cluster"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.slots: set[int] = set()
        self.view: dict[int, ClusterServer] = {}  # slot -> its master, as this one knows it
        self.migrating: dict[int, ClusterServer] = {}
        self.importing: set[int] = set()

    def _elsewhere(self, command: bytes, words: Sequence[bytes], asking: bool) -> Error | None:
        keys = _keys_of(command, words)
        if not keys:
            return None
        slots = {key_slot(key.partition(b"\0")[0] if command == b"SSUBSCRIBE" else key) for key in keys}
        if len(slots) > 1:
            return Error("CROSSSLOT Keys in request don't hash to the same slot")
        slot = slots.pop()
        missing = [key for key in keys if self.keys.get(key) is None] if command != b"SSUBSCRIBE" else []
        if slot in self.importing and asking:
            if len(keys) > 1 and missing:
                return Error("TRYAGAIN Multiple keys request during rehashing of slot")
            return None
        if slot not in self.slots:
            to = self.view.get(slot)
            if to is None or to is self:
                return Error("CLUSTERDOWN Hash slot not served")
            return Error(f"MOVED {slot} {to.host}:{to.port}")
        if (target := self.migrating.get(slot)) is not None and missing:
            if len(missing) < len(keys):
                return Error("TRYAGAIN Multiple keys request during rehashing of slot")
            return Error(f"ASK {slot} {target.host}:{target.port}")
        return None

    def _do_asking(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del words
        peer.asking = True
        return OK

    def _do_cluster(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del peer, words
        found: list[Any] = []
        begin, owner = 0, self.view.get(0)
        for slot in range(1, 16385):
            now = self.view.get(slot) if slot < 16384 else None
            if now is not owner or slot == 16384:
                if owner is not None:
                    found.append([begin, slot - 1, [owner.host, owner.port, owner.run_id]])
                begin, owner = slot, now
        return found

    def publish(self, channel: bytes, message: bytes) -> int:
        """It goes to all nodes of the cluster; only the own listeners count."""
        schedule = self.world.schedule
        for each in self.world.servers:
            if isinstance(each, ClusterServer) and each is not self and each.state == "up":
                schedule.at(schedule.now + 0.001, each.pass_on, channel, message)
        return self.send_to_listeners(channel, message)

    def pass_on(self, channel: bytes, message: bytes) -> None:
        """A message that another node of the cluster has sent."""
        self.send_to_listeners(channel, message)
        self._flush()

    # -- slots that move ---------------------------------------------------------------------------------------------

    def give(self, slot: int, to: ClusterServer) -> None:
        """The slot is moved: from now on its keys go there one by one."""
        if slot in self.slots and slot not in self.migrating and to.state == "up" and to is not self:
            self.migrating[slot] = to
            to.importing.add(slot)

    def give_key(self, slot: int) -> bool:
        """MIGRATE of one key. False: none is left."""
        to = self.migrating.get(slot)
        if to is None or to.state != "up" or self.state != "up":
            return False
        for key in list(self.keys.values):
            if key_slot(key) == slot and (value := self.keys.get(key)) is not None:
                left = value.ends - self.now_ms()
                moved = value.copy()
                moved.ends = value.ends if left == math.inf else to.now_ms() + left
                to.keys.values[key] = moved
                del self.keys.values[key]
                self.world.judge.moved(self, to, key)
                return True
        return False

    def give_all(self, slot: int) -> None:
        """The end of the move: the other one has the slot."""
        to = self.migrating.get(slot)
        if to is None:
            return
        if to.state != "up" or self.state != "up":  # the tool that moves the slot goes on later
            self.world.schedule.at(self.world.schedule.now + 0.5, self.give_all, slot)
            return
        while self.give_key(slot):
            pass
        del self.migrating[slot]
        to.importing.discard(slot)
        self.slots.discard(slot)
        to.slots.add(slot)
        self.view[slot] = to.view[slot] = to
        world = self.world
        for each in world.servers:
            if isinstance(each, ClusterServer) and each not in (self, to):
                world.schedule.at(world.schedule.now + 0.1, each.view.__setitem__, slot, to)
        for peer in self._peers.values():
            for channel in [each for each in peer.shard_channels if key_slot(each) == slot]:
                del peer.shard_channels[channel]
                push = Push((b"sunsubscribe", channel, len(peer.shard_channels)))
                peer.connection.send(encode(push, peer.protocol))


def _keys_of(command: bytes, words: Sequence[bytes]) -> Sequence[bytes]:
    if command in (b"EVALSHA", b"EVAL"):
        return words[3 : 3 + int(words[2])]
    if command in (b"GET", b"SET", b"PTTL", b"TYPE", b"DELIFEQ", b"SSUBSCRIBE"):
        return words[1:2]
    return words[1:] if command in (b"EXISTS", b"DEL", b"MGET") else ()


def _shown(words: Sequence[bytes]) -> str:
    """A command, for the trace: the scripts of asynclock by their verb and id."""
    command = words[0].decode()
    if command in ("EVAL", "EVALSHA") and words[2:3] != [b"0"]:
        arguments = words[3 + int(words[2]) :]
        about = b" ".join(arguments[:1]).decode() + " " + _id(arguments[1] if len(arguments) > 1 else b"")
        more = b" ".join(each for each in arguments[5:] if each)[:60]
        return f"{command} {words[3].decode()} {about} [{more.decode(errors='replace')}]"
    if command == "SCRIPT":
        return f"SCRIPT LOAD {sha1(words[2]).hexdigest()[:6]}"  # noqa: S324 - as Redis
    return b" ".join(words).decode(errors="replace")[:100]


def _id(raw: bytes) -> str:
    return raw[:4].decode() + "." + raw[12:18].decode()


def _brief(reply: Any) -> str:
    return repr(reply)[:90]


class SentinelServer(Server):
    """A sentinel, which names the master of one deployment."""

    mode = "sentinel"

    def __init__(self, *args: Any, master: Server) -> None:
        super().__init__(*args)
        self.master = master
        self.epoch = 0
        self._since = -10_000.0

    def _do_sentinel(self, peer: _Peer, words: Sequence[bytes]) -> Any:
        del peer
        if words[1].upper() == b"GET-MASTER-ADDR-BY-NAME":
            return [self.master.host.encode(), str(self.master.port).encode()]
        age = int((self.world.schedule.now - self._since) * 1000)
        fields = {
            "name": "mymaster", "ip": self.master.host, "port": str(self.master.port), "num-other-sentinels": "2",
            "config-epoch": str(self.epoch), "role-reported-time": str(age),
        }  # fmt: skip
        return [word.encode() for pair in fields.items() for word in pair]

    def switch(self, master: Server, epoch: int) -> None:
        """It learns of a failover."""
        if epoch <= self.epoch:
            return
        old, self.master, self.epoch, self._since = self.master, master, epoch, self.world.schedule.now
        text = f"mymaster {old.host} {old.port} {master.host} {master.port}"
        if self.state == "up":
            self.send_to_listeners(b"+switch-master", text.encode())
            self._flush()
