"""Reads the replies of a server: refusals and errors."""

from __future__ import annotations

import math
import re
import ssl
from enum import Enum
from errno import ECONNREFUSED
from typing import TYPE_CHECKING, Any

from hiredis import ProtocolError
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, RedisError, ResponseError

from asynclock._errors import ConfigError
from asynclock._options import RESERVED
from asynclock._untrusted import number_of, printable, said
from asynclock.stores.lookups import ADVICE
from asynclock.stores.port import Refused, Slots, WrongKind
from asynclock.stores.redis.encoding import NATIVE_RELEASES
from asynclock.stores.redis.remedies import known_cause, sentence
from asynclock.stores.redis.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asynclock.stores.port import Grant


PLAIN_YES: Grant = 0, False
"""The grant for the OK of a plain SET NX."""

PLAIN_NO = Refused(math.inf)
"""The refusal for its nil, which does not say for how long."""

A_MS = 0.001
"""Redis rounds a PTTL, so a key may live for so much longer, in seconds."""


def refusal_of(reply: list[Any]) -> Refused:
    """Read the refusal of a script: [0, pttl, holder, rank, order(, slots in use)]. A pttl of -1: without expiry; -2:
    nobody holds the name. Raises ProtocolError."""
    try:
        pttl, slots = reply[1], None
        left = pttl / 1000 + A_MS if pttl >= 0 else math.inf if pttl == -1 else None
        if len(reply) > 5:
            slots = _slots_of(reply[5].decode())
        return Refused(left, reply[2].decode("utf-8", "backslashreplace"), reply[3], reply[4], slots)
    except (AttributeError, IndexError, TypeError, ValueError):
        raise ProtocolError(f"no script answers {reply!r:.99}") from None


def _slots_of(text: str) -> Slots:
    """Read the slots in use: "3 4", or "2:3 4" for the second of several names. A number that is too long was written
    by another program: no client asks for that slot."""
    part, _, taken = text.rpartition(":")
    slots = (number_of(each) for each in taken.split())
    return Slots(tuple(each for each in slots if each is not None), int(part) - 1 if part else 0)


class Fault(Enum):
    """How to handle an error reply."""

    RESEND = "unknown script: the server did nothing, so send the whole script"
    RECONNECT = "not a master any more: connect to the new master"
    CONFIG = "only the user can solve the problem"
    DOWN = "no vote now, but the connection is good"


