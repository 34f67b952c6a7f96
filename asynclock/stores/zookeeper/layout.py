"""How locks are laid out in ZooKeeper: the names of the nodes, their order, and what each one waits for. Pure.

A lock is a node, the child of the store's path that has the escaped name. Each client that holds the lock or waits for
it has an ephemeral, sequential child of that node. The server numbers these children in the order in which it creates
them. A client holds the lock once no child with a smaller number is in its way.

    kazoo      <random><mark>__lock__<number>           mutex, writer     kazoo.recipe.lock: Lock, WriteLock
               <random><mark>__rlock__<number>          reader            ReadLock
               <random><mark>__sem__<number>            semaphore         (none: see the page)
    curator    _c_<uuid>-<mark>-lock-<number>           mutex             InterProcessMutex
               _c_<uuid>-<mark>-__WRIT__<number>        writer            InterProcessReadWriteLock
               _c_<uuid>-<mark>-__READ__<number>        reader
               _c_<uuid>-<mark>-sem-<number>            semaphore         (none)

A waiter for several names has a ticket, with the word __wait__ (kazoo) or -wait- (curator), which is in nobody's way:
the recipes of kazoo do not see it, and those of Curator sort it behind all others. A ticket with the word __next__ or
-next- closes the name: later arrivals of asynclock wait behind it, with such a ticket of their own.

`random` are the 32 hexadecimal digits of an id of asynclock; `uuid` is the same, written as a UUID. By them a client
finds the node of a create whose reply was lost. `mark` names the kind: m, w, r, or s with the number of permits; d is
the mark of a name of which a run of `once` has returned. The nodes of kazoo and of Curator have none.

The number is the cversion of the lock's node, an int of 32 bits with its sign, with ten digits ("%010d" of Java). It
ends with 2^31 - 1. A server of version 3.8 gives this number to each later node, and negative ones to nodes that it
creates at the same time; an older one counts on through the negative numbers. So they say nothing of the order. In this
module they come after all others, and nobody holds a lock by one (`is_ordered`).

Sources: kazoo/recipe/lock.py; Curator's StandardLockInternalsDriver, InterProcessReadWriteLock and ProtectedUtils;
ZooKeeper's PrepRequestProcessor and DataTree.createNode, which sets a cversion only if it is greater.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from asynclock.rules.model import ID_LENGTH
from asynclock.rules.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asynclock.rules.model import Rule

FOREIGN = "-" * ID_LENGTH + "|"
"""The beginning of the id under which a hold of another program is shown. It has the bar of an id, because the store
notices when such a hold ends, too."""


class Layout(StrEnum):
    """Whose nodes the nodes of asynclock look like."""

    KAZOO = "kazoo"
    CURATOR = "curator"


_WORDS = {
    Layout.KAZOO: {"": "__lock__", "w": "__lock__", "r": "__rlock__", "s": "__sem__"},
    Layout.CURATOR: {"": "-lock-", "w": "-__WRIT__", "r": "-__READ__", "s": "-sem-"},
}
"""The word before the number, by the letter of a kind."""


_NUMBER = "[0-9]{10}|-[0-9]{9,10}"

_LAST = 2**31 - 1


def _place(number: str) -> int:
    """The place in the order of a lock of the node with that number."""
    return int(number) + (2**32 if number.startswith("-") else 0)


def is_ordered(place: int) -> bool:
    """Whether all nodes that came before it have places before it."""
    return place < _LAST


def knows(letter: str) -> bool:
    """Whether the layouts have nodes for the kind with this letter."""
    return all(letter in words for words in _WORDS.values())


_OURS = {
    Layout.KAZOO: re.compile(rf"([0-9a-f]{{32}})([mwrd]|s[0-9]{{1,5}})(?:__lock__|__rlock__|__sem__)({_NUMBER})"),
    Layout.CURATOR: re.compile(
        r"_c_([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})-([mwrd]|s[0-9]{1,5})"
        rf"-(?:lock-|__WRIT__|__READ__|sem-)({_NUMBER})"
    ),
}

_TICKETS = {Layout.KAZOO: "__wait__", Layout.CURATOR: "-wait-"}
_CLOSING_TICKETS = {Layout.KAZOO: "__next__", Layout.CURATOR: "-next-"}

_TICKET = {
    Layout.KAZOO: re.compile(rf"([0-9a-f]{{32}})__(wait|next)__({_NUMBER})"),
    Layout.CURATOR: re.compile(rf"_c_([0-9a-f-]{{36}})-(wait|next)-({_NUMBER})"),
}

_END = re.compile(rf"[_-]({_NUMBER})\Z")
"""Of the name of each of these nodes: the word before the number ends so."""

_THEIRS = {
    Layout.KAZOO: re.compile(rf"(__lock__|__rlock__)({_NUMBER})\Z"),
    Layout.CURATOR: re.compile(rf"(lock-|__WRIT__|__READ__)({_NUMBER})\Z"),
}

_THEIR_LETTERS = {"__lock__": "x", "__rlock__": "r", "lock-": "", "__WRIT__": "w", "__READ__": "r"}
"""kazoo gives the same word to a mutex and to a writer: x."""


class Child(NamedTuple):
    """The node of one client that holds a lock or waits for it. Children are ordered by their number."""

    number: int
    name: str  # of the node, below the node of the lock
    letter: str  # of its kind; "x": a mutex or a writer of kazoo
    permits: int = 0  # of a semaphore
    random: str = ""  # the beginning of its id; "": another program made it
    closes: bool = False  # a ticket, behind which later arrivals wait

    @property
    def foreign_id(self) -> str:
        """The id under which the hold of another program is shown."""
        return f"{FOREIGN}r." if self.letter == "r" else FOREIGN


# -- names -----------------------------------------------------------------------------------------------------------

_ESCAPED = re.compile("[^ -$&-.0-~\xa0-\ud7ff\uf900-\uffef]")
"""A slash, a percent sign, and the characters that ZooKeeper does not allow in a path."""


def escaped(name: str) -> str:
    """The node of a lock: its name, with a slash, a percent sign and what ZooKeeper does not allow percent-encoded as
    UTF-8. A name of dots, and the name of ZooKeeper's own node, have their first character encoded."""
    node = _ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)
    if node in (".", "..", "zookeeper"):
        node = f"%{ord(node[0]):02X}{node[1:]}"
    return node


