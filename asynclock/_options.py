"""The options that a user may set, and the checked settings that they become. A wrong option is refused at once."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar

from asynclock._errors import ConfigError, brief

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

Seconds: TypeAlias = float | timedelta

RESERVED = "asynclock~"
"""The start of all keys except the holds (after the prefix), and of all channels. A lock's name must not begin so."""

BROKEN_BY = f"{RESERVED}by~"
"""Before the name of a client that breaks a hold, in the notice that tells the holder of it: the notice is sent under
another name, that of the lock with this and the client behind it. A client that does not know of this finds no hold of
that name, and ignores the notice. The notice of the break itself follows."""

MIN_LEASE = 0.1  # seconds; the drift allowance and one slow turn of the loop would use up a shorter lease
MAX_METADATA = 1024  # characters; every command of the lock carries it


THREAD: Literal["thread"] = "thread"
"""The value of `renew` for a lease that a thread renews while the event loop is blocked."""


class LockOptions(TypedDict, total=False):
    """The options of every lock. Given to the client, they are the defaults of its locks. Times are in seconds."""

    lease: Seconds
    """How long a hold lives without a renewal, in seconds (default 30)."""
    timeout: Seconds | None
    """How long to wait, in seconds: None without limit (the default), 0 tries once."""
    renew: bool | Literal["thread"]
    """The watchdog renews the lease every lease/3 (default True). "thread": while the event loop is blocked, a thread
    renews it, for at most `max_block`."""
    max_hold: Seconds | None
    """The lease is lost after this time, in seconds, renewed or not (default None: never)."""
    min_hold: Seconds
    """The name stays taken for this time after its acquisition, in seconds, released or not (default 0)."""
    cancel_on_lost: bool
    """Cancel the task in `async with` when the lease is lost (default True); False: raise LockLost at its end only."""
    metadata: str
    """A note for operators that is stored with the hold (default "")."""
    label: str
    """What events and metrics call the lock, such as "order:{id}" for all orders (default ""). A decorator uses its
    template. It is not sent to the servers."""
    fencing: bool
    """Give out fencing tokens (default True); False sends the plain `SET NX PX` of other Redlock clients."""


class ClientOptions(LockOptions, total=False):
    """The options of a client."""

    prefix: str
    """The key of a lock is this prefix and its name (default "lock:"). "" is for locks that are shared with other lock
    libraries; then no other key of the database may have the name of a lock."""
    max_lease: Seconds
    """The longest lease in the whole deployment, in seconds (default 60). A restarted node casts no vote for this time
    and one second more."""
    node_timeout: Seconds | None
    """A node that is silent for this many seconds casts no vote. Default: lease/10 on one node; on a quorum 0.05, or
    more if a round trip takes longer than 0.025, up to lease/10."""
    connect_timeout: Seconds
    """The longest time to connect to a node, in seconds (default 1): lookup, TCP, TLS, login, handshake together."""
    patience: Seconds
    """How long an acquire, or entering the client, waits for the end of an outage, in seconds (default 5). It counts
    from the first failed round of this outage, and never lasts beyond the timeout."""
    max_block: Seconds
    """With renew="thread": a loop that is blocked for longer loses its leases, in seconds (default 60)."""
    fence_memory: Seconds
    """How long a name's fencing counter outlives its last hold (default 300)."""
    trust_restarts: bool
    """Restarted nodes vote at once (default False). Only for servers that write each command to disk first."""


