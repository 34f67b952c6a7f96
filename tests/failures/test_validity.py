"""A client never believes in its hold longer than the nodes keep it, whatever happens to notices, replies and time."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from functools import partial

import pytest

from asynclock import ConfigError, Lease, LockLost, LockNotHeld, QuorumUnavailable, Redlock
from tests.support.distant_stores import Beyond
from tests.support.probes import id_of, nodes_of, reconnected, session_of, tag_of
from tests.support.still_clock import turns
from tests.support.user_store import state_of

_OFTEN = ["ask"] * 3 + ["release"] * 2 + ["toggle silence"] * 2


class Believers(Beyond):
    """Clients that want one name, from stores at some distance, which at times cannot be received from or reached."""

    def __init__(self, nodes: int, name: str, fair: bool, chance: random.Random) -> None:
        super().__init__(nodes, name, way=chance.choice([0.001, 0.02, 0.5]))
        self.served = 0
        self._fair = fair
        self._chance = chance
        self._asking: list[asyncio.Task[None]] = []
        self._leases: list[Lease] = []

    async def play(self, steps: int) -> None:
        chance = self._chance
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    self.opened(lease=chance.choice([6.0, 30.0]), renew=chance.random() < 0.5)
                )
                for _ in range(3)
            ]
            for client in clients:
                await client.health()
            for _ in range(steps):
                self._act(chance.choice(clients))
                await turns(chance.choice([0, 1, 3, 20]))
                self.check()
                seconds = chance.choice([0.0, 0.0, 0.01, 0.1, 0.1, 1.0, 5.0])
                await self.pass_time(seconds, step=max(0.01, seconds / 20))
                self.check()
        await self.finish(*self._asking)  # what was on its way

    def _act(self, client: Redlock) -> None:
        chance = self._chance
        match chance.choice([*_OFTEN, "cancel", "deaf", "silent", "again"]):
            case "ask":
                self._asking.append(asyncio.create_task(self._ask(client)))
            case "release" if held := [lease for lease in self._leases if lease.held]:
                self._asking.append(asyncio.create_task(self._release(held[0])))
            case "cancel" if self._asking:
                chance.choice(self._asking).cancel()
            case "deaf":
                for node, store in zip(nodes_of(client), self.far, strict=True):
                    if chance.random() < 0.8:
                        node.listens = False
                        store.unlisten(tag_of(client))
            case "toggle silence":
                self._toggle_silence(client)
            case "silent":
                store = chance.choice(self.far)
                store.silent = not store.silent
                store.disconnect()
            case "again":
                reconnected(client, 0)
            case _:
                pass

    def _toggle_silence(self, client: Redlock) -> None:
        for index, (node, store) in enumerate(zip(nodes_of(client), self.far, strict=True)):
            if not node.listens and self._chance.random() < 0.8:
                store.listen(tag_of(client), partial(session_of(client).received, index))
                node.listens = True
                reconnected(client, index)

    async def _ask(self, client: Redlock) -> None:
        try:
            self._leases.append(await client(self.name, fair=self._fair).acquire(timeout=None))
            self.served += 1
        except (ConfigError, QuorumUnavailable):  # it is closed, or no node answers
            pass

    async def _release(self, lease: Lease) -> None:
        with suppress(LockLost, LockNotHeld):  # released twice
            await lease.release()

    def check(self) -> None:
        """At most one client believes that it holds, and a majority of the nodes keep the hold as long as it
        believes."""
        held = [lease for lease in self._leases if lease.held]
        assert len(held) <= 1
        for lease in held:
            kept = [
                hold.ends - store.now()
                for store in self.far
                for hold in state_of(store, self.name).holds
                if hold.id == id_of(lease) and hold.ends is not None
            ]
            assert sum(left >= lease.remaining for left in kept) > len(self.far) // 2, (lease, kept)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("fair", [False, True], ids=["first-come", "fair"])
async def test_e15_nobody_believes_longer_than_the_nodes(
    name: str, nodes: int, fair: bool, chance: random.Random
) -> None:
    """Many games with lost notices, lost commands, cancels, expiring leases, slow answers and none: see
    `check`."""
    served = games = 0
    while games < 20 // nodes or served <= 10:  # one serves some 4 callers, and at times none
        game = Believers(nodes, f"{name}:{games}", fair, chance)
        await game.play(40)
        served, games = served + game.served, games + 1
