"""What a server's replies mean: refusals and errors."""

from __future__ import annotations

import logging
import math
import re
import ssl
from enum import Enum
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, RedisError

from asynclock._errors import ConfigError, brief
from asynclock._options import RESERVED
from asynclock.rules.model import Verb
from asynclock.stores.port import Refused, Slots, WrongKind
from asynclock.stores.redis.encoding import NATIVE_RELEASES
from asynclock.stores.redis.scripts import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asynclock.rules.model import Op
    from asynclock.stores.port import Grant

log = logging.getLogger("asynclock")


PLAIN_YES: Grant = 0, False
"""What the OK of a plain SET NX means."""

PLAIN_NO = Refused(math.inf)
"""What its nil means: it does not tell for how long."""

_new = tuple.__new__

A_MS = 0.001
"""Redis rounds a PTTL; a key may live for so much longer than it says."""


def refusal_of(reply: list[Any]) -> Refused:
    """What a script's refusal means: [0, pttl, holder, rank, order(, slots in use)], pttl being -1 without expiry and
    -2 where nobody holds the name. Raises ProtocolError."""
    try:
        pttl, slots = reply[1], None
        left = pttl / 1000 + A_MS if pttl >= 0 else math.inf if pttl == -1 else None
        if len(reply) > 5:
            slots = _slots_of(reply[5].decode())
        # The same as Refused(...), in a third of its time.
        return _new(Refused, (left, reply[2].decode("utf-8", "backslashreplace"), reply[3], reply[4], slots))
    except (AttributeError, IndexError, TypeError, ValueError):
        raise ProtocolError(f"no script answers {reply!r:.99}") from None


def _slots_of(text: str) -> Slots:
    """From "3 4", or "2:3 4" where it is about the second of several names."""
    part, _, taken = text.rpartition(":")
    return Slots(tuple(map(int, taken.split())), int(part) - 1 if part else 0)


class Fault(Enum):
    """What to do about an error reply."""

    RESEND = "script unknown: nothing was done, send it whole"
    RECONNECT = "no master any more: connect again, to the new one"
    CONFIG = "will not get better by itself: the user must act"
    DOWN = "no vote now; the connection is good"


_CODES = {
    "NOSCRIPT": Fault.RESEND,
    "READONLY": Fault.RECONNECT,
    "UNBLOCKED": Fault.RECONNECT,
    "NOAUTH": Fault.CONFIG,
    "WRONGPASS": Fault.CONFIG,
    "NOPERM": Fault.CONFIG,
    "WRONGTYPE": Fault.CONFIG,
    "CROSSSLOT": Fault.CONFIG,
    "MOVED": Fault.CONFIG,
    "ASK": Fault.CONFIG,
}
ACL_COMMANDS = (
    *("command|info", "script|load", "info", "select", "subscribe"),  # a new connection
    *("eval", "evalsha", "get", "mget", "set", "del", "exists", "pttl", "pexpire", "time", "publish"),
    *("zadd", "zrem", "zrange", "zrank", "hget", "hset", "hdel"),  # waiting
    *("zscore", "zcard", "zremrangebyscore"),  # read-write locks and semaphores
    *("type", "getrange", "scan", "ping"),  # inspect, holders, health
)
"""All that an ACL user needs. DELIFEQ (Valkey 9) and DELEX (Redis 8.4) are not among them: a server that does not know
one of them refuses the whole rule, and releases work without."""

ACL_RULE = f"ACL SETUSER name on >password ~* &{RESERVED}* {' '.join(f'+{each}' for each in ACL_COMMANDS)}"

_HINTS = {
    "NOAUTH": "give user and password in the url",
    "WRONGPASS": "check user and password in the url",
    "NOPERM": f"the user needs this rule (with a prefix, ~prefix* in place of ~*): {ACL_RULE}",
    "WRONGTYPE": "the key is in use as something else: rename the lock or set a prefix",
    "MOVED": "one node of a cluster was named: use independent servers",
    "ASK": "one node of a cluster was named: use independent servers",
}
_INSIDE = re.compile(
    r"-([A-Z]{3,})\b"
)  # Redis 6 wraps the error of a script's command; what pcall gives begins with @user_script


_ALL = ", ".join(each.partition("|")[0].upper() for each in ACL_COMMANDS)

