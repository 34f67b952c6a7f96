"""The keys of a name on Redis, all in one slot of a cluster."""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import NamedTuple

from redis.crc import key_slot

from asynclock._options import RESERVED


class Keys(NamedTuple):
    """hold is exactly prefix + name; the others stand beside it."""

    hold: str
    fence: str
    queue: str
    tickets: str
    undone: str  # goes before the random part of an id, ID_LENGTH characters: the id's tombstone
    packed_hold: bytes  # the first, as a command has it
    packed: bytes  # all but the tombstone, as a command has them
    undone_bytes: bytes


_MOST = 4096  # so many names are kept
_LONGEST = (
    256  # characters of a name and its prefix; keys of a longer one are made each time, or they would fill memory
)


class _Known(dict[tuple[str, str], Keys]):
    """Keys by (prefix, name). A hit costs no call of Python code, which an `lru_cache` bounded by size would need."""

    def __missing__(self, wanted: tuple[str, str]) -> Keys:
        made = _made(*wanted)
        if len(made.hold) <= _LONGEST:
            if len(self) >= _MOST:
                self.clear()
            self[wanted] = made
        return made


KNOWN = _Known()


def keys(prefix: str, name: str) -> Keys:
    """The keys of `name`."""
    return KNOWN[prefix, name]


def _made(prefix: str, name: str) -> Keys:
    hold = prefix + name
    where = _slot_mate(prefix, name, hold)
    fixed = hold, f"{where}fence", f"{where}queue", f"{where}tickets"
    packed = [b"$%d\r\n%b\r\n" % (len(key), key) for key in map(str.encode, fixed)]
    return Keys(*fixed, f"{where}undone:", packed[0], b"".join(packed), f"{where}undone:".encode())


def mark(prefix: str) -> str:
    """The key that first use leaves on a node, without expiry."""
    return f"{prefix}{RESERVED}used"


def _slot_mate(prefix: str, name: str, hold: str) -> str:
    """A key that no other name has, in the slot of `hold`. Redis hashes what stands in the first {...} of a key, if
    anything does, else all of it; so the name's own braces decide how it can be followed."""
    own = f"{prefix}{RESERVED}{{{hold}}}"  # begins with the prefix, for ACLs like ~prefix*
    if "{" not in prefix and "}" not in hold:
        return own
    if _tag(hold) is not None:
        same = f"{prefix}{RESERVED}{name}:" if _tag(prefix) is not None else f"{prefix}{RESERVED}:{name}:"
        if key_slot(same.encode()) == key_slot(hold.encode()):
            return same
    ours = RESERVED if "{" in prefix else prefix + RESERVED
    return f"{ours}{{{_tag_for(key_slot(hold.encode()))}}}{hold}:"


def _tag(key: str) -> str | None:
    opened = key.find("{")
    closed = key.find("}", opened + 1)
    return key[opened + 1 : closed] if opened >= 0 and closed > opened + 1 else None


@lru_cache(maxsize=1024)
def _tag_for(slot: int) -> str:
    """A tag in `slot`, for the odd name (such as 'a}b') that cannot serve as one; 16,384 tries on average, 6 ms."""
    return next(str(n) for n in count() if key_slot(b"%d" % n) == slot)


def channel(tag: str) -> str:
    """Where a client listens; the same on every node, whatever the prefix."""
    return f"{RESERVED}{tag}"
