"""Named histories of shared kinds and of several names, and the corpora that mutants are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from hypothesis import HealthCheck, Phase, given, settings

from asynclock.rules.model import SERVED, VISITED, Serve, Verb
from tests.support.directed import DIRECTED, acquire, breaks, calls, extend, grants, heals, looks, release, tries
from tests.support.directed_operators import OPERATORS, breaks_any, peek
from tests.support.histories import ELDER, FOURTH, MUTE, NOBODY, SKEW, THIRD, YOUNGER, Ask, Foreign, Listen, Pass
from tests.support.shared_histories import (
    FIFTH,
    SECOND_TRY,
    THIRD_TRY,
    TICKET,
    YOUNGER_TRY,
    Act,
    Play,
    Step,
    crowd,
    lose,
    one_clients_crowd,
    plays,
    take,
    world,
)

FAMILIES = {
    "read-write": (["read-write"], 1),
    "semaphore": (["semaphore"], 1),
    "multi": (["mutex", "fair", "read-write", "semaphore"], 3),
}
"""Of which kinds the names are that random histories are on, and how many."""

WORLDS = {
    "read-write": (world("w."), world("r. w. r. r. r. r. w. r. w."), world("w. r. r. w. r. r. r. r. r.")),
    "semaphore": (world("s1/."), world("s1/. s2/. s2/. s3/. s2/. s2/. s2/1. s2/0. s2/0.")),
    "multi": (world("m", "w.", "s1/."), world("s2/.", "f", "r. w. r. r. r. r. w. r. w.")),
}


def both(
    who: int, number: int = 1, names: tuple[int, ...] = (0, 1), verb: Verb = Verb.ACQUIRE, token: int | None = None
) -> Act:
    """It asks for two names, under its waiter's ticket where it is an attempt of one."""
    ticket = number if verb is Verb.ACQUIRE else 0
    return Act(verb, who, token=token, serve=Serve.GRANT, number=ticket, waiter=TICKET, names=names)


def all_of(who: int = ELDER, verb: Verb = Verb.ACQUIRE, serve: Serve = Serve.WAKE, tombstone: bool = False) -> Act:
    """It asks for three names, and leaves no ticket."""
    return Act(verb, who, token=0, serve=serve, tombstone=tombstone, names=(0, 1, 2))


# -- those of the mutex, on other kinds --------------------------------------------------------------------------------


def borrowed(family: str) -> dict[str, Sequence[Step]]:
    """The named histories of the mutex without a write of another program; for several names, each op of these for
    two."""
    found: dict[str, Sequence[Step]] = {}
    for name, steps in (DIRECTED | OPERATORS).items():
        ours = [step for step in steps if not isinstance(step, Foreign)]
        if len(ours) == len(steps) and not any(isinstance(step, Ask) and step.plain for step in ours):
            found[name] = [together(step) for step in ours] if family == "multi" else ours
    return found


def together(step: Step) -> Step:
    """The same for two names, if it is possible."""
    if isinstance(step, Ask) and step.verb in (Verb.ACQUIRE, Verb.EXTEND, Verb.RELEASE):
        return Act(**{each.name: getattr(step, each.name) for each in fields(Ask)}, names=(0, 1))
    return step


# -- their own ---------------------------------------------------------------------------------------------------------