@dataclass(frozen=True, slots=True)
class LockSettings:
    """Checked LockOptions; all times are floats, in seconds."""

    lease: float = 30.0
    timeout: float | None = None
    renew: bool | Literal["thread"] = True
    max_hold: float | None = None
    min_hold: float = 0.0
    cancel_on_lost: bool = True
    metadata: str = ""
    label: str = ""
    fencing: bool = True


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Checked ClientOptions; all times are floats, in seconds."""

    lock: LockSettings = LockSettings()
    prefix: str = "lock:"
    max_lease: float = 60.0
    node_timeout: float | None = None
    connect_timeout: float = 1.0
    patience: float = 5.0
    max_block: float = 60.0
    fence_memory: float = 300.0
    trust_restarts: bool = False


_LOCK = frozenset(f.name for f in fields(LockSettings))
_CLIENT = frozenset(f.name for f in fields(ClientSettings)) - {"lock"}
_OF_A_MUTEX = {"fair", "reentrant", "owner"}
_OPTIONAL = {"timeout", "max_hold", "node_timeout"}
_ZERO_OK = {"timeout", "min_hold", "patience"}
_FLAGS = {"renew", "cancel_on_lost", "fencing", "trust_restarts"}
_TEXTS = {"prefix", "metadata", "label"}

ENVIRONMENT = {
    option: f"ASYNCLOCK_{option.upper()}"
    for option in ("prefix", "lease", "max_lease", "timeout", "node_timeout", "connect_timeout", "trust_restarts")
}
"""The environment variables of a client that was made without nodes, by option. An empty one counts as not set, except
for the prefix."""

_SWITCHES = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}

_ELSEWHERE = {
    **dict.fromkeys(("expire", "ttl", "lock_timeout", "auto_release_time"), "lease"),
    **dict.fromkeys(("blocking", "blocking_timeout", "wait", "wait_timeout", "acquire_timeout"), "timeout"),
    **dict.fromkeys(("auto_renewal", "auto_renew", "auto_extend"), "renew"),
}
"""The names that other lock libraries have for our options."""

_POLLING = {"sleep", "retry", "retries", "retry_count", "retry_times", "retry_delay", "retry_interval", "retry_jitter"}
"""Options of libraries that poll."""

_Settings = TypeVar("_Settings", LockSettings, ClientSettings)


def client_settings(options: Mapping[str, Any], base: ClientSettings | None = None) -> ClientSettings:
    """Check a client's options. Raises ConfigError."""
    base = base or ClientSettings()
    checked = _checked(options, _LOCK | _CLIENT, "client")
    own = {key: value for key, value in checked.items() if key in _CLIENT}
    merged = _replace(base, own)
    if merged.fence_memory < 60:
        raise ConfigError(f"fence_memory={merged.fence_memory:g} s is too short to order tokens: give at least 60")
    if merged.max_block > merged.fence_memory:  # a blocked loop does not renew the counter of the fencing tokens
        raise ConfigError(
            f"max_block={merged.max_block:g} s is above fence_memory={merged.fence_memory:g} s: "
            "give a shorter max_block, or a longer fence_memory"
        )
    lock = _replace(base.lock, {key: value for key, value in checked.items() if key in _LOCK})
    _check_lock(lock, merged)
    return _replace(merged, {"lock": lock})


def environment_settings(environ: Mapping[str, str], given: Mapping[str, Any]) -> ClientSettings:
    """The settings of a client with the `given` options. The options that were not given are those of the environment
    (`ENVIRONMENT`). Raises ConfigError, which names the variable."""
    found = written_options(environ, [option for option in ENVIRONMENT if option not in given])
    try:
        return client_settings({**found, **given})
    except ConfigError as error:
        if not found:
            raise
        names = ", ".join(f"{ENVIRONMENT[option]}={brief(environ[ENVIRONMENT[option]])}" for option in found)
        raise ConfigError(f"the environment has {names}: {error}") from None


def written_options(environ: Mapping[str, str], options: Iterable[str]) -> dict[str, Any]:
    """Those of these options that the environment sets. Raises ConfigError, which names the variable."""
    return {
        option: _written(option, variable, environ[variable])
        for option, variable in ((option, ENVIRONMENT[option]) for option in options)
        if environ.get(variable) or (option == "prefix" and variable in environ)
    }


def _written(option: str, variable: str, text: str) -> Any:
    """The value of an option from the text of its environment variable. Raises ConfigError."""
    if option in _TEXTS:
        return text
    if option in _FLAGS:
        if text.lower() not in _SWITCHES:
            raise ConfigError(f"{variable}={brief(text)} is neither true nor false: write {variable}=1 or {variable}=0")
        return _SWITCHES[text.lower()]
    try:
        return seconds(option, float(text), zero=option in _ZERO_OK)
    except ValueError as error:  # a ConfigError is one
        why = f"{error}; " if isinstance(error, ConfigError) else "is no number of seconds: "
        raise ConfigError(f"{variable}={brief(text)} {why}write for example {variable}=10") from None


def lock_settings(name: str, options: Mapping[str, Any], client: ClientSettings) -> LockSettings:
    """One lock's settings: its options, and its client's where it has none. Raises ConfigError, which has the name."""
    if not options:
        return client.lock
    try:
        lock = _replace(client.lock, _checked(options, _LOCK, "lock"))
        _check_lock(lock, client)
    except ConfigError as error:
        error.name = name
        raise
    return lock


