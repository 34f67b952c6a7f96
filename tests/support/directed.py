"""Histories that have a name."""

from __future__ import annotations

from functools import partial

from asynclock.rules.model import DONE, MARKS_FREE, RESTING, SERVED, VISITED, Serve, Verb
from tests.support.histories import (  # fmt: skip
    BREAK,
    ELDER,
    FOURTH,
    IDS,
    LOSE_FENCE,
    LOSE_TICKETS,
    MUTE,
    NOBODY,
    PERSIST,
    SKEW,
    THIRD,
    YOUNGER,
    Ask,
    Listen,
    Pass,
    Permit,
    Step,
    crowd,
    set_fence,
    take,
)

acquire = partial(Ask, Verb.ACQUIRE, serve=Serve.WAKE)
"""A round that leaves no ticket."""
heals = partial(Ask, Verb.ACQUIRE)
"""A hold that a majority has, and this node lacks."""
extend = partial(Ask, Verb.EXTEND, token=0)
release = partial(Ask, Verb.RELEASE, token=0)

tries = partial(Ask, Verb.ACQUIRE, serve=Serve.GRANT, number=1)
"""A waiter at a single node."""
looks = partial(Ask, Verb.WAIT, serve=Serve.GRANT, number=2, keeps=True)
"""It renews its ticket."""
grants = partial(Ask, Verb.RELEASE, token=0, serve=Serve.GRANT)
"""A release at a single node, or a waiter that leaves."""
calls = partial(Ask, Verb.RELEASE, token=0, serve=Serve.WAKE)
"""The same over N nodes."""

adopts = partial(Ask, Verb.ADOPT, YOUNGER, waiter=ELDER)
"""A client that knows the elder's id."""
breaks = partial(Ask, Verb.BREAK, NOBODY, serve=Serve.GRANT)

HANDED_OVER: dict[str, list[Step]] = {
    "adopted": [acquire(), adopts(), adopts(THIRD), extend(), extend(YOUNGER), release(YOUNGER), acquire()],
    "adopted twice by one id": [acquire(), adopts(), adopts(lease=20_000), adopts(lease=5_000)],
    "adopted, and F was lost": [acquire(), LOSE_FENCE, adopts(), LOSE_FENCE, adopts()],
    "an adopted end never goes back": [acquire(lease=20_000), adopts(lease=5_000), adopts(THIRD, waiter=YOUNGER)],
    "an adopted end moves on": [acquire(lease=5_000), adopts(lease=20_000)],
    "adopted with a waiter": [acquire(), tries(THIRD), adopts(), grants(), grants(YOUNGER)],
    "adopted, and then a waiter comes": [acquire(), adopts(), tries(THIRD), grants(YOUNGER)],
    "adopted without an end": [acquire(), PERSIST, adopts(), acquire(THIRD)],
    "adopted by an id that was undone": [acquire(), release(YOUNGER, tombstone=True), adopts(), adopts(THIRD)],
    "nothing to adopt, with a waiter": [acquire(), tries(YOUNGER), BREAK, adopts(THIRD, serve=Serve.GRANT)],
    "an adoption that is refused serves nobody": [
        *(acquire(lease=500), tries(YOUNGER), Pass(500), adopts(THIRD, serve=Serve.GRANT), looks(YOUNGER)),
    ],
    "adopted while a ticket of its id waits": [acquire(), looks(), adopts(), breaks()],
    "nothing to adopt": [adopts(), take("another's", 0), adopts(), release()],
    "an adopter's clock counts": [acquire(), adopts(clock=SKEW + 1), adopts(THIRD, waiter=YOUNGER, clock=-SKEW)],
    "an adopter with tickets": [acquire(), tries(), tries(YOUNGER), adopts(), looks(YOUNGER), breaks()],
    "broken": [breaks(), acquire(), breaks(), extend(), release(), acquire()],
    "broken with waiters": [acquire(), tries(YOUNGER), tries(THIRD), breaks(), breaks(), breaks()],
    "broken, and told who did it": [acquire(), tries(YOUNGER), breaks(waiter=YOUNGER), breaks(waiter=THIRD), breaks()],
    "broken, and a waiter is notified": [acquire(), tries(YOUNGER), breaks(serve=Serve.WAKE), breaks()],
    "broken, and nobody is served": [acquire(), tries(YOUNGER), breaks(serve=Serve.NOBODY), looks(YOUNGER)],
    "a stranger's is not broken": [take("another's", 0), breaks(), acquire(MUTE), breaks(), acquire()],
    "the broken one does not listen": [take(IDS[ELDER].replace("|", "!"), 0), breaks(), acquire()],
    "a rest is broken": [acquire(), release(rest=5_000), breaks(), acquire(YOUNGER)],
    "a done name is broken": [acquire(), release(rest=5_000, done=True), breaks(), acquire(YOUNGER)],
}

