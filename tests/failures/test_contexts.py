"""What the library does by itself runs in no request's context; a loss is told in that of its holder (HAZARDS F25)."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import pytest

from asynclock import LockLost, Redlock
from asynclock._clock import wait_ended
from asynclock._loop import own_task
from asynclock.events import Event, LoopLagged, Lost, NodeDown, NodeUp, ReleaseFailed
from asynclock.stores import MemoryStore, NodeConfig, TransactionalNode
from tests.support.servers import Server
from tests.support.shifted_clock import Shifted, shifted
from tests.support.still_clock import Still
from tests.support.waiters import LIMIT, LONG, until

_REQUEST: ContextVar[str] = ContextVar("request", default="")


class Tagged(logging.Handler):
    """The log lines and events of a client, each with the request in whose context it came."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self.events: list[tuple[str, type[Event]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((_REQUEST.get(), record.getMessage()))

    def __call__(self, event: Event) -> None:
        self.events.append((_REQUEST.get(), type(event)))

    def of(self, event: type[Event]) -> list[str]:
        """The requests of these events."""
        return [request for request, its in self.events if its is event]

    def saying(self, text: str) -> list[str]:
        """The requests of the lines with that text."""
        return [request for request, line in self.lines if text in line]


@pytest.fixture
def tagged() -> Iterator[Tagged]:
    handler, log = Tagged(), logging.getLogger("asynclock")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


async def request(tag: str, work: Coroutine[Any, Any, Any]) -> Any:
    """Run it as a task of its own, in a context that has the tag."""

    async def tagged() -> Any:
        _REQUEST.set(tag)
        return await work

    return await asyncio.create_task(tagged())


async def use(client: Redlock, name: str) -> None:
    async with client(name):
        pass


async def lose(client: Redlock, name: str, held: asyncio.Event) -> None:
    with pytest.raises(LockLost):
        async with client(name):
            held.set()
            await asyncio.sleep(LIMIT)


async def test_f25_a_loss_is_told_in_the_context_of_its_holder(
    make: Callable[..., Redlock], name: str, tagged: Tagged
) -> None:
    """The first request opened the client, a later one holds the lock, and an operator breaks it."""
    client, operator, held = make(), make(), asyncio.Event()
    client.subscribe(tagged)
    await request("A", use(client, f"{name}:a"))
    loses = asyncio.create_task(request("C", lose(client, name, held)))
    await held.wait()
    assert await operator.break_lock(name)
    await loses
    assert tagged.of(Lost) == ["C"]
    assert tagged.saying("lost the lock") == ["C"]


async def test_f25_a_loss_that_the_watchdog_finds(redlock: Redlock, name: str, tagged: Tagged) -> None:
    """Its timer runs since another request acquired a lock."""
    redlock.subscribe(tagged)

    async def outlives() -> None:
        with pytest.raises(LockLost):
            async with redlock(name, max_hold=0.1):
                await asyncio.sleep(LIMIT)

    await request("A", use(redlock, f"{name}:a"))
    b = await request("B", redlock(f"{name}:b", max_hold=60).acquire())
    await request("C", outlives())
    assert tagged.of(Lost) == ["C"]
    await b.release()


async def test_f25_a_holder_that_finds_the_loss_itself(shared_urls: list[str], name: str, tagged: Tagged) -> None:
    """It is told in the context as it is by then."""
    clock = Shifted()
    async with shifted(shared_urls[:1], clock, lease=10.0) as client:
        client.subscribe(tagged)

        async def hold() -> None:
            lease = await client(name).acquire(timeout=None)
            _REQUEST.set("C, step 2")
            clock.jump(10.0)
            assert await lease.wait_lost()

        await request("C", hold())
        assert tagged.of(Lost) == ["C, step 2"]
        assert tagged.saying("lost") == ["C, step 2"]


async def test_f25_the_release_that_a_close_sends(server: Server, name: str, tagged: Tagged) -> None:
    """The holder is cancelled, and its release has no majority: the close tells it for the holder. The lease is lost by
    the close, and that is told for the holder, too."""
    client = Redlock(server.url)
    client.subscribe(tagged)
    lease = await request("C", client(name).acquire(timeout=None))
    server.freeze()
    await request("D", client.aclose())
    assert not lease.held
    assert tagged.of(Lost) == ["C"]
    assert tagged.of(ReleaseFailed) == ["C"]


