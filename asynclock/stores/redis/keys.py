"""The keys of a name on Redis. All keys of a name are in the same slot of a cluster."""

from __future__ import annotations

from functools import lru_cache
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from redis.crc import key_slot

from asynclock._options import RESERVED
from asynclock.rules.model import ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynclock.rules.model import Op


class Keys(NamedTuple):
    """`hold` is exactly prefix + name; the other keys are derived from it."""

    hold: str
    fence: str
    queue: str
    tickets: str
    undone: str  # followed by the random part of an id (ID_LENGTH characters), the key of its tombstone


_TRIES = 1 << 17
"""So many hash tags are tried: they are in all slots but a few."""

_SOME = 512  # numbers that are tried at a time

_MOST = 4096  # the greatest number of cached names
_LONGEST = 256  # bytes of prefix and name; keys of longer names are not cached, because they could fill the memory


def keys(prefix: str, name: str) -> Keys:
    """The keys of `name`."""
    kept = len(prefix) + len(name) <= _LONGEST
    return _kept_keys(prefix, name) if kept else _kept_keys.__wrapped__(prefix, name)


def packed(prefix: str, name: str) -> bytes:
    """The five keys, encoded as in a command, without the end of the last one, which is the random part of an id.

    The keys of plain names are not cached: a join is cheap, and many programs lock each name only once.
    """
    hold = (prefix + name).encode()
    kept = len(hold) <= _LONGEST
    if kept and "}" not in name and (between := _between(prefix, len(hold))):
        return hold.join(between)
    return _kept_packed(prefix, name) if kept else _kept_packed.__wrapped__(prefix, name)


@lru_cache(_MOST)
def _kept_keys(prefix: str, name: str) -> Keys:
    hold = prefix + name
    where = _slot_mate(prefix, name, hold)
    return Keys(hold, f"{where}fence", f"{where}queue", f"{where}tickets", f"{where}undone:")


@lru_cache(_MOST)
def _kept_packed(prefix: str, name: str) -> bytes:
    *words, undone = (key.encode() for key in keys(prefix, name))
    lengths = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"%b$%d\r\n%b" % (lengths, len(undone) + ID_LENGTH, undone)


@lru_cache(maxsize=1024)
def _between(prefix: str, length: int) -> tuple[bytes, ...]:
    """The encoded text around the five places where the hold occurs. It is the same for all plain names whose hold has
    so many bytes, so the keys of a name cost one join. Empty for a prefix with braces."""
    if not _is_plain(prefix):
        return ()
    own = f"{prefix}{RESERVED}{{".encode()
    ends = (b"}fence", b"}queue", b"}tickets", b"}undone:")
    sizes = [length + len(own) + len(end) for end in ends]
    sizes[-1] += ID_LENGTH
    before = [b"\r\n$%d\r\n%b" % (size, own) for size in sizes]
    return (b"$%d\r\n" % length, before[0], *map(bytes.__add__, ends, before[1:]), ends[-1])


def key_in_slot(prefix: str, slot: int) -> str:
    """A key of asynclock in that slot, for a prefix without braces. It is never set."""
    return f"{prefix}{RESERVED}{{{_tag_for(slot)}}}probe"


def mark(prefix: str, tag: str = "") -> str:
    """The key of the mark of first use, in the slot of a hash tag if there is one. It has no expiry."""
    return f"{prefix}{RESERVED}{{{tag}}}used" if tag else f"{prefix}{RESERVED}used"


def slot_of(prefix: str, name: str) -> int:
    """The slot of the cluster in which all keys of `name` are."""
    return int(key_slot((prefix + name).encode()))


def slot_of_op(prefix: str, op: Op) -> int:
    """The slot of an op. If it has several names, they are all in this slot."""
    return slot_of(prefix, op.kind.parts[0].name if op.kind.parts else op.name)


def only_slot(prefix: str) -> int | None:
    """The slot in which all names are, because the prefix has a hash tag; None: they are in many."""
    return slot_of(prefix, "") if _tag(prefix) is not None else None


def tag_of(prefix: str) -> str:
    """The hash tag of a prefix that has one; "": it has none."""
    return _tag(prefix) or ""


def tag_within(owned: Callable[[int], bool]) -> str:
    """A hash tag in one of the slots for which `owned` is true. All clients find the same one. "": there is none."""
    global _tags  # noqa: PLW0603 - one process, one table; if two threads find more at once, one result is dropped
    tags, looked = _tags, 0
    while True:
        for slot, tag in islice(tags.by_slot.items(), looked, None):
            if owned(slot):
                return tag
        if tags.tried >= _TRIES:
            return ""
        looked = len(tags.by_slot)
        _tags = tags = tags.more()


class _Tags(NamedTuple):
    """The first hash tag in each slot, in the order in which they are tried. A process looks for them once, since a
    master with few slots needs thousands of tries."""

    by_slot: dict[int, str]
    tried: int

    def more(self) -> _Tags:
        """After some more tries."""
        by_slot = dict(self.by_slot)
        for number in range(self.tried, self.tried + _SOME):
            by_slot.setdefault(key_slot(b"%d" % number), str(number))
        return _Tags(by_slot, self.tried + _SOME)


_tags = _Tags({}, 0)


def _slot_mate(prefix: str, name: str, hold: str) -> str:
    """The beginning of the keys of this name only, all in the slot of `hold`. Redis hashes the text in the first {...}
    of a key, or the whole key if there is none or it is empty. So the form depends on the braces in the name."""
    if _is_plain(prefix) and "}" not in name:
        return f"{prefix}{RESERVED}{{{hold}}}"  # begins with the prefix, for ACLs like ~prefix*
    if _tag(hold) is not None:
        same = f"{prefix}{RESERVED}{name}:" if _tag(prefix) is not None else f"{prefix}{RESERVED}:{name}:"
        if key_slot(same.encode()) == key_slot(hold.encode()):
            return same
    ours = RESERVED if "{" in prefix else prefix + RESERVED
    return f"{ours}{{{_tag_for(key_slot(hold.encode()))}}}{hold}:"


def _is_plain(prefix: str) -> bool:
    """Whether a key can begin with this prefix and have a hash tag of asynclock after it."""
    return "{" not in prefix and "}" not in prefix


def _tag(key: str) -> str | None:
    opened = key.find("{")
    closed = key.find("}", opened + 1)
    return key[opened + 1 : closed] if opened >= 0 and closed > opened + 1 else None


@lru_cache(maxsize=1024)
def _tag_for(slot: int) -> str:
    """A hash tag in `slot`, for a name that cannot be a tag itself, such as 'a}b'. It takes 16,384 tries on average,
    6 ms."""
    return next(str(n) for n in count() if key_slot(b"%d" % n) == slot)


def channel(tag: str, shard: str = "") -> str:
    """The channel of a client. It is the same on every node and for every prefix. `shard`: a hash tag in a slot of one
    master of a cluster, for the channel of that master."""
    return f"{RESERVED}{tag}{{{shard}}}" if shard else f"{RESERVED}{tag}"
