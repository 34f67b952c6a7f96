"""OpenTelemetry metrics and spans of a client.

    from asynclock import redlock
    from asynclock.otel import instrument

    instrument(redlock)

This needs the API of OpenTelemetry alone: `pip install 'asynclock[otel]'`. The application chooses an SDK and an
exporter. Without an SDK a client counts in ints, and nothing reads them. docs/metrics.md lists the instruments.

The rules:

1. What happens in each acquire is counted in ints, and observable instruments read these ints when the SDK collects.
2. A histogram records the holds, and the acquires that waited: one record of the SDK costs a third of a free acquire
   and its release.
3. The number of attribute sets is bounded. A name is never an attribute of a metric. After MOST_LABELS labels, each
   further label is counted as OTHER.
4. All clients of a process share the instruments of a meter provider, because two instruments with the same name would
   report the same series twice.
5. The SDK collects in a thread of its own. It copies what it reads in one step. Each thread counts into a dict of its
   own, so that no lock is needed, and a forked child inherits no locked one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from asynclock.events import (
    Acquired,
    Detached,
    Event,
    LockEvent,
    Lost,
    Released,
    ReleaseFailed,
    Renewed,
    TimedOut,
    Unavailable,
)

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import Observation
    from opentelemetry.trace import Status, StatusCode
except ImportError as missing:
    raise ImportError(
        "asynclock.otel needs the OpenTelemetry API 1.30 or later: pip install 'asynclock[otel]'"
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider
    from opentelemetry.trace import Tracer, TracerProvider

    from asynclock.client import Redlock
    from asynclock.runtime.counts import Counts, NodeCounts

__all__ = ["HOLD_BUCKETS", "MOST_LABELS", "OTHER", "WAIT_BUCKETS", "instrument"]

MOST_LABELS = 200
"""So many labels are counted apart."""

OTHER = "(other)"
"""The label under which all further labels are counted."""

WAIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The bucket boundaries of `asynclock.wait.duration`, in seconds. A view of the SDK replaces them."""