def unescaped(node: str) -> str:
    """The name of a lock, from its node."""
    return unquote(node, errors="replace")


def prefix_of(layout: Layout, id: str, rule: Rule) -> str:
    """The name of the node of that id, without its number."""
    random, letter = id[:ID_LENGTH], rule.letter
    mark = f"s{rule.slots}" if letter == "s" else letter or "m"
    if layout is Layout.KAZOO:
        return f"{random}{mark}{_WORDS[layout][letter]}"
    return f"_c_{_as_uuid(random)}-{mark}{_WORDS[layout][letter]}"


def done_mark_of(layout: Layout, name: str) -> str:
    """The name of the mark that takes the place of that node of a mutex, after a run of `once`."""
    place = name.rindex("m__lock__" if layout is Layout.KAZOO else "m-lock-")
    return f"{name[:place]}d{name[place + 1 :]}"


def random_of(layout: Layout, id: str) -> str:
    """The beginning of the names of all nodes of that id."""
    random = id[:ID_LENGTH]
    return random if layout is Layout.KAZOO else f"_c_{_as_uuid(random)}"


def ticket_prefix_of(layout: Layout, id: str, *, closes: bool = False) -> str:
    """The name of the ticket of that id, without its number."""
    return f"{random_of(layout, id)}{(_CLOSING_TICKETS if closes else _TICKETS)[layout]}"


def place_of(name: str) -> int:
    """The place in the order of its lock of a node that this client has created."""
    found = _END.search(name)
    return _LAST if found is None else _place(found[1])


def tickets_of(layout: Layout, names: Iterable[str]) -> list[Child]:
    """The tickets at a lock, in order."""
    return sorted(
        Child(_place(found[3]), name, "", random=found[1].replace("-", ""), closes=found[2] == "next")
        for name in names
        if (found := _TICKET[layout].fullmatch(name))
    )