HOLDS: dict[str, list[Step]] = {
    "an id that holds is answered the same": [acquire(), acquire(lease=20_000), acquire(lease=5_000)],
    "a hold whose fence was lost gets a new one": [acquire(), LOSE_FENCE, acquire(clock=SKEW)],
    "a stranger that never ends": [take("another's", 0), acquire(), extend(), release()],
    "a look at a hold that lost its end takes nothing": [acquire(), PERSIST, extend(lease=0), acquire(YOUNGER)],
    "a look at an empty value takes nothing": [take("", 0), extend(NOBODY, lease=0, token=None), acquire()],
    "a hold that lost its end gets one": [acquire(), PERSIST, extend(), acquire(YOUNGER)],
    "an end never goes back": [acquire(lease=20_000), extend(lease=5_000), extend(lease=19_999), extend(lease=20_001)],
    "the shortest lease": [acquire(), PERSIST, extend(lease=1), Pass(1), acquire(YOUNGER)],
    "a release takes no other's ticket": [acquire(THIRD), tries(YOUNGER), release(waiter=YOUNGER), grants(THIRD)],
    "a second undo is a release as any": [acquire(), release(tombstone=True), release(lease=20_000, tombstone=True)],
    "a plain id is not known again": [acquire(plain=True), acquire(plain=True, lease=20_000)],
    "a plain hold of a script's id": [acquire(), acquire(plain=True)],
    "a script finds its id held plainly": [acquire(plain=True), acquire()],
    "an extend of an undone id is refused as any other": [release(tombstone=True), extend(), acquire(YOUNGER)],
    "an undone id is refused until its tombstone ends": [
        *(release(lease=1_000, tombstone=True), acquire(), Pass(999), acquire(), Pass(1), acquire()),
    ],
    "a name rests": [
        *(acquire(), release(rest=500), acquire(YOUNGER), Pass(499), acquire(YOUNGER), Pass(1), acquire(YOUNGER)),
    ],
    "a name is done": [
        *(acquire(), release(rest=500, done=True), acquire(YOUNGER), Pass(499), acquire(YOUNGER), Pass(1)),
        acquire(YOUNGER),
    ],
    "a name is done, and a tombstone is left": [
        *(acquire(), release(rest=500, done=True, tombstone=True), acquire(), Pass(500), acquire()),
    ],
    "done for no time": [acquire(), release(done=True), acquire(YOUNGER), release(YOUNGER, rest=500)],
    "another's release does not mark a name as done": [
        *(acquire(), release(YOUNGER, rest=500, done=True), release(rest=500), release(rest=900, done=True)),
    ],
    "a release with a rest that finds no hold of its id serves": [
        *(acquire(), tries(YOUNGER), grants(THIRD, rest=500), BREAK, grants(THIRD, rest=500), looks(YOUNGER)),
    ],
    "a run that is done marks a free name": [
        *(release(rest=500, done=MARKS_FREE), acquire(), Pass(499), acquire(YOUNGER), Pass(1), acquire(YOUNGER)),
    ],
    "a run that is done marks no other's hold": [
        *(acquire(YOUNGER), release(rest=500, done=MARKS_FREE), extend(YOUNGER), release(YOUNGER), acquire()),
    ],
    "a run that is done marks its own hold": [acquire(), release(rest=500, done=MARKS_FREE), acquire(YOUNGER)],
    "a mark is never shortened": [
        *(acquire(), release(rest=500, done=True), release(YOUNGER, rest=400, done=MARKS_FREE), Pass(450)),
        *(acquire(THIRD), Pass(50), acquire(THIRD)),
    ],
    "a mark can be made longer": [
        *(acquire(), release(rest=500, done=True), release(rest=600, done=MARKS_FREE), Pass(550), acquire(YOUNGER)),
        *(Pass(50), acquire(YOUNGER)),
    ],
    "a mark without an end stays": [
        *(acquire(), release(rest=500, done=True), PERSIST, release(rest=600, done=MARKS_FREE), Pass(600), acquire()),
    ],
    "a name that rests gets no mark": [
        *(acquire(), release(rest=500), release(rest=900, done=MARKS_FREE), Pass(500), acquire(YOUNGER)),
    ],
    "a stranger's hold gets no mark": [
        take("another's", 600),
        release(rest=900, done=MARKS_FREE),
        Pass(600),
        acquire(),
    ],
    "done for no time marks no free name": [release(done=MARKS_FREE), acquire()],
    "a mark of a free name is told to the first waiter": [
        *(
            acquire(),
            tries(YOUNGER),
            BREAK,
            grants(rest=500, done=MARKS_FREE),
            looks(YOUNGER),
            Pass(500),
            looks(YOUNGER),
        ),
    ],
    "a mark raises F, and leaves a tombstone": [
        *(acquire(), BREAK, release(token=5, rest=500, done=MARKS_FREE, tombstone=True), Pass(500), acquire()),
        acquire(YOUNGER),
    ],
    "an op without a token gets F": [acquire(), extend(token=None), release(token=None)],
    "the last fence that Lua counts": [set_fence(str(2**53 - 1), 0), acquire(), extend()],
    "no number": [set_fence("garbage", 0), acquire(), set_fence("12x", 0), release(token=5), acquire()],
    "an old dump": [acquire(), set_fence("7", 1_000), release(token=9), Pass(60_000), acquire(YOUNGER)],
    "a fence that outlived its memory": [acquire(memory=1_000), Pass(1_000), extend(), acquire()],
    "a span of fences ends at F": [
        *(acquire(span=16), release(), acquire(YOUNGER, span=3), LOSE_FENCE, acquire(YOUNGER, span=2)),
    ],
}

