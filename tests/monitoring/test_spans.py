"""Spans: off by default; one for each acquire and each hold, with the real SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from asynclock import LockLost, QuorumUnavailable, Redlock
from asynclock.otel import instrument
from tests.support.meters import Meters, Traces
from tests.support.servers import Server
from tests.support.waiters import IN_VAIN

Make = Callable[..., Redlock]


def traced(client: Redlock, **options: Any) -> Traces:
    """The spans of the client from now on."""
    traces = Traces()
    instrument(client, meter_provider=Meters().provider, tracer_provider=traces.provider, **options)
    return traces


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_there_are_none_by_default(redlock: Redlock, name: str) -> None:
    """A span costs more than an acquire."""
    traces = traced(redlock)
    async with redlock(name):
        pass
    assert traces.spans() == ()


async def test_an_acquire_and_its_hold_are_spans_of_the_task(redlock: Redlock, name: str) -> None:
    """Their parent is the current span; they are named by the label, and say which lock."""
    traces = traced(redlock, spans=True)
    tracer = traces.provider.get_tracer("application")
    with tracer.start_as_current_span("request") as request:
        async with redlock(name, label="order:{id}") as lease:
            loop = asyncio.get_running_loop()
            began = loop.time()
            await asyncio.sleep(0.01)
            held_for = loop.time() - began
    assert lease.name == name
    acquire, hold, _ = traces.spans()
    of = {"asynclock.kind": "mutex", "asynclock.label": "order:{id}", "asynclock.name": name}
    assert (acquire.name, attributes_of(acquire)) == ("acquire order:{id}", of | {"asynclock.outcome": "acquired"})
    assert (hold.name, attributes_of(hold)) == ("hold order:{id}", of)
    for span in (acquire, hold):
        assert span.parent is not None
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.status.status_code is StatusCode.UNSET
    assert acquire.end_time is not None
    assert hold.end_time is not None
    assert acquire.end_time <= hold.end_time
    assert seconds(hold) >= held_for - 0.002  # two clocks


async def test_a_lock_without_a_label_is_named_by_its_kind(redlock: Redlock, name: str) -> None:
    """A name of a lock in the name of a span would make a span name for each order."""
    traces = traced(redlock, spans=True)
    async with redlock.read(name):
        pass
    assert [span.name for span in traces.spans()] == ["acquire read", "hold read"]


@pytest.mark.parametrize("make", ["memory"], indirect=True)  # a server that is late would make it an outage
async def test_a_timeout_is_an_error(make: Make, name: str) -> None:
    """As long as the caller waited."""
    client, other = make(), make()
    traces = traced(client, spans=True)
    async with other(name):
        assert await client(name).acquire(timeout=IN_VAIN) is None
    (span,) = traces.spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "timeout")
    assert attributes_of(span)["asynclock.outcome"] == "timeout"
    assert seconds(span) >= IN_VAIN - 0.01  # a timer of uvloop may be early by some ms


async def test_an_outage_is_an_error(server: Server, name: str) -> None:
    """The description says which outcome."""
    async with Redlock(server.url, patience=1.0) as client:
        traces = traced(client, spans=True)
        server.kill()
        with pytest.raises(QuorumUnavailable):
            await client(name).acquire()
    (span,) = traces.spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "unavailable")


async def test_f25_a_loss_is_an_error_in_the_span_of_its_holder(redlock: Redlock, name: str) -> None:
    """The watchdog and the notices run in no task of the program. A span of another request is no parent."""
    traces = traced(redlock, spans=True)
    tracer = traces.provider.get_tracer("application")
    with tracer.start_as_current_span("opens"):
        async with redlock(f"{name}:a"):
            pass
    with tracer.start_as_current_span("request") as request:
        with pytest.raises(LockLost):
            async with redlock(name, max_hold=0.05):
                await asyncio.sleep(20)
    (hold,) = [span for span in traces.spans() if "asynclock.reason" in attributes_of(span)]
    assert (hold.status.status_code, hold.status.description) == (StatusCode.ERROR, "lost: max_hold")
    assert attributes_of(hold)["asynclock.reason"] == "max_hold"
    assert hold.parent is not None
    assert hold.parent.span_id == request.get_span_context().span_id
