"""How locks are laid out in ZooKeeper: names, order, who waits for whom. And the urls of the store."""

from __future__ import annotations

from typing import Any

import pytest

from asynclock import ConfigError
from asynclock.locks.multi import Multi
from asynclock.rules.model import Part, Rule
from asynclock.rules.mutex import MUTEX, Mutex
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import Semaphore
from asynclock.stores.port import Use, Wish
from asynclock.stores.zookeeper import ZooKeeperStore
from asynclock.stores.zookeeper.contender import data_of, read
from asynclock.stores.zookeeper.layout import (
    Child,
    Layout,
    done_mark_of,
    escaped,
    holders,
    is_of,
    is_ordered,
    may_wait,
    obstacle,
    place_of,
    prefix_of,
    queue_of,
    ticket_prefix_of,
    tickets_of,
    unescaped,
)

RANDOM = "0123456789abcdef0123456789abcdef"
KINDS: list[Rule] = [MUTEX, READ, WRITE, Semaphore(3)]


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("order:42", "order:42"),
        ("a/b", "a%2Fb"),
        ("100%", "100%25"),
        (".", "%2E"),
        ("..", "%2E."),
        ("zookeeper", "%7Aookeeper"),
        ("a b", "a b"),
        ("\x00\n\x7f\x85", "%00%0A%7F%C2%85"),
        ("größe", "größe"),
        ("\ue000\uffff", "%EE%80%80%EF%BF%BF"),
        ("\N{LOCK}", "%F0%9F%94%92"),  # ZooKeeper counts it as two characters that it does not allow
    ],
)
def test_d8_a_name_is_escaped_and_read_back(name: str, node: str) -> None:
    assert escaped(name) == node
    assert unescaped(node) == name


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_says_what_it_is(layout: Layout, kind: Rule) -> None:
    """Its kind, its id and its number."""
    name = f"{prefix_of(layout, RANDOM + '|x', kind)}0000000007"
    (child,) = queue_of(layout, [name, f"{ticket_prefix_of(layout, RANDOM)}0000000008", "something else"])
    assert (child.number, child.random, child.letter, child.permits) == (7, RANDOM, kind.letter, kind.slots)
    assert is_of(child, kind)
    (ticket,) = tickets_of(layout, [name, f"{ticket_prefix_of(layout, RANDOM)}0000000008"])
    assert (ticket.number, ticket.random) == (8, RANDOM)


@pytest.mark.parametrize("layout", list(Layout))
def test_the_mark_of_a_run_has_the_place_of_its_mutex(layout: Layout) -> None:
    """So no waiter enters between the two."""
    name = f"{prefix_of(layout, RANDOM, MUTEX)}0000000007"
    mark = done_mark_of(layout, name)
    assert mark != name
    (child,) = queue_of(layout, [mark])
    assert (child.number, child.random, child.letter) == (7, RANDOM, "")


@pytest.mark.parametrize(
    ("layout", "name", "letter"),
    [
        (Layout.KAZOO, f"{RANDOM}__lock__0000000003", "x"),
        (Layout.KAZOO, f"{RANDOM}__rlock__0000000003", "r"),
        (Layout.CURATOR, "_c_01234567-89ab-cdef-0123-456789abcdef-lock-0000000003", ""),
        (Layout.CURATOR, "_c_01234567-89ab-cdef-0123-456789abcdef-__READ__0000000003", "r"),
        (Layout.CURATOR, "_c_01234567-89ab-cdef-0123-456789abcdef-__WRIT__0000000003", "w"),
        (Layout.CURATOR, "lock-0000000003", ""),
    ],
)
def test_nodes_of_other_programs(layout: Layout, name: str, letter: str) -> None:
    """They have no id of asynclock."""
    (child,) = queue_of(layout, [name])
    assert (child.number, child.letter, child.random) == (3, letter, "")


def test_a_lock_of_kazoo_may_be_a_mutex_or_a_writer() -> None:
    """But no semaphore."""
    (child,) = queue_of(Layout.KAZOO, [f"{RANDOM}__lock__0000000003"])
    assert [is_of(child, kind) for kind in KINDS] == [True, True, True, False]


WRAPPED = ["2147483646", "2147483647", "-2147483648", "-1234567890", "-123456789", "-000000001"]
"""As the servers number the nodes of one name in turn, if they count on after 2^31 - 1."""


