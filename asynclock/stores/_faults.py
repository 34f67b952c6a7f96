"""What a server's error reply means for us."""

from __future__ import annotations

import re
import ssl
from enum import Enum

from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, RedisError

from asynclock._errors import ConfigError
from asynclock._ports import WrongKind


class Fault(Enum):
    """What to do about an error reply."""

    RESEND = "script unknown: nothing was done, send it whole"
    RECONNECT = "no master any more: connect again, to whoever is"
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
_HINTS = {
    "NOAUTH": "give user and password in the url",
    "WRONGPASS": "check user and password in the url",
    "NOPERM": "let the ACL user run eval, evalsha, script|load, mget, get, set, exists, pttl, pexpire, del, time, "
    "zadd, zrem, zrange, zrank, hget, hset and hdel on keys that begin with the client's prefix; and hello, subscribe "
    "and publish on the channels asynclock~*",
    "WRONGTYPE": "the key is in use as something else: rename the lock or set a prefix",
    "MOVED": "one node of a cluster was named: use independent servers",
    "ASK": "one node of a cluster was named: use independent servers",
}
_INSIDE = re.compile(
    r"-([A-Z]{3,})\b"
)  # Redis 6 wraps the error of a script's command; what pcall gives begins with @user_script


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
    if "unknown command" in str(error):
        return Fault.CONFIG
    return _CODES.get(code_of(error), Fault.DOWN)


def is_about(error: ServerError, commands: tuple[tuple[str, ...], ...]) -> bool:
    """Whether it is one of these commands that is unknown or forbidden."""
    return any(command[0].lower() in str(error).lower() for command in commands)


def config_error(label: str, error: Exception) -> ConfigError:
    """Which node refuses, why, and what to do."""
    code = code_of(ServerError(str(error)))
    if isinstance(error, NoPermissionError):
        code = "NOPERM"
    elif isinstance(error, AuthenticationError):
        code = "WRONGPASS"
    hint = _HINTS.get(code, "check what the url points to")
    raised = WrongKind if code == "WRONGTYPE" else ConfigError
    return raised(f"{label} refuses: {error}; {hint}")


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