READERS, WRITERS = world("r."), world("w.")
WRITERS_TOO = world("r. w. r. r. w. w. w. r. w.")  # the second and the sixth are writers
MIXED = world("r. w. r. r. r. r. w. r. w.")  # the second is a writer
THREE = world("s3/. s3/. s3/. s3/. s3/. s3/. s3/1. s3/0. s3/1.")  # attempts at slots
TWO = world("s2/. s1/. s2/. s1/. s2/.")  # the second and the fourth want fewer permits
MANY = world("f", "f", "r. w. r. r. r. r. w. r. w.")
LOSE_ALL = tuple(lose("hold", name) for name in range(3))
SHARED: dict[str, list[Step]] = {
    "an extend makes no fence": [acquire(), lose("fence"), extend(token=None), extend(token=3), acquire()],
    "a hold that lost its fence gets one": [acquire(), lose("fence"), acquire(lease=20_000), extend()],
    "a holder of another kind is broken without a notice": [Listen(MUTE), acquire(MUTE), breaks()],
    "the tickets are lost": [acquire(), tries(YOUNGER), tries(THIRD), lose("tickets"), grants(), breaks()],
    "the holder's own ticket is passed over": [acquire(), looks(), tries(YOUNGER), looks(YOUNGER), grants()],
    "a rest ends before the others do": [acquire(), release(rest=500), acquire(YOUNGER), Pass(500), acquire(YOUNGER)],
    "a clock far behind is clamped": [acquire(clock=-3 * SKEW), grants(), acquire(YOUNGER, clock=-3 * SKEW)],
    "a rest serves nobody": [acquire(), looks(YOUNGER, serve=Serve.NOBODY), grants(rest=500), looks(YOUNGER)],
    "a release of no hold leaves no rest": [
        *(acquire(), looks(YOUNGER, serve=Serve.NOBODY), grants(THIRD, rest=500), looks(YOUNGER)),
    ],
    "a longer hold of another keeps its end": [
        *(acquire(lease=20_000), acquire(YOUNGER, lease=5_000), extend(YOUNGER, lease=10_000)),
    ],
    "the first waiter leaves beside a hold that ends before the rest": [
        *(acquire(lease=1_000), acquire(FIFTH, lease=5_000), tries(YOUNGER), tries(THIRD), grants(FIFTH, rest=3_000)),
        *(grants(YOUNGER), Pass(1_000), grants(THIRD), looks(YOUNGER)),
    ],
    "two places rest": [
        *(acquire(), acquire(FOURTH), tries(YOUNGER), tries(THIRD), grants(rest=1_000), grants(FOURTH, rest=2_000)),
        *(Pass(1_000), calls(YOUNGER), grants(FIFTH), grants(FIFTH, serve=Serve.NOBODY), release(FIFTH)),
    ],
    "a waiter that may enter is before one that may not": [
        *(acquire(), tries(FOURTH), tries(YOUNGER), tries(THIRD), grants(rest=1_000, serve=Serve.WAKE)),
        *(grants(FOURTH, serve=Serve.WAKE), looks(THIRD)),
    ],
    "all leave, and none has ended": [acquire(), acquire(THIRD, lease=500), grants(), Pass(500), acquire(YOUNGER)],
}


def stranger(mode: str) -> list[Step]:
    """A hold that asynclock did not make is broken only when asked, and others beside it are broken without it."""
    token = "0f" * 15 + f"zz|{mode}17|"
    return [take(token, 5_000), acquire(), breaks(), breaks(), peek(YOUNGER), breaks_any(), breaks_any(), acquire()]


def crowds(mode: str) -> dict[str, list[Step]]:
    """More waiters than can be served at once."""
    return {
        "one too many is stale": [acquire(), tries(YOUNGER), crowd(mode, SERVED), grants(), looks(THIRD)],
        "as many are stale as may be before that of a rest": [
            *(acquire(), tries(YOUNGER), crowd(mode, VISITED - 1), grants(rest=1_234), looks(THIRD)),
        ],
        "one too many is stale before that of a rest": [
            *(acquire(), tries(YOUNGER), crowd(mode, VISITED), grants(rest=1_234), looks(THIRD)),
        ],
        "a probe behind so many stale tickets": [
            acquire(),
            crowd(mode, SERVED),
            looks(YOUNGER, lease=61_000),
            looks(YOUNGER),
        ],
        "a probe behind one fewer": [
            acquire(),
            crowd(mode, SERVED - 1),
            looks(YOUNGER, lease=61_000),
            looks(YOUNGER),
        ],
        "a peek of the server behind one fewer": [acquire(), crowd(mode, SERVED - 1), peek(FIFTH)],
        "a peek of the server behind so many": [acquire(), crowd(mode, SERVED), peek(FIFTH), release(), peek(FIFTH)],
        "as many as allowed are granted": [acquire(), one_clients_crowd(mode, SERVED + 1), grants(), looks(YOUNGER)],
        "as many as allowed are notified": [
            acquire(),
            one_clients_crowd(mode, SERVED + 1),
            calls(),
            looks(YOUNGER),
            calls(THIRD),
        ],
        "as many as allowed are notified beside a rest": [
            *(acquire(), one_clients_crowd(mode, SERVED + 1), grants(rest=1_000), calls(YOUNGER)),
        ],
        "one fewer": [acquire(), one_clients_crowd(mode, SERVED - 1), calls(), grants(YOUNGER)],
    }


