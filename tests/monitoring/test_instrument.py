"""instrument(): when counting begins and ends, several clients and threads, and an application without the SDK."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from threading import Event, Thread
from weakref import ref

import pytest

from asynclock import Redlock
from asynclock.otel import instrument
from tests.support.meters import Meters
from tests.support.programs import run_fresh_python

Make = Callable[..., Redlock]

# -- begin and end -----------------------------------------------------------------------------------------------------


async def test_counting_begins_with_the_call_and_ends_with_stop(redlock: Redlock, meters: Meters, name: str) -> None:
    """What was counted stays; the state of the client is reported no more. A second stop has no effect."""
    async with redlock(name):
        pass
    stop = instrument(redlock, meter_provider=meters.provider)
    assert meters.by("asynclock.acquisitions", "outcome") == {}
    async with redlock(name):
        assert meters.value("asynclock.held") == 1
        stop()
        stop()
        assert meters.value("asynclock.held") == 0
    async with redlock(name):
        pass
    assert meters.points("asynclock.node.up") == []
    assert meters.value("asynclock.acquisitions") == 1
    assert meters.value("asynclock.hold.duration") == 0


async def test_a_second_call_counts_nothing_twice(redlock: Redlock, meters: Meters, name: str) -> None:
    """It replaces the first, whose stop has no effect then."""
    first = instrument(redlock, meter_provider=meters.provider)
    instrument(redlock, meter_provider=meters.provider)
    for cycle in (1, 2):
        async with redlock(name):
            assert meters.value("asynclock.held") == 1
        assert meters.value("asynclock.acquisitions") == cycle
        first()


async def test_two_providers_count_each(redlock: Redlock, meters: Meters, name: str) -> None:
    """A client may report to both."""
    more = Meters()
    for each in (meters, more):
        instrument(redlock, meter_provider=each.provider)
    async with redlock(name):
        pass
    assert [each.value("asynclock.acquisitions") for each in (meters, more)] == [1, 1]


async def test_clients_of_one_provider_share_its_series(make: Make, meters: Meters, name: str) -> None:
    """Two instruments of one name would report each series twice."""
    for number in range(3):
        client = make()
        instrument(client, meter_provider=meters.provider)
        async with client(f"{name}:{number}"):
            pass
    points = meters.points("asynclock.acquisitions")
    assert len({tuple(sorted(point.attributes.items())) for point in points}) == len(points) == 3
    assert meters.value("asynclock.acquisitions") == 3


@pytest.mark.parametrize("make", ["memory"], indirect=True)
async def test_a_client_that_was_dropped_is_forgotten(meters: Meters, name: str, make: Make) -> None:
    """Metrics do not keep it alive; what it counted stays."""
    del make
    client = Redlock("memory:")
    instrument(client, meter_provider=meters.provider)
    async with client(name):
        pass
    await client.aclose()
    alive = ref(client)
    del client
    gc.collect()
    assert alive() is None
    assert meters.value("asynclock.acquisitions") == 1
    assert meters.points("asynclock.node.up") == []


def test_clients_in_several_threads_are_counted_exactly(shared_urls: list[str], meters: Meters, name: str) -> None:
    """Each thread has an event loop, and all share one client, while the SDK collects."""
    client, cycles, ended = Redlock(shared_urls[0]), 200, Event()
    interval = sys.getswitchinterval()
    instrument(client, meter_provider=meters.provider)

    async def work(number: int) -> None:
        async with client:
            for _ in range(cycles):
                async with client(f"{name}:{number}"):
                    pass

    threads = [Thread(target=lambda each=each: asyncio.run(work(each))) for each in range(4)]

    def collect() -> None:
        while not ended.is_set():
            meters.metrics()

    collector = Thread(target=collect)
    collector.start()
    sys.setswitchinterval(1e-6)  # threads take turns in the midst of a count
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        ended.set()
    collector.join()
    assert meters.value("asynclock.acquisitions", outcome="acquired") == 4 * cycles
    assert meters.value("asynclock.hold.duration") == 4 * cycles


# -- without the SDK, without the API ----------------------------------------------------------------------------------

NO_API = """
import sys
sys.modules["opentelemetry"] = None
import asynclock
try:
    import asynclock.otel
except ImportError as error:
    print(error)
"""


def test_a_missing_api_is_an_error_that_says_what_to_install() -> None:
    """The other modules do not need it."""
    assert "pip install 'asynclock[otel]'" in run_fresh_python(NO_API)


NO_SDK = """
import asyncio, sys
sys.modules["opentelemetry.sdk"] = None
from asynclock import Redlock
from asynclock.otel import instrument

async def main():
    client = Redlock("memory:")
    instrument(client, spans=True)
    async with client("k", label="a"):
        pass
    await client.aclose()

asyncio.run(main())
print("works")
"""


def test_it_works_without_an_sdk() -> None:
    """The API alone: ints that nothing reads."""
    assert run_fresh_python(NO_SDK) == "works\n"


LATE_SDK = """
import asyncio
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from asynclock import Redlock
from asynclock.otel import instrument

async def main():
    client, reader = Redlock("memory:"), InMemoryMetricReader()
    instrument(client)
    async with client("k"):
        pass
    metrics.set_meter_provider(MeterProvider([reader]))
    instrument(client)  # again: the application is set up twice
    async with client("k"):
        pass
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        if metric.name == "asynclock.acquisitions":
            print([point.value for point in metric.data.data_points if point.attributes["outcome"] == "acquired"])
    await client.aclose()

asyncio.run(main())
"""


def test_the_global_provider_may_be_set_later() -> None:
    """A library does not know when the application sets it. What was counted before is reported."""
    assert run_fresh_python(LATE_SDK) == "[2]\n"
