"""The rule and the SQL stores agree: random histories; vote, full state and notices are compared after each step.

`ASYNCLOCK_EXAMPLES=2000 pytest tests/agreement/test_sql_agreement.py` plays that many, other ones each time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from asynclock.rules.model import Kind, Verb
from asynclock.rules.mutex import FAIR, MUTEX
from asynclock.stores.sql import SQLStore
from tests.support.directed import DIRECTED
from tests.support.directed_operators import OPERATORS
from tests.support.histories import STILL, YOUNGER, Ask, Pass, Step
from tests.support.queued_releases import QUEUED_RELEASES, QueuedRelease
from tests.support.shared_directed import FAMILIES, directed
from tests.support.shared_histories import Play, plays
from tests.support.sql_agreement import MUTEX_NAMES, WORLD_NAMES, SQLPlayer, SQLStage
from tests.support.stage import EXAMPLES


def playing(examples: int) -> settings:
    """Without shrinking, which would take minutes over a database."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )


KINDS = pytest.mark.parametrize("kind", [MUTEX, FAIR], ids=["mutex", "fair"])


class Theatre:
    """A stage in a loop of its own, which lives as long as the module."""

    def __init__(self, store: SQLStore) -> None:
        self.runner = asyncio.Runner()
        self.every = 1 if store.label.startswith(("postgresql", "sqlite")) else 5  # MariaDB is slower, and no other
        self.stage = self.runner.run(SQLStage(store).open())

    def mutex(self, kind: Kind, steps: Sequence[Step]) -> None:
        self.runner.run(SQLPlayer(self.stage, MUTEX_NAMES).play_mutex(kind, steps))

    def world(self, play: Play) -> None:
        world, steps = play
        names = WORLD_NAMES[: len(world.modes)]
        self.runner.run(SQLPlayer(self.stage, names).play_world(world, steps))

    def release(self, kind: Kind, release: QueuedRelease) -> None:
        self.runner.run(SQLPlayer(self.stage, MUTEX_NAMES).play_release(kind, release))

    def close(self) -> None:
        self.runner.run(self.stage.aclose())
        self.runner.close()


@pytest.fixture(scope="module", params=["postgresql", "mariadb", "sqlite"])
def theatre(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Theatre]:
    """On each database."""
    if request.param == "sqlite":
        folder: Path = tmp_path_factory.mktemp("agreement")
        store = SQLStore(f"sqlite:///{folder}/locks.db")
    else:
        store = SQLStore(request.getfixturevalue(f"{request.param}_url"), table=f"agreed_{os.getpid()}")
    theatre = Theatre(store)
    yield theatre
    theatre.close()


@KINDS
@playing(15)
@given(steps=STILL)
def test_decide_and_table_agree_over_hours(theatre: Theatre, kind: Kind, steps: Sequence[Step]) -> None:
    """The mutex, with writes by other programs."""
    theatre.mutex(kind, steps)


@KINDS
def test_decide_and_table_agree_on_named_histories(theatre: Theatre, kind: Kind) -> None:
    """Those that hold Redis to `decide`."""
    for steps in list((DIRECTED | OPERATORS).values())[:: theatre.every]:
        theatre.mutex(kind, steps)


@KINDS
def test_decide_and_table_agree_on_releases_that_others_wait_for(theatre: Theatre, kind: Kind) -> None:
    """One statement does the most common of them on PostgreSQL (`serving.py`)."""
    served = theatre.stage.served
    served.clear()

    @playing(500 // theatre.every)
    @given(release=QUEUED_RELEASES)
    def play_all(release: QueuedRelease) -> None:
        theatre.release(kind, release)

    play_all()
    is_postgresql = theatre.stage.store.label.startswith("postgresql")
    assert min(served[True], served[False]) > 20 if is_postgresql else not served


def test_decide_and_table_agree_after_the_end_of_a_hold(theatre: Theatre) -> None:
    """A release and an extend come too late, with a token and without; then another one takes the name."""
    for late in (Ask(Verb.RELEASE), Ask(Verb.RELEASE, token=5), Ask(Verb.EXTEND), Ask(Verb.EXTEND, token=5)):
        steps: list[Step] = [Ask(Verb.ACQUIRE, lease=1000), Pass(1000), late, Ask(Verb.ACQUIRE, YOUNGER), late]
        theatre.mutex(MUTEX, steps)
        theatre.mutex(MUTEX, [Ask(Verb.ACQUIRE, lease=1000), Ask(Verb.EXTEND, lease=20), Pass(500), late])


@pytest.mark.parametrize("family", ["read-write", "semaphore", "multi"])
def test_decide_and_table_agree_on_other_kinds(theatre: Theatre, family: str) -> None:
    """Readers and writers, permits, and several names at once: random histories, and the named ones."""
    families, count = FAMILIES[family]

    @playing(12)
    @given(play=plays(families, count=count))
    def play_all(play: Play) -> None:
        theatre.world(play)

    play_all()
    for play in list(directed(family).values())[:: 4 * theatre.every]:
        theatre.world(play)
