"""How long a waiter for several names waits with its nodes, which are in the way of others at the names that are free.
The literature on deadlocks calls this "hold and wait".

Such a waiter has a ticket that closes one of its names, so that this name becomes free. Then it creates its nodes, and
waits with them for the holders of its other names. One of these may wait for the name that it has, and would wait for
ever. So the waiter deletes its nodes after a time, and closes the name that was in its way instead:

- if for a few looks the holder at one name is of a client that waits behind it at another name;
- otherwise at the end of a round. The holder may wait for it by way of a third client, which cannot be seen.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from asynclock.rules.model import TAG_LENGTH
from asynclock.stores.zookeeper.contender import HoldAndWait
from asynclock.stores.zookeeper.layout import holders, queue_of, tickets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from asynclock.rules.model import Part
    from asynclock.stores.zookeeper.contender import Contender
    from asynclock.stores.zookeeper.layout import Child, Layout
    from asynclock.stores.zookeeper.places import Places

_LOOK = 0.75
"""Seconds between two looks."""

_LOOKS = 4
"""So many looks find the same holder. A shorter hold was of another task of its client."""

_LOOKS_AGAIN = 6
"""The same once a round was in vain. Else tasks of other clients that hold its names in turn, for longer than the first
number of looks, would keep it out for ever. A holder that waits behind it waits for less than 5 s."""

_ROUND = 4.0
"""Seconds of the first round. Each later one is twice as long, so that long holds end within one."""


class HoldAndWaitLimits:
    """Of the waiters of one node. `look_again`: see `Turns`."""

    def __init__(
        self,
        layout: Layout,
        places: Places,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], object],
        look_again: Callable[[Contender], Coroutine[Any, Any, None]],
    ) -> None:
        self._layout = layout
        self._places = places
        self._spawn = spawn
        self._look_again = look_again

    def ends(self, contender: Contender, part: Part) -> bool:
        """Whether a waiter deletes its nodes now, since `part` refuses it. Else it keeps them."""
        ticket, waiting, loop = contender.ticket, contender.hold_and_wait, asyncio.get_running_loop()
        if ticket is None or not ticket.closes or ticket.part is part:
            return True
        if waiting is None:
            waiting = contender.hold_and_wait = HoldAndWait(loop.time() + _ROUND * 2**contender.rounds)
            loop.call_later(_LOOK, self._look, contender, waiting)
        elif waiting.is_over:
            contender.rounds += 1
            return True
        return False

    def _look(self, contender: Contender, waiting: HoldAndWait) -> None:
        if contender.hold_and_wait is waiting and not contender.is_unwanted:
            asyncio.get_running_loop().call_later(_LOOK, self._look, contender, waiting)
            self._spawn(partial(self._judge, contender, waiting))

    async def _judge(self, contender: Contender, waiting: HoldAndWait) -> None:
        async with contender.turn:
            if contender.hold_and_wait is not waiting or contender.is_unwanted:
                return
            is_late = asyncio.get_running_loop().time() >= waiting.ends
            waiting.is_over = is_late or await self._is_waited_for(contender, waiting)
        if waiting.is_over:
            await self._look_again(contender)

    async def _is_waited_for(self, contender: Contender, waiting: HoldAndWait) -> bool:
        """Whether the holder at one of its names seems to wait behind it at another one."""
        suspects = await self._suspects(contender)
        same = suspects & waiting.suspects
        waiting.looks, waiting.suspects = (waiting.looks + 1, same) if same else (1, suspects)
        return bool(suspects) and waiting.looks >= (_LOOKS_AGAIN if contender.rounds else _LOOKS)

    async def _suspects(self, contender: Contender) -> set[str]:
        """The nodes of the holders in its way that are of clients that wait behind it. Other programs do not say who
        they are, so any of them may be the same one."""
        inside, behind, ticket = dict[str, str](), set[str](), contender.ticket
        for own in contender.nodes:
            names = await self._places.children(own.part.name)
            queue = queue_of(self._layout, names)
            earlier = [child for child in queue if child.number < own.number]
            inside |= {child.name: _client(child) for child in holders(earlier)}
            if not earlier:  # the name is free for it
                arrived = ticket.number if ticket is not None and ticket.part is own.part else own.number
                waiting = (*queue, *tickets_of(self._layout, names))
                behind |= {_client(each) for each in waiting if each.number > arrived and each.name != own.name}
        return {name for name, client in inside.items() if client in behind}


def _client(child: Child) -> str:
    return child.random[:TAG_LENGTH]