TICKETS: dict[str, list[Step]] = {
    "a renewed ticket keeps its place": [
        *(acquire(), tries(YOUNGER), Pass(10), tries(THIRD), Pass(10), looks(YOUNGER), looks(THIRD)),
    ],
    "a lost ticket comes back in its old place": [
        *(acquire(), tries(YOUNGER, order=5), Pass(10), tries(THIRD, order=9)),
        *(release(YOUNGER), looks(YOUNGER, order=-10_000 - 1), looks(THIRD)),
    ],
    "a first order is clamped to the node's clock, before": [
        *(acquire(), tries(YOUNGER, order=-SKEW), tries(THIRD, order=-SKEW - 1), tries(FOURTH, order=-3 * SKEW)),
    ],
    "a first order is clamped to the node's clock, after": [
        *(acquire(), tries(YOUNGER, order=SKEW), tries(THIRD, order=SKEW + 1), tries(FOURTH, order=3 * SKEW)),
    ],
    "a later order is not clamped": [
        *(
            acquire(),
            looks(YOUNGER, order=-3 * SKEW),
            tries(THIRD, number=2, order=3 * SKEW),
            looks(FOURTH, order=None),
        ),
    ],
    "one order, two ids": [acquire(), tries(THIRD, order=7), tries(YOUNGER, order=7), looks(THIRD), looks(YOUNGER)],
    "the longest ticket says when the queue goes": [
        *(acquire(lease=60_000), tries(YOUNGER, lease=20_000), tries(THIRD, lease=10_000), Pass(19_999)),
        *(looks(THIRD, lease=5_000), Pass(1), looks(YOUNGER, lease=30_000), Pass(20_000), tries(FOURTH, lease=1_000)),
    ],
    "the queue has ended": [acquire(lease=60_000), tries(YOUNGER, lease=500), Pass(500), tries(THIRD), grants()],
    "a ticket under another id": [
        *(acquire(), tries(YOUNGER, waiter=THIRD), tries(FOURTH, waiter=THIRD, number=2, keeps=True), grants()),
        *(grants(THIRD), acquire(YOUNGER, waiter=THIRD)),
    ],
    "no number, no ticket": [
        *(acquire(), tries(YOUNGER, number=0), looks(YOUNGER, number=0), grants(), looks(YOUNGER, number=0)),
    ],
    "a look without a number tells no rank": [acquire(), tries(YOUNGER), looks(YOUNGER, number=0), looks(YOUNGER)],
    "a ticket goes with its id": [acquire(), tries(YOUNGER), tries(THIRD), grants(YOUNGER), grants(THIRD), extend()],
    "an undo puts the ticket back": [
        *(acquire(), tries(YOUNGER, waiter=THIRD), release(), acquire(FOURTH, waiter=THIRD, number=1)),
        *(release(FOURTH, waiter=THIRD, number=2, tombstone=True, order=-5), looks(THIRD, number=3)),
    ],
    "an undo stores the ticket behind the one that was served": [
        *(acquire(), tries(YOUNGER), tries(THIRD)),
        *(grants(waiter=FOURTH, number=2, order=-5), looks(FOURTH), grants(YOUNGER, waiter=YOUNGER, number=2)),
    ],
    "an undo that removes no hold stores no ticket": [
        *(acquire(), tries(YOUNGER), release(FOURTH, waiter=THIRD, number=2, tombstone=True), looks(YOUNGER)),
        *(tries(THIRD, waiter=FOURTH, number=1), release(FOURTH, tombstone=True)),
        *(release(THIRD, waiter=FOURTH, number=1), looks(YOUNGER)),
    ],
    "an undo puts the ticket back where the name rests": [
        *(acquire(), tries(YOUNGER), grants(rest=500, waiter=THIRD, number=2), looks(YOUNGER)),
    ],
    "an undo puts the only ticket back where the name rests": [acquire(), grants(rest=500, waiter=THIRD, number=2)],
    "a tombstone beats wait and acquire": [
        *(acquire(), release(YOUNGER, tombstone=True), tries(YOUNGER), looks(YOUNGER), tries(THIRD)),
        *(grants(), looks(YOUNGER), tries(YOUNGER)),
    ],
    "a tombstone of a holder": [acquire(), Ask(Verb.RELEASE, THIRD, tombstone=True), acquire(THIRD), extend()],
    "a holder waits for itself": [acquire(), looks(), tries(), grants()],
}

