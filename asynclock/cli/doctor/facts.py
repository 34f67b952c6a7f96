"""What `asynclock doctor` asks each server, on a connection of its own with the settings of the url.

It changes no key: the commands that could are sent in a form that does nothing, to a key that does not exist. If INFO
is refused, it writes a random key and deletes it (`addresses.py`). A command that a server refuses, or answers with
something else than it should, leaves its fact unknown.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from asynclock._errors import ConfigError
from asynclock._options import RESERVED
from asynclock._untrusted import number_of
from asynclock.cli.doctor.addresses import servers_at
from asynclock.cli.doctor.sentinels import SentinelFacts, ask_sentinels
from asynclock.cli.doctor.severity import CONNECT
from asynclock.rules.model import MARK, RESTING_MARK, TIMED, is_made_by_asynclock
from asynclock.stores.redis.checks import probe_keys
from asynclock.stores.redis.connecting import follow
from asynclock.stores.redis.hang_ups import explained
from asynclock.stores.redis.keys import channel, mark
from asynclock.stores.redis.replies import ACL_COMMANDS, ServerError, connect_error
from asynclock.stores.redis.restarts import fields
from asynclock.stores.redis.stages import Stage

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from asynclock.stores.redis.restarts import Dialer

PINGS = 20
_CLOCK_SAMPLES = 5
_ANSWER = 5.0  # seconds for all answers of one server to one question
_PAGES = 10  # of SCAN
_PAGE = "500"
_SAMPLE = 100  # keys of which the type is read
_SETTINGS = ("appendfsync", "save", "stop-writes-on-bgsave-error", "min-replicas-to-write")
_LIBRARY = re.compile(r"lib-name=asynclock\(max_lease=([\d.e+]+)\)")

_CODES = {OutOfMemoryError: "OOM ", ReadOnlyError: "READONLY ", MasterDownError: "MASTERDOWN "}
"""By the class that redis-py makes of an error reply, the code that it removes from the text."""


@dataclass(slots=True)
class ClusterFacts:
    """The cluster of a master."""

    label: str
    masters: int
    uncovered: int
    """The slots that no master has."""
    full_coverage: str | None = None
    """Its cluster-require-full-coverage: "yes" or "no"."""
    node_timeout: float | None = None
    """Its cluster-node-timeout, in seconds."""


@dataclass(slots=True)
class NodeFacts:
    """One server. Empty or None: unknown."""

    node: str
    error: str = ""
    """Why it does not answer; "" if it does."""
    misconfigured: bool = False
    """Only the user can solve that: a lock raises ConfigError."""
    run_id: str = ""
    product: str = ""
    version: str = ""
    mode: str = ""
    role: str = ""
    replicas: int = 0
    uptime: float | None = None
    mark: str = ""
    """The run_id that the server had at its first use; "" if it was never used."""
    elsewhere: str = ""
    """Why it does not serve all names: it is one node of a cluster, and was named by itself."""
    loading: bool = False
    snapshots_fail: bool = False
    """The last snapshot failed, and the server refuses writes after that."""
    appends_fail: bool = False
    """The last write to its append-only file failed, and the server refuses writes after that."""
    no_write: str = ""
    """Its refusal of a SET that would have written nothing, for another reason than the rights of the user."""
    append_only: bool | None = None
    fsync: str = ""
    save: str | None = None
    maxmemory: int | None = None
    policy: str = ""
    used_memory: int = 0
    offset: float | None = None
    """Its clock less the clock of this machine, in seconds."""
    offset_error: float = 0.0
    latencies: tuple[float, ...] = ()
    """Of some PINGs, in seconds."""
    max_leases: dict[float, int] = field(default_factory=dict)
    """The max_lease of the clients that are connected now, and how many have it."""
    user: str = ""
    refused: tuple[str, ...] = ()
    """The commands that the user may not send, or not for these keys and channels."""
    unknown: tuple[str, ...] = ()
    """The commands that the server does not know."""
    hidden: tuple[str, ...] = ()
    """The commands that only the doctor needs, and may not send."""
    keys: int = 0
    """The keys with the prefix that were looked at."""
    foreign: dict[str, int] = field(default_factory=dict)
    """Those that are no locks of asynclock, by type; "string with expiry" may be locks of another library."""
    example: str = ""
    cluster: ClusterFacts | None = None
    """Of a master of a cluster that was named as a whole."""
    sentinels: tuple[SentinelFacts, ...] = ()
    """The sentinels that name this master, if the url names sentinels."""
    min_replicas: int = 0
    """The option of the store."""
    min_replicas_to_write: int | None = None
    servers: tuple[str, ...] | None = None
    """The run_ids that several connections to its address reached, "?" for those that do not tell it."""

    def failed(self, error: Exception) -> None:
        """It cannot be asked."""
        self.error, self.misconfigured = str(error), isinstance(error, ConfigError)


async def facts_of(
    store: Dialer, prefix: str, cluster: ClusterFacts | None = None, *, connect: float = CONNECT
) -> NodeFacts:
    """Ask one server; `cluster`: it is a master of one; `connect`: the connect_timeout of the clients. Never raises for
    what the server says or does."""
    facts, stages = NodeFacts(store.label, cluster=cluster), [Stage.CONNECT]
    facts.min_replicas = getattr(store, "min_replicas", 0)
    if (sentinels := getattr(store, "sentinels", None)) is not None:
        facts.sentinels = await ask_sentinels(sentinels)
    try:
        connection = await store.dial()  # it may have to start an embedded server
    except Exception as error:
        facts.failed(connect_error(store.label, error, stages[-1]))
        return facts
    follow(connection, stages.append)
    try:
        async with asyncio.timeout(connect):
            await connection.connect()  # type: ignore[no-untyped-call]
    except Exception as error:
        facts.failed(connect_error(store.label, await explained(connection, error, stages[-1], connect), stages[-1]))
        return facts
    try:
        await _Questions(connection, facts, prefix).ask_all()
        if cluster is None:
            facts.servers = await servers_at(store, prefix)
    except (OSError, RedisError, TimeoutError) as error:
        why = await explained(connection, error, stages[-1], connect)
        if why is not error or isinstance(error, AuthenticationError):
            facts.failed(connect_error(store.label, why, stages[-1]))
        else:
            said = f": {error}" if str(error) else f" did not answer within {_ANSWER:g} s"
            facts.error = f"{store.label}{said}"
    finally:
        await connection.disconnect(nowait=True)
    return facts


class _Questions:
    """The questions to one server."""

    def __init__(self, connection: AbstractConnection, facts: NodeFacts, prefix: str) -> None:
        self._connection = connection
        self._facts = facts
        self._prefix = prefix

    async def ask_all(self) -> None:
        """The measurements come first, so that the other questions do not disturb them. SUBSCRIBE comes last, because a
        connection that has subscribed accepts no other commands."""
        await self._ask("PING")
        await self._latency()
        await self._clock()
        await self._server()
        await self._clients()
        await self._keys()
        if self._facts.cluster is not None:
            await self._cluster(self._facts.cluster)
        else:
            await self._slots()
        await self._permissions()

    async def _many(self, *commands: tuple[str, ...]) -> list[Any]:
        """The answers, in order; a refusal is an answer. A server that loads its data answers INFO, and refuses most
        other commands."""
        answers: list[Any] = []
        async with asyncio.timeout(_ANSWER):
            packed = self._connection.pack_commands(commands)
            await self._connection.send_packed_command(packed)
            for _ in commands:
                try:
                    answers.append(await self._connection.read_response(disconnect_on_error=False))
                except (ResponseError, BusyLoadingError) as error:
                    self._facts.loading |= isinstance(error, BusyLoadingError)
                    answers.append(error)
        return answers

    async def _ask(self, *command: str) -> Any:
        return (await self._many(command))[0]

    # -- measurements --------------------------------------------------------------------------------------------

    async def _latency(self) -> None:
        taken = []
        for _ in range(PINGS):
            began = time.perf_counter()
            await self._ask("PING")
            taken.append(time.perf_counter() - began)
        self._facts.latencies = tuple(taken)

    async def _clock(self) -> None:
        """The server read its clock between the sending of TIME and the answer: the shortest round trip says most."""
        for _ in range(_CLOCK_SAMPLES):
            sent = time.time()
            answer = await self._ask("TIME")
            received = time.time()
            if (server := _unix_time(answer)) is None:
                return
            error = (received - sent) / 2
            if self._facts.offset is None or error < self._facts.offset_error:
                self._facts.offset, self._facts.offset_error = server - (sent + received) / 2, error

    # -- what it says of itself ----------------------------------------------------------------------------------

    async def _server(self) -> None:
        facts = self._facts
        info, used, who, *settings = await self._many(
            ("INFO",),
            ("GET", mark(self._prefix)),
            ("ACL", "WHOAMI"),
            *(("CONFIG", "GET", each) for each in _SETTINGS),
        )
        self._note("INFO", info)
        self._note("CONFIG GET", *settings)
        said = fields(info)
        fsync, save, stops, to_write = map(_setting, settings)
        facts.min_replicas_to_write = number_of(to_write or "")
        facts.run_id = said.get("run_id", "")
        facts.product = "valkey" if "valkey_version" in said else "redis" if said else ""
        facts.version = said.get("valkey_version") or said.get("redis_version", "")
        facts.mode = said.get("server_mode") or said.get("redis_mode", "")
        facts.role = "replica" if said.get("role") == "slave" else said.get("role", "")
        facts.replicas = number_of(said.get("connected_slaves", "")) or 0
        facts.uptime = number_of(said.get("uptime_in_seconds", ""))
        facts.mark = _text(used)
        facts.loading |= said.get("loading") == "1"
        facts.snapshots_fail = said.get("rdb_last_bgsave_status") == "err" and bool(save) and stops != "no"
        facts.append_only = said["aof_enabled"] == "1" if "aof_enabled" in said else None
        facts.appends_fail = bool(facts.append_only) and said.get("aof_last_write_status") == "err"
        facts.fsync = fsync or ""
        facts.save = save
        facts.maxmemory = number_of(said.get("maxmemory", ""))
        facts.policy = said.get("maxmemory_policy", "")
        facts.used_memory = number_of(said.get("used_memory", "")) or 0
        facts.user = _text(who)

    async def _clients(self) -> None:
        """asynclock tells servers from Redis 7.2 and Valkey on the max_lease of each client."""
        clients = await self._ask("CLIENT", "LIST")
        self._note("CLIENT LIST", clients)
        known = self._facts.max_leases
        for text in _LIBRARY.findall(_text(clients)):
            if (said := _seconds(text)) is not None:
                known[said] = known.get(said, 0) + 1

    async def _cluster(self, cluster: ClusterFacts) -> None:
        names = ("cluster-require-full-coverage", "cluster-node-timeout")
        coverage, timeout = map(_setting, await self._many(*(("CONFIG", "GET", each) for each in names)))
        cluster.full_coverage = coverage
        milliseconds = number_of(timeout or "")
        cluster.node_timeout = None if milliseconds is None else milliseconds / 1000

    async def _slots(self) -> None:
        """Whether it has all slots of names, as far as two of them tell, as clients look (`checks.py`)."""
        for each in await self._many(*(("EXISTS", key) for key in probe_keys(self._prefix))):
            if is_elsewhere(each):
                self._facts.elsewhere = str(each)

    async def _keys(self) -> None:
        """Look at some of the keys with the prefix."""
        facts, cursor, found = self._facts, "0", list[str]()
        pattern = "".join(f"\\{each}" if each in "*?[]\\" else each for each in self._prefix)
        for _ in range(_PAGES):
            page = await self._ask("SCAN", cursor, "MATCH", f"{pattern}*", "COUNT", _PAGE)
            self._note("SCAN", page)
            if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list):
                return
            cursor = _text(page[0])
            found += [name for key in page[1] if not is_derived(name := _text(key))]
            if cursor == "0" or len(found) >= _SAMPLE:
                break
        found = found[:_SAMPLE]
        facts.keys = len(found)
        types = await self._many(*(("TYPE", key) for key in found)) if found else []
        for key, its_type in zip(found, map(_text, types), strict=True):
            if what := await self._foreign(key, its_type):
                facts.foreign[what] = facts.foreign.get(what, 0) + 1
                facts.example = facts.example or key

    def _note(self, command: str, *answers: Any) -> None:
        """Remember a command of which an answer is an error."""
        if any(isinstance(each, ResponseError) for each in answers):
            self._facts.hidden += (command,)

    async def _foreign(self, key: str, type: str) -> str:
        """What the key is; "": a lock of asynclock, or it is gone, or the user may not read what it is."""
        if type == "string":
            value, left = await self._many(("GETRANGE", key, "0", "63"), ("PTTL", key))
            if not isinstance(value, bytes) or not isinstance(left, int) or left == -2 or is_hold(_text(value)):
                return ""
            return "string with expiry" if left >= 0 else "string"
        if type == "zset":
            first = await self._ask("ZRANGE", key, "0", "0")
            if not isinstance(first, list) or not first or is_hold(_text(first[0])):
                return ""
        return "" if type == "none" else type

    async def _permissions(self) -> None:
        """Send each command that locks need."""
        facts, key = self._facts, f"{self._prefix}{RESERVED}doctor"
        wanted = {each: _harmless(each, key) for each in ACL_COMMANDS}
        if facts.min_replicas:
            wanted["wait"] = ("WAIT", "0", "1")
        if facts.cluster is not None:
            wanted = {"asking": ("ASKING",), **wanted}  # the next command ends what it permits
        asked = {each: command for each, command in wanted.items() if command}
        answers = dict(zip(asked, await self._many(*asked.values()), strict=True))
        facts.refused = tuple(each for each, said in answers.items() if is_refusal(said))
        facts.unknown = tuple(each for each, said in answers.items() if is_unknown(said))
        facts.no_write = refusal_of_write(answers["set"])
        resp3, _ = await self._many(("HELLO", "3"), ("HELLO", "2"))
        if isinstance(resp3, ResponseError):  # unknown, or without this version
            facts.unknown += ("hello|3",)
        said = await self._ask("SUBSCRIBE", channel("doctor"))
        facts.refused += ("subscribe",) * is_refusal(said)
        facts.unknown += ("subscribe",) * is_unknown(said)


def _harmless(command: str, key: str) -> tuple[str, ...]:
    """A form of the command that changes nothing where `key` does not exist; () if there is none, and for SUBSCRIBE,
    which comes last."""
    arguments: dict[str, tuple[str, ...]] = {
        "command|info": ("get",),
        "script|load": ("return 1",),
        "info": ("server",),
        "eval": ("return 1", "0"),
        "evalsha": ("0" * 40, "0"),
        "set": (key, "", "XX", "PX", "1000"),
        "pexpire": (key, "1000"),
        "publish": (channel("doctor"), ""),
        "zadd": (key, "XX", "1", "m"),
        "zrange": (key, "0", "0"),
        "hset": (key, "field", "value", "without a value"),  # an error, after that of a right that is missing
        "zremrangebyscore": (key, "0", "0"),
        "getrange": (key, "0", "0"),
        "scan": ("0", "COUNT", "1"),
    }
    name = tuple(command.upper().split("|"))
    if command in arguments:
        return (*name, *arguments[command]) if arguments[command] else ()
    if command in ("time", "ping"):
        return name
    if command in ("get", "mget", "del", "exists", "pttl", "zcard", "type"):
        return (*name, key)
    if command in ("zrem", "zrank", "zscore", "hget", "hdel"):
        return (*name, key, "m")
    return ()


# -- reading the answers; pure -----------------------------------------------------------------------------------------


def is_refusal(answer: Any) -> bool:
    """Whether the user may not send the command."""
    return isinstance(answer, NoPermissionError)


def is_unknown(answer: Any) -> bool:
    """Whether the server does not know the command: it is renamed, or disabled."""
    return isinstance(answer, ResponseError) and "unknown command" in str(answer).lower()


def refusal_of_write(answer: Any) -> str:
    """Why the server refuses all writes now; "" if it does not, and for what the other facts tell."""
    if not isinstance(answer, ResponseError) or is_refusal(answer) or is_unknown(answer) or is_elsewhere(answer):
        return ""
    code = next((code for known, code in _CODES.items() if isinstance(answer, known)), "")
    return str(ServerError(f"{code}{answer}"))


def is_elsewhere(answer: Any) -> bool:
    """Whether it is the refusal of a node of a cluster for a key that another node has, or none."""
    known = isinstance(answer, (AskError, ClusterDownError))  # a MovedError is an AskError; older versions have none
    known = known and not isinstance(answer, MasterDownError)  # of a replica, which is a ClusterDownError to redis-py
    return known or (isinstance(answer, ResponseError) and str(answer).startswith(("MOVED ", "ASK ", "CLUSTERDOWN ")))


def is_hold(value: str) -> bool:
    """Whether asynclock made this value."""
    value = value.removeprefix(MARK)
    return is_made_by_asynclock(value) or value in TIMED or value.startswith(RESTING_MARK)


def is_derived(key: str) -> bool:
    """Whether the key is one of asynclock's own beside the holds, of whatever prefix."""
    return RESERVED in key


def _seconds(text: str) -> float | None:
    """The max_lease that a client gives as its name; None: it is no number. Any client can name itself so."""
    try:
        said = float(text)
    except ValueError:
        return None
    return said if math.isfinite(said) else None


def _unix_time(answer: Any) -> float | None:
    """The answer to TIME; None: unknown."""
    match [number_of(_text(each)) for each in answer] if isinstance(answer, list) else []:
        case [int(seconds), int(microseconds)]:
            return seconds + microseconds / 1_000_000
    return None


def _setting(answer: Any) -> str | None:
    """The answer to CONFIG GET; None: unknown."""
    return _text(answer[1]) if isinstance(answer, list) and len(answer) == 2 else None


def _text(answer: Any) -> str:
    """ "" for a refusal and for a nil."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else ""
