"""What the latencies, clocks and versions of servers mean. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Protocol

from asynclock.cli.doctor.severity import Finding, Severity
from asynclock.cli.output import length
from asynclock.rules.model import CLOCK_SKEW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asynclock.cli.doctor.severity import Terms

_DRIFT = 1.0  # seconds between clocks that the usual time services keep to by far

_FALLING = f"; with more than {CLOCK_SKEW:g} s a fencing token can fall after its counter was forgotten."


class Measured(Protocol):
    """What was measured at one server."""

    @property
    def node(self) -> str: ...
    @property
    def offset(self) -> float | None: ...
    @property
    def offset_error(self) -> float: ...
    @property
    def latencies(self) -> tuple[float, ...]: ...


def clock_findings(facts: Sequence[Measured], *, keeps_fences: bool = False) -> Iterator[Finding]:
    """Clocks that are far apart. `keeps_fences`: the fencing tokens of the store rise whatever the clocks show."""
    known = {each.node: (each.offset, each.offset_error) for each in facts if each.offset is not None}
    known["this machine"] = 0.0, 0.0
    lowest, highest = (pick(known, key=lambda node: known[node][0]) for pick in (min, max))
    apart = known[highest][0] - known[lowest][0] - known[highest][1] - known[lowest][1]
    if apart > _DRIFT:
        yield Finding(
            Severity.ERROR if apart > CLOCK_SKEW and not keeps_fences else Severity.WARNING,
            "clock",
            tuple(node for node in (lowest, highest) if node in {each.node for each in facts}),
            f"The clocks of {lowest} and {highest} are {length(apart)} apart.",
            "Validity does not depend on it, but waiters are served out of order" + ("." if keeps_fences else _FALLING),
            "Run a time service (chrony, ntpd) on all machines.",
        )


def latency_findings(facts: Sequence[Measured], terms: Terms) -> Iterator[Finding]:
    """Servers that are slow for the node_timeout of the clients."""
    for each in facts:
        if not each.latencies:
            continue
        usual, worst = median(each.latencies), max(each.latencies)
        slow = sorted(each.latencies)[len(each.latencies) * 9 // 10 - 1]  # one slow answer of ten is no pattern
        if slow * 2 < terms.node_timeout:
            continue
        yield Finding(
            Severity.ERROR if usual >= terms.node_timeout else Severity.WARNING,
            "latency",
            (each.node,),
            f"{each.node} answers within {length(usual)}, at worst {length(worst)}; node_timeout is "
            f"{length(terms.node_timeout)}.",
            "An answer that is later is no vote: acquires fail or take several rounds, and renewals may fail.",
            f"Set node_timeout to {length(slow * 4)} or more, with a lease of at least three times that, or use "
            "servers that are nearer.",
        )


def version_findings(known: Mapping[str, str]) -> Iterator[Finding]:
    """Of servers with different versions, by node."""
    if len(set(known.values())) > 1:
        yield Finding(
            Severity.WARNING,
            "versions",
            tuple(known),
            "The servers have different versions: " + ", ".join(f"{node} {said}" for node, said in known.items()) + ".",
            "Locks work; but the servers may differ in what they refuse.",
            "Finish the upgrade.",
        )