_UNKNOWN = re.compile(r"unknown (redis )?command\b", re.IGNORECASE)
"""A command that is renamed, disabled or too new. Sent directly: all servers say "unknown command 'DEL'". In a script:
Redis 6.2 "Unknown Redis command called from Lua script", Redis 7 "Unknown Redis command called from script", Valkey
"Unknown command called from script"."""


class ServerError(Exception):
    """An error reply."""


def code_of(error: ServerError) -> str:
    """The error's code word; inside a script's error, that of its cause."""
    text = str(error)
    if "ACL failure in script" in text or "can't run this command" in text:
        return "NOPERM"
    head = text.partition(" ")[0]
    if head != "ERR" and not head.startswith("@"):
        return head
    inside = _INSIDE.search(text)
    return inside[1] if inside else head


def fault_of(error: ServerError) -> Fault:
    if _UNKNOWN.search(str(error)):
        return Fault.CONFIG
    return _CODES.get(code_of(error), Fault.DOWN)


def is_half_done(error: ServerError) -> bool:
    """Whether a script may have failed after it had written something. (WRONGTYPE is found out before that.)"""
    code = code_of(error)
    return code != "WRONGTYPE" and (code == "ERR" or "script" in str(error))


def is_about_native_release(error: ServerError) -> bool:
    """Whether the server's own compare-and-delete is unknown or forbidden."""
    about = str(error).lower().partition("with args")[0]  # the arguments may contain any word
    return any(command[0].lower() in about for command in NATIVE_RELEASES)


def unknown_command(text: str, script: str = "") -> str:
    """Which command a server does not know, by its error reply. For a command of a script it tells the line alone: then
    these are the commands of that line. "" where the reply is about something else."""
    if not _UNKNOWN.search(text):
        return ""
    if (sent := re.search(r"unknown command [`'\"]?([\w|.]+)", text, re.IGNORECASE)) and "called from" not in text:
        return sent[1].upper()
    at = re.search(r"user_script:\s*(\d+)", text)
    line = script.splitlines()[int(at[1]) - 1 : int(at[1])] if at else []
    return " or ".join(dict.fromkeys(re.findall(r"redis\.p?call\('(\w+)'", "".join(line)))) or "a command of its script"


def refusal(label: str, error: ServerError, op: Op) -> ConfigError:
    """The error of an op that a server refuses. A release is logged as well, because many are sent in the background:
    the key stays on that server until its lease ends."""
    refused = config_error(label, error, SCRIPTS[op.kind.letter])
    if op.verb is Verb.RELEASE and not isinstance(refused, WrongKind):  # a key of another type is none of ours
        log.error("asynclock: %s was not released: %s", brief(op.name), refused)
    return refused


def config_error(label: str, error: Exception, script: str = "") -> ConfigError:
    """Which node refuses, why, and what to do."""
    if unknown := unknown_command(str(error), script):
        return ConfigError(
            f"{label} does not know {unknown} ({error}): let the server have all of {_ALL}, under their own names"
        )
    code = code_of(ServerError(str(error)))
    if isinstance(error, NoPermissionError):
        code = "NOPERM"
    elif isinstance(error, AuthenticationError):
        code = "WRONGPASS"
    hint = _HINTS.get(code, "check what the url points to")
    raised = WrongKind if code == "WRONGTYPE" else ConfigError
    return raised(f"{label} refuses: {error}; {hint}")


async def clear(label: str, answer: Awaitable[Any], command: tuple[str, ...]) -> Any:
    """The answer to that command; an error that the user must act on becomes a ConfigError."""
    try:
        return await answer
    except ServerError as error:
        if fault_of(error) is Fault.CONFIG:
            raise config_error(label, error, command[1] if command[0] == "EVAL" else "") from None
        raise


def connect_error(label: str, error: Exception) -> Exception:
    """What a failed connect means: a ConfigError where trying again is no use."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message
            return ConfigError(f"{label}: its certificate does not verify ({why}): check the CA and the host name")
        if isinstance(cause, InvalidResponse):
            return ConfigError(f"{label} does not answer as a Redis server does: check host and port")
        if isinstance(cause, (AuthenticationError, NoPermissionError)):
            return config_error(label, cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, RedisError) and fault_of(ServerError(str(error))) is Fault.CONFIG:
        return config_error(label, error)
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{label} did not answer the connection attempt in time")
    return ConnectionError(f"{label} is out of reach: {error}")