class BoundOptions:
    """The options of a lock, and the settings that they come to with those of its client. A client may get other
    settings after its locks were made: by `configure`, or from the environment at its first await. A lock that kept the
    old ones could take a lease that is longer than the new max_lease."""

    __slots__ = ("_options", "client", "settings")

    def __init__(self, name: str, options: Mapping[str, Any], client: ClientSettings) -> None:
        """Raises ConfigError, which has the name."""
        self._options = options
        self.settings = lock_settings(name, options, client)
        self.client = client  # its settings, with which these were computed

    def under(self, client: ClientSettings, name: str) -> LockSettings:
        """The settings with these of the client. Raises ConfigError, which has the name."""
        if client is not self.client:
            self.settings = lock_settings(name, self._options, client)
            self.client = client  # last: another thread that sees it takes the settings
        return self.settings


def check_options(options: Mapping[str, Any], *, of_a_mutex: bool = False) -> None:
    """Check the options of a lock whose client is not known yet: their names and types, and the range of each time.
    `of_a_mutex`: it may have those of a mutex, too. Raises ConfigError."""
    _checked({key: value for key, value in options.items() if not (of_a_mutex and key in _OF_A_MUTEX)}, _LOCK, "lock")


def same_terms(a: LockSettings, b: LockSettings) -> bool:
    """Whether a hold acquired with `a` may be passed on to a waiter with `b`: all but their timeouts and labels are
    equal."""
    return not a.min_hold and (a is b or replace(a, timeout=None, label="") == replace(b, timeout=None, label=""))


def check_name(name: object) -> str:
    """Check a lock's name: any non-empty str that does not begin with RESERVED. Raises ConfigError."""
    if not isinstance(name, str):
        hint = "decode it first" if isinstance(name, bytes) else "make it one"
        raise ConfigError(f"a lock's name is a str, not {type(name).__name__}: {hint}")
    if not name:
        raise ConfigError("a lock's name is empty: give what it protects, such as 'order:42'")
    if name.startswith(RESERVED):
        raise ConfigError(f"names that begin with {RESERVED!r} are reserved: rename {brief(name)}")
    if not name.isascii():
        check_text("a lock's name", name)
    return plain_text(name)


def plain_text(text: str) -> str:
    """The text as a str. It becomes a part of keys and ids, and a subclass, such as an Enum that is a str, would be
    another text there."""
    return text if type(text) is str else str.__str__(text)


def check_text(what: str, text: str) -> None:
    """Refuse a text that no server could store. Raises ConfigError."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} must encode as UTF-8: {brief(text)} has a lone surrogate") from None


def seconds(option: str, value: object, *, zero: bool = False) -> float:
    """`value` in seconds: a finite number or a timedelta, above 0 (with `zero`, 0 or more). Raises ConfigError."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{option} is a number of seconds or a timedelta, not {type(value).__name__}")
    bound = "0 or more" if zero else "more than 0"
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        never = " (None means: without limit)" if option in _OPTIONAL else ""
        raise ConfigError(f"{option}={value} s is not finite: give {bound}{never}")
    if value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{option}={value:g} s is out of range: give {bound}")
    if value > LONGEST and option in _STORED:
        raise ConfigError(f"{option}={value:g} s is out of range: give at most {LONGEST:g}")
    return value


LONGEST = 1e14
"""The longest time that a server stores, in seconds. Redis counts in ms, with 63 bits."""

_STORED = {"lease", "max_lease", "min_hold", "fence_memory", "within"}

ANSWER_TIMEOUT = 5.0
"""The longest wait for the answer to a command that is not part of a ballot, in seconds."""

QUORUM_TIMEOUT = 0.05
"""The default node_timeout where other nodes can answer, in seconds, if they are near."""

RELEASE_TIMEOUT = 3.0
"""The longest wait for the answer to a release, in seconds. A cancelled task leaves its block after that at most."""


def node_timeout(
    client: ClientSettings, lock: LockSettings, nodes: int, name: str = "", *, measured: float = 0.0
) -> float:
    """After how many seconds a silent node casts no vote. `measured`: the time that the farthest node needs, by its
    round trips. Raises ConfigError."""
    if client.node_timeout is None and nodes == 1:
        return lock.lease / 10
    if client.node_timeout is None:
        timeout = min(max(QUORUM_TIMEOUT, measured), longest_node_timeout(client, lock))
    else:
        timeout = client.node_timeout
    if lock.lease < 3 * timeout - 1e-9:
        check_node_timeout(lock, timeout, name)
    return timeout