MARKS: dict[str, list[Step]] = {
    "a hold is marked once and notified once": [
        *(acquire(), tries(YOUNGER), looks(YOUNGER), tries(THIRD), extend(lease=20_000)),
    ],
    "a hold is marked without a notice": [acquire(), Listen(ELDER, False), tries(YOUNGER), Listen(ELDER), tries(THIRD)],
    "a marked hold is its owner's": [acquire(), tries(YOUNGER), acquire(lease=20_000), extend(lease=30_000), release()],
    "a marked hold lost its fence": [acquire(), tries(YOUNGER), LOSE_FENCE, acquire(span=3), release(YOUNGER)],
    "a marked hold is not another's": [acquire(), tries(YOUNGER), extend(YOUNGER), release(YOUNGER), acquire(THIRD)],
    "a mark keeps the end": [acquire(lease=20_000), tries(YOUNGER, lease=5_000), Pass(5_000), looks(THIRD)],
    "a mark keeps no end": [acquire(), PERSIST, tries(YOUNGER), extend(), tries(YOUNGER)],
    "a foreign holder is not marked": [
        *(take("0f" * 16, 1_000), tries(), Pass(1_000), take("0f" * 16 + "!", 1_000), tries(), Pass(1_000)),
        *(take("another's|", 1_000), tries(), Pass(1_000), take("0f" * 15 + "|", 1_000), tries(), Pass(1_000)),
        *(take("0f" * 17 + "|", 1_000), tries(), Pass(1_000), take("", 1_000), tries()),
    ],
    "a stranger of ours is": [take("0F" * 16 + "|", 1_000), tries(), looks(), tries(YOUNGER)],
    "a stranger's mark": [take("+another's", 1_000), tries(), grants(), Pass(1_000), take("+", 0), tries(), looks()],
    "a holder that does not listen is not marked": [acquire(MUTE), tries(YOUNGER), grants(MUTE), looks(YOUNGER)],
    "a resting name is not marked": [
        *(acquire(), release(rest=500), tries(YOUNGER), take(RESTING, 0), Pass(500), looks(YOUNGER)),
    ],
    "a done name is not marked": [
        *(acquire(), release(rest=500, done=True), tries(YOUNGER), take(DONE, 0), Pass(500), looks(YOUNGER)),
    ],
    "a barger enters, though others wait": [
        *(acquire(), tries(YOUNGER), tries(THIRD), release(), tries(FOURTH), grants(FOURTH)),
    ],
    "the last waiter enters": [acquire(), tries(YOUNGER), release(), tries(YOUNGER), release(YOUNGER)],
    "a waiter enters before others": [
        acquire(),
        tries(YOUNGER),
        tries(THIRD),
        release(),
        tries(THIRD),
        grants(THIRD),
    ],
    "a plain hold is not marked at once": [
        acquire(),
        tries(YOUNGER),
        BREAK,
        acquire(plain=True),
        looks(YOUNGER),
        grants(),
    ],
}

