"""The commands that a new connection sends before the first op."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from asynclock._version import version
from asynclock.stores.redis.checks import Mode, mode_of, role_of
from asynclock.stores.redis.encoding import NATIVE_RELEASES
from asynclock.stores.redis.keys import channel
from asynclock.stores.redis.replies import ServerError
from asynclock.stores.redis.scripts import PROBE_SCRIPT, SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.stores.port import NodeConfig
    from asynclock.stores.redis.connection import CommandReply
    from asynclock.stores.redis.node import RedisNode
    from asynclock.stores.redis.restarts import Restarts

log = logging.getLogger("asynclock")


async def handshake(
    ask: Callable[..., CommandReply], config: NodeConfig, restarts: Restarts, node: RedisNode, client_name: str | None
) -> tuple[tuple[str, ...], bool, Mode]:
    """Introduce the client, load the scripts, subscribe, and give the facts about the server to `restarts`. Returns the
    server's own compare-and-delete command, () if it has none or forbids it; whether the server sends notices; and what
    it is. Raises ConfigError for a Sentinel, ConnectionError for a replica."""
    hello = ask("HELLO")  # without a version: the later replies of the handshake keep their form
    _introduce(ask, config, client_name)
    natives = ask("COMMAND", "INFO", *(command[0] for command in NATIVE_RELEASES))
    memory = ask("INFO", "memory")
    asked = [ask("SCRIPT", "LOAD", script) for script in dict.fromkeys([*SCRIPTS.values(), PROBE_SCRIPT])]
    if config.quarantine is not None:
        asked += [ask("INFO", "server"), ask("GET", node.mark)]
    answers = await asyncio.gather(*(reply.answer_of() for reply in asked), return_exceptions=True)
    native: tuple[str, ...] = ()
    mode = Mode.UNKNOWN
    with contextlib.suppress(ServerError):  # the server is older, or HELLO is forbidden
        said = await hello.answer_of()
        mode = mode_of(said, node.label)
        if mode is not Mode.CLUSTER:  # there, another master has the slots, and the replies say which
            restarts.check_role(role_of(said))
    with contextlib.suppress(ServerError):  # COMMAND is forbidden: each release is a script
        there = await natives.answer_of()
        native = next((known for known, info in zip(NATIVE_RELEASES, there, strict=True) if info), ())
    with contextlib.suppress(ServerError):  # INFO is forbidden
        restarts.check_memory(await memory.answer_of())
    for answer in answers:
        if isinstance(answer, ServerError):
            restarts.cannot_check(answer)
        elif isinstance(answer, BaseException):
            raise answer
    if config.quarantine is not None:
        restarts.learn(*answers[-2:])
    return native, await _listen(ask, config, node.label), mode


def _introduce(ask: Callable[..., CommandReply], config: NodeConfig, client_name: str | None) -> None:
    """Tell the server what it shows in CLIENT LIST. The name that the user's client has is kept. Nothing depends on the
    answers, because a server may forbid these commands, or not know them."""
    if not client_name:
        ask("CLIENT", "SETNAME", "asynclock")
    ask("CLIENT", "SETINFO", "LIB-NAME", f"asynclock(max_lease={config.max_lease:g})")
    ask("CLIENT", "SETINFO", "LIB-VER", version())


async def _listen(ask: Callable[..., CommandReply], config: NodeConfig, label: str) -> bool:
    """Subscribe (rule 6 of `node.py`). Whether the server sends notices."""
    try:
        await ask("HELLO", "3").answer_of()
        await ask("SUBSCRIBE", channel(config.listener.tag)).answer_of()
        await ask("PUBLISH", channel(""), "").answer_of()  # a server that forbids this cannot notify anyone
    except ServerError as error:
        log.warning("asynclock: %s sends no notices (%s): waiters poll it", label, error)
        return False
    return True
