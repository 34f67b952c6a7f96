"""The commands that a new connection sends before the first op."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from asynclock._version import version
from asynclock.stores.redis.checks import Mode, mode_of, role_of
from asynclock.stores.redis.encoding import NATIVE_RELEASES
from asynclock.stores.redis.replies import ServerError
from asynclock.stores.redis.scripts import PROBE_SCRIPT, SCRIPTS

if TYPE_CHECKING:
    from asynclock.stores.port import NodeConfig
    from asynclock.stores.redis.handlers import Ask
    from asynclock.stores.redis.restarts import Restarts


async def handshake(
    ask: Ask, config: NodeConfig, restarts: Restarts, label: str, mark: str, client_name: str | None
) -> tuple[tuple[str, ...], Mode]:
    """Introduce the client, load the scripts, and give the facts about the server to `restarts`. Returns the server's
    own compare-and-delete command, () if it has none or forbids it; and what the server is. Raises ConfigError for a
    Sentinel, ConnectionError for a replica."""
    hello = ask("HELLO")  # without a version: the later replies of the handshake keep their form
    _introduce(ask, config, client_name)
    natives = ask("COMMAND", "INFO", *(command[0] for command in NATIVE_RELEASES))
    memory, server, replication = ask("INFO", "memory"), ask("INFO", "server"), ask("INFO", "replication")
    asked = [ask("SCRIPT", "LOAD", script) for script in dict.fromkeys([*SCRIPTS.values(), PROBE_SCRIPT])]
    if config.quarantine is not None:
        asked += [server, ask("GET", mark)]
    answers = await asyncio.gather(*(reply.answer_of() for reply in asked), return_exceptions=True)
    native: tuple[str, ...] = ()
    mode = Mode.UNKNOWN
    with contextlib.suppress(ServerError):  # the server is older, or HELLO is forbidden
        said = await hello.answer_of()
        mode = mode_of(said, label)
        if mode is not Mode.CLUSTER:  # there, another master has the slots, and the replies say which
            restarts.check_role(role_of(said))
    with contextlib.suppress(ServerError):  # COMMAND is forbidden: each release is a script
        there = await natives.answer_of()
        native = next((known for known, info in zip(NATIVE_RELEASES, there, strict=True) if info), ())
    with contextlib.suppress(ServerError):  # INFO is forbidden
        restarts.check_memory(await memory.answer_of())
        restarts.check_identity(await server.answer_of(), await replication.answer_of(), server.sent)
    restarts.begin_checks()
    for answer in answers:
        if isinstance(answer, ServerError):
            restarts.cannot_check(answer)
        elif isinstance(answer, BaseException):
            raise answer
    if config.quarantine is not None:
        restarts.learn(*answers[-2:])
    return native, mode


def _introduce(ask: Ask, config: NodeConfig, client_name: str | None) -> None:
    """Tell the server what it shows in CLIENT LIST. The name that the user's client has is kept. Nothing depends on the
    answers, because a server may forbid these commands, or not know them."""
    if not client_name:
        ask("CLIENT", "SETNAME", "asynclock")
    ask("CLIENT", "SETINFO", "LIB-NAME", f"asynclock(max_lease={config.max_lease:g})")
    ask("CLIENT", "SETINFO", "LIB-VER", version())
