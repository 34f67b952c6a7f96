"""The judge of the whole stack: what is promised, in true time, from what the servers have stored."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from asynclock.rules.model import ID_LENGTH, TAG_LENGTH
from simulation.checks import Judge
from simulation.stack.resp import Error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asynclock.protocol.hold import Tenure
    from simulation.checks import Record
    from simulation.clients import Client
    from simulation.stack.servers import Server
    from simulation.stack.world import World

PREFIX = b"lock:"

_LEAVES = 0.5
"""Seconds after the switch of the last sentinel in which all clients leave the old master: their messages need some."""


class StackJudge(Judge):
    """`carried_out_at` is called after each command."""

    _world: Any

    def __init__(self, world: World) -> None:
        super().__init__(world, world.plan.options["max_lease"])  # type: ignore[arg-type]  # it has what the judge asks
        self._stored: dict[tuple[Server, bytes], dict[str, float]] = {}

    def have_been_assumed(self, name: str) -> bool:
        """In the whole run, or not at all."""
        del name
        return self._safe

    _assumed = have_been_assumed

    def _see(self, *args: object) -> None:
        """Refusals are not judged here."""

    def carried_out_at(self, server: Server, words: Sequence[bytes], reply: object, keys: Sequence[bytes]) -> None:
        """A server has carried a command out, which has changed these keys."""
        self._look_for_released(server, words, reply, keys)
        for key in keys:
            if key.startswith(PREFIX) and not key.startswith(PREFIX + b"asynclock~"):
                self._hold_changed(server, words, key)

    def _look_for_released(self, server: Server, words: Sequence[bytes], reply: object, keys: Sequence[bytes]) -> None:
        """An id is spent by its release: neither its hold nor its ticket comes back. A plain SET looks at no tombstone,
        as docs/safety.md says."""
        verb, own = _verb_and_ids(words)
        for key in keys:
            for its_id in server.ids(key):
                if (server.node, its_id) in self._released and its_id not in self._left_alone:
                    is_late_ticket = verb == "acquire" and its_id not in own  # docs/evidence.md
                    if words[0].upper() == b"SET" or is_late_ticket:
                        self._left_alone.add(its_id)
                    elif self._safe:
                        self.fail("an id came back after its release", f"{its_id[12:18]} at {server.label} by {verb}")
        if (released := _released_by(words, reply)) is not None:
            self._released.add((server.node, released))

    def _hold_changed(self, server: Server, words: Sequence[bytes], key: bytes) -> None:
        before = self._stored.get((server, key), {})
        after = self._stored[server, key] = server.holders(key)
        for its_id, ends in after.items():
            nodes = self._ends.get(its_id)
            if nodes is None:
                nodes = self._ends[its_id] = [-math.inf] * self._world.deployment.nodes
                self._granted_at[its_id] = self.now
                if server.role == "old master" and self.now > self._left_by(its_id, server) + _LEAVES:
                    self.fail("an old master is used", f"{its_id[12:18]} got {key.decode()} at {server.label}")
            nodes[server.node] = max(nodes[server.node], ends)
        verb, own = _verb_and_ids(words)
        if verb == "break":
            self._rests_until.pop(key.removeprefix(PREFIX).decode(), None)
        for its_id, ends in before.items():
            if its_id in after or ends <= self.now:
                continue
            if verb == "break":
                self._broken.add(its_id)
                self._broken_at[key.removeprefix(PREFIX).decode()] = self.now
                continue
            if its_id not in own:
                self.fail("another's key was deleted", f"{verb} of {key.decode()} at {server.label}: {its_id[12:18]}")
            elif verb == "release":
                for record, _ in self._held():
                    if record.key == its_id and self._safe:
                        self.fail("released while held", f"{record} of {key.decode()}")

    def _left_by(self, its_id: str, server: Server) -> float:
        """Since when the process with that id could know that the server is no master any more."""
        ran: list[float] = [each.loop.runs_since for each in self._world.live() if each.tag == its_id[:TAG_LENGTH]]
        return max([server.switched_at, *ran])

    def forgot(self, server: Any) -> None:
        super().forgot(server)
        for where in [each for each in self._stored if each[0] is server]:
            del self._stored[where]

    def came_back(self, server: Server) -> None:
        """A server has the data of an earlier moment. Its clients release again what they have released in the last two
        seconds; other holds that came back stay for their lease, as docs/safety.md says."""
        for key in list(server.keys.values):
            self._left_alone.update(each for each in server.holders(key) if not self.has(each))

    def _held(self) -> Iterator[tuple[Record, Tenure]]:
        """The tenures that are held, each by the clock of its own process."""
        for record in list(self._records):
            tenure = record.tenure()
            if tenure is None or not tenure.open:
                del self._records[record]
                continue
            if self.is_held(record.client, tenure):
                yield record, tenure

    def is_held(self, client: Client, tenure: Tenure) -> bool:
        """By the clock of its process."""
        with self._seen_from(client):
            return tenure.held

    def _check_max_hold(self, record: Record, tenure: Tenure) -> None:
        with self._seen_from(record.client):
            super()._check_max_hold(record, tenure)

    @contextlib.contextmanager
    def _seen_from(self, client: Client) -> Iterator[None]:
        """Clocks read what they show to that process."""
        self._world.seen_from = client.loop
        try:
            yield
        finally:
            self._world.seen_from = None

    def has(self, its_id: str) -> bool:
        """Whether a program has a tenure of that hold, or nobody has to release it."""
        if its_id in self._left_alone:
            return True
        return any(
            each.key == its_id and (tenure := each.tenure()) is not None and tenure.open for each in self._records
        )

    def moved(self, source: Server, target: Server, key: bytes) -> None:
        """A slot has moved, with this key."""
        self._stored.pop((source, key), None)
        if key.startswith(PREFIX) and not key.startswith(PREFIX + b"asynclock~"):
            self._stored[target, key] = target.holders(key)

    # -- after all has healed ----------------------------------------------------------------------------------------

    def nothing_is_left(self) -> None:
        """All tasks have ended, and each node is connected."""
        tags = {client.tag for client in self._world.live() if client.tag}
        for client in self._world.live():
            session = client.session()
            machine = None if session is None else session.machine
            parts = {} if machine is None else {
                "a claim": machine.under_way, "a hold": machine.holds, "a ticket": machine.tickets.all(),
                "a local queue": machine.queues,
            }  # fmt: skip
            for what, each in parts.items():
                if each:
                    self.fail(f"{what} is left", client.name)
        for server in self._world.servers:
            for key in list(server.keys.values) if server.role == "master" else ():  # nobody looks at an old one
                for its_id in server.ids(key):
                    if its_id[:TAG_LENGTH] in tags and its_id not in self._left_alone:
                        self.fail("an id is left at a server", f"{its_id[12:18]} in {key.decode()} at {server.label}")

    def nothing_is_stored(self) -> None:
        """All leases have ended: only counters and the marks of first use are left."""
        for server in self._world.servers:
            for key in server.left() if server.role == "master" else ():
                self.fail("a server keeps what has ended", f"{key} at {server.label}")


def _verb_and_ids(words: Sequence[bytes]) -> tuple[str, set[str]]:
    """The verb of a command, and the ids whose holds it may end."""
    if words[0].upper() in (b"EVALSHA", b"EVAL") and len(words) > 3:
        arguments = words[3 + int(words[2]) :]
        verb = b"".join(arguments[:1]).decode(errors="replace")
        ids = [arguments[1], arguments[9]] if len(arguments) > 9 and verb in ("release", "adopt") else arguments[1:2]
        return verb, {each[:ID_LENGTH].decode(errors="replace") for each in ids}
    if words[0].upper() == b"DELIFEQ":
        return "release", {words[2].lstrip(b"+")[:ID_LENGTH].decode()}
    return words[0].decode(), set()


def _released_by(words: Sequence[bytes], reply: object) -> str | None:
    """The id that a command has spent. A release with a ticket is an undo, after which its owner asks again. If the
    server's own command has deleted nothing, the script follows it, and is the release."""
    if words[0].upper() == b"DELIFEQ":
        return _verb_and_ids(words)[1].pop() if reply == 1 else None
    if words[0].upper() not in (b"EVALSHA", b"EVAL") or isinstance(reply, Error):
        return None
    arguments = words[3 + int(words[2]) :]
    if len(arguments) <= 10 or arguments[0] != b"release" or arguments[10]:
        return None
    return arguments[1][:ID_LENGTH].decode(errors="replace")