def longest_node_timeout(client: ClientSettings, lock: LockSettings) -> float:
    """The longest time that a node has to answer, in any client of a name: that of a client which is far away."""
    return max(QUORUM_TIMEOUT, lock.lease / 10, client.node_timeout or 0.0)


def check_node_timeout(settings: LockSettings, node_timeout: float, name: str = "") -> None:
    """Refuse a lease below three node timeouts: no round could win in time. Raises ConfigError."""
    if settings.lease < 3 * node_timeout - 1e-9:  # 3 * 0.05 is a little more than 0.15
        raise ConfigError(
            f"lease={settings.lease:g} s is too short for node_timeout={node_timeout:g} s: "
            f"give a lease of at least {3 * node_timeout:g} s (three node timeouts)",
            name=name,
        )


def _check_lock(lock: LockSettings, client: ClientSettings) -> None:
    if lock.lease < MIN_LEASE:
        raise ConfigError(f"lease={lock.lease:g} s is too short: give at least {MIN_LEASE:g} s")
    if lock.lease > client.max_lease:
        raise ConfigError(
            f"lease={lock.lease:g} seconds is above max_lease={client.max_lease:g} seconds: leases are in seconds, "
            f"not milliseconds; for a longer lease, raise max_lease in every client of the deployment"
        )
    if lock.min_hold > lock.lease:
        raise ConfigError(f"min_hold={lock.min_hold:g} s is above lease={lock.lease:g} s: give at most the lease")
    if len(lock.metadata) > MAX_METADATA:
        raise ConfigError(f"metadata has {len(lock.metadata)} characters: give at most {MAX_METADATA}")
    if client.node_timeout is not None:
        check_node_timeout(lock, client.node_timeout)


def _checked(options: Mapping[str, Any], known: frozenset[str], whose: str) -> dict[str, Any]:
    return {key: _value(key, value, known, whose) for key, value in options.items()}


def _value(key: str, value: Any, known: frozenset[str], whose: str) -> Any:
    if key not in known:
        if key in _POLLING:
            raise ConfigError(
                f"{key!r} is no option of a {whose}: a waiter does not poll, it is notified; 'timeout' says how many "
                "seconds it waits"
            )
        alias = _ELSEWHERE.get(key)
        close = [alias] if alias else difflib.get_close_matches(key, known | _OF_A_MUTEX, 1)
        if close and close[0] in _OF_A_MUTEX:
            raise ConfigError(
                f"{key!r} is no option of a {whose}: {close[0]!r} is an option of the mutex only, redlock(name)"
            )
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(known))}"
        raise ConfigError(f"{key!r} is no option of a {whose}: {hint}")
    if key == "renew" and value == THREAD and isinstance(value, str):
        return THREAD
    if key in _FLAGS or key in _TEXTS:
        wanted = bool if key in _FLAGS else str
        if not isinstance(value, wanted):
            if key == "renew":
                raise ConfigError(f"renew is True, False or {THREAD!r}, not {value!r}")
            raise ConfigError(f"{key} is a {wanted.__name__}, not {type(value).__name__}")
        if isinstance(value, str):
            check_text(key, value)
            return plain_text(value)
        return value
    if value is None and key in _OPTIONAL:
        return None
    return seconds(key, value, zero=key in _ZERO_OK)


def _replace(settings: _Settings, changes: Mapping[str, Any]) -> _Settings:
    """dataclasses.replace, but three times faster, because a web server makes a lock per request."""
    if not changes:
        return settings
    return type(settings)(**{f: changes.get(f, getattr(settings, f)) for f in settings.__slots__})


def check_flag(option: str, value: object, name: str = "") -> None:
    """Refuse everything but True and False. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{option} is True or False, not {type(value).__name__}", name=name)


def check_owner(owner: Hashable, name: str) -> Hashable:
    """Check the owner of a reentrant lock: any hashable object. Raises ConfigError."""
    try:
        hash(owner)
    except TypeError:
        raise ConfigError(
            f"owner is something hashable, such as a str, not {type(owner).__name__}", name=name
        ) from None
    return owner