HOLD_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""The bucket boundaries of `asynclock.hold.duration`, in seconds. A view of the SDK replaces them."""

_SCOPE = "asynclock"
_OUTCOMES = {Acquired: "acquired", TimedOut: "timeout", Unavailable: "unavailable"}
_REASONS = ("expired", "taken", "broken", "max_hold", "closed")
_RENEWALS = ("ok", "failed")


def instrument(
    redlock: Redlock,
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    spans: bool = False,
) -> Callable[[], None]:
    """Count what this client does from now on, in the metrics of `meter_provider` (default: the global provider).

    With `spans`, each acquire and each hold is a span of `tracer_provider` (default: the global provider). Spans are
    off by default, since they cost more than an acquire. Returns a function that ends the counting. A second call for
    the same client and meter provider replaces the first. Does no I/O. Source:
    https://opentelemetry.io/docs/specs/otel/metrics/api/
    """
    tracer = trace.get_tracer(_SCOPE, _version(), tracer_provider) if spans else None
    return _instruments_of(meter_provider).add(redlock, None if tracer is None else Spans(tracer))


_guard = threading.Lock()
_of_provider: WeakKeyDictionary[MeterProvider, Instruments] = WeakKeyDictionary()
_of_global: list[Instruments] = []  # one at most: the global provider may be set later, and the API then passes it on


def _instruments_of(provider: MeterProvider | None) -> Instruments:
    """The instruments of a meter provider. None: those of the global one."""
    with _guard:
        if provider is None:
            if not _of_global:
                _of_global.append(Instruments(metrics.get_meter(_SCOPE, _version())))
            return _of_global[0]
        if provider not in _of_provider:
            _of_provider[provider] = Instruments(metrics.get_meter(_SCOPE, _version(), provider))
        return _of_provider[provider]


def _version() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("asynclock")
    return ""


class Tally:
    """The ints of one observable counter: one for each set of attribute values."""

    def __init__(self, *keys: str) -> None:
        self._keys = keys
        self._of_thread: dict[int, dict[tuple[str, ...], int]] = {}

    def add(self, *values: str, number: int = 1) -> None:
        """Count once more. With `number=0` the set is reported as 0 until it is counted."""
        ident = threading.get_ident()
        mine = self._of_thread.get(ident)
        if mine is None:
            mine = self._of_thread[ident] = {}
        mine[values] = mine.get(values, 0) + number

    def observe(self, options: CallbackOptions) -> Iterable[Observation]:
        """For the SDK."""
        del options
        total: Counter[tuple[str, ...]] = Counter()
        for mine in list(self._of_thread.values()):
            for values, number in list(mine.items()):
                total[values] += number
        return [Observation(number, dict(zip(self._keys, values, strict=True))) for values, number in total.items()]


def _histograms(meter: Meter) -> tuple[Histogram, Histogram]:
    """Of the waits, and of the holds."""
    return (
        meter.create_histogram(
            "asynclock.wait.duration",
            "s",
            "Time from the call to the end of an acquire that waited.",
            explicit_bucket_boundaries_advisory=WAIT_BUCKETS,
        ),
        meter.create_histogram(
            "asynclock.hold.duration",
            "s",
            "Time from the grant to the end of a lease.",
            explicit_bucket_boundaries_advisory=HOLD_BUCKETS,
        ),
    )


class Instruments:
    """The instruments of one meter provider, for all clients that use it."""

    def __init__(self, meter: Meter) -> None:
        self._clients: dict[int, tuple[ref[Redlock], Callable[[], None]]] = {}
        self._labels: set[str] = set()
        self._attributes: dict[tuple[str, str], Mapping[str, str]] = {}  # by kind and label
        self._acquisitions = Tally("kind", "label", "outcome")
        self._lost = Tally("kind", "label", "reason")
        self._renewals = Tally("kind", "label", "outcome")
        self._release_failures = Tally("kind", "label")
        self._make_observable(meter)
        self._wait, self._hold = _histograms(meter)
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Acquired: self._ended,
            TimedOut: self._ended,
            Unavailable: self._ended,
            Released: self._held_for,
            Detached: self._held_for,
            Lost: self._was_lost,
            Renewed: self._was_renewed,
            ReleaseFailed: self._release_failed,
        }

    def _make_observable(self, meter: Meter) -> None:
        """The instruments that the SDK reads when it collects."""
        meter.create_observable_counter(
            "asynclock.acquisitions", [self._acquisitions.observe], "{acquisition}", "Acquires that have ended."
        )
        meter.create_observable_counter(
            "asynclock.lost", [self._lost.observe], "{lease}", "Leases that ended before their release."
        )
        meter.create_observable_counter(
            "asynclock.renewals", [self._renewals.observe], "{renewal}", "Renewals of leases."
        )
        meter.create_observable_counter(
            "asynclock.release.failures",
            [self._release_failures.observe],
            "{release}",
            "Releases that no majority answered. The hold ends with its lease.",
        )
        meter.create_observable_up_down_counter(
            "asynclock.held", [self._observe_held], "{lease}", "Leases that this process holds now."
        )
        meter.create_observable_up_down_counter(
            "asynclock.waiting", [self._observe_waiting], "{acquisition}", "Acquires that wait now."
        )
        meter.create_observable_gauge(
            "asynclock.node.up", [self._observe_up], "{node}", "1: the node can be asked; 0: it cannot."
        )
        meter.create_observable_gauge(
            "asynclock.node.rtt", [self._observe_rtt], "s", "The last measured round trip to the node."
        )

    # -- the clients ---------------------------------------------------------------------------------------------

    def add(self, client: Redlock, spans: Spans | None) -> Callable[[], None]:
        """Count the events of a client from now on. Returns a function that ends this."""
        key = id(client)
        if (known := self._clients.get(key)) is not None:
            known[1]()
        unsubscribe = client.subscribe(self._listener(spans))

        def stop() -> None:
            unsubscribe()
            if (now := self._clients.get(key)) is not None and now[1] is stop:
                del self._clients[key]

        self._clients[key] = (ref(client, lambda _: stop()), stop)
        return stop

    def _listener(self, spans: Spans | None) -> Callable[[Event], None]:
        handlers = self._handlers

        def listener(event: Event) -> None:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)
                if spans is not None:
                    spans.tell(event)

        return listener

    # -- events --------------------------------------------------------------------------------------------------

    def _of(self, event: LockEvent) -> Mapping[str, str]:
        """The attributes of a lock's events: its kind and its label."""
        found = self._attributes.get((event.kind, event.label))
        if found is None:
            key = event.kind, self._counted_as(event.label)
            found = self._attributes.get(key)
            if found is None:
                found = self._attributes[key] = self._new(*key)
        return found

    def _counted_as(self, label: str) -> str:
        if label not in self._labels:
            if len(self._labels) >= MOST_LABELS:
                return OTHER
            self._labels.add(label)
        return label

    def _new(self, kind: str, label: str) -> Mapping[str, str]:
        """The attributes of a first event. Its counters begin at 0: a rate needs a value before the first increase."""
        for outcome in _OUTCOMES.values():
            self._acquisitions.add(kind, label, outcome, number=0)
        for reason in _REASONS:
            self._lost.add(kind, label, reason, number=0)
        for outcome in _RENEWALS:
            self._renewals.add(kind, label, outcome, number=0)
        self._release_failures.add(kind, label, number=0)
        return {"kind": kind, "label": label}

    def _ended(self, event: Acquired | TimedOut | Unavailable) -> None:
        of, outcome = self._of(event), _OUTCOMES[type(event)]
        self._acquisitions.add(of["kind"], of["label"], outcome)
        if event.had_to_wait:
            self._wait.record(event.waited, {**of, "outcome": outcome})

    def _held_for(self, event: Released | Detached | Lost) -> None:
        self._hold.record(event.held_for, self._of(event))

    def _was_lost(self, event: Lost) -> None:
        of = self._of(event)
        self._lost.add(of["kind"], of["label"], event.reason)
        self._hold.record(event.held_for, of)

    def _was_renewed(self, event: Renewed) -> None:
        of = self._of(event)
        self._renewals.add(of["kind"], of["label"], event.outcome)

    def _release_failed(self, event: ReleaseFailed) -> None:
        of = self._of(event)
        self._release_failures.add(of["kind"], of["label"])

    # -- the state of the clients, when the SDK collects ---------------------------------------------------------

    def _counts(self) -> list[Counts]:
        found = [client() for client, _ in list(self._clients.values())]
        return [counts for client in found if client is not None for counts in client._counts_of_sessions()]

    def _observe_held(self, options: CallbackOptions) -> Iterable[Observation]:
        del options
        return [Observation(sum(each.held for each in self._counts()))]

    def _observe_waiting(self, options: CallbackOptions) -> Iterable[Observation]:
        del options
        return [Observation(sum(each.waiting for each in self._counts()))]

    def _observe_up(self, options: CallbackOptions) -> Iterable[Observation]:
        """A node is down if one of the event loops cannot ask it."""
        del options
        up: dict[str, bool] = {}
        for node in self._nodes():
            up[node.node] = up.get(node.node, True) and node.up
        return [Observation(int(is_up), {"node": node}) for node, is_up in up.items()]

    def _observe_rtt(self, options: CallbackOptions) -> Iterable[Observation]:
        """The longest that one of the event loops has measured."""
        del options
        rtt: dict[str, float] = {}
        for node in self._nodes():
            if node.rtt is not None:
                rtt[node.node] = max(rtt.get(node.node, 0.0), node.rtt)
        return [Observation(seconds, {"node": node}) for node, seconds in rtt.items()]

    def _nodes(self) -> Iterable[NodeCounts]:
        return [node for each in self._counts() for node in each.nodes]


class Spans:
    """A span for each acquire and each hold, made when it ends. So its parent is the current span of the task that
    acquires or releases. A loss is told in the context of its holder, so its parent is the span of that."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def tell(self, event: Event) -> None:
        """Make the span of an event, if it ends an acquire or a hold."""
        match event:
            case Acquired() | TimedOut() | Unavailable():
                outcome = _OUTCOMES[type(event)]
                failed = "" if isinstance(event, Acquired) else outcome
                self._span("acquire", event, event.waited, failed, {"asynclock.outcome": outcome})
            case Released() | Detached():
                self._span("hold", event, event.held_for, "", {})
            case Lost():
                self._span("hold", event, event.held_for, f"lost: {event.reason}", {"asynclock.reason": event.reason})

    def _span(self, what: str, event: LockEvent, seconds: float, failed: str, more: dict[str, str]) -> None:
        end = time.time_ns()
        span = self._tracer.start_span(
            f"{what} {event.label or event.kind}",
            attributes={
                "asynclock.kind": event.kind,
                "asynclock.label": event.label,
                "asynclock.name": event.name,
                **more,
            },
            start_time=end - int(seconds * 1e9),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(end)
