"""When a command is overdue, and whose retries count."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from asynclock import QuorumUnavailable, Redlock
from asynclock._op import Op, Verb
from asynclock.locks.mutex import MUTEX
from asynclock.stores._debts import Debts
from asynclock.stores._link import Debt, is_overdue


@pytest.mark.parametrize(
    ("moved_at", "now", "overdue"),
    [
        (10.0, 10.04, False),  # its time is not up
        (10.0, 10.06, True),  # silent since it was sent
        (10.03, 10.06, False),  # in line behind others that are being answered
        (10.03, 10.09, True),  # the answers have stopped
        (15.04, 15.049, False),  # a long line
        (15.05, 15.06, True),  # but there is an end to waiting in line
    ],
)
def test_silence_makes_a_command_overdue_not_age(moved_at: float, now: float, overdue: bool) -> None:
    """Sent at 10.0 with 0.05 s to answer, on a link that moved last at `moved_at`."""
    sink = Debt(Op(Verb.RELEASE, MUTEX, "x", "", 30.0), 10.0, 10.05)
    assert is_overdue(sink, moved_at, now) is overdue


def test_what_is_owed_is_not_owed_for_ever() -> None:
    """A release that is refused each time it is sent lapses when the hold that it undoes must have ended."""
    debts, op = Debts(), Op(Verb.RELEASE, MUTEX, "x", "a" * 32, 30.0)
    now = 0.0
    debts.owe(op, now)
    while list(debts.pay(now)):  # sent, and refused
        now += 5.0
        debts.owe(op, now)
    assert now == 90.0


async def test_a_clients_retries_do_not_delay_the_bad_news(tmp_path: Path) -> None:
    """A handed-in client that would try for ten minutes: we are told at once what is wrong."""
    theirs = Redis(unix_socket_path=str(tmp_path / "nobody"), retry=Retry(ConstantBackoff(60), 10))
    redlock = Redlock(theirs)
    with pytest.raises(QuorumUnavailable, match="out of reach"):
        await redlock("x").acquire(timeout=0)
    await redlock.aclose()
