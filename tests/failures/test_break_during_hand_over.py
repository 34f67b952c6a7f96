"""A hold is broken, or ends, while it goes from one owner to the next: nobody enters by it (HAZARDS D7)."""

from __future__ import annotations

from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.hold import Tenure
from asynclock.protocol.rounds import Wake
from asynclock.protocol.states import DONE, Asking, Queued
from asynclock.rules.model import BREAK, ID_LENGTH, QUIET, Notice, Op, Serve
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


def renews_ticket(client: SteppedClient, acquisition: Acquisition) -> None:
    """It sends its ticket again. The reply is on its way."""
    acquisition.wake(0.0, Wake.MISSED)
    client.clock.advance(0.0)
    client.turn()
    assert isinstance(acquisition.state, Asking)


def test_d7_a_grant_that_was_broken_before_it_was_read_is_not_taken() -> None:
    """A release makes a waiter the holder while its ticket is renewed. An operator breaks that hold, and the next
    waiter has the name. The renewal is refused, and the first waiter waits again."""
    holder, client, servers = clients_over(1)
    other = SteppedClient("c", servers, holder.clock, holder.clients)
    held = holder.acquire()
    settle(holder)
    tenure = taken(held)
    waiting = client.acquire()
    settle(client)
    behind = other.acquire()
    settle(other)
    renews_ticket(client, waiting)
    tenure.hold.end(tenure)
    holder.nodes[0].carry_out()
    breaks(holder)
    assert isinstance(waiting.state, Asking)
    settle(client, other)
    entered = taken(behind)
    assert waiting.state is not DONE
    entered.hold.end(entered)
    settle(client, other)
    assert taken(waiting).fence > entered.fence


def test_a_grant_that_has_expired_before_it_was_read_is_not_taken() -> None:
    """A release makes a waiter the holder while its ticket is renewed. The session of that hold ends at the store, and
    the connection is lost. The waiter asks again once it is back."""
    holder, client, servers = clients_over(1)
    held = holder.acquire()
    settle(holder)
    tenure = taken(held)
    waiting = client.acquire()
    settle(client)
    renews_ticket(client, waiting)
    tenure.hold.end(tenure)
    holder.nodes[0].carry_out()
    (granted,) = servers[0][NAME].holds
    client.machine.received(0, Notice(granted.id[:ID_LENGTH], 0, name=NAME, expired=True))
    client.nodes[0].cut()
    client.turn()
    assert waiting.state is not DONE