_CODES = {
    "NOSCRIPT": Fault.RESEND,
    "READONLY": Fault.RECONNECT,
    "MASTERDOWN": Fault.RECONNECT,
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
"""All commands that an ACL user needs. DELIFEQ (Valkey 9) and DELEX (Redis 8.4) are not in the list: a server that does
not know a command refuses the whole rule, and releases work without them."""

ACL_RULE = f"ACL SETUSER name on >password ~* &{RESERVED}* {' '.join(f'+{each}' for each in ACL_COMMANDS)}"

_ONE_NODE = "one node of a cluster was named: name the cluster (redis+cluster://host:port), or independent servers"

_HINTS = {
    "NOAUTH": "give user and password in the url",
    "WRONGPASS": "check user and password in the url",
    "NOPERM": f"the user needs this rule (with a prefix, ~prefix* in place of ~*): {ACL_RULE}",
    "WRONGTYPE": "the key is in use as something else: rename the lock or set a prefix",
    "MOVED": _ONE_NODE,
    "ASK": _ONE_NODE,
}
_INSIDE = re.compile(r"(?:-|@user_script:\d+: )([A-Z]{3,})\b")
"""Redis 6 puts an error inside that of the script, which begins with @user_script after a pcall: the error of a command
after a dash, an error of the script itself without one."""


_ALL = ", ".join(each.partition("|")[0].upper() for each in ACL_COMMANDS)

_UNKNOWN = re.compile(r"unknown (redis )?command\b", re.IGNORECASE)
"""The error for a command that is renamed, disabled or too new. Outside of scripts: "unknown command 'DEL'", on all
servers. In a script: "Unknown Redis command called from Lua script" (Redis 6.2), "Unknown Redis command called from
script" (Redis 7), "Unknown command called from script" (Valkey)."""


_ADVICE = {
    "READONLY": "it is a replica: name its master, or use Sentinel",
    "MASTERDOWN": "it is a replica that does not reach its master: name the master, or repair their connection",
    "LOADING": "it loads its data: wait",
    "OOM": "its memory is full: raise maxmemory, or delete what is not needed",
    "MISCONF": "it cannot write to its disk: free disk space, or see its log",
    "NOREPLICAS": "it has fewer replicas than min-replicas-to-write: start them, or lower it",
}
"""What to do about an error that ends when the server is repaired."""


_PLACE = re.compile(
    r"^ERR Error running script \(call to \w+\): (?:@user_script: ?\d+: )+-?|"  # Redis 6
    r" script: (?:\w+, )?on @user_script:\d+\.?$"  # Redis 7, Valkey
)
"""The text by which an error names the script and the line of a command."""

_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
"""The text by which a server repeats the arguments of a command that it does not know. Those of AUTH are secret."""


def for_users(text: str) -> str:
    """The error of a server as its users may read it: without the script, which they do not know, and without the
    arguments of the command. Pure."""
    return _PLACE.sub("", _ARGUMENTS.sub("", text))


class ServerError(Exception):
    """An error reply. As text it says what to do, if that is known."""

    def __str__(self) -> str:
        text = super().__str__()
        advice = _ADVICE.get(code_of(self))
        return printable(f"{for_users(text).rstrip('.')}; {advice}" if advice else _ARGUMENTS.sub("", text))


def code_of(error: ServerError) -> str:
    """The code of an error; of an error in a script, the code of its cause."""
    text = Exception.__str__(error)
    if "ACL failure in script" in text or "can't run this command" in text:
        return "NOPERM"
    head = text.partition(" ")[0]
    if head != "ERR" and not head.startswith("@"):
        return head
    inside = _INSIDE.search(text)
    return inside[1] if inside else head


REDIRECTS = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"})


def is_redirect(error: ServerError) -> bool:
    """Whether the node of a cluster did nothing, because another node has the slot, or none has it now."""
    return code_of(error) in REDIRECTS


def fault_of(error: ServerError) -> Fault:
    if _UNKNOWN.search(str(error)):
        return Fault.CONFIG
    return _CODES.get(code_of(error), Fault.DOWN)


def is_half_done(error: ServerError) -> bool:
    """Whether a script may have failed after a write. (Before WRONGTYPE it writes a tombstone at most.)"""
    code = code_of(error)
    return code != "WRONGTYPE" and (code == "ERR" or "@user_script" in Exception.__str__(error))


def is_about_native_release(error: ServerError) -> bool:
    """Whether the error is about the server's own compare-and-delete command."""
    about = str(error).lower()
    return any(command[0].lower() in about for command in NATIVE_RELEASES)


def unknown_command(text: str, script: str = "") -> str:
    """The command that a server does not know, from its error reply. For a command in a script the reply contains only
    the line number, so the result names all commands of that line. "": the reply is about something else."""
    if not _UNKNOWN.search(text):
        return ""
    if (sent := re.search(r"unknown command [`'\"]?([\w|.]+)", text, re.IGNORECASE)) and "called from" not in text:
        return sent[1].upper()
    at = re.search(r"user_script:\s*(\d+)", text)
    line = script.splitlines()[int(at[1]) - 1 : int(at[1])] if at else []
    return " or ".join(dict.fromkeys(re.findall(r"redis\.p?call\('(\w+)'", "".join(line)))) or "a command of its script"


def config_error(label: str, error: BaseException, script: str = "") -> ConfigError:
    """The error to raise: which node refuses, why, and what the user can do."""
    if unknown := unknown_command(str(error), script):
        why = for_users(str(error))
        return ConfigError(
            f"{label} does not know {unknown} ({why}): let the server have all of {_ALL}, under their own names"
        )
    code = code_of(ServerError(str(error)))
    if isinstance(error, NoPermissionError):
        code = "NOPERM"
    elif isinstance(error, AuthenticationError):
        code = "WRONGPASS"
    hint = _HINTS.get(code, "check what the url points to")
    raised = WrongKind if code == "WRONGTYPE" else ConfigError
    return raised(f"{label} refuses: {for_users(str(error))}; {hint}")


async def clear(label: str, answer: Awaitable[Any], command: tuple[str, ...], *, redirects: bool = False) -> Any:
    """Await the answer to a command. An error that only the user can solve becomes a ConfigError. `redirects`: the
    caller follows redirections of a cluster."""
    try:
        return await answer
    except ServerError as error:
        if fault_of(error) is Fault.CONFIG and not (redirects and is_redirect(error)):
            raise config_error(label, error, command[1] if command[0] == "EVAL" else "") from None
        raise


_AGREE = "check host and port, and whether both sides use TLS (rediss://) or neither (redis://)"

_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"}
"""The reasons of an SSLError if the server answers without TLS."""


def _advice(label: str, stage: Stage) -> str:
    if stage is Stage.LOOKUP:
        return f"; {ADVICE}"
    return "" if label.startswith(("unix:", "embedded:")) else f"; {_AGREE}"


def not_connected_yet(label: str, stage: Stage) -> ConnectionError:
    """The error to report while the first attempt to connect is in that stage."""
    advice = "" if stage is Stage.CREDENTIALS else _advice(label, stage)
    return ConnectionError(f"{label} is not connected yet: {stage.value}{advice}")


def connect_error(label: str, error: BaseException, stage: Stage) -> Exception:
    """The error to report for an attempt to connect that failed in that stage: a ConfigError if only the user can solve
    the problem."""
    if isinstance(error, ConfigError):
        return error
    if stage is Stage.CREDENTIALS:  # its cause is about another server, for example one that refused the provider
        return ConnectionError(f"{label} is out of reach: {said(error)}")
    if (known := _by_cause(label, error)) is not None:
        return known
    advice = _advice(label, stage)
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{label} did not answer the connection attempt in time: {stage.value}{advice}")
    if isinstance(error, ResponseError):  # it answers, so host, port and TLS are right
        return ConnectionError(f"{label} is out of reach: {printable(sentence(str(error)))}")
    if stage in (Stage.LOOKUP, Stage.CONNECT) or str(error).startswith(label):  # or explained by the handshake
        return ConnectionError(f"{label} is out of reach: {said(error)}")
    return ConnectionError(f"{label} is out of reach: {said(error)} ({stage.value}){advice}")


def _by_cause(label: str, error: BaseException) -> Exception | None:
    """The error to report, if the error or one of its causes says what is wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message
            return ConfigError(f"{label}: its certificate does not verify ({why}): check the CA and the host name")
        if (known := known_cause(label, cause)) is not None:
            return known
        if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
            return ConfigError(f"{label} answers without TLS: turn it on at the server, or write redis:// in the url")
        if isinstance(cause, InvalidResponse):
            return ConfigError(f"{label} does not answer as a Redis server does: {_AGREE}")
        if isinstance(cause, (AuthenticationError, NoPermissionError)):
            return config_error(label, cause)
        if isinstance(cause, OSError) and (cause.errno == ECONNREFUSED or f"Errno {ECONNREFUSED}" in str(cause)):
            return ConnectionError(f"{label} refused the connection: no server listens there, or it is full")
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, RedisError) and fault_of(ServerError(str(error))) is Fault.CONFIG:
        return config_error(label, error)
    return None
