"""Histories that have a name: of what operators ask. A peek asks whether an acquire would enter."""

from __future__ import annotations

from functools import partial

from asynclock.rules.model import SERVED, Serve, Verb
from tests.support.directed import acquire, breaks, extend, looks, release, tries
from tests.support.histories import (  # fmt: skip
    ANYBODY,
    FOURTH,
    LOSE_TICKETS,
    MUTE,
    THIRD,
    YOUNGER,
    Ask,
    Pass,
    Step,
    crowd,
    take,
)

breaks_any = partial(Ask, Verb.BREAK, ANYBODY, serve=Serve.GRANT)
"""Also the hold of another program."""

peek = partial(Ask, Verb.PEEK, lease=0)

PLAIN = peek(FOURTH)
FAIR = peek(FOURTH, fair=True)

OPERATORS: dict[str, list[Step]] = {
    "a peek of a free name, and of a held one": [PLAIN, acquire(), PLAIN, extend(), PLAIN, release(), FAIR, PLAIN],
    "a peek finds a stranger": [take("another's", 0), PLAIN, FAIR],
    "a peek finds a name that rests": [acquire(), release(rest=500), PLAIN, Pass(500), PLAIN],
    "a peek of an id that was undone": [release(FOURTH, tombstone=True), PLAIN, peek(YOUNGER)],
    "a peek enters before others, unless it is fair": [
        *(acquire(), tries(YOUNGER), release(), PLAIN, FAIR, looks(YOUNGER, serve=Serve.NOBODY)),
    ],
    "a fair peek passes over stale tickets": [
        *(acquire(), tries(YOUNGER, fresh=500), tries(THIRD, fresh=1_000), release(), FAIR),
        *(Pass(499), FAIR, Pass(1), FAIR, Pass(499), FAIR, Pass(1), FAIR, acquire()),
    ],
    "a fair peek finds a fresh ticket before a stale one": [
        *(acquire(), tries(YOUNGER, fresh=1_000), tries(THIRD, fresh=500), release(), Pass(600), FAIR),
    ],
    "a fair peek behind as many tickets as one step visits": [
        *(acquire(), tries(YOUNGER, fresh=1), release(), crowd(SERVED - 2), Pass(1), FAIR, PLAIN),
        *(looks(THIRD, fresh=1, serve=Serve.NOBODY), Pass(1), FAIR, PLAIN),
    ],
    "a fair peek finds that the tickets are lost": [acquire(), tries(YOUNGER), release(), FAIR, LOSE_TICKETS, FAIR],
    "a stranger's is broken only when asked": [
        *(take("another's", 0), tries(YOUNGER), breaks(), acquire(MUTE), breaks_any(), breaks_any(), acquire()),
    ],
    "a stranger that resembles us is broken only when asked": [
        *(take("0f" * 15 + "|17|", 0), breaks(), breaks_any(), take("", 0), breaks(), breaks_any(), acquire()),
    ],
    "any hold of ours is broken": [take("0F" * 16 + "!17|", 0), breaks(), acquire(), tries(YOUNGER), breaks_any()],
    "a ticket says how many tasks wait": [acquire(), tries(YOUNGER, tasks=7), tries(THIRD), looks(YOUNGER, tasks=12)],
}