SERVES: dict[str, list[Step]] = {
    "a release grants to the first": [
        acquire(),
        tries(THIRD),
        Pass(1),
        tries(YOUNGER),
        grants(),
        grants(THIRD),
        grants(YOUNGER),
    ],
    "a release calls the first": [
        acquire(),
        tries(THIRD),
        Pass(1),
        tries(YOUNGER),
        calls(),
        tries(THIRD),
        looks(YOUNGER),
    ],
    "a release that serves nobody": [acquire(), tries(YOUNGER), release(), looks(YOUNGER, serve=Serve.NOBODY)],
    "a grant ends with its ticket": [acquire(), tries(YOUNGER, lease=7_000), Pass(1_234), grants(), looks(THIRD)],
    "a grant has the number of its ticket": [acquire(), tries(YOUNGER), looks(YOUNGER, number=17), grants()],
    "a grant's fence is of the node's clock": [
        acquire(clock=-SKEW),
        tries(YOUNGER),
        Pass(999),
        grants(),
        LOSE_FENCE,
        extend(YOUNGER),
    ],
    "a grant's fence is above F": [
        acquire(clock=SKEW),
        tries(YOUNGER),
        grants(),
        set_fence("7", 1_000),
        grants(YOUNGER),
    ],
    "a grant's fence is the next": [set_fence(str(2**53 - 2), 0), acquire(), tries(YOUNGER), grants()],
    "a grant's span is its ticket's": [
        acquire(span=3),
        tries(YOUNGER, span=16),
        tries(THIRD),
        grants(span=5),
        grants(YOUNGER),
    ],
    "a grant's fence has the memory of the serving op": [
        acquire(),
        tries(YOUNGER),
        grants(memory=99_000),
        Pass(98_000),
        extend(),
    ],
    "a stale waiter keeps its ticket while another one holds": [
        *(acquire(), tries(YOUNGER, fresh=500), Pass(500), calls(THIRD), grants(FOURTH)),
    ],
    "stale heads are passed over": [
        *(acquire(), tries(YOUNGER, fresh=999), tries(THIRD, fresh=1_000), tries(FOURTH, fresh=1_001), Pass(1_000)),
        *(grants(), grants(FOURTH)),
    ],
    "stale heads are not called": [
        *(acquire(), tries(YOUNGER, fresh=1_000), tries(THIRD, fresh=1_001), Pass(1_000), calls(), looks(YOUNGER)),
    ],
    "all are stale": [acquire(), tries(YOUNGER, fresh=1), tries(THIRD, fresh=1), Pass(1), grants(), looks(YOUNGER)],
    "a head that does not listen is skipped": [
        acquire(),
        tries(YOUNGER),
        tries(THIRD),
        Listen(YOUNGER, False),
        grants(),
        grants(THIRD),
    ],
    "a head that does not listen is not notified": [
        acquire(),
        tries(YOUNGER),
        tries(THIRD),
        Listen(YOUNGER, False),
        calls(),
        looks(YOUNGER),
    ],
    "a head that polls becomes the holder": [acquire(), tries(MUTE), Pass(1), tries(THIRD), grants(), looks(THIRD)],
    "also without permission": [acquire(), tries(MUTE), Pass(1), tries(THIRD), Permit(False), grants()],
    "a waiter for several names is notified": [
        *(acquire(), tries(YOUNGER, span=0), tries(THIRD), grants(), looks(THIRD)),
        *(Listen(YOUNGER, False), looks(THIRD)),
    ],
    "none is listening": [
        acquire(),
        tries(YOUNGER, span=3),
        tries(MUTE),
        Listen(YOUNGER, False),
        grants(),
        looks(THIRD),
    ],
    "without permission a grant is undone": [
        *(acquire(), tries(YOUNGER), tries(THIRD), Permit(False), grants(), looks(YOUNGER), Permit(True), looks(THIRD)),
    ],
    "without permission nobody is notified": [
        acquire(),
        Permit(False),
        tries(YOUNGER),
        tries(THIRD),
        calls(),
        looks(YOUNGER),
    ],
    "one too many is stale": [acquire(), tries(YOUNGER), crowd(SERVED), grants(), looks(THIRD)],
    "as many are stale as may be": [acquire(), tries(YOUNGER), crowd(SERVED - 1), grants()],
    "the tickets are lost": [acquire(), tries(YOUNGER), tries(THIRD), LOSE_TICKETS, grants(), tries(YOUNGER)],
    "the first waiter is notified of a rest": [
        *(acquire(), tries(YOUNGER), looks(YOUNGER, number=5), tries(THIRD), grants(rest=1_234), looks(YOUNGER)),
    ],
    "the first waiter leaves a name that rests": [
        *(acquire(), tries(YOUNGER), tries(THIRD), grants(rest=1_234), Pass(100), grants(YOUNGER), Pass(1_000)),
        *(grants(THIRD), looks(YOUNGER)),
    ],
    "the first waiter leaves a name that is done": [
        *(acquire(), tries(YOUNGER), tries(THIRD), grants(rest=1_234, done=True), Pass(100), grants(YOUNGER)),
    ],
    "a later waiter leaves a name that rests": [
        *(acquire(), tries(YOUNGER), tries(THIRD), grants(rest=1_234), grants(THIRD), looks(YOUNGER)),
    ],
    "the first waiter leaves a name that is held": [
        *(acquire(), tries(YOUNGER), tries(THIRD), grants(YOUNGER), looks(THIRD)),
    ],
    "a stale waiter is not notified of a rest": [
        *(acquire(), tries(YOUNGER, fresh=500), tries(THIRD), Pass(500), grants(rest=1_234), looks(FOURTH)),
    ],
    "a waiter that does not listen is not notified of a rest": [
        *(acquire(), tries(YOUNGER), tries(THIRD), Listen(YOUNGER, False), grants(rest=1_234), looks(FOURTH)),
    ],
    "a waiter that polls needs no notice of a rest": [
        *(acquire(), tries(MUTE), Pass(1), tries(THIRD), grants(rest=1_234), looks(FOURTH)),
    ],
    "a stale waiter that polls is not waited for": [
        *(acquire(), tries(MUTE, fresh=500), Pass(1), tries(THIRD), Pass(499), grants(rest=1_234), looks(FOURTH)),
    ],
    "no notice of a rest is allowed": [
        *(acquire(), tries(YOUNGER), tries(THIRD), Permit(False), grants(rest=1_234), looks(FOURTH)),
    ],
    "an unknown id has the end of a rest told": [
        *(acquire(), tries(YOUNGER), grants(rest=1_234), grants(THIRD), grants(THIRD, serve=Serve.WAKE)),
        *(grants(THIRD, serve=Serve.NOBODY), Pass(1), tries(FOURTH), grants(THIRD, waiter=FOURTH)),
    ],
    "as many stale waiters as may be are before that of a rest": [
        *(acquire(), tries(YOUNGER), crowd(VISITED - 1), grants(rest=1_234), looks(FOURTH)),
    ],
    "one too many is stale before that of a rest": [
        *(acquire(), tries(YOUNGER), crowd(VISITED), grants(rest=1_234), looks(FOURTH)),
    ],
    "a holder that waits itself leaves a rest": [acquire(), looks(), tries(YOUNGER), grants(rest=500)],
    "a name that rests with nobody waiting": [acquire(), tries(YOUNGER), grants(YOUNGER), grants(rest=1_234)],
    "the first waiter is notified of a run that is done": [
        *(acquire(), tries(YOUNGER), tries(THIRD), grants(rest=1_234, done=True), looks(YOUNGER)),
    ],
    "a release serves the ticket that it names": [acquire(), tries(YOUNGER), grants(waiter=YOUNGER), extend(YOUNGER)],
    "an extend that is refused serves nobody": [
        *(acquire(lease=500), tries(YOUNGER), Pass(500), extend(THIRD, serve=Serve.GRANT), looks(YOUNGER)),
    ],
    "the release of another id does not serve": [acquire(), tries(YOUNGER), tries(THIRD), grants(THIRD), calls(FOURTH)],
    "a waiter that leaves a free name serves it": [
        acquire(),
        tries(YOUNGER),
        tries(THIRD),
        BREAK,
        grants(THIRD),
        extend(YOUNGER),
    ],
    "a probe serves after an expired hold": [
        *(acquire(lease=1_000), tries(YOUNGER), tries(THIRD), Pass(1_000), looks(THIRD), looks(YOUNGER)),
    ],
    "a probe notifies after an expired hold": [
        *(acquire(lease=1_000), tries(YOUNGER), tries(THIRD), Pass(1_000), looks(THIRD, serve=Serve.WAKE)),
        *(looks(YOUNGER, serve=Serve.WAKE), tries(YOUNGER)),
    ],
    "the first finds it free, and is not served": [
        acquire(lease=1_000),
        tries(YOUNGER),
        Pass(1_000),
        looks(YOUNGER),
        tries(YOUNGER),
    ],
    "a probe finds all waiters before it stale": [
        *(acquire(lease=1_000), tries(YOUNGER, fresh=500), tries(THIRD), Pass(1_000), looks(THIRD), tries(THIRD)),
    ],
    "a probe without a ticket": [acquire(lease=1_000), tries(YOUNGER), Pass(1_000), looks(FOURTH, number=0)],
}

