"""An undo that meets a name which is in use as another kind by now, at Redis and at each database (HAZARDS C3)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asynclock import Redlock
from asynclock.locks.multi import Multi
from asynclock.quorum.ballot import REFUSED, Ballot
from asynclock.rules.model import ACQUIRE, RELEASE, Kind, Op, Part, Verb
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import WRITE
from tests.support.probes import nodes_of
from tests.support.waiters import LIMIT, LONG, until


@pytest.fixture(params=["redis", "postgresql", "mariadb", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("shared_urls")[0])
    if request.param == "sqlite":
        return f"sqlite:///{request.getfixturevalue('tmp_path')}/locks.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


async def asked(client: Redlock, verb: Verb, kind: Kind, name: str, *, tombstone: bool = False) -> Ballot:
    """The answer to an op of one id."""
    (node,) = nodes_of(client)
    mode = "" if kind.parts else kind.mode
    op = Op(verb, kind, name, f"{1:032x}|{mode}", LONG, memory=LONG, tombstone=tombstone)
    ballot = Ballot(op, 1, time.monotonic(), time.monotonic() + LIMIT)
    node.send(op, ballot)
    await until(lambda: ballot.outcome is not None)
    return ballot


@pytest.mark.parametrize("used_as", ["semaphore", "mutex"])
@pytest.mark.parametrize("number", [1, 2])
async def test_c3_an_acquire_that_arrives_after_a_hold_of_another_kind_is_undone(
    url: str, name: str, number: int, used_as: str
) -> None:
    """Its undo came while semaphores had the names of a mutex, or the other way round."""
    names = [f"{name}:{each}" for each in range(number)]
    rule: Any = MUTEX if used_as == "semaphore" else WRITE
    kind = Multi([Part(each, rule) for each in names]) if number > 1 else rule
    async with Redlock(url, lease=LONG) as client:
        others = [client.semaphore(each, 2) if used_as == "semaphore" else client(each) for each in names]
        async with client.multi(*others):
            await asked(client, RELEASE, kind, names[0], tombstone=True)
        assert (await asked(client, ACQUIRE, kind, names[0])).outcome is REFUSED
        async with client.multi(*names, timeout=0):
            pass
