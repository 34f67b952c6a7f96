"""What a kind of lock is: `Kind`, as a client sees it, and `Rule`, by which a store decides who may enter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, cast

from asynclock.rules.model import ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynclock.rules.model import Entry, Op


class Slots(NamedTuple):
    """The slots in use, in the refusal of a node."""

    taken: tuple[int, ...]
    part: int = 0  # the number of the name, for an op of several names


class Kind(Protocol):
    """A kind of lock, as a client sees it."""

    @property
    def name(self) -> str: ...
    @property
    def letter(self) -> str:
        """The first character of its mode, by which a store finds its rule or script; "" for the mutex."""

    @property
    def fair(self) -> bool:
        """Whether its attempts enter only in the order of the queue."""

    @property
    def shared(self) -> bool:
        """Whether several ids can hold a name at once. If not, the hold on Redis is a plain string with the mark of
        rule 9, and the tasks of one process use a local queue."""

    @property
    def mode(self) -> str:
        """The text after the bar in its ids, which describes the hold; "" for the mutex."""

    @property
    def max_per_task(self) -> int:
        """The number of holds of a name with which a task that waits for one more waits for itself."""

    @property
    def deadlock_hint(self) -> str:
        """The advice in the message of SelfDeadlock."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The names that it holds together; (): only the name of its op."""

    @property
    def slots(self) -> int:
        """The number of slots. Over N nodes each hold has a slot, which its id contains and a majority grants; 0: the
        kind has no slots."""

    def at(self, slot: int) -> Kind:
        """The kind of an attempt for this slot."""

    def choose(self, taken: Sequence[Slots], spare: int) -> int | None:
        """A slot that a majority may grant. `taken`: the slots in use at each node that refused; `spare`: the number of
        nodes that a majority does not need. None: no such slot is known."""

    def respects_queue(self, id: str) -> bool:
        """Whether an attempt enters after the tickets before it, even if it could enter now."""


class Rule(Kind, Protocol):
    """The rule of a kind of lock of one name: which attempts can enter. Pure. No hold has ended, and none is of
    `id`."""

    def at(self, slot: int) -> Rule: ...

    def of_mode(self, mode: str) -> Rule:
        """The rule of a hold whose id has this mode, which has the same letter."""

    def taken(self, holds: Sequence[Entry]) -> tuple[int, ...] | None:
        """The slots in use; None: the kind has no slots."""

    def admits(self, holds: Sequence[Entry], id: str) -> bool:
        """Whether the id can hold the name together with `holds`."""

    def blocking_hold(self, holds: Sequence[Entry]) -> Entry:
        """The hold that a refused attempt waits for: it tries again when this hold ends."""


class Slotless:
    """The methods that are the same for all rules without slots."""

    parts = ()
    slots = 0

    def at(self, slot: int) -> Self:
        del slot
        return self

    def of_mode(self, mode: str) -> Self:
        del mode
        return self

    def choose(self, taken: Sequence[Slots], spare: int) -> None:
        del taken, spare

    def taken(self, holds: Sequence[Entry]) -> None:
        del holds


_SLOT = re.compile(r"/\d+")


class Part(NamedTuple):
    """One of several names that are held together."""

    name: str
    kind: Rule

    def named(self, id: str, *, waits: bool = False) -> str:
        """The id of that hold at this name; or of its ticket, which is not for a single slot."""
        mode = _SLOT.sub("/", self.kind.mode) if waits else self.kind.mode
        return f"{id[: ID_LENGTH + 1]}{mode}{id[ID_LENGTH + 1 :]}" if id else ""


def parts_of(op: Op) -> tuple[Part, ...]:
    """The names of an op, usually one."""
    return op.kind.parts or (Part(op.name, cast("Rule", op.kind)),)
