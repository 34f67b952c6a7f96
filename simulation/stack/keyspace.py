"""The keys of a simulated server, and the commands on them, as far as asynclock uses them. Times are in ms on the clock
of that server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from simulation.stack.resp import Error, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WRONG_TYPE = Error("WRONGTYPE Operation against a key holding the wrong kind of value")
_NOT_INTEGER = Error("ERR value is not an integer or out of range")

OK = Status("OK")


class Value:
    """What a key has: bytes, a sorted set or a hash."""

    __slots__ = ("data", "ends")

    def __init__(self, data: Any, ends: float = math.inf) -> None:
        self.data = data
        self.ends = ends

    @property
    def kind(self) -> str:
        if isinstance(self.data, bytes):
            return "string"
        return "zset" if isinstance(self.data, Scores) else "hash"

    def copy(self) -> Value:
        return Value(self.data if isinstance(self.data, bytes) else type(self.data)(self.data), self.ends)


class Scores(dict[bytes, float]):
    """A sorted set: the scores of its members."""

    def ordered(self) -> list[bytes]:
        return sorted(self, key=lambda each: (self[each], each))


class Keyspace:
    """See the module. `changed` has the keys that were written since it was emptied last."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self.values: dict[bytes, Value] = {}
        self.changed: dict[bytes, None] = {}
        self._exact = now_ms

    def _now(self) -> float:
        """Redis counts in whole ms."""
        return math.floor(self._exact())

    def copy(self) -> dict[bytes, Value]:
        return {key: value.copy() for key, value in self.values.items()}

    def get(self, key: bytes) -> Value | None:
        value = self.values.get(key)
        if value is not None and value.ends < self._now():
            del self.values[key]
            self.changed[key] = None
            return None
        return value

    def do(self, words: Sequence[bytes]) -> Any:
        """Carry a command out. An Error is its answer, too."""
        command = _COMMANDS.get(words[0].upper())
        if command is None:
            return Error(f"ERR unknown command '{words[0].decode(errors='replace')}', with args beginning with: ")
        return command(self, words)

    @staticmethod
    def is_write(word: bytes) -> bool:
        return word.upper() in _WRITES

    @staticmethod
    def needs_memory(word: bytes) -> bool:
        """Whether a server at its memory limit refuses it."""
        return word.upper() in _NEED_MEMORY

    def _of(self, key: bytes, kind: type) -> Any:
        """The data of a key; None: there is none; an Error for another type."""
        value = self.get(key)
        if value is None:
            return None
        return value.data if isinstance(value.data, kind) else WRONG_TYPE

    def _put(self, key: bytes, value: Value) -> None:
        self.values[key] = value
        self.changed[key] = None

    def _delete(self, key: bytes) -> int:
        if self.get(key) is None:
            return 0
        del self.values[key]
        self.changed[key] = None
        return 1

    # -- commands --------------------------------------------------------------------------------------------------

    def _get(self, words: Sequence[bytes]) -> Any:
        return self._of(words[1], bytes)

    def _mget(self, words: Sequence[bytes]) -> Any:
        found = [self._of(key, bytes) for key in words[1:]]
        return [None if each is WRONG_TYPE else each for each in found]

    def _set(self, words: Sequence[bytes]) -> Any:
        key, data, options = words[1], words[2], [word.upper() for word in words[3:]]
        old = self.get(key)
        if b"NX" in options and old is not None:
            return None
        ends = math.inf
        if b"PX" in options:
            length = _integer(words[3 + options.index(b"PX") + 1])
            if isinstance(length, Error):
                return length
            if length <= 0:
                return Error("ERR invalid expire time in 'set' command")
            ends = self._now() + length
        elif b"KEEPTTL" in options and old is not None:
            ends = old.ends
        self._put(key, Value(data, ends))
        return OK

    def _del(self, words: Sequence[bytes]) -> Any:
        return sum(self._delete(key) for key in words[1:])

    def _exists(self, words: Sequence[bytes]) -> Any:
        return sum(self.get(key) is not None for key in words[1:])

    def _pttl(self, words: Sequence[bytes]) -> Any:
        value = self.get(words[1])
        if value is None:
            return -2
        return -1 if value.ends == math.inf else int(max(0.0, value.ends - self._now()))

    def _pexpire(self, words: Sequence[bytes]) -> Any:
        length = _integer(words[2])
        if isinstance(length, Error):
            return length
        value = self.get(words[1])
        if value is None:
            return 0
        if length <= 0:
            self._delete(words[1])
            return 1
        value.ends = self._now() + length
        self.changed[words[1]] = None
        return 1

    def _type(self, words: Sequence[bytes]) -> Any:
        value = self.get(words[1])
        return Status("none" if value is None else value.kind)

    def _getrange(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], bytes)
        if isinstance(data, Error):
            return data
        return (data or b"")[int(words[2]) : int(words[3]) + 1]

    def _time(self, words: Sequence[bytes]) -> Any:
        del words
        micros = int(self._exact() * 1000)
        return [b"%d" % (micros // 1_000_000), b"%d" % (micros % 1_000_000)]

    def _delifeq(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], bytes)
        if isinstance(data, Error):
            return data
        return self._delete(words[1]) if data == words[2] else 0

    def _zadd(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], Scores)
        if isinstance(data, Error):
            return data
        if data is None:
            self._put(words[1], Value(data := Scores()))
        added = int(words[3] not in data)
        data[words[3]] = float(words[2])
        self.changed[words[1]] = None
        return added

    def _zrem(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], Scores)
        return data if isinstance(data, Error) else self._remove(words[1], data, words[2:])

    def _remove(self, key: bytes, data: Any, members: Sequence[bytes]) -> int:
        gone = [each for each in members if data is not None and data.pop(each, None) is not None]
        if gone:
            self.changed[key] = None
            if not data:
                self._delete(key)
        return len(gone)

    def _zrange(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], Scores)
        if isinstance(data, Error):
            return data
        ordered = [] if data is None else data.ordered()
        first, last = int(words[2]), int(words[3])
        length = len(ordered)
        first = max(0, first + length if first < 0 else first)
        found = ordered[first : (last + length if last < 0 else last) + 1]
        if len(words) > 4 and words[4].upper() == b"WITHSCORES":
            return [word for each in found for word in (each, _score(data[each]))]
        return found

    def _zrank(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], Scores)
        if isinstance(data, Error) or data is None or words[2] not in data:
            return data if isinstance(data, Error) else None
        return data.ordered().index(words[2])

    def _zscore(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], Scores)
        if isinstance(data, Error) or data is None or words[2] not in data:
            return data if isinstance(data, Error) else None
        return _score(data[words[2]])

    def _zcard(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], Scores)
        return data if isinstance(data, Error) else len(data or ())

    def _zremrangebyscore(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], Scores)
        if isinstance(data, Error):
            return data
        top = float(words[3])
        return self._remove(words[1], data, [each for each in data or () if data[each] <= top])

    def _hset(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], dict)
        if isinstance(data, Scores):
            return WRONG_TYPE
        if isinstance(data, Error):
            return data
        if data is None:
            self._put(words[1], Value(data := {}))
        added = int(words[2] not in data)
        data[words[2]] = words[3]
        self.changed[words[1]] = None
        return added

    def _hget(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], dict)
        if isinstance(data, Scores):
            return WRONG_TYPE
        return data if isinstance(data, Error) or data is None else data.get(words[2])

    def _hdel(self, words: Sequence[bytes]) -> Any:
        data = self._of(words[1], dict)
        if isinstance(data, Scores):
            return WRONG_TYPE
        return data if isinstance(data, Error) else self._remove(words[1], data, words[2:])


def _integer(word: bytes) -> int | Error:
    try:
        return int(word)
    except ValueError:
        return _NOT_INTEGER


def _score(score: float) -> bytes:
    return b"%d" % score if score == int(score) else repr(score).encode()


_COMMANDS: dict[bytes, Any] = {
    name.removeprefix("_").upper().encode(): getattr(Keyspace, name)
    for name in (
        "_get", "_mget", "_set", "_del", "_exists", "_pttl", "_pexpire", "_type", "_getrange", "_time", "_delifeq",
        "_zadd", "_zrem", "_zrange", "_zrank", "_zscore", "_zcard", "_zremrangebyscore", "_hset", "_hget", "_hdel",
    )
}  # fmt: skip
_WRITES = frozenset([b"SET", b"DEL", b"PEXPIRE", b"DELIFEQ", b"ZADD", b"ZREM", b"ZREMRANGEBYSCORE", b"HSET", b"HDEL"])
_NEED_MEMORY = frozenset([b"SET", b"ZADD", b"HSET"])