def closing_before(layout: Layout, names: Iterable[str], number: int) -> Child | None:
    """The last ticket that closes the lock to those that arrived with that number; None: it is open to them."""
    word = _CLOSING_TICKETS[layout]
    found = tickets_of(layout, [name for name in names if word in name])
    return next((each for each in reversed(found) if each.number < number), None)


def _as_uuid(random: str) -> str:
    return f"{random[:8]}-{random[8:12]}-{random[12:16]}-{random[16:20]}-{random[20:]}"


def queue_of(layout: Layout, names: Iterable[str]) -> list[Child]:
    """The children of a lock in order. Nodes that are no part of a lock are left out."""
    return sorted(child for name in names if (child := _child(layout, name)) is not None)


def _child(layout: Layout, name: str) -> Child | None:
    if ours := _OURS[layout].fullmatch(name):
        mark = ours[2]
        letter = "" if mark in ("m", "d") else mark[0]
        return Child(_place(ours[3]), name, letter, int(mark[1:] or 0), ours[1].replace("-", ""))
    if theirs := _THEIRS[layout].search(name):
        return Child(_place(theirs[2]), name, _THEIR_LETTERS[theirs[1]])
    return None


# -- the order --------------------------------------------------------------------------------------------------------


class Obstacle(NamedTuple):
    """What a waiter watches: it looks again when this changes."""

    child: Child  # the last one that is in its way
    any_child: bool = False  # the waiter watches all children: whichever of several holders leaves, it may enter


def obstacle(before: Sequence[Child], rule: Rule, behind: Sequence[Child] = ()) -> Obstacle | None:
    """What an attempt of this kind between these children waits for; None: it holds the lock."""
    if rule.letter == "s":
        return _permit_obstacle(before, rule.slots, behind)
    for child in reversed(before):
        if rule.letter != "r" or child.letter != "r":
            return Obstacle(child)
    return None


def _permit_obstacle(before: Sequence[Child], permits: int, behind: Sequence[Child]) -> Obstacle | None:
    """A waiter with more or as many permits before this one enters earlier: this one watches it. The first one that
    waits watches all children, because each holder that leaves makes room. Later arrivals with more permits may have
    entered before this one, and count as well. The last child of those that may be inside waits for none behind it, so
    they never all wait for each other."""
    if len(before) < permits:
        inside = [child for rank, child in enumerate(behind, len(before) + 1) if rank < child.permits]
        return Obstacle(inside[-1], any_child=True) if len(before) + len(inside) >= permits else None
    for rank in range(len(before) - 1, -1, -1):
        if before[rank].permits >= permits and rank >= before[rank].permits:
            return Obstacle(before[rank])
    return Obstacle(before[-1], any_child=True)


def holders(queue: Sequence[Child]) -> list[Child]:
    """Those that hold the lock. A waiter for a permit that has its turn, and waits for holders behind it, is among
    them (`may_wait`)."""
    found: list[Child] = []
    only_readers = True  # before this child
    for rank, child in enumerate(queue):
        reads = child.letter == "r"
        if (rank < child.permits) if child.letter == "s" else (only_readers if reads else rank == 0):
            found.append(child)
        only_readers = only_readers and reads
    return found


def may_wait(queue: Sequence[Child]) -> set[str]:
    """The names of those among `holders` that may wait for holders behind them, which have more permits: these entered
    while it waited, or after it had entered. Its data say that it waits."""
    found: set[str] = set()
    behind = 0  # holders
    for rank in range(len(queue) - 1, -1, -1):
        if rank < queue[rank].permits:
            if rank + behind >= queue[rank].permits:
                found.add(queue[rank].name)
            behind += 1
    return found


def is_of(child: Child, rule: Rule) -> bool:
    """Whether a holder is of the same kind of lock."""
    mine = FAMILIES[rule.letter]
    return mine != FAMILIES["s"] if child.letter == "x" else FAMILIES[child.letter] == mine
