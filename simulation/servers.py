"""The servers: the shipped `decide` over states in memory, at the time of their own clock."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asynclock.rules.model import State
from asynclock.stores.deciding import decided, keys_of
from asynclock.stores.port import WrongKind
from simulation.loop import WALL

if TYPE_CHECKING:
    from random import Random

    from asynclock.rules.model import Op
    from simulation.checks import Judge
    from simulation.loop import Schedule
    from simulation.network import Connection, Request

_EMPTY = State()

_REWINDS = 3.0
"""Seconds by which a server that restarts may have lost its last writes, at most."""


class ServerError(Exception):
    """An error reply. `resend`: the server did nothing, since it does not know the script."""

    def __init__(self, text: str, *, resend: bool = False) -> None:
        super().__init__(text)
        self.resend = resend


class Server:
    """One server."""

    def __init__(
        self, index: int, schedule: Schedule, random: Random, judge: Judge, rate: float, offset: float
    ) -> None:
        self.index = index
        self.label = f"node {index}"
        self.up = True
        self.silent = False  # its machine is gone, too: nobody refuses a connection
        self.frozen = 0
        self.fails = False  # it answers each op with an error
        self.unknown_scripts = 0  # so many ops get NOSCRIPT
        self.may_publish = True
        self.deaf: frozenset[int] = frozenset()  # the clients that get no notices from it
        self.run_id = f"run-{index}-0"
        self.started = -1e6  # true time
        self.mark = ""
        self.states: dict[str, State] = {}
        self._schedule = schedule
        self._random = random
        self._judge = judge
        self._rate = rate
        self._offset = offset
        self._starts = 0
        self._connections: dict[Connection, None] = {}
        self._journal: deque[tuple[float, str, State]] = deque()  # what each write has replaced lately

    def now(self) -> float:
        """Its Unix time."""
        return WALL + self._offset + self._rate * self._schedule.now

    def true_time(self, when: float) -> float:
        """The true time at which its clock shows `when`, if nobody steps it."""
        return (when - WALL - self._offset) / self._rate

    def step(self, seconds: float) -> None:
        self._offset += seconds

    # -- connections ---------------------------------------------------------------------------------------------

    def accept(self, connection: Connection) -> None:
        self._connections[connection] = None

    def forget(self, connection: Connection) -> None:
        """The client has ended it. A frozen server still reads what has arrived before."""
        if not connection.unread:
            self._connections.pop(connection, None)

    def receive(self, connection: Connection, request: Request) -> None:
        if self.frozen:
            connection.unread.append(request)
        else:
            self._handle(connection, request)

    def _handle(self, connection: Connection, request: Request) -> None:
        match request.what:
            case "hello":
                connection.listens = self.may_publish and int(connection.tag[:2], 16) not in self.deaf
                connection.reply((self.run_id, self._schedule.now - self.started, self.mark))
            case "mark":
                connection.reply(self.mark)
            case "set mark":
                self.mark = request.value
                connection.reply(None)
            case _:
                assert request.op is not None  # noqa: S101 - see Request
                connection.reply(self._answer(request.op))

    def _answer(self, op: Op) -> object:
        if self.unknown_scripts:
            self.unknown_scripts -= 1
            return ServerError("NOSCRIPT", resend=True)
        if self.fails:
            return ServerError("LOADING it loads its data")
        return self.carry_out(op)

    def carry_out(self, op: Op) -> object:
        """The vote. Its notices leave first to other clients, and after the earlier replies to each."""
        keys = keys_of("", op)
        before = [self.states.get(key, _EMPTY) for key in keys]
        try:
            change, vote = decided(op, before, self.now(), self._listens)
        except WrongKind as error:
            return error
        for key, old, new in zip(keys, before, change.states, strict=True):
            self._write(key, old, new)
        self._judge.carried_out(self, op, vote, before, change.states)
        for notice in change.notices:
            for connection in self._connections:
                if connection.listens and connection.tag == notice.tag:
                    connection.reply(notice)
        return vote

    def _listens(self, tag: str) -> bool | None:
        if not self.may_publish:
            return None
        return any(each.listens and each.tag == tag for each in self._connections)

    def _write(self, key: str, old: State, new: State) -> None:
        if new is old:
            return
        now = self._schedule.now
        self._journal.append((now, key, old))
        while self._journal[0][0] < now - _REWINDS:
            self._journal.popleft()
        if new == _EMPTY:
            self.states.pop(key, None)
        else:
            self.states[key] = new

    # -- faults --------------------------------------------------------------------------------------------------

    def freeze(self, seconds: float) -> None:
        """The process is stopped. Its kernel takes what arrives."""
        self.frozen += 1
        self._schedule.at(self._schedule.now + seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen -= 1
        connections = [each for each in self._connections if each.unread]
        self._random.shuffle(connections)
        for connection in connections if not self.frozen and self.up else ():
            while connection.unread:
                self._handle(connection, connection.unread.popleft())
            if not connection.open_there:
                self.forget(connection)

    def crash(self, silent: bool) -> None:
        self.up, self.silent = False, silent
        for connection in list(self._connections):
            connection.end_at_server(silent)
        self._connections.clear()

    def restart(self, lost: str) -> None:
        """With its data, without the last writes ("rewound"), or without all of them ("empty")."""
        self._starts += 1
        self.up, self.silent = True, False
        self.run_id = f"run-{self.index}-{self._starts}"
        self.started = self._schedule.now
        if lost == "empty":
            self.states.clear()
            self.mark = ""
        elif lost == "rewound":
            since = self._schedule.now - _REWINDS * self._random.random()
            while self._journal and self._journal[-1][0] >= since:
                _, key, old = self._journal.pop()
                self.states[key] = old
        self._journal.clear()

    def evict(self, name: str) -> None:
        """Delete the key of the hold."""
        if (state := self.states.get(name)) is not None:
            self.states[name] = State((), state.fence, state.fence_ends, state.undone, state.queue, state.queue_ends)