@pytest.mark.parametrize("layout", list(Layout))
def test_the_numbers_after_2_to_the_31_come_after_all_others(layout: Layout) -> None:
    """They are negative, and have one or two signs more than their digits. A waiter must not overtake the holder."""
    names = [f"{prefix_of(layout, RANDOM, MUTEX)}{each}" for each in WRAPPED]
    assert [child.name for child in queue_of(layout, reversed(names))] == names
    assert [is_ordered(place_of(name)) for name in names] == [True, *[False] * 5]
    tickets = [f"{ticket_prefix_of(layout, RANDOM)}{each}" for each in WRAPPED]
    assert [child.name for child in tickets_of(layout, reversed(tickets))] == tickets
    assert [child.number for child in queue_of(layout, names)] == [place_of(name) for name in names]


@pytest.mark.parametrize("number", ["123456789", "12345678901", "-12345678901", "+123456789", "٠١٢٣٤٥٦٧٨٩", "9" * 5000])
@pytest.mark.parametrize("layout", list(Layout))
def test_f11_a_number_that_no_server_gives_is_no_place(layout: Layout, number: str) -> None:
    """Another program may create any node."""
    assert not queue_of(layout, [f"{prefix_of(layout, RANDOM, MUTEX)}{number}"])
    assert not tickets_of(layout, [f"{ticket_prefix_of(layout, RANDOM)}{number}"])
    assert not is_ordered(place_of(f"{prefix_of(layout, RANDOM, MUTEX)}{number}"))


def children(letters: str) -> list[Any]:
    """Children in that order: m, w, r, or the number of permits."""
    kinds: dict[str, Rule] = {"m": MUTEX, "w": WRITE, "r": READ}
    names = [
        f"{prefix_of(Layout.KAZOO, RANDOM, kinds.get(each) or Semaphore(int(each)))}{number:010}"
        for number, each in enumerate(letters)
    ]
    return queue_of(Layout.KAZOO, reversed(names))


@pytest.mark.parametrize(
    ("before", "kind", "waits_for"),
    [
        ("", MUTEX, None),
        ("m", MUTEX, 0),
        ("mmm", MUTEX, 2),  # the one before it, not the holder: a release wakes one
        ("rr", READ, None),
        ("rrwrr", READ, 2),  # all readers behind a writer wait for it
        ("wrw", READ, 2),
        ("rr", WRITE, 1),
        ("", WRITE, None),
        ("22", Semaphore(3), None),
        ("333", Semaphore(3), 2),  # the first waiter: all children
        ("3333", Semaphore(3), 3),
        ("33333", Semaphore(3), 4),
        ("1155", Semaphore(5), None),
        ("551", Semaphore(3), 2),
    ],
)
def test_who_waits_for_whom(before: str, kind: Rule, waits_for: int | None) -> None:
    found = obstacle(children(before), kind)
    assert (None if found is None else found.child.number) == waits_for


@pytest.mark.parametrize(
    ("before", "permits", "behind", "waits_for"),
    [
        ("", 1, "5", 0),  # it entered before this one could
        ("", 1, "1", None),  # a waiter
        ("5", 3, "155", 2),  # the last two may be inside
        ("5", 4, "155", None),
        ("3", 3, "3333", None),  # all with the same number: the first three
    ],
)
def test_holders_behind_a_waiter_for_a_permit_count(
    before: str, permits: int, behind: str, waits_for: int | None
) -> None:
    """They have more permits, and entered while it waited. Each of them makes room when it leaves."""
    queue = children(f"{before}{permits}{behind}")
    rank = len(before)
    found = obstacle(queue[:rank], Semaphore(permits), queue[rank + 1 :])
    assert (None if found is None else found.child.number) == (None if waits_for is None else rank + 1 + waits_for)
    assert found is None or found.any_child


def test_the_first_waiter_for_a_permit_watches_all_children() -> None:
    """Whichever holder leaves, it may enter. The next waiter watches the first one."""
    first, second = obstacle(children("333"), Semaphore(3)), obstacle(children("3333"), Semaphore(3))
    assert first is not None
    assert first.any_child
    assert second is not None
    assert not second.any_child


@pytest.mark.parametrize(
    ("queue", "inside"),
    [("mm", [0]), ("rrwr", [0, 1]), ("wr", [0]), ("33333", [0, 1, 2]), ("3335", [0, 1, 2, 3]), ("", [])],
)
def test_who_holds(queue: str, inside: list[int]) -> None:
    assert [child.number for child in holders(children(queue))] == inside


