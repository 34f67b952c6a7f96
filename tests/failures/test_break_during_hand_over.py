"""An operator breaks a hold while it goes from one owner to the next: nobody enters by it (HAZARDS D7)."""

from __future__ import annotations

from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.hold import Tenure
from asynclock.protocol.states import DONE, Asking, Queued
from asynclock.rules.model import BREAK, QUIET, Op, Serve
from asynclock.rules.mutex import MUTEX
from tests.support.stepped_quorum import NAME, SteppedClient, clients_over, settle


def breaks(client: SteppedClient) -> None:
    """An operator breaks the lock at the only node, by this client. The notices arrive."""
    client.quorum.ask(Op(BREAK, MUTEX, NAME, "", 0.0, memory=60.0, queueing=QUIET[Serve.GRANT]), 3.0)
    client.nodes[0].carry_out()


def taken(acquisition: Acquisition) -> Tenure:
    """What it has got."""
    assert acquisition.state is DONE
    tenure = acquisition.take()
    assert isinstance(tenure, Tenure)
    return tenure


def test_d7_a_broken_hold_is_not_passed_on() -> None:
    """Another client has the name since the break. The holder knows of the break, and ends its tenure before a server
    has confirmed that. The next task of its process enters once the other client has released."""
    client, other, _ = clients_over(1)
    tasks = [client.acquire() for _ in range(3)]
    settle(client)
    first = taken(tasks[0])
    first.hold.end(first)
    settle(client)
    second = taken(tasks[1])
    assert second.hold.next_fence <= second.hold.last_fence
    waiting = other.acquire()
    settle(other)
    breaks(other)
    second.hold.end(second)
    assert isinstance(tasks[2].state, Queued | Asking)
    settle(client, other)
    entered = taken(waiting)
    assert entered.held
    assert tasks[2].state is not DONE
    entered.hold.end(entered)
    settle(client, other)
    assert taken(tasks[2]).fence > entered.fence
