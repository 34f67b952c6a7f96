"""Asks Redis Sentinels which server is the master.

The rules:

1. All sentinels are asked at once. The answer of a majority is waited for, and that of the others for a moment longer.
   Among the answers that differ, that with the greatest config epoch counts: each failover has a greater one than all
   before it, and a sentinel that was cut off has an older one.
2. Where the sentinels are silent or the epochs are forbidden, one answer is enough: the node checks the role of the
   server (`node.py`), and listens to the sentinels from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from asynclock._errors import ConfigError
from asynclock._loop import AGAIN, own_task
from asynclock.stores.closing import CANCELLING
from asynclock.stores.forks import Origin
from asynclock.stores.lookups import lookup_under_way
from asynclock.stores.redis import reconnect
from asynclock.stores.redis.connecting import follow
from asynclock.stores.redis.hang_ups import explained
from asynclock.stores.redis.remedies import SENTINEL_LOGIN, joined
from asynclock.stores.redis.replies import connect_error, for_users, unknown_command
from asynclock.stores.redis.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from redis.asyncio.connection import AbstractConnection

log = logging.getLogger("asynclock")

Address: TypeAlias = tuple[str, int]

_GRACE = 0.05  # seconds for which the other sentinels are waited for, after a majority has answered
_LIMIT = 1.0  # seconds for one sentinel to connect and to answer
_QUIET = 5.0  # seconds of silence after which a sentinel is asked whether it is there
_RIGHTS = ("&+switch-master", "+subscribe", "+ping", "+sentinel|get-master-addr-by-name", "+sentinel|master")
_PAUSES = (0.1, 5.0)  # seconds between attempts to connect to a sentinel: the first and the longest


class Master(NamedTuple):
    """The master that a sentinel names."""

    address: Address
    epoch: int = -1  # of its last failover; -1: the sentinel forbids to ask for it
    age: float = 0.0  # seconds for which the sentinel has known it as the master


class Endpoint(NamedTuple):
    """One sentinel."""

    label: str
    dial: Callable[[], AbstractConnection]


def newest(answers: Sequence[Master]) -> Master:
    """The answer that counts (rule 1): with the greatest epoch, then the one that most sentinels give. Its age is the
    longest that is known. Pure."""
    named = Counter(each.address for each in answers)
    best = max(answers, key=lambda each: (each.epoch, named[each.address], each.address))
    same = [each for each in answers if each.address == best.address and each.epoch == best.epoch]
    return best._replace(age=max(each.age for each in same))


class Sentinels:
    """The sentinels of one master. It has no connections of its own, so that all event loops can use it."""

    def __init__(
        self, name: str, endpoints: Sequence[Endpoint], *, others: int = 0, forced_host: str | None = None
    ) -> None:
        self.name = name
        self.endpoints = tuple(endpoints)
        self._others = others  # an answer counts only from a sentinel that sees so many others
        self._forced_host = forced_host

    def dialed(self, master: Address) -> Address:
        """Where to connect to the master that the sentinels name."""
        return master if self._forced_host is None else (self._forced_host, master[1])

    async def find(self, within: float = _LIMIT) -> Master:
        """The master, after `within` seconds at most. Raises ConnectionError, or ConfigError if only the user can solve
        the problem."""
        asked = {asyncio.ensure_future(self.ask(each, within)): each for each in self.endpoints}
        found: list[Master] = []
        errors: dict[str, Exception] = {}
        pending, loop = set(asked), asyncio.get_running_loop()
        until = loop.time() + within
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=max(0.0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                had_majority = len(found) > len(asked) // 2
                for each in done:
                    error = each.exception()
                    if error is None:
                        found.append(each.result())
                    elif isinstance(error, Exception):
                        errors[asked[each].label] = error
                if not had_majority and len(found) > len(asked) // 2:
                    until = min(until, loop.time() + _GRACE)
        finally:
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)  # asyncio logs an error that nobody reads
        if found:
            return newest(found)
        for label in [asked[each].label for each in pending]:
            lookup = lookup_under_way(label.rpartition(":")[0])
            errors[label] = TimeoutError(f"no answer within {within:g} s{lookup}")
        raise self._unknown(errors)

    def _unknown(self, errors: Mapping[str, Exception]) -> Exception:
        """The error if no sentinel names a master. A ConfigError if each of them answers so that only the user can
        solve it."""
        reasons = joined(
            [str(error) if label in str(error) else f"{label}: {error}" for label, error in errors.items()]
        )
        hopeless = all(isinstance(each, ConfigError) for each in errors.values())
        return (ConfigError if hopeless else ConnectionError)(f"no sentinel names the master {self.name}: {reasons}")

    async def ask(self, endpoint: Endpoint, within: float = _LIMIT) -> Master:
        """The master that this sentinel names. Raises ConnectionError, TimeoutError, ConfigError."""
        return self._master(endpoint.label, *await self._asked(endpoint, within))

    async def state(self, endpoint: Endpoint) -> dict[str, str]:
        """What this sentinel says of the master, for `asynclock doctor`. Raises as `ask` does."""
        address, state = await self._asked(endpoint, _LIMIT)
        self._master(endpoint.label, address, state)
        return fields_of(state)

    async def _asked(self, endpoint: Endpoint, within: float) -> list[Any]:
        connection, stages = endpoint.dial(), [Stage.CONNECT]
        follow(connection, stages.append)
        try:
            async with asyncio.timeout(within):
                await connection.connect()  # type: ignore[no-untyped-call]
                return await _answers(
                    connection,
                    ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name),
                    ("SENTINEL", "MASTER", self.name),
                )
        except Exception as error:
            why = await explained(connection, error, stages[-1], within)
            raise login_error(endpoint.label, why) or connect_error(endpoint.label, why, stages[-1]) from None
        finally:
            await connection.disconnect(nowait=True)

    def _master(self, label: str, address: Any, state: Any) -> Master:
        """Read the two answers. While a failover is under way, the first has the new master already. Pure."""
        if address is None:
            raise ConfigError(f"{label} knows no master {self.name}: correct the name in the url")
        if isinstance(address, ResponseError) and unknown_command(str(address)):
            raise ConfigError(f"{label} is no sentinel ({address}): name the sentinels, or write redis:// in the url")
        if isinstance(address, NoPermissionError):
            raise ConfigError(f"{label} refuses: {address}; its user needs {' '.join(_RIGHTS)}")
        if isinstance(address, ResponseError):
            raise ConnectionError(f"{label}: {address}")
        known = (address[0].decode(), int(address[1]))
        fields = fields_of(state)
        if self._others > (others := int(fields.get("num-other-sentinels", 0))):
            raise ConnectionError(f"{label} sees {others} other sentinels, and the client wants {self._others}")
        master = Master(known, int(fields.get("config-epoch", -1)))
        if (fields.get("ip"), fields.get("port")) != (known[0], str(known[1])):
            return master
        age = int(fields.get("role-reported-time", 0)) / 1000
        return master._replace(age=age)


def login_error(label: str, error: BaseException) -> ConfigError | None:
    """The error to report where a sentinel refuses the login, which is not the login of the master; None: `error` has
    another cause. Pure."""
    if not isinstance(error, AuthenticationError):
        return None
    return ConfigError(f"{label} refuses: {str(error).rstrip('.')}; {SENTINEL_LOGIN}")


def fields_of(answer: Any) -> dict[str, str]:
    """The fields of an answer that is a list of names and values; none, if it is an error. Pure."""
    if not isinstance(answer, list):
        return {}
    words = [word.decode(errors="replace") for word in answer]
    return dict(zip(words[::2], words[1::2], strict=False))


async def _answers(connection: AbstractConnection, *commands: tuple[str, ...]) -> list[Any]:
    """The answers to some commands; an error reply is one, too."""
    found: list[Any] = []
    await connection.send_packed_command(connection.pack_commands(commands))
    for _ in commands:
        try:
            found.append(await connection.read_response())
        except ResponseError as error:
            found.append(error)
    return found


class Watch:
    """Listens to all sentinels of one node. `left` is called with the addresses of the old and of the new master when a
    sentinel has switched, and `named` with the master that a sentinel names, after each switch and each connect. A
    sentinel may take `within` seconds to connect, and to answer."""

    def __init__(
        self,
        sentinels: Sentinels,
        left: Callable[[Address, Address], object],
        named: Callable[[Master], object],
        within: float,
    ) -> None:
        self._sentinels = sentinels
        self._within = within
        self._left = left
        self._named = named
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._stopped = False
        self._origin = Origin()

    def start(self) -> None:
        """A second call does nothing."""
        if not self._started:
            self._started = True
            for each in self._sentinels.endpoints:
                self._begin(each)

    def _begin(self, endpoint: Endpoint) -> None:
        if not self._stopped and self._origin.is_here:
            ended = partial(self._ended, endpoint)
            self._tasks.add(own_task(self._follow(endpoint), f"asynclock {endpoint.label}", ended))

    def _ended(self, endpoint: Endpoint, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and not self._stopped:
            task.get_loop().call_later(AGAIN, self._begin, endpoint)

    async def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCELLING)

    async def _follow(self, endpoint: Endpoint) -> None:
        """Listen to one sentinel, and connect again whenever the connection is lost."""
        pause = _PAUSES[0]
        while self._origin.is_here:
            began = asyncio.get_running_loop().time()
            connection = endpoint.dial()
            try:
                await self._listen(endpoint, connection)
            except Exception as error:
                log.debug("asynclock: %s is not listened to: %s", endpoint.label, for_users(str(error)))
            finally:
                await connection.disconnect(nowait=True)
            if asyncio.get_running_loop().time() - began > _PAUSES[1]:
                pause = _PAUSES[0]
            await reconnect.pause(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause = min(2 * pause, _PAUSES[1])

    async def _listen(self, endpoint: Endpoint, connection: AbstractConnection) -> None:
        """Returns or raises once the connection is lost."""
        async with asyncio.timeout(self._within):
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_command("SUBSCRIBE", "+switch-master")
            await connection.read_response()
        self._named(await self._sentinels.ask(endpoint, self._within))  # a switch before the subscription
        asked = False
        while True:
            reconnect.raise_if_cancelled()
            message = await connection.read_response(timeout=_QUIET)  # None: there is none within so many seconds
            if message is None and asked:
                return
            if message is None:
                await connection.send_command("PING")
            asked = message is None
            if message is not None and message[0] == b"message":
                await self._switched(endpoint, message[-1])

    async def _switched(self, endpoint: Endpoint, text: bytes) -> None:
        words = text.decode(errors="replace").split()
        if len(words) == 5 and words[0] == self._sentinels.name:
            with contextlib.suppress(ValueError):
                self._left((words[1], int(words[2])), (words[3], int(words[4])))
            self._named(await self._sentinels.ask(endpoint, self._within))