@pytest.mark.parametrize(
    ("queue", "uncertain"),
    [
        ("333", ""),
        ("155", "0"),
        ("1", ""),
        ("51", ""),
        ("25", ""),
        ("255", "0"),
        ("3555", "0"),
        ("15553", "0"),
        ("mrr", ""),
    ],
)
def test_who_may_wait_in_the_place_of_a_holder(queue: str, uncertain: str) -> None:
    """As many as its own number may hold the name behind it. The last one in such a place waits for none."""
    found = children(queue)
    assert may_wait(found) == {found[int(each)].name for each in uncertain}
    for rank, child in enumerate(found):
        if rank < child.permits:  # as each of them finds it
            waits = obstacle(found[:rank], Semaphore(child.permits), found[rank + 1 :]) is not None
            assert waits == (child.name in may_wait(found))


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_the_data_of_a_node_are_read_back(tasks: int, waits: bool) -> None:
    """Those of other programs say nothing."""
    assert read(data_of(f"{RANDOM}|x", tasks, waits=waits)) == (f"{RANDOM}|x", tasks, waits)
    assert read(None) == ("", 1, False)
    assert read(b"\xff\x00two\x00waits\x00") == ("\ufffd", 1, False)


class Letter(str):
    """It counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Letter.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_each_reader_is_looked_at_once() -> None:
    """Each attempt looks for the holders in the event loop, and a name may have thousands of readers."""
    readers = [Child(number, str(number), Letter("r")) for number in range(1_000)]
    assert holders(readers) == readers
    Letter.compared = 0
    holders(readers)
    assert Letter.compared <= 3 * len(readers)


# -- the store -------------------------------------------------------------------------------------------------------


def test_a_url_with_all_it_can_have() -> None:
    """The label has no password."""
    store = ZooKeeperStore("zookeeper://me:s%40cret@a:1,b:2/some/path/?session_timeout=12&layout=curator")
    assert store.label == "zookeeper://a:1,b:2/some/path"
    assert (store.root, store.session_timeout, store.layout) == ("/some/path", 12.0, Layout.CURATOR)
    assert (store.address.hosts, store.address.user) == ("a:1,b:2", "me:s@cret")
    assert ZooKeeperStore("zookeeper://a").root == "/asynclock"
    assert "cret" not in repr(store)


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://",
        "zookeeper:///path",
        "zookeeper://me@a:1/path",
        "zookeeper://a:1/a//b",
        "zookeeper://a:1/../b",
        "zookeeper://a:port/b",
        "zookeeper://a:1/b?session_timeout",
        "zookeeper://a:1/b?unknown=1",
        "zookeeper://a:1/b?layout=redis",
        "zookeeper://a:1/b?ttl_nodes=maybe",
        "zookeeper://a:1/b?session_timeout=soon",
        "zookeeper://a:1/b?session_timeout=0.5",
        "zookeeper://a:1/b?session_timeout=inf",
    ],
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        ZooKeeperStore(url)


STORE = ZooKeeperStore("zookeeper://a/b", session_timeout=20)


class Latch(Mutex):
    """A kind that its layouts do not know."""

    letter = "o"


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (Wish(Use.LOCK, MUTEX, ("a",), 20.0), None),
        (Wish(Use.LOCK, MUTEX, ("a",), 20.0, fencing=False), None),
        (Wish(Use.LOCK, MUTEX, (), 20.0), None),
        (Wish(Use.LOCK, MUTEX, ("a",), 10.0), "give lease=20, the session_timeout"),
        (Wish(Use.LOCK, MUTEX, ("a",), 20.0, 1.0), "min_hold"),
        (Wish(Use.DETACH, MUTEX, ("a",), 20.0), "session"),
        (Wish(Use.ADOPT, MUTEX, ("a",), 20.0), "session"),
        (Wish(Use.ONCE, MUTEX, ("a",), 20.0), "?ttl_nodes=true in the url"),
        (Wish(Use.LOCK, MUTEX, ("ü" * 40_000,), 20.0), "shorter"),
        (Wish(Use.LOCK, MUTEX, ("n" * 65_000,) * 8, 20.0), None),
        (Wish(Use.LOCK, MUTEX, ("n" * 65_000,) * 9, 20.0), "together"),
        (Wish(Use.LOCK, Latch(), ("a",), 20.0), "kind of lock"),
        (Wish(Use.LOCK, Multi([Part("a", MUTEX), Part("b", READ)]), ("a", "b"), 20.0), None),
        (Wish(Use.LOCK, Multi([Part("a", MUTEX), Part("b", Latch())]), ("a", "b"), 20.0), "kind of lock"),
    ],
)
def test_what_it_cannot_keep(wish: Wish, why: str | None) -> None:
    """With the reason."""
    found = STORE.cannot(wish)
    if wish.use is Use.ONCE:
        assert ZooKeeperStore("zookeeper://a/b", session_timeout=20, ttl_nodes=True).cannot(wish) is None
    assert found is None if why is None else found is not None and why in found