FAIRS: dict[str, list[Step]] = {
    "fair: no waiters": [tries(fair=True), release(), acquire(YOUNGER, fair=True, number=0), tries(THIRD, fair=True)],
    "fair: no waiters, and nobody is served": [
        *(acquire(waiter=THIRD, fair=True), acquire(YOUNGER, waiter=THIRD, fair=True), release()),
    ],
    "fair: only the first enters": [
        *(acquire(), tries(YOUNGER, fair=True), tries(THIRD, fair=True), release()),
        *(tries(THIRD, fair=True, serve=Serve.WAKE), tries(YOUNGER, fair=True, number=2, keeps=True)),
    ],
    "fair: a later id serves the first": [
        *(acquire(), tries(YOUNGER, fair=True), release(), tries(THIRD, fair=True), tries(YOUNGER, fair=True)),
    ],
    "fair: a later id notifies the first": [
        *(acquire(), tries(YOUNGER), release(), tries(THIRD, fair=True, serve=Serve.WAKE), acquire(YOUNGER, fair=True)),
        *(tries(YOUNGER, fair=True, number=2, keeps=True, serve=Serve.WAKE), release(YOUNGER)),
    ],
    "fair: the first is stale": [
        *(acquire(), tries(YOUNGER, fresh=500), release(), Pass(500), tries(THIRD, fair=True), release(THIRD)),
    ],
    "fair: an attempt under its ticket": [
        *(acquire(), tries(THIRD), tries(YOUNGER, order=7), release()),
        *(acquire(FOURTH, waiter=THIRD, fair=True, serve=Serve.WAKE), release(FOURTH)),
    ],
    "fair: an id without a ticket finds no waiter": [
        *(acquire(), tries(YOUNGER, fresh=500), release(), Pass(500), tries(THIRD, fair=True, number=0)),
        acquire(FOURTH, fair=True),
    ],
    "fair: too many are stale": [
        *(acquire(), tries(YOUNGER), release(), crowd(SERVED), tries(YOUNGER, number=2, keeps=True, fair=True)),
        tries(YOUNGER, number=3, keeps=True, fair=True),
    ],
    "fair: its own hold": [acquire(), tries(YOUNGER), tries(fair=True), extend()],
}

