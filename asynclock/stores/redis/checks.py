"""Checks whether a server would vote: it takes a hold of a reserved name and gives it back (`scripts/probe.lua`)."""

from __future__ import annotations

from enum import Enum
from hashlib import sha1
from typing import TYPE_CHECKING, Any

from asynclock._errors import ConfigError
from asynclock.rules.model import ID_LENGTH
from asynclock.stores.port import PROBE
from asynclock.stores.redis.keys import channel, key_in_slot, keys
from asynclock.stores.redis.replies import Fault, ServerError, config_error, fault_of, is_redirect
from asynclock.stores.redis.scripts import PROBE_SCRIPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.stores.port import NodeConfig
    from asynclock.stores.redis.handlers import Ask

_SHA = sha1(PROBE_SCRIPT.encode()).hexdigest()  # noqa: S324 - Redis identifies scripts by their SHA-1
_LEASE = "1000"  # ms for which a probe that is cut off half-way may leave a key
_SLOTS = (0, 16383)  # the first and the last slot: no node of a cluster with several shards serves both


class Mode(Enum):
    """What a server is, by its reply to HELLO."""

    UNKNOWN = "unknown"  # before Redis 6.2, and where HELLO is forbidden
    STANDALONE = "standalone"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"
    SHARD = "shard"  # one node of a cluster whose other nodes are known, too


def mode_of(hello: Any, label: str) -> Mode:
    """The mode in the reply to HELLO, in the form of RESP2 or RESP3. Raises ConfigError for a Sentinel, which keeps no
    locks. Pure."""
    mode = _said(hello, b"mode")
    found = next((each for each in Mode if each.value == mode), Mode.UNKNOWN)
    if found is Mode.SENTINEL:
        raise ConfigError(
            f"{label} is a Sentinel, which keeps no locks: write redis+sentinel://host:26379/mymaster, or pass the "
            "client of its master, Sentinel(...).master_for(name) of redis.asyncio.sentinel"
        )
    return found


def role_of(hello: Any) -> str:
    """The role in the same reply: master or replica; "" if it names none. Pure."""
    return _said(hello, b"role")


def _said(hello: Any, field: bytes) -> str:
    said = dict(zip(hello[::2], hello[1::2], strict=False)) if isinstance(hello, list) else hello
    found = said.get(field) if isinstance(said, dict) else None
    return found.decode(errors="replace") if isinstance(found, bytes) else ""


async def check_vote(ask: Ask, config: NodeConfig, mode: Mode, label: str, name: str = PROBE) -> str:
    """Take and give back a hold of `name`. Returns the server's refusal of PUBLISH, "" if it publishes. Raises
    ConfigError for an error that only the user can solve, else ServerError."""
    prefix, tag = config.prefix, config.listener.tag
    at = keys(prefix, name)
    words = ("5", *at[:-1], at.undone + tag[:ID_LENGTH], tag, _LEASE, channel(""))
    try:
        for each in [ask("EXISTS", key) for key in probe_keys(prefix)] if mode is Mode.CLUSTER else ():
            await each.answer_of()
        return await _run(ask, words)
    except ServerError as error:
        if fault_of(error) is Fault.CONFIG and not (mode is Mode.SHARD and is_redirect(error)):
            raise config_error(label, error, PROBE_SCRIPT) from None
        raise


def probe_keys(prefix: str) -> tuple[str, ...]:
    """Keys that are never set: one node of a cluster with several shards does not serve all of them, but for a prefix
    with a hash tag, whose names are in one slot."""
    return tuple(key_in_slot(prefix, slot) for slot in _SLOTS) if "{" not in prefix else (keys(prefix, PROBE).hold,)


async def _run(ask: Ask, words: Sequence[str]) -> str:
    try:
        refusal: bytes = await ask("EVALSHA", _SHA, *words).answer_of()
    except ServerError as error:
        if fault_of(error) is not Fault.RESEND:
            raise
        refusal = await ask("EVAL", PROBE_SCRIPT, *words).answer_of()  # the server forgot its scripts
    return refusal.decode(errors="replace")
