"""What errors say about the cause: who holds a lock that an acquire did not get, and why a lease was lost."""

from __future__ import annotations

import math
import pickle

import pytest

from asynclock._errors import Reason
from asynclock._options import LockSettings
from asynclock.info import Holder
from asynclock.protocol.causes import BLOCKED, Cause, NoLease, lock_lost_error, lock_timeout_error
from asynclock.quorum.denials import most_named
from asynclock.rules.model import DONE, RESTING
from asynclock.stores.port import Refused

NOW = 1_700_000_041.0
RANDOM = "c0ffee" * 5 + "ab"
ID = f"{RANDOM}|1700000000000000|812|web-3|"
NIGHTLY = ID + "nightly"
OTHER = f"{'d' * 32}|1700000040000000|7|web-9|"
FOREIGN = "the value of another program's key"
LABELS = ["redis://a", "redis://b", "redis://c"]
SILENT = TimeoutError("redis://a is silent")
RESET = ConnectionError("redis://c: reset")
OUTAGE = "its lease expired: no majority of the nodes renewed it for 29.7 s (since 22:13:31 UTC)"
BLOCK = "the event loop did not run for {} s or longer (blocked, or the process was stopped), so it sent no renewal"
HELD = "'k' was held by another owner for the whole timeout ({} s)"
ALIEN = "the holder is a key of another program"
DELETE = "if nothing uses it, delete it by hand, or with break_lock(name, foreign=True)"
HERE = Holder("k", "web-1", 99, NOW - 3.0, 20.0, "batch")


@pytest.mark.parametrize(
    ("refusal", "here", "timeout", "text"),
    [
        (NoLease(), None, 5.0, HELD.format(5)),
        (
            NoLease(ID, 19.0, 0.2, 5.001),
            None,
            5.0,
            f"{HELD.format(5)}; the holder is web-3, pid 812, for 41 s",
        ),
        (
            NoLease(NIGHTLY, 19.0, 9.5, 12.0),
            None,
            12.0,
            f"{HELD.format(12)}; the holder is web-3, pid 812 ('nightly'), for 41 s (the nodes were asked 9.5 s ago)",
        ),
        (
            NoLease(ID, 19.0),
            HERE,
            0.5,
            f"{HELD.format(0.5)}; the holder is web-1, pid 99 (this process, 'batch'), for 3 s",
        ),
        (
            NoLease(ID, 19.0),
            None,
            0.0,
            "'k' was held by another owner at the only try (timeout=0); the holder is web-3, pid 812, for 41 s",
        ),
        (
            NoLease(FOREIGN, math.inf),
            None,
            0.5,
            f"{HELD.format(0.5)}; {ALIEN}, without an expiry: {DELETE}",
        ),
        (
            NoLease(FOREIGN, 8.0),
            None,
            0.5,
            f"{HELD.format(0.5)}; {ALIEN}, which expires in 8 s",
        ),
        (
            NoLease(RESTING, 8.0),
            None,
            0.5,
            "'k' was taken for the whole timeout (0.5 s): it rests after a release (min_hold); it is free in 8 s",
        ),
        (
            NoLease(DONE, 8.0),
            None,
            0.5,
            "'k' was taken for the whole timeout (0.5 s): a run of once() has returned; it is free in 8 s",
        ),
        (
            NoLease(free=True),
            None,
            0.0,
            "'k' was free, but other owners had asked for it before, and had not entered at the only try (timeout=0)",
        ),
    ],
)
def test_a_timeout_names_the_holder(refusal: NoLease, here: Holder | None, timeout: float, text: str) -> None:
    """By what is known of it; and shows neither its id nor the value of a key of another program."""
    error = lock_timeout_error("k", refusal, here, NOW, timeout=timeout, several=False)
    assert str(error) == text
    assert error.waited == refusal.waited
    assert RANDOM not in repr(error.holder)
    assert FOREIGN not in repr(error.holder)
    assert pickle.loads(pickle.dumps(error)).holder == error.holder


def test_a_timeout_of_several_names_says_so() -> None:
    """It is not known which of them was held."""
    error = lock_timeout_error("a, b", NoLease(), None, NOW, timeout=1.0, several=True)
    assert str(error) == "one or another of 'a, b' was held by another owner for the whole timeout (1 s)"


def test_the_holder_of_a_timeout_has_what_its_id_says() -> None:
    """The end is counted by the nodes; None: it never ends."""
    known = lock_timeout_error("k", NoLease(NIGHTLY, 19.0), None, NOW, timeout=1.0, several=False)
    assert known.holder == Holder("k", "web-3", 812, 1_700_000_000.0, 19.0, "nightly")
    never = lock_timeout_error("k", NoLease(FOREIGN, math.inf), None, NOW, timeout=1.0, several=False)
    assert never.holder == Holder("k", "", 0, 0.0, None, "")


