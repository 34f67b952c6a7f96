"""A program that reports to OpenTelemetry."""

from collections.abc import Callable

from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from asynclock import Redlock
from asynclock.otel import instrument


def set_up(redlock: Redlock, meters: MeterProvider, tracers: TracerProvider) -> Callable[[], None]:
    instrument(redlock)
    instrument(redlock, meter_provider=meters)
    stop: Callable[[], None] = instrument(redlock, meter_provider=meters, tracer_provider=tracers, spans=True)
    return stop
