"""The promises of the scripts of shared kinds and of several names that no history reaches: on a server without memory,
and among keys of other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import redis

from asynclock.rules.model import ID_LENGTH, Serve, State, Verb
from tests.support.agreement import command_of
from tests.support.histories import ELDER, THIRD, YOUNGER
from tests.support.odd_servers import only_an_undo_leaves_a_tombstone
from tests.support.shared_agreement import keys_of
from tests.support.shared_histories import AT, IDS, Act, World, op_of, world
from tests.support.stage import Stage

FAR = 2_000_000_000_000
"""An end in Unix ms, years from now."""


class Odd:
    """A server, and ops of 20 s with a memory of 60 s there; the first id holds nothing yet."""

    def __init__(self, stage: Stage, world: World, turned: Mapping[str, str]) -> None:
        self.stage = stage
        self.cli = stage.cli
        self.world = world
        self.turned = turned
        stage.reset()

    def ask(self, verb: Verb, who: int = ELDER, fence: int = 0, names: tuple[int, ...] = (), **more: Any) -> object:
        """One of the ids asks, with that token or clock."""
        act = Act(verb, who, 20_000, clock=fence - 1, token=fence, names=names, **more)
        op, _ = op_of(act, self.world, [State() for _ in self.world.modes], 1)
        command = command_of(op)
        command[1] = self.turned.get(command[1].decode(), command[1].decode()).encode()
        return self.cli.execute_command(*command)  # type: ignore[no-untyped-call]

    def full(self, verb: Verb, **more: Any) -> object:
        """The same while the server is out of memory: no command that may need some is let through."""
        self.cli.config_set("maxmemory", 1)
        try:
            return self.ask(verb, **more)
        finally:
            self.cli.config_set("maxmemory", 0)

    def refused_full(self, verb: Verb, **more: Any) -> bool:
        """The same: whether it is refused for lack of memory; else it is granted, with the fence that each name then
        has."""
        try:
            reply = self.full(verb, **more)
        except redis.ResponseError as error:
            if "maxmemory" not in str(error):
                raise
            return True
        fences = {self.cli.get(AT[name].fence) for name in more.get("names") or (0,)}
        assert fences == {b"%d" % reply[1]}  # type: ignore[index]
        return False

    def id(self, who: int, name: int = 0) -> str:
        return self.world.part(name, who).named(IDS[who])

    def holds(self, fence: int = 5, who: int = ELDER, name: int = 0, ms: int = 10_000) -> None:
        """Before: the first id holds for 10 s, F is kept for 10 s."""
        at = AT[name]
        if self.world.part(name, who).kind.shared:
            self.cli.zadd(at.hold, {self.id(who, name): self._ms() + ms})
            self.cli.pexpire(at.hold, ms)
        else:
            self.cli.set(at.hold, self.id(who, name), px=ms)
        self.cli.set(at.fence, fence, px=10_000)

    def waits(self, who: int = YOUNGER, number: int = 7, ends: int = FAR, name: int = 0, order: int = 1) -> None:
        """Before: the second id waits."""
        self.cli.zadd(AT[name].queue, {self.id(who, name): order})
        self.cli.hset(AT[name].tickets, IDS[who][:ID_LENGTH], f"{number} {FAR} {ends} 1")

    def holds_as(self, mode: str) -> None:
        """Before: another id holds the first name as another kind."""
        self.cli.zadd(AT[0].hold, {f"{IDS[YOUNGER][:33]}{mode}.17|rws:1|": FAR})

    def holders(self, name: int = 0) -> list[bytes]:
        found: Any = self.cli.zrange(AT[name].hold, 0, -1)
        return list(found)

    def ranks(self, name: int = 0) -> list[bytes]:
        """The waiters."""
        found: Any = self.cli.zrange(AT[name].queue, 0, -1)
        return list(found)

    def published(self) -> list[bytes]:
        """The notices to others."""
        self.cli.publish(*self.stage.last())
        return [text for _, text in self.stage.published()]

    def is_empty(self) -> bool:
        return not self.cli.exists(*(key for at in AT for key in keys_of(at)))

    def left(self, name: int = 0, who: int = ELDER) -> float:
        """Seconds that the hold has left, rounded up to ten: 10 before, 20 once renewed."""
        at = AT[name]
        if not self.world.part(name, who).kind.shared:
            ms: int = self.cli.pttl(at.hold)
            return -(-ms // 10_000) * 10
        score: Any = self.cli.zscore(at.hold, self.id(who, name))
        assert self.cli.pttl(at.hold) >= score - self._ms() - 1
        left: float = score - self._ms()
        return -(-left // 10_000) * 10

    def _ms(self) -> int:
        seconds, us = self.cli.time()
        return int(seconds * 1000 + us // 1000)


# -- one name ----------------------------------------------------------------------------------------------------------


def full_acquire_is_whole(odd: Odd) -> None:
    """It fails and leaves nothing, or has all that it takes."""
    if odd.refused_full(Verb.ACQUIRE, fence=7):
        assert odd.is_empty()
    else:
        assert odd.left() == 20


def full_extend_goes_on(odd: Odd) -> None:
    """The hold is prolonged; the reply says if F could not be raised."""
    odd.holds(fence=5)
    assert odd.full(Verb.EXTEND, fence=7) == [1, int(odd.cli.get(AT[0].fence) or 0)]
    assert odd.left() == 20


def full_extend_of_nothing_is_answered(odd: Odd) -> None:
    """The reply says that there is no holder."""
    answer: Any = odd.full(Verb.EXTEND, fence=7)
    assert answer[:5] == [0, -2, b"", -1, 0]
    assert odd.is_empty()
    odd.cli.set(AT[0].fence, 7, px=10_000)
    odd.full(Verb.EXTEND, fence=7)
    assert odd.cli.pttl(AT[0].fence) > 50_000


def full_extend_of_equal_fence_goes_on(odd: Odd) -> None:
    """In steady state F is the token, and its memory goes on without a write of it."""
    odd.holds(fence=7)
    assert odd.full(Verb.EXTEND, fence=7) == [1, 7]
    assert odd.cli.pttl(AT[0].fence) > 50_000
    assert odd.left() == 20


def full_release_frees(odd: Odd) -> None:
    """The name is free, though F and a tombstone may not have been written."""
    odd.holds(fence=5)
    assert odd.full(Verb.RELEASE, fence=7, tombstone=True) == [1, int(odd.cli.get(AT[0].fence) or 0)]
    assert odd.holders() == []


def full_release_of_nothing_is_answered(odd: Odd) -> None:
    """An undo of an op that never came does not fail either, with a token or without."""
    for token in 0, 7:
        answer: Any = odd.full(Verb.RELEASE, fence=token, tombstone=True)
        assert answer[:5] == [0, -2, b"", -1, 0]


def full_release_rests(odd: Odd) -> None:
    """A hold with min_hold rests; the waiter is notified."""
    odd.holds()
    odd.waits(number=7)
    assert odd.full(Verb.RELEASE, rest=30_000) == [1, 5]
    assert odd.holders() == [b"~" + odd.id(ELDER)[1:].encode()]
    assert odd.published() == [f"{IDS[YOUNGER][:ID_LENGTH]} 7 0 30000 {AT[0].hold}".encode()]


def full_release_notifies(odd: Odd) -> None:
    """The waiter is notified."""
    odd.holds()
    odd.waits(number=7)
    assert odd.full(Verb.RELEASE, serve=Serve.WAKE) == [1, 5]
    assert odd.published() == [f"{IDS[YOUNGER][:ID_LENGTH]} 7 0 -1 {AT[0].hold}".encode()]


def full_release_grants(odd: Odd) -> None:
    """The waiter is granted."""
    odd.holds()
    odd.waits()
    assert odd.full(Verb.RELEASE, serve=Serve.GRANT) == [1, 5]
    assert odd.holders() == [odd.id(YOUNGER).encode()]


def full_release_stores_the_ticket_again(odd: Odd) -> None:
    """The undo of an attempt is complete."""
    odd.holds()
    assert odd.full(Verb.RELEASE, serve=Serve.GRANT, number=1, fresh=10_000, waiter=THIRD) == [1, 5]
    assert odd.ranks() == [odd.world.part(0, THIRD).named(IDS[THIRD], waits=True).encode()]


def full_probe_grants_nothing(odd: Odd) -> None:
    """Without a fence there is no grant. The name is free, and the waiter keeps its place."""
    odd.waits()
    answer: Any = odd.full(Verb.WAIT, who=THIRD, serve=Serve.GRANT)
    assert answer[:5] == [0, -2, b"", -1, 0]
    assert not odd.cli.exists(AT[0].hold, AT[0].fence)
    assert (odd.published(), odd.ranks()) == ([], [odd.id(YOUNGER).encode()])


def another_type_is_reported(odd: Odd) -> None:
    """A name that is in use as a mutex is neither taken nor freed."""
    odd.cli.set(AT[0].hold, "somebody's")
    for verb in Verb.ACQUIRE, Verb.EXTEND, Verb.RELEASE, Verb.WAIT, Verb.ADOPT, Verb.BREAK, Verb.PEEK:
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            odd.ask(verb)
    assert odd.cli.get(AT[0].hold) == b"somebody's"


def another_kind_is_reported(odd: Odd) -> None:
    """Nor one that is in use as another kind whose holds are kept in the same way, though they may have ended."""
    other = {"s": "r", "r": "s2/", "w": "s2/"}[odd.id(ELDER)[33]]
    odd.cli.zadd(AT[0].hold, {f"{IDS[who][:33]}{other}.17|rws:1|": ends for who, ends in ((ELDER, 1), (YOUNGER, FAR))})
    for verb in Verb.ACQUIRE, Verb.EXTEND, Verb.RELEASE, Verb.WAIT, Verb.ADOPT, Verb.BREAK, Verb.PEEK:
        with pytest.raises(redis.ResponseError, match="WRONGTYPE another kind"):
            odd.ask(verb)
    assert odd.cli.zcard(AT[0].hold) == 2


def full_refusal_notifies(odd: Odd) -> None:
    """An attempt without a ticket that finds room for another waiter is refused, and not for lack of memory."""
    odd.waits()
    if odd.world.part(0, ELDER).kind.letter == "r":
        return  # it enters beside another reader
    answer: Any = odd.full(Verb.ACQUIRE, fence=7, serve=Serve.WAKE)
    assert answer[:2] == [0, -2]
    assert len(odd.published()) == 1


def an_undo_at_another_kind_leaves_its_tombstone(odd: Odd) -> None:
    """The name is in use as a mutex, or as another kind whose holds are kept in the same way."""
    other = {"s": "r", "r": "s2/", "w": "s2/"}[odd.id(ELDER)[33]]
    for in_use in (lambda: odd.cli.set(AT[0].hold, "somebody's"), lambda: odd.holds_as(other)):
        odd.stage.reset()
        in_use()
        only_an_undo_leaves_a_tombstone(odd, AT[0].hold, AT[0].undone + IDS[ELDER][:ID_LENGTH])


Promise = Callable[[Odd], None]

ONE: list[Promise] = [
    full_acquire_is_whole,
    full_extend_goes_on,
    full_extend_of_nothing_is_answered,
    full_extend_of_equal_fence_goes_on,
    full_release_frees,
    full_release_of_nothing_is_answered,
    full_release_rests,
    full_release_notifies,
    full_release_grants,
    full_release_stores_the_ticket_again,
    full_probe_grants_nothing,
    full_refusal_notifies,
    another_type_is_reported,
    another_kind_is_reported,
    an_undo_at_another_kind_leaves_its_tombstone,
]


# -- several names -----------------------------------------------------------------------------------------------------

BOTH = (0, 1)


def full_acquire_of_both_is_whole(odd: Odd) -> None:
    """Out of memory it fails and leaves nothing, or has both."""
    if odd.refused_full(Verb.ACQUIRE, fence=7, names=BOTH):
        assert not odd.cli.exists(*(at.hold for at in AT))
    else:
        assert (odd.left(0), odd.left(1)) == (20, 20)


def full_release_frees_both(odd: Odd) -> None:
    """Both are free."""
    odd.holds(fence=5, name=0)
    odd.holds(fence=5, name=1)
    answer: Any = odd.full(Verb.RELEASE, fence=7, names=BOTH, tombstone=True)
    assert answer == [1, min(int(odd.cli.get(AT[name].fence) or 0) for name in BOTH)]
    assert not odd.cli.exists(AT[0].hold, AT[1].hold)


def full_extend_of_both_goes_on(odd: Odd) -> None:
    """Both are prolonged; the reply has the least fence of both."""
    odd.holds(fence=6, name=0)
    odd.holds(fence=5, name=1)
    assert odd.full(Verb.EXTEND, fence=5, names=BOTH) == [1, 5]
    assert (odd.left(0), odd.left(1)) == (20, 20)


def a_fence_that_cannot_rise_releases_both(odd: Odd) -> None:
    """An id that holds both and asks again has one token at both. Where one name cannot get it, the id holds
    neither."""
    for first, second in ((5, 9), (9, 5)):
        odd.stage.reset()
        odd.holds(fence=first, name=0, ms=30_000)
        odd.holds(fence=second, name=1, ms=30_000)
        if odd.refused_full(Verb.ACQUIRE, fence=7, names=BOTH):
            assert not odd.cli.exists(AT[0].hold, AT[1].hold)
        else:
            assert odd.cli.get(AT[0].fence) == b"9"


def another_kind_of_one_leaves_the_other_free(odd: Odd) -> None:
    """One of the names is in use as another kind. The reply says so, whichever comes first, and the other name has no
    holder: its waiters are served."""
    for wrong in BOTH:
        for hers in Serve.GRANT, Serve.WAKE:
            odd.stage.reset()
            odd.cli.lpush(AT[wrong].hold, "somebody's")
            odd.waits(name=1 - wrong, order=FAR * 1000)
            with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                odd.ask(Verb.ACQUIRE, fence=7, names=BOTH, serve=hers, number=1, fresh=5_000, waiter=ELDER)
            granted = int(odd.published()[0].split()[2])
            assert bool(granted) is (hers is Serve.GRANT)
            assert odd.cli.exists(AT[1 - wrong].hold) == int(bool(granted))


def another_kind_of_one_releases_the_other(odd: Odd) -> None:
    """The reply to a release says so too, and the other name is released all the same."""
    for wrong in BOTH:
        odd.stage.reset()
        odd.cli.lpush(AT[wrong].hold, "somebody's")
        odd.holds(name=1 - wrong)
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            odd.ask(Verb.RELEASE, names=BOTH)
        assert not odd.cli.exists(AT[1 - wrong].hold)


SEVERAL: list[Promise] = [
    full_acquire_of_both_is_whole,
    full_release_frees_both,
    full_extend_of_both_goes_on,
    a_fence_that_cannot_rise_releases_both,
    another_kind_of_one_leaves_the_other_free,
    another_kind_of_one_releases_the_other,
]

WHERE = {
    "read-write": [(promise, each) for promise in ONE for each in (world("w."), world("r."))],
    "semaphore": [(promise, each) for promise in ONE for each in (world("s1/."), world("s1/0."))],
    "multi": [
        (promise, each) for promise in SEVERAL for each in (world("m", "w."), world("s1/.", "f"), world("m", "f"))
    ],
}


def odd(family: str) -> list[Callable[[Stage, Mapping[str, str]], None]]:
    """All promises of a family, to be checked with other scripts in place of its own."""

    def kept(promise: Promise, where: World) -> Callable[[Stage, Mapping[str, str]], None]:
        return lambda stage, turned: promise(Odd(stage, where, turned))

    return [kept(promise, where) for promise, where in WHERE[family]]