HEALS: dict[str, list[Step]] = {
    "a heal goes before the waiters": [
        *(acquire(), tries(YOUNGER), tries(THIRD), release(), heals(fair=True), extend(), looks(YOUNGER), calls()),
        *(tries(YOUNGER, fair=True, number=2, keeps=True, serve=Serve.WAKE), looks(THIRD)),
    ],
    "a heal that is not fair goes before the waiters": [acquire(), tries(YOUNGER), release(), heals(), calls()],
    "a heal of a free name": [heals(fair=True), tries(YOUNGER), release(), heals(fair=True, lease=500), Pass(500)],
    "a heal goes beside no other holder": [
        *(acquire(YOUNGER), tries(THIRD), heals(fair=True), heals(), extend(), calls(YOUNGER)),
    ],
    "a heal of an id that was undone": [
        *(acquire(YOUNGER), tries(THIRD), release(YOUNGER), release(tombstone=True), heals(fair=True), heals()),
        looks(THIRD),
    ],
    "a heal of a hold that is there": [acquire(), tries(YOUNGER), heals(fair=True, lease=20_000), calls()],
    "a heal takes the ticket that it names": [
        *(acquire(), tries(YOUNGER), tries(THIRD), release(), heals(fair=True, waiter=YOUNGER), looks(THIRD)),
    ],
}

DIRECTED = HOLDS | HANDED_OVER | TICKETS | MARKS | SERVES | FAIRS | HEALS
