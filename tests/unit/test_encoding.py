"""How an Op becomes bytes."""

from __future__ import annotations

from hashlib import sha1

from hypothesis import given
from hypothesis import strategies as st

from asynclock.rules.model import MARKS_FREE, Op, Queueing, Serve, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.stores.redis import encoding as _wire
from asynclock.stores.redis.scripts import SCRIPTS
from tests.support.probes import plain_arguments

CHARACTERS = st.characters(exclude_categories=("Cs",))
"""Those of UTF-8. With `codec="utf-8"` Hypothesis would encode each of a million, once in each process."""
texts = st.text(CHARACTERS)
names = st.one_of(texts, st.text("{}a:", max_size=8), st.integers(200, 300).map("x".__mul__))
"""With braces, which decide where a name's keys are; and of lengths around that from which keys are not kept."""


@given(
    verb=st.sampled_from(Verb),
    name=names,
    prefix=names,
    random=st.sampled_from(["", "0123456789abcdef" * 2]),
    metadata=texts,
    lease=st.one_of(st.sampled_from([0.0, 30.0]), st.floats(0.0, 3600.0)),
    fence=st.integers(0, 2**53),
    rest=st.one_of(st.sampled_from([0.0, 0.0001, 3.0]), st.floats(0.0, 10.0)),  # some repeat: their words are cached
    done=st.sampled_from([0, 1, MARKS_FREE]),
    tombstone=st.booleans(),
    queueing=st.builds(
        Queueing,
        st.sampled_from(Serve),
        st.booleans(),
        st.integers(1, 16),
        texts,
        st.integers(0, 1000),
        st.floats(0.0, 60.0),
        st.integers(0, 2**53),
    ),
)
def test_the_fast_encoding_is_the_plain_one(
    verb: Verb,
    name: str,
    prefix: str,
    random: str,
    metadata: str,
    lease: float,
    fence: int,
    rest: float,
    done: int,
    tombstone: bool,
    queueing: Queueing,
) -> None:
    """Byte for byte what hiredis packs of the same words."""
    whole = random and f"{random}|{metadata}"  # "" is the id of a mere look
    op = Op(
        verb, MUTEX, name, whole, lease, fence, lease + 60,
        rest=rest, tombstone=tombstone, queueing=queueing, done=done,
    )  # fmt: skip
    sha = sha1(SCRIPTS[""].encode()).hexdigest()
    plain = _wire.pack("EVALSHA", sha, *plain_arguments(op, prefix, tombstone))
    assert _wire.encode(op, prefix) == plain
    assert op.packed == plain


@given(name=names, prefix=names, metadata=texts, lease=st.one_of(st.sampled_from([30.0]), st.floats(0.001, 3600.0)))
def test_the_fast_plain_set_is_the_packed_one(name: str, prefix: str, metadata: str, lease: float) -> None:
    """The acquire of fencing=False: byte for byte what hiredis packs of the same words."""
    whole = f"{'0123456789abcdef' * 2}|{metadata}"
    op = Op(Verb.ACQUIRE, MUTEX, name, whole, lease, plain=True)
    assert _wire.encode(op, prefix) == _wire.pack("SET", prefix + name, whole, "NX", "PX", int(lease * 1000 + 0.5))
