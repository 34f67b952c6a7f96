"""Encodes an Op as bytes: one EVALSHA, with seconds converted to milliseconds."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha1
from typing import TYPE_CHECKING

from hiredis import pack_command

from asynclock.rules.model import ID_LENGTH, MARKS_FREE
from asynclock.stores.redis.keys import keys, packed
from asynclock.stores.redis.scripts import SCRIPTS

if TYPE_CHECKING:
    from asynclock.rules.model import Op, Queueing

NATIVE_RELEASES = (("DELIFEQ",), ("DELEX", "IFEQ"))
"""Commands that compare and delete, with the word between key and value: of Valkey 9, of Redis 8.4."""


def pack(*command: str | int) -> bytes:
    """Encode a command in the Redis protocol."""
    packed: bytes = pack_command(command)  # type: ignore[arg-type]  # its stub means a tuple of one
    return packed


def encode(op: Op, prefix: str) -> bytes:
    """The op as an EVALSHA (a plain acquire as a SET), kept in `op.packed`: it is the same for all nodes."""
    if op.plain:
        # The same as pack("SET", key, id, "NX", "PX", lease), in less than half of its time.
        hold, whole = (prefix + op.name).encode(), op.id.encode()
        head, tail = _plain_frame(op.lease)
        wire = b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (head, len(hold), hold, len(whole), whole, tail)
    elif op.kind.parts or not op.id:
        wire = pack("EVALSHA", _sha(op.kind.letter), *_arguments(op, prefix, op.tombstone))
    else:
        # The same as pack("EVALSHA", sha, *_arguments(...)), in a third of its time: repeated parts are cached.
        whole = op.id.encode()
        fence = b"%d" % op.fence
        head, verb, lease, rest = _frame(op.kind.letter, op.verb, op.lease, op.memory, op.rest, op.tombstone, op.done)
        wire = b"%b%b%b\r\n%b$%d\r\n%b\r\n%b$%d\r\n%b\r\n%b%b" % (
            head, packed(prefix, op.name), whole[:ID_LENGTH],
            verb, len(whole), whole, lease, len(fence), fence, rest, op.queueing.packed or _pack_queueing(op.queueing),
        )  # fmt: skip
    op.packed = wire
    return wire


def _pack_queueing(queueing: Queueing) -> bytes:
    """Encode its arguments. The result is cached, because many ops share one Queueing."""
    words = [str(word).encode() for word in _words(queueing)]
    queueing.packed = packed = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return packed


def _words(queueing: Queueing) -> tuple[str | int, ...]:
    number, fresh = queueing.number, max(1, _ms(queueing.fresh))
    ticket = f"{number} {fresh} {queueing.order} {queueing.tasks}" if number else ""
    return f"{queueing.serve:d}{'f' * queueing.fair}", queueing.span, queueing.waiter, ticket


def encode_native(op: Op, prefix: str, command: tuple[str, ...]) -> bytes | None:
    """A release as the server's own compare-and-delete, at a tenth of the cost of a script; None: the script is needed.

    It matches nothing if the hold is marked; then the script follows and serves the waiters. It does not carry the
    token, because a majority of witnesses has it since the acquire.
    """
    queueing = op.queueing
    if op.kind.shared or op.rest or op.tombstone or queueing.number or queueing.contended or queueing.looks:
        return None
    head, middle = _native_head(command)
    hold, whole = (prefix + op.name).encode(), op.id.encode()
    wire = b"%b$%d\r\n%b\r\n%b$%d\r\n%b\r\n" % (head, len(hold), hold, middle, len(whole), whole)
    op.packed = command, wire
    return wire


def encode_whole(op: Op, prefix: str, *, tombstone: bool = False) -> bytes:
    """The op as an EVAL, for a server that may not know the script."""
    if op.plain:
        return encode(op, prefix)
    return pack("EVAL", SCRIPTS[op.kind.letter], *_arguments(op, prefix, op.tombstone or tombstone))


def _arguments(op: Op, prefix: str, tombstone: bool) -> tuple[str | int, ...]:
    """The number of keys, the keys, and the other arguments."""
    found: list[str | int] = []
    for name in [part.name for part in op.kind.parts] or [op.name]:
        at = keys(prefix, name)
        found += [at.hold, at.fence, at.queue, at.tickets, at.undone + op.id[:ID_LENGTH]]
    return (
        len(found),
        *found,
        op.verb,
        op.id,
        _ms(op.lease),
        op.fence,
        _ms(op.memory),
        _rest(op.rest, op.done),
        1 if tombstone else 0,
        *_words(op.queueing),
        *("f" if part.kind.fair else part.kind.mode for part in op.kind.parts),
    )


@lru_cache(maxsize=64)
def _plain_frame(lease: float) -> tuple[bytes, bytes]:
    """The parts of a plain SET: before the key, and after the id."""
    return b"*6\r\n" + _words_of("SET"), _words_of("NX", "PX", _ms(lease))


@lru_cache(maxsize=64)
def _native_head(command: tuple[str, ...]) -> tuple[bytes, bytes]:
    """The parts of a release as the server's own command: before the key, and between key and id."""
    return b"*%d\r\n" % (len(command) + 2) + _words_of(command[0]), _words_of(*command[1:])


@lru_cache(maxsize=64)
def _sha(letter: str) -> str:
    return sha1(SCRIPTS[letter].encode()).hexdigest()  # noqa: S324 - Redis identifies scripts by their SHA-1


@lru_cache(maxsize=1024)
def _frame(
    letter: str, verb: str, lease: float, memory: float, rest: float, tombstone: bool, done: int
) -> tuple[bytes, ...]:
    """The encoded parts that many ops share: an EVALSHA of 19 words up to its first key (of five); the verb; the lease;
    and the three arguments after the fence."""
    head = b"*19\r\n" + _words_of("EVALSHA", _sha(letter), 5)
    return head, _words_of(verb), _words_of(_ms(lease)), _words_of(_ms(memory), _rest(rest, done), int(tombstone))


def _rest(rest: float, done: int) -> str | int:
    """The ms for which the name stays taken. A "d" follows after a run of `once` that returned; "df": a free name gets
    the mark, too."""
    left = _ms(rest)
    return f"{left}{'df' if done == MARKS_FREE else 'd'}" if done and left else left


def _words_of(*words: str | int) -> bytes:
    """Encode some words of a command, without the head that counts them."""
    return pack(*words).partition(b"\r\n")[2]


def _ms(seconds: float) -> int:
    return int(seconds * 1000 + 0.5)
