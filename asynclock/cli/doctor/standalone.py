"""What `asynclock doctor` knows of every store that is the only node of its client: a database, or an ensemble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asynclock.cli.doctor.measures import latency_findings
from asynclock.cli.doctor.severity import Finding, Severity, advice_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from asynclock.cli.doctor.severity import Terms
    from asynclock.client import Redlock
    from asynclock.info import NodeHealth

VOTES = 10
_TRIES = 3

_EXPLAIN = {"table", "rights", "replica", "file", "disk", "lease", "session", "serving"}
"""Where a check of these found an error, a refused hold needs no finding of its own."""


@dataclass(slots=True)
class StoreFacts:
    """One store. Empty or None: unknown."""

    node: str
    place: str = ""
    """Where in it the locks are."""
    error: str = ""
    """Why it does not answer; "" if it does."""
    misconfigured: bool = False
    """Only the user can solve that: a lock raises ConfigError."""
    remedy: str = ""
    """What to do about the error, if that is known."""
    product: str = ""
    version: str = ""
    role: str = ""
    offset: float | None = None
    """Its clock less the clock of this machine, in seconds."""
    offset_error: float = 0.0
    latencies: tuple[float, ...] = ()
    """Of some holds that were taken and given back, in seconds."""
    no_vote: str = ""
    """Why it refused such a hold; "" if it did not."""
    note: str = ""
    """What does not work although it grants holds."""
    hidden: tuple[str, ...] = ()
    """The questions to which it gives no answer."""


async def ask_votes(facts: StoreFacts, client: Redlock) -> None:
    """Take and give back some holds, as an acquire and its release do. The first one, which connects, does not count.
    Never raises."""
    taken: list[float] = []
    for number in range(VOTES + 1):
        node = await _vote(client)
        if not node.ok or node.latency is None:
            facts.no_vote = node.error
            break
        facts.note = node.error
        if number:
            taken.append(node.latency)
    facts.latencies = tuple(taken)


async def _vote(client: Redlock) -> NodeHealth:
    """A node that fails is asked again: on a busy machine an answer takes longer than `health` waits."""
    for _ in range(_TRIES):
        (node,) = (await client.health()).nodes
        if node.ok:
            break
    return node


def general_findings(facts: StoreFacts, terms: Terms, needs: Mapping[str, str]) -> Iterator[Finding]:
    """What every store may show. `needs`: by question, what its answer would tell. Pure."""
    nodes = (facts.node,)
    if facts.error:
        yield Finding(
            Severity.ERROR,
            "reachable",
            nodes,
            facts.error,
            f"No lock can be acquired: every acquire raises "
            f"{'ConfigError' if facts.misconfigured else 'QuorumUnavailable'}.",
            advice_for(facts.remedy, misconfigured=facts.misconfigured),
        )
    elif facts.no_vote:
        yield Finding(
            Severity.ERROR,
            "vote",
            nodes,
            f"A hold could not be taken and given back: {facts.no_vote.rstrip('.')}.",
            "No lock can be acquired.",
            "Remove the cause that it names, then run asynclock health.",
        )
    yield from latency_findings([facts], terms)
    if facts.hidden:
        yield Finding(
            Severity.OK,
            "unchecked",
            nodes,
            f"{facts.node} does not tell this user: {', '.join(facts.hidden)}.",
            "Some checks were left out: " + "; ".join(needs[each] for each in facts.hidden if each in needs) + ".",
            "Run doctor as a user who may read that.",
        )


def sorted_findings(found: Iterable[Finding]) -> list[Finding]:
    """The worst first. A refused hold is left out where another error says why. Pure."""
    known = sorted(found, key=lambda each: -each.severity)
    if any(each.severity is Severity.ERROR and each.check in _EXPLAIN for each in known):
        known = [each for each in known if each.check != "vote"]
    return known