def cause(loss: Reason, **facts: object) -> Cause:
    usual = {"settings": LockSettings(lease=30.0, max_hold=90.0), "at": NOW + 0.3, "unrenewed": 29.7, "late": 0.01}
    return Cause(loss, **{"broken_by": None, "errors": {}, "denials": {}, **usual, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (
            cause("expired", errors={0: SILENT, 2: RESET}),
            f"{OUTAGE}: redis://a is silent; redis://c: reset",
        ),
        (
            cause("expired", errors={0: SILENT}, denials={1: Refused(None)}),
            f"{OUTAGE}: redis://a is silent; redis://b: the key is gone",
        ),
        (
            cause("expired", late=31.0),
            f"its lease expired: {BLOCK.format(31)}",
        ),
        (
            cause("expired", late=15.0, errors={0: SILENT}),
            f"its lease expired: {BLOCK.format(15)}; before that: redis://a is silent",
        ),
        (
            cause("expired", settings=LockSettings(lease=30.0, renew=False)),
            "its lease expired after 29.7 s: with renew=False, call extend() before it ends",
        ),
        (cause("taken", denials={0: Refused(9.0, OTHER), 1: Refused(9.0, OTHER)}), "web-9, pid 7"),
        (cause("taken", denials={0: Refused(9.0, FOREIGN)}), "a key of another program"),
        (
            cause("taken", broken_by="812|web-3|", denials={0: Refused(9.0, OTHER), 1: Refused(9.0, OTHER)}),
            "web-9, pid 7, after web-3, pid 812 broke it (break_lock)",
        ),
        (cause("broken", broken_by=""), "an operator broke it (break_lock)"),
        (cause("broken", broken_by="812|web-3|"), "web-3, pid 812 broke it (break_lock)"),
        (cause("broken", broken_by="812|web-3|a|note"), "web-3, pid 812 ('a|note') broke it (break_lock)"),
        (cause("broken"), "its key is gone from a majority of the nodes"),
        (cause("max_hold"), "it was held for max_hold (90 s)"),
        (cause("closed"), "its client was closed"),
    ],
)
def test_a_loss_says_why(why: Cause, text: str) -> None:
    """In its message, by the facts; and shows no id."""
    error = lock_lost_error("k", why, LABELS)
    assert str(error).startswith("lost the lock 'k': ")
    assert text in str(error)
    assert error.reason == why.loss
    assert FOREIGN not in str(error)
    assert OTHER[:32] not in f"{error} {error.errors!r}"


def test_the_errors_of_a_loss_are_those_of_each_node() -> None:
    """An exception, or what a refusal says; a node that said nothing has no entry. They pickle."""
    said = cause("expired", errors={0: TimeoutError("silent")}, denials={1: Refused(9.0, OTHER)})
    error = lock_lost_error("k", said, LABELS)
    assert list(error.errors) == ["redis://a", "redis://b"]
    assert isinstance(error.errors["redis://a"], TimeoutError)
    assert str(error.errors["redis://b"]) == "redis://b: the name is held by web-9, pid 7"
    again = pickle.loads(pickle.dumps(error))
    assert {node: str(each) for node, each in again.errors.items()} == {
        node: str(each) for node, each in error.errors.items()
    }


@pytest.mark.parametrize(("share", "blocked"), [(BLOCKED * 0.9, False), (BLOCKED, True), (2.0, True)])
def test_a_late_watchdog_is_named_from_a_third_of_the_lease_on(share: float, blocked: bool) -> None:
    """A shorter delay leaves time for several renewals, so it is not why the lease ended."""
    error = lock_lost_error("k", cause("expired", late=30.0 * share), LABELS)
    assert ("the event loop did not run" in str(error)) is blocked


@pytest.mark.parametrize(
    ("denials", "holder"),
    [
        ([], None),
        ([Refused(None), Refused(5.0, "")], None),
        ([Refused(5.0, "a")], "a"),
        ([Refused(5.0, "a"), Refused(6.0, "b"), Refused(4.0, "a")], "a"),
        ([Refused(5.0, "a"), Refused(6.0, "b")], "b"),
    ],
)
def test_the_holder_that_most_nodes_name(denials: list[Refused], holder: str | None) -> None:
    """Of those that are named as often, the one that holds longest."""
    named = most_named(denials)
    assert (named.holder if named is not None else None) == holder