OWN: dict[str, dict[str, Play]] = {
    "read-write": {
        **{name: (READERS, steps) for name, steps in (SHARED | crowds("r.")).items()},
        **{f"{name}, of writers": (WRITERS, steps) for name, steps in (SHARED | crowds("w.")).items()},
        "a stranger is broken only when asked": (READERS, stranger("r.")),
        "two readers may enter beside a place that rests, and a writer may not": (
            WRITERS_TOO,
            [
                *(acquire(), looks(YOUNGER, serve=Serve.NOBODY), looks(THIRD, serve=Serve.NOBODY), Pass(1)),
                *(looks(FOURTH, serve=Serve.NOBODY), Pass(1), looks(FIFTH, serve=Serve.NOBODY)),
                *(grants(rest=1_000), grants(YOUNGER, serve=Serve.WAKE)),
            ],
        ),
        "the last reader leaves a place that rests": (
            MIXED,
            [
                *(
                    acquire(),
                    acquire(THIRD),
                    tries(YOUNGER),
                    grants(THIRD, rest=3_000),
                    grants(serve=Serve.NOBODY),
                    Pass(3_000),
                    looks(FIFTH),
                )
            ],
        ),
        "a reader ends before a place that rests": (
            WRITERS_TOO,
            [
                *(acquire(lease=1_000), acquire(THIRD), tries(YOUNGER), Pass(1), tries(FIFTH)),
                *(grants(THIRD, rest=3_000), grants(YOUNGER)),
            ],
        ),
        "a writer that waits holds back readers": (
            MIXED,
            [acquire(), tries(YOUNGER), tries(THIRD), grants(), grants(YOUNGER), acquire(FIFTH), grants(THIRD)],
        ),
        "a reader's heal goes before a writer that waits, and a reader's round does not": (
            MIXED,
            [
                *(acquire(), tries(YOUNGER), release(), acquire(THIRD), heals(), acquire(FIFTH), heals(FIFTH)),
                *(tries(YOUNGER, number=2, keeps=True), calls(), calls(FIFTH), acquire(YOUNGER)),
            ],
        ),
        "a reader's heal does not go beside a writer that holds": (
            MIXED,
            [
                acquire(),
                tries(YOUNGER),
                release(),
                acquire(YOUNGER),
                tries(SECOND_TRY),
                heals(),
                extend(),
                calls(YOUNGER),
            ],
        ),
        "a reader's heal after its release is refused": (
            MIXED,
            [acquire(), tries(YOUNGER), tries(THIRD), release(tombstone=True), heals(), acquire(YOUNGER)],
        ),
        "a peek of readers and of a writer": (
            MIXED,
            [
                *(acquire(), peek(THIRD), peek(YOUNGER), tries(YOUNGER, fresh=500), peek(THIRD), peek(FOURTH)),
                *(Pass(499), peek(THIRD), Pass(1), peek(THIRD), release(), peek(YOUNGER), acquire(YOUNGER)),
                *(peek(THIRD), peek(SECOND_TRY), tries(THIRD, fresh=500), release(YOUNGER), peek(FOURTH)),
                *(peek(YOUNGER), tries(SECOND_TRY, serve=Serve.NOBODY), peek(FOURTH)),
            ],
        ),
        "a peek of a reader finds a writer behind readers": (
            MIXED,
            [acquire(YOUNGER), tries(THIRD), tries(SECOND_TRY), release(YOUNGER), peek(FOURTH), peek(YOUNGER)],
        ),
        "a writer enters after the tickets that can enter": (
            MIXED,
            [
                *(acquire(), tries(YOUNGER, fresh=500), Pass(1), tries(SECOND_TRY), Pass(1), tries(THIRD), release()),
                *(peek(SECOND_TRY), heals(SECOND_TRY), release(SECOND_TRY), acquire(SECOND_TRY, serve=Serve.WAKE)),
                *(peek(THIRD), Pass(499), peek(FOURTH), looks(SECOND_TRY), acquire(SECOND_TRY, serve=Serve.WAKE)),
                *(release(SECOND_TRY), peek(YOUNGER), acquire(YOUNGER, serve=Serve.WAKE)),
            ],
        ),
        "a writer is woken alone": (
            MIXED,
            [acquire(YOUNGER), tries(SECOND_TRY), tries(THIRD), calls(YOUNGER), acquire(SECOND_TRY)],
        ),
        "the waiter behind one that polls is notified": (
            MIXED,
            [
                *(acquire(YOUNGER), tries(THIRD, span=0), Pass(1), tries(FOURTH, span=0), Pass(1), tries(MUTE)),
                *(Pass(1), tries(SECOND_TRY), grants(YOUNGER), looks(SECOND_TRY)),
            ],
        ),
        "readers are woken together, up to a writer": (
            MIXED,
            [
                *(acquire(YOUNGER), tries(THIRD), tries(FIFTH), tries(SECOND_TRY), tries(FOURTH)),
                *(calls(YOUNGER), acquire(THIRD), acquire(FIFTH), grants(THIRD), grants(FIFTH), grants(SECOND_TRY)),
            ],
        ),
    },
    "semaphore": {
        **{name: (world("s1/."), steps) for name, steps in SHARED.items()},
        **{f"{name}, of three": (THREE, steps) for name, steps in SHARED.items()},
        **{name: (world("s100/."), steps) for name, steps in crowds("s100/.").items()},
        "a stranger is broken only when asked": (THREE, stranger("s3/.")),
        "the last permit leaves a place that rests": (
            world("s2/."),
            [
                *(acquire(), acquire(FOURTH), tries(YOUNGER), Pass(1), tries(THIRD)),
                *(grants(FOURTH, rest=3_000), grants(serve=Serve.NOBODY), Pass(3_000), looks(FIFTH)),
            ],
        ),
        "a permit ends before a place that rests": (
            world("s2/."),
            [
                *(acquire(lease=1_000), acquire(FOURTH), tries(YOUNGER), Pass(1), tries(THIRD)),
                *(grants(FOURTH, rest=3_000), grants(YOUNGER)),
            ],
        ),
        "permits are free for two waiters, and rest for the next": (
            THREE,
            [
                *(acquire(), looks(YOUNGER, serve=Serve.NOBODY), looks(THIRD, serve=Serve.NOBODY), Pass(1)),
                *(looks(FOURTH, serve=Serve.NOBODY), Pass(1), looks(FIFTH, serve=Serve.NOBODY)),
                *(grants(rest=1_000), grants(YOUNGER, serve=Serve.WAKE)),
            ],
        ),
        "a slot is taken once": (
            THREE,
            [acquire(SECOND_TRY), acquire(YOUNGER_TRY), acquire(THIRD_TRY), acquire(YOUNGER_TRY), extend(NOBODY)],
        ),
        "a slot is taken once, whatever the waiter's ticket says": (
            THREE,
            [acquire(SECOND_TRY), tries(YOUNGER_TRY, waiter=TICKET), looks(YOUNGER_TRY, waiter=TICKET)],
        ),
        "a try of a slot that is taken serves nobody": (
            THREE,
            [
                *(acquire(SECOND_TRY), looks(FIFTH, serve=Serve.NOBODY), Pass(10)),
                *(tries(YOUNGER_TRY, waiter=TICKET, serve=Serve.WAKE), looks(YOUNGER_TRY, waiter=TICKET)),
            ],
        ),
        "a slot is taken once, by the one that ends last": (
            THREE,
            [acquire(SECOND_TRY, lease=20_000), acquire(THIRD_TRY), acquire(YOUNGER_TRY), acquire(FIFTH)],
        ),
        "a holder of a slot probes under its waiter's ticket": (
            THREE,
            [
                *(acquire(SECOND_TRY), acquire(), acquire(FIFTH), tries(YOUNGER_TRY, waiter=TICKET)),
                *(lose("hold"), looks(YOUNGER_TRY, waiter=TICKET), acquire(SECOND_TRY)),
                *(looks(YOUNGER_TRY, waiter=TICKET), looks(THIRD_TRY, waiter=TICKET)),
            ],
        ),
        "as many are notified as there are permits": (
            THREE,
            [
                *(acquire(), acquire(YOUNGER), acquire(THIRD), tries(FOURTH), tries(FIFTH), tries(MUTE), Listen(MUTE)),
                *(looks(THIRD, serve=Serve.WAKE), lose("hold"), looks(YOUNGER, serve=Serve.WAKE)),
            ],
        ),
        "the waiter behind one that polls is notified": (
            THREE,
            [
                *(acquire(), acquire(SECOND_TRY), acquire(THIRD_TRY), tries(YOUNGER, span=0), Pass(1)),
                *(tries(THIRD, span=0), Pass(1), tries(MUTE), Pass(1), tries(FIFTH), lose("hold")),
                looks(FOURTH, serve=Serve.GRANT),
            ],
        ),
        "a peek counts the holders by its own permits": (
            world("s3/. s1/. s3/. s2/."),
            [
                *(peek(YOUNGER), acquire(), peek(YOUNGER), peek(THIRD), acquire(THIRD), peek(FOURTH)),
                *(peek(MUTE), tries(MUTE), acquire(MUTE), peek(THIRD), release(THIRD), peek(FOURTH), breaks()),
            ],
        ),
        "permits enter after the tickets that can enter": (
            THREE,
            [
                *(acquire(), acquire(YOUNGER), acquire(THIRD), tries(FOURTH), Pass(1), tries(FIFTH), lose("hold")),
                *(peek(YOUNGER), acquire(ELDER, serve=Serve.WAKE), peek(YOUNGER), heals(THIRD), release(THIRD)),
                *(acquire(YOUNGER, serve=Serve.WAKE), tries(FOURTH), peek(YOUNGER), acquire(THIRD)),
                *(acquire(FIFTH, serve=Serve.WAKE), peek(THIRD)),
            ],
        ),
        "a single node grants to the tickets before": (
            THREE,
            [
                *(acquire(), acquire(YOUNGER), acquire(THIRD), tries(FOURTH, fresh=500), Pass(1), tries(FIFTH)),
                *(release(), release(YOUNGER), Pass(500), acquire(serve=Serve.GRANT), peek(YOUNGER)),
            ],
        ),
        "an attempt passes a ticket with fewer permits": (
            world("s3/. s1/. s3/. s2/."),
            [
                *(acquire(), tries(YOUNGER, fresh=500), Pass(1), tries(FOURTH), peek(THIRD), acquire(THIRD)),
                *(release(THIRD), looks(THIRD), tries(FOURTH, serve=Serve.WAKE), peek(THIRD), looks(THIRD)),
                *(release(FOURTH), Pass(499), peek(THIRD), acquire(THIRD, serve=Serve.GRANT)),
            ],
        ),
        "those behind waiters with fewer permits are served": (
            TWO,
            [
                *(acquire(), acquire(THIRD), tries(YOUNGER), Pass(1), tries(FOURTH), Pass(1), tries(FIFTH)),
                *(calls(), grants(YOUNGER), peek(THIRD), acquire(), grants(THIRD), calls(FOURTH), breaks()),
            ],
        ),
        "the first that is passed is notified of a rest": (
            TWO,
            [
                *(acquire(), acquire(THIRD), tries(YOUNGER), Pass(1), tries(FIFTH), Pass(1), tries(FOURTH)),
                *(release(THIRD, rest=5_000), calls(), grants(FIFTH), calls(FOURTH)),
            ],
        ),
        "the first that is passed is notified of a rest, behind one that is woken": (
            TWO,
            [
                *(acquire(), acquire(THIRD), tries(FIFTH), Pass(1), tries(YOUNGER), Pass(1), tries(FOURTH)),
                *(release(THIRD, rest=5_000), calls(), grants()),
            ],
        ),
        "the first that is passed is notified, behind one that polls": (
            TWO,
            [
                *(acquire(), acquire(THIRD), tries(YOUNGER), Pass(1), tries(MUTE), Pass(1), tries(FOURTH)),
                *(grants(), calls(THIRD)),
            ],
        ),
        "a ticket of another kind is passed": (
            world("s2/. r. s2/. s1/. s2/."),
            [
                *(looks(YOUNGER), peek(ELDER), acquire(ELDER), looks(FOURTH), tries(THIRD), tries(FIFTH)),
                *(calls(THIRD), peek(THIRD), grants(), breaks()),
            ],
        ),
        "who enters leaves room for one with fewer permits that was woken": (
            TWO,
            [
                *(acquire(), tries(YOUNGER), calls(), peek(THIRD), acquire(THIRD), tries(FIFTH), looks(YOUNGER)),
                *(lose("hold"), Pass(1), calls(MUTE), peek(THIRD), acquire(THIRD), acquire(YOUNGER)),
            ],
        ),
        "room is left for the fewest permits of all that were woken": (
            world("s3/. s2/. s3/. s3/. s3/."),
            [
                *(acquire(), acquire(THIRD), tries(YOUNGER), Pass(1), tries(FOURTH), Pass(1), tries(FIFTH)),
                *(lose("hold"), calls(MUTE), peek(THIRD), acquire(THIRD), looks(FIFTH), acquire(FIFTH)),
            ],
        ),
        "an attempt with fewer permits passes nobody": (
            TWO,
            [
                *(acquire(), tries(YOUNGER), Pass(1), tries(FIFTH, fresh=500), lose("hold"), acquire(FOURTH)),
                *(peek(FOURTH), peek(THIRD), acquire(THIRD), tries(FOURTH), looks(FIFTH), Pass(500), looks(FIFTH)),
            ],
        ),
        "fewer permits than are in": (
            world("s3/. s1/. s3/. s2/."),
            [acquire(), acquire(THIRD), tries(YOUNGER), tries(FOURTH), grants(), grants(THIRD), grants(FOURTH)],
        ),
    },
    "multi": {
        "a ticket goes where another name refuses": (
            world("m", "m"),
            [
                *(acquire(), both(SECOND_TRY), grants(), Act(Verb.ACQUIRE, name=1), both(YOUNGER_TRY, number=2)),
                *(acquire(FIFTH), both(SECOND_TRY, number=3), Act(Verb.RELEASE, name=1, serve=Serve.GRANT)),
                *(grants(FIFTH), both(YOUNGER_TRY), grants(YOUNGER_TRY)),
            ],
        ),
        "the waiter for a released name is served": (
            world("r. w.", "r. w."),
            [
                *(acquire(), tries(YOUNGER), Act(Verb.ACQUIRE, YOUNGER, name=1), both(THIRD, names=(0, 1))),
                *(grants(), both(FIFTH), Act(Verb.RELEASE, YOUNGER, name=1, serve=Serve.GRANT), both(FIFTH)),
            ],
        ),
        "an attempt at a slot waits with a ticket for any": (
            world("m", "s3/. s3/. s3/. s3/. s3/. s3/. s3/1. s3/0. s3/1."),
            [
                *(acquire(), both(SECOND_TRY), grants(), both(SECOND_TRY), both(YOUNGER_TRY)),
                *(both(SECOND_TRY, verb=Verb.EXTEND, token=0), both(SECOND_TRY, verb=Verb.RELEASE), both(YOUNGER_TRY)),
            ],
        ),
        "a heal of several names goes before the waiters for each of them": (
            MANY,
            [
                *(all_of(), tries(YOUNGER), Act(Verb.ACQUIRE, THIRD, name=1, serve=Serve.WAKE, number=1)),
                *(Act(Verb.ACQUIRE, YOUNGER, name=2, serve=Serve.WAKE, number=1), *LOSE_ALL),
                *(all_of(THIRD), all_of(serve=Serve.NOBODY), all_of(verb=Verb.EXTEND), tries(YOUNGER, number=2)),
                all_of(verb=Verb.RELEASE),
            ],
        ),
        "a heal of several names goes beside no other holder": (
            MANY,
            [
                *(all_of(), *LOSE_ALL, Act(Verb.ACQUIRE, YOUNGER, name=2, serve=Serve.WAKE)),
                *(all_of(serve=Serve.NOBODY), all_of(verb=Verb.EXTEND), all_of(YOUNGER)),
            ],
        ),
        "a heal of several names after their release": (
            MANY,
            [
                *(all_of(), tries(YOUNGER), all_of(verb=Verb.RELEASE, tombstone=True), all_of(serve=Serve.NOBODY)),
                Act(Verb.WAIT, YOUNGER, serve=Serve.WAKE, number=2),
            ],
        ),
        "the ticket of an attempt at a slot has none": (
            world("s2/0. s2/. s2/. s2/. s2/. s2/. s2/1. s2/1. s2/0.", "m"),
            [
                *(acquire(), acquire(THIRD), both(SECOND_TRY), grants(), Act(Verb.ACQUIRE, FOURTH, name=1)),
                both(SECOND_TRY, number=2),
            ],
        ),
        "a peek of several names": (
            world("f", "f", "s1/."),
            [
                *(both(FIFTH, verb=Verb.PEEK), acquire(), both(FIFTH, verb=Verb.PEEK), tries(YOUNGER), release()),
                *(both(FIFTH, verb=Verb.PEEK), both(FIFTH, verb=Verb.PEEK, names=(1, 2)), Act(Verb.ACQUIRE, name=2)),
                *(both(FIFTH, verb=Verb.PEEK, names=(0, 2)), both(FIFTH, verb=Verb.PEEK, names=(1, 2))),
            ],
        ),
        "a peek of an id that was undone": (
            world("m", "m"),
            [
                *(
                    release(FIFTH, tombstone=True),
                    both(FIFTH, verb=Verb.PEEK),
                    both(FIFTH, verb=Verb.PEEK, names=(1, 0)),
                ),
                *(Act(Verb.ACQUIRE, name=1), both(FIFTH, verb=Verb.PEEK)),
            ],
        ),
        "its place in the queue was what it lacked": (
            world("f", "f"),
            [
                *(acquire(), tries(YOUNGER, fresh=500), tries(THIRD, fresh=500), release(), Pass(500), both(FIFTH)),
                *(both(FIFTH, verb=Verb.EXTEND, token=0), both(FIFTH, verb=Verb.RELEASE), both(THIRD)),
            ],
        ),
    },
}


def directed(family: str) -> dict[str, Play]:
    """All named histories, each world's under its number."""
    found = dict(OWN[family])
    for number, each in enumerate(WORLDS[family]):
        found |= {f"{name}, {number}": (each, list(steps)) for name, steps in borrowed(family).items()}
    return found


def corpus(family: str, size: int) -> list[Play]:
    """The named histories, and so many random ones, always the same."""
    found = list(directed(family).values())
    families, count = FAMILIES[family]

    @settings(
        max_examples=size,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(play=plays(families, count=count))
    def collect(play: Play) -> None:
        found.append(play)

    collect()
    return found