async def test_f25_events_of_nodes_belong_to_no_request(server: Server, name: str, tagged: Tagged) -> None:
    """One request opened the client, and others wait while the server goes and comes back."""
    async with aclosing(Redlock(server.url, patience=60)) as client:
        client.subscribe(tagged)
        await request("A", use(client, name))
        server.kill()
        waits = asyncio.create_task(request("B", use(client, name)))
        await until(lambda: tagged.of(NodeDown))
        server.restart()
        await waits
    assert {each for kind in (NodeDown, NodeUp) for each in tagged.of(kind)} == {""}
    assert tagged.saying("the node") == [""] * len(tagged.saying("the node"))


class Telling(MemoryStore):
    """A store whose node reports while a request calls it."""

    def open(self, config: NodeConfig) -> TransactionalNode:
        self.tell = config.tell
        return super().open(config)


async def test_f25_a_node_that_reports_while_it_is_called(name: str, tagged: Tagged) -> None:
    """As a node that a user wrote may do."""
    store = Telling()
    async with aclosing(Redlock(store)) as client:
        client.subscribe(tagged)
        await request("A", use(client, name))

        async def ask() -> None:
            store.tell(NodeDown("db", "out of reach"))

        await request("B", ask())
    assert tagged.of(NodeDown) == [""]
    assert tagged.saying("the node db is down") == [""]


async def test_f25_a_blocked_loop_belongs_to_no_request(name: str, tagged: Tagged) -> None:
    """Also where a request finds it, by an acquire before any timer runs."""
    still = Still(1, name)
    async with aclosing(still.client(lease=3.0)) as client:
        client.subscribe(tagged)

        async def blocks() -> None:
            async with client(name, reentrant=True, renew=False):
                still.clock.block(1.5)
                async with client(name, reentrant=True, renew=False, max_hold=1.0):
                    assert tagged.of(LoopLagged) == [""]

        await request("B", blocks())


class Thing:
    """Such as the session of a database, which a request has in its context."""


_THING: ContextVar[Thing] = ContextVar("thing")


@pytest.mark.every_store
async def test_f25_the_objects_of_a_request_do_not_stay_alive(make: Callable[..., Redlock], name: str) -> None:
    """Also not those of the request that opened the client, and of one that waited."""
    client, things = make(), list[weakref.ref[Thing]]()

    async def with_a_thing() -> None:
        _THING.set(thing := Thing())
        things.append(weakref.ref(thing))
        lease = await client(name).acquire(timeout=LONG)
        assert lease is not None
        await client.inspect(name)
        assert (await client.health()).ok
        assert await client(name).locked()
        await lease.release()

    await asyncio.create_task(with_a_thing())
    await asyncio.gather(*(asyncio.create_task(with_a_thing()) for _ in range(3)))

    def gone() -> bool:
        gc.collect()
        return not any(each() for each in things)

    await until(gone)  # long before the time of that acquire
    assert await client(name).locked() is False


# -- how it is done --------------------------------------------------------------------------------------------------


async def test_f25_a_task_of_the_library_under_a_task_factory_of_the_program() -> None:
    """One that knows nothing of contexts, as those of older libraries do."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(lambda loop, work: asyncio.Task(work, loop=loop))  # type: ignore[arg-type]
    ended: list[object] = []

    async def work() -> str:
        return _REQUEST.get()

    _REQUEST.set("A")
    try:
        task = own_task(work(), ended=lambda task: ended.append((task, _REQUEST.get())))
        assert await task == ""
        await asyncio.sleep(0)
        assert ended == [(task, "")]
    finally:
        loop.set_task_factory(None)


async def test_a_wait_for_a_task_of_the_library_has_an_end() -> None:
    """With the task, or after its time; the task goes on."""
    go_on = asyncio.Event()
    task = own_task(go_on.wait())
    await wait_ended(task, 0.01)
    assert not task.done()
    go_on.set()
    await wait_ended(task, LIMIT)
    assert task.done()
    await wait_ended(task, LIMIT)
