"""The votes of an adoption: its fence is known to a majority before the caller has the lease, an adoption that was
given up is carried out nowhere afterwards, and no error shows a secret."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis as blocking

from asynclock import ConfigError, LockError, LockNotHeld, QuorumUnavailable, Redlock
from asynclock.protocol.handover import parse_handle
from asynclock.rules.model import ID_LENGTH, Op, Verb
from asynclock.stores.port import NodeConfig, Refused, ReplyHandler
from asynclock.stores.transactional import TransactionalNode
from tests.support.cancelled_waits import Make
from tests.support.default_keys import key_of, keys_of
from tests.support.fake_clock import FakeClock
from tests.support.memory_probes import set_clock, set_state
from tests.support.probes import id_of, nodes_of, tag_of
from tests.support.proxied_clients import behind_proxies, forget, learn, statistic, unknown
from tests.support.servers import Server, Servers
from tests.support.still_clock import Memory, Still, turns
from tests.support.user_store import state_of
from tests.support.waiters import LIMIT, LONG, back, holder, until, urls_of

# -- the second round ------------------------------------------------------------------------------------------------


async def test_a_majority_knows_the_fence_of_an_adoption(shared_urls: list[str], name: str) -> None:
    """The counters of the nodes are far apart when a handle is adopted: as soon as the caller has the lease, a majority
    of the nodes has a counter that is as great as its fence."""
    urls, majority = shared_urls, len(shared_urls) // 2 + 1
    async with Redlock(*urls) as giver, Redlock(*urls) as taker:
        await back(taker)
        await back(giver)
        lease = await giver(name).acquire(timeout=None)
        handle = await lease.detach()
        key = keys_of(name).fence
        for ahead, url in enumerate(urls[:majority], 1):
            with closing(blocking.Redis.from_url(url)) as cli:
                cli.set(key, lease.fence + ahead * 10**9, px=60_000)
        adopted = await taker.adopt(handle)
        known = [_get(url, key) for url in urls]  # without a turn of the loop in between
        assert sum(fence >= adopted.fence for fence in known) >= majority
        assert adopted.fence > lease.fence + 10**9
        await adopted.release()


def _get(url: str, key: str) -> int:
    """The counter there; 0: the acquire has not come to that node yet."""
    with closing(blocking.Redis.from_url(url)) as cli:
        found: Any = cli.get(key)
    return int(found or 0)


class NoRaise(Memory):
    """A store that, while it has an `answer` of its own, does not carry out what raises its counter."""

    answer: Exception | Refused | None = None

    def open(self, config: NodeConfig) -> TransactionalNode:
        return NoRaiseNode(self, config)


class NoRaiseNode(TransactionalNode):
    def __init__(self, store: NoRaise, config: NodeConfig) -> None:
        super().__init__(store, config)
        self._mine = store

    def send(self, op: Op, handler: ReplyHandler) -> None:
        answer = self._mine.answer
        if answer is None or op.verb is not Verb.EXTEND:
            super().send(op, handler)
            return
        self._mine.asked.append((op.verb, 0.0))
        tell = partial(handler.fail, maybe=True) if isinstance(answer, Exception) else handler.answer
        asyncio.get_running_loop().call_soon(tell, self._index, answer)


@pytest.mark.parametrize("answer", [ConnectionError("it disconnected"), Refused(None)], ids=["unknown", "refused"])
async def test_an_adoption_without_witnesses_is_none_yet(name: str, answer: Exception | Refused) -> None:
    """The counters of three nodes are far apart, and two of them do not accept the fence. The adoption goes on asking;
    the caller has it once they do."""
    still = Still(3, name)
    stores = [NoRaise(FakeClock()) for _ in range(3)]
    for store in stores:
        set_clock(store, still.clock)
    still.stores = list(stores)
    async with still.client(lease=LONG) as giver, still.client(lease=LONG) as taker:
        await back(taker)
        await back(giver)
        lease = await giver(name).acquire(timeout=None)
        handle = await lease.detach()
        for ahead, store in enumerate(stores):
            state = state_of(store, name)
            set_state(store, name, replace(state, fence=state.fence + ahead * 10**9))
        for store in stores[:2]:
            store.answer = answer
        still.asked()
        adopting = asyncio.create_task(taker.adopt(handle))
        async with asyncio.timeout(LIMIT):
            while (Verb.EXTEND, 0.0) not in stores[0].asked:
                await asyncio.sleep(0)
        await turns()
        assert not adopting.done()
        for store in stores:
            store.answer = None
        async with asyncio.timeout(LIMIT):
            while not adopting.done():
                await still.until(still.clock.now() + 0.05)
            adopted = await adopting
        assert sum(state_of(store, name).fence >= adopted.fence for store in stores) > 1
        await adopted.release()


# -- an adoption that was given up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3])
async def test_an_adoption_is_not_sent_again_after_it_was_given_up(servers: Servers, name: str, nodes: int) -> None:
    """The servers have lost the script as a handle is adopted. Another client loads it, the adopter is cancelled, and
    its undo is carried out; only then comes the reply that the adoption met no script. It is not sent again: the hold
    stays as it was, and the handle serves another adopter."""
    some = [servers.start() for _ in range(nodes)]
    async with (
        Redlock(*urls_of(some), lease=LONG) as giver,
        behind_proxies(some, lease=LONG, node_timeout=5.0) as (taker, proxies),
    ):
        await back(taker)
        await back(giver)
        lease = await giver(name).acquire(timeout=None)
        handle = await lease.detach()
        ours = id_of(lease).encode()
        for server, proxy in zip(some, proxies, strict=True):
            forget(server)
            proxy.hold_replies()
        adopting = asyncio.create_task(taker.adopt(handle))
        await until(lambda: all(unknown(server) for server in some))
        for server in some:
            learn(server)
        before = [carried_out(server) for server in some]
        adopting.cancel()
        await asyncio.wait({adopting})
        await until(lambda: all(carried_out(each) > sent for each, sent in zip(some, before, strict=True)))
        for proxy in proxies:
            proxy.let_go()
        await taker.health()
        await taker.health()  # behind all that was sent, and sent again
        assert [holder(server, name) for server in some] == [ours] * nodes
        async with asyncio.timeout(LIMIT):
            adopted = await giver.adopt(handle)
        await adopted.release()


def carried_out(server: Server) -> int:
    """How many scripts the server was asked for by their digest."""
    return statistic(server, "commandstats", "cmdstat_evalsha", "calls")


# -- errors ----------------------------------------------------------------------------------------------------------


def shows_no_secret(error: LockError, *secrets: str) -> None:
    """Neither its message, nor its arguments, nor its causes."""
    texts: list[str] = []
    each: BaseException | None = error
    while each is not None:
        texts += [str(each), repr(each), repr(each.__dict__), *getattr(each, "__notes__", ())]
        each = each.__cause__ or each.__context__
    texts.append(repr(pickle.loads(pickle.dumps(error)).__dict__))
    for secret in secrets:
        assert not [text for text in texts if secret in text]


async def test_no_error_of_an_adoption_shows_an_id(make: Make, name: str) -> None:
    """Neither that of the hold, which the handle is made of, nor that of the client which tried: an id in a log would
    let its reader release, or adopt, the hold of another client."""
    giver, taker, late = make(), make(), make()
    lease = await giver(name).acquire(timeout=None)
    handle = await lease.detach()
    adopted = await taker.adopt(handle)
    with pytest.raises(LockNotHeld) as caught:
        await late.adopt(handle)
    shows_no_secret(
        caught.value, parse_handle(handle).id[:ID_LENGTH], handle[12:40], id_of(adopted)[:ID_LENGTH],
        tag_of(late),
    )  # fmt: skip
    await adopted.release()


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("how", ["outage", "another-kind"])
async def test_no_error_of_a_failed_adoption_shows_an_id(servers: Servers, name: str, nodes: int, how: str) -> None:
    """The same where the servers are out of reach, or have another type under that name."""
    some = [servers.start() for _ in range(nodes)]
    async with Redlock(*urls_of(some)) as giver, Redlock(*urls_of(some), patience=0.2) as taker:
        await back(taker)
        handle = await (await giver.read(name).acquire(timeout=None)).detach()
        raised: Callable[[Server], object] = Server.kill if how == "outage" else partial(put_list, name=name)
        for server in some:
            raised(server)
        async with asyncio.timeout(LIMIT):
            with pytest.raises(QuorumUnavailable if how == "outage" else ConfigError) as caught:
                await taker.adopt(handle)
        shows_no_secret(caught.value, parse_handle(handle).id[:ID_LENGTH], handle[12:40], tag_of(taker))


def put_list(server: Server, name: str) -> None:
    with server.cli() as cli:
        cli.delete(key_of(name))
        cli.rpush(key_of(name), "somebody's")


# -- a round that failed ---------------------------------------------------------------------------------------------


async def test_a_round_that_failed_leaves_no_key(servers: Servers, name: str) -> None:
    """Two of three servers are frozen as a handle is adopted, so the round fails. One comes back, and the next round
    wins without the other one, which has the adoption still in its socket. It carries that out later, and gets the
    release all the same."""
    some = [servers.start() for _ in range(3)]
    async with (
        Redlock(*urls_of(some), lease=LONG) as giver,
        Redlock(*urls_of(some), lease=LONG, patience=LIMIT) as taker,
    ):
        await back(taker)
        lease = await giver(name).acquire(timeout=None)
        await until(lambda: all(holder(server, name) for server in some))  # else one may get it after the thaw
        handle = await lease.detach()
        stuck = nodes_of(taker)[0]
        for server in some[:2]:
            server.freeze()
        adopting = asyncio.create_task(taker.adopt(handle))
        await until(lambda: stuck.error is not None)  # its connection was dropped, with the adoption unanswered
        some[1].thaw()
        async with asyncio.timeout(LIMIT):
            adopted = await adopting
            await adopted.release()
        some[0].thaw()
        await until(lambda: stuck.error is None)
        await taker.health()
        assert [holder(server, name) for server in some] == [b""] * 3
