"""What the nodes of a cluster say about its slots."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock.stores.redis import keys
from asynclock.stores.redis.cluster.masters import first_answer
from asynclock.stores.redis.cluster.topology import (
    Address,
    Range,
    Redirect,
    apart,
    ranges_of,
    redirect_of,
    span_of,
    uncovered,
)
from asynclock.stores.redis.keys import slot_of, tag_within

ASKED = Address("10.0.0.1", 7000)


def test_ranges() -> None:
    """An empty host is the host that was asked; a replica without a host name does not count."""
    said = [
        [0, 99, [b"10.0.0.2", 7001, b"id", []], [b"", 7002, b"id"], [b"?", 7003, b"id"]],
        [100, 200, [b"?", 7004, b"id"]],
        [300, 16383, [None, 7005, b"id"]],
    ]
    ranges = ranges_of(said, ASKED)
    assert ranges == (
        Range(0, 99, Address("10.0.0.2", 7001), (Address("10.0.0.1", 7002),)),
        Range(100, 200, None, ()),
        Range(300, 16383, Address("10.0.0.1", 7005), ()),
    )
    assert uncovered(ranges) == 99


@pytest.mark.parametrize("said", [None, b"OK", [1], [[1, 2, 3]], [[b"x", 1, [b"a", 1]]]])
def test_no_ranges(said: Any) -> None:
    with pytest.raises(ValueError, match="no answer to CLUSTER SLOTS"):
        ranges_of(said, ASKED)


@pytest.mark.parametrize(
    ("error", "means"),
    [
        ("MOVED 3999 10.0.0.2:7001", Redirect("MOVED", Address("10.0.0.2", 7001))),
        ("ASK 3999 :7001", Redirect("ASK", Address("10.0.0.1", 7001))),
        ("MOVED 3999 ::1:7001", Redirect("MOVED", Address("::1", 7001))),
        ("MOVED 3999 ?:7001", Redirect("MOVED", None)),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Redirect("TRYAGAIN", None)),
        ("CLUSTERDOWN The cluster is down", Redirect("CLUSTERDOWN", None)),
    ],
)
def test_redirections(error: str, means: Redirect) -> None:
    assert redirect_of(error, ASKED) == means


@pytest.mark.parametrize(
    ("names", "tagged"),
    [
        (("order:1", "order:2"), '"{order}:1", "{order}:2"'),
        (("a", "b"), '"{together}:a", "{together}:b"'),
        (("shop/eu/1", "shop/eu/22"), '"{shop/eu}/1", "{shop/eu}/22"'),
        (("order", "order:1"), '"{together}:order", "{together}:order:1"'),
        (("a", "b", "c", "d"), '"{together}:a", "{together}:b", "{together}:c", ...'),
        (("{x}:1", "{y}:1"), '"{together}:x:1", "{together}:y:1"'),
    ],
)
def test_the_hash_tag_to_use(names: tuple[str, ...], tagged: str) -> None:
    """The message shows names that are in one slot."""
    assert (apart("lock:", names) or "").endswith(f"redlock.multi({tagged})")


def test_in_one_slot() -> None:
    """A hash tag in the names or in the prefix."""
    assert apart("lock:", ("{a}1", "x{a}y")) is None
    assert apart("{app}:", ("a", "b")) is None
    assert apart("lock:", ("a",)) is None
    assert apart("lock:", ()) is None


def test_slots_in_words() -> None:
    assert span_of([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert span_of(range(0, 20, 2)) == "0, 2, 4, 6 and 6 more ranges"
    assert span_of([]) == ""


def test_a_tag_in_a_slot() -> None:
    """All clients find the same one, in one of these slots."""
    tag = tag_within(lambda slot: 5461 <= slot <= 10922)
    assert 5461 <= slot_of("", f"{{{tag}}}") <= 10922
    assert tag_within(lambda slot: slot == 7) == tag_within(lambda slot: slot == 7) != ""
    assert tag_within(lambda slot: False) == ""


def test_the_tags_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master with few slots needs thousands of tries, in one turn of the loop. Those of one are of use to all."""
    assert tag_within(lambda slot: False) == ""
    monkeypatch.setattr(keys, "key_slot", lambda key: pytest.fail(f"another try: {key!r}"))
    assert all(tag_within(lambda slot: slot == mine) for mine in range(16))  # noqa: B023


async def test_the_first_answer_that_names_a_slot_counts() -> None:
    """A node that was reset names none. That counts only if all others say the same: one that does not answer may know
    more."""
    some = (Range(0, 16383, ASKED, ()),)

    async def says(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
        return ranges

    async def fails() -> tuple[Range, ...]:
        raise OSError("it is down")

    assert await first_answer([says(()), says(some)]) == some
    assert await first_answer([says(()), fails(), says(some)]) == some
    assert await first_answer([says(()), says(())]) == ()
    for order in ([says(()), fails()], [fails(), says(())]):
        with pytest.raises(OSError, match="it is down"):
            await first_answer(order)
