"""What the lines of the clients, and the times of the faults, say. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tests.support.chaos.faults import KILLED, LOSSY

SETTLES = 2.0
"""Seconds in which a client uses a node again after its fault."""

Line = dict[str, Any]
"""One that a client wrote; `host` is the number of its host."""


class Past(NamedTuple):
    """A fault as it was. `votes`: when the node may vote again, which is after its end if it has a quarantine. `host`:
    -1 for all."""

    began: float
    votes: float
    kind: str
    host: int
    node: int


class Outage(NamedTuple):
    """A time in which a client host had no majority. `returned`: since then it has one without any fault."""

    host: int
    began: float
    returned: float
    next: float  # when such a majority is lost again


def violations(lines: Sequence[Line]) -> list[str]:
    """What must never happen."""
    entered = [each for each in lines if "ended" in each]
    found = [
        f"{each['conflict']}: two holders: {each}" for each in lines if "conflict" in each and _is_double(each, entered)
    ]
    for name in sorted({each["name"] for each in entered}):
        tenures = sorted(
            (each for each in entered if each["name"] == name and _valid(each)), key=lambda each: each["began"]
        )
        found += _falling(name, tenures)
    found += [f"an error that no lock may raise: {each['unexpected']}" for each in lines if "unexpected" in each]
    return found + [f"logged as an error: {each['text']}" for each in lines if each.get("log") in ("ERROR", "CRITICAL")]


def _valid(entry: Line) -> bool:
    """Whether the body began while its lease was held."""
    return bool(entry["began"] < entry["until"])


def _is_double(conflict: Line, entered: Iterable[Line]) -> bool:
    """Whether both leases were valid. A body may outlive its lease for a moment: its loop must run to cancel it. Then
    the other lease began after that validity. Where the other body is not known, its lease counts as valid."""
    others = [
        each
        for each in entered
        if each["name"] == conflict["name"]
        and (each["host"], each["task"]) != (conflict["host"], conflict["task"])
        and not (each["shared"] and conflict["shared"])
        and each["began"] <= conflict["at"]
        and each["ended"] >= conflict["began"]
    ]
    valid = not others or any(each["until"] > conflict["began"] for each in others)
    return bool(conflict["at"] < conflict["until"] and valid)


def _falling(name: str, tenures: Iterable[Line]) -> list[str]:
    """Tokens that do not rise. A reader's is compared with those of the writers before it: it cannot overlap them."""
    found, highest, of_writers = [], 0, 0
    for each in tenures:
        if each["fence"] <= (of_writers if each["shared"] else highest):
            found.append(f"{name}: a token that does not rise, after {highest}: {each}")
        highest = max(highest, each["fence"])
        of_writers = of_writers if each["shared"] else max(of_writers, each["fence"])
    return found


def errors(lines: Iterable[Line]) -> Counter[str]:
    """By kind; with the bodies that outlived their leases."""
    counted = Counter(each["failed"] for each in lines if "failed" in each)
    counted += Counter(
        "body outlived its lease" for each in lines if "ended" in each and each["ended"] >= each["until"]
    )
    return counted


def as_hosts_had_them(faults: Iterable[Past], lines: Sequence[Line], hosts: int) -> Iterator[Past]:
    """The same faults; those of killed nodes once for each host. Its client counts the quarantine from the moment at
    which it finds the new server, and that is late where the host was cut off."""
    found = [each for each in lines if "quarantined" in each]
    for each in faults:
        if each.kind != KILLED:
            yield each
            continue
        for host in range(hosts):
            own = (line for line in found if (line["host"], line["quarantined"]) == (host, each.node))
            votes = (line["at"] + line["seconds"] for line in own if line["at"] > each.began)
            yield each._replace(host=host, votes=max(each.votes, next(votes, 0.0)))


def _changes(faults: Iterable[Past], host: int) -> list[tuple[float, int, int, bool]]:
    """The faults that this host has: when each begins (1) and ends (-1), the node, whether it loses packets."""
    return sorted(
        (at, begins, each.node, each.kind == LOSSY)
        for each in faults
        if each.host in (host, -1)
        for at, begins in ((each.began, 1), (each.votes, -1))
    )


def outages(faults: Sequence[Past], hosts: int, nodes: int) -> list[Outage]:
    """Of all hosts. A link that loses 30 % may still carry votes: it neither makes an outage, nor ends it."""
    found = []
    for host in range(hosts):
        found += _outages_of(host, _changes(faults, host), nodes)
    return found


def _outages_of(host: int, changes: Iterable[tuple[float, int, int, bool]], nodes: int) -> list[Outage]:
    hard, soft = Counter[int](), Counter[int]()
    majority = nodes // 2 + 1
    found: list[Outage] = []
    began = None
    for at, begins, node, lossy in changes:
        (soft if lossy else hard)[node] += begins
        reached = sum(not hard[each] for each in range(nodes))
        clean = sum(not hard[each] and not soft[each] for each in range(nodes))
        if found and math.isinf(found[-1].next) and clean < majority:
            found[-1] = found[-1]._replace(next=at)
        if began is None and reached < majority:
            began = at
        elif began is not None and clean >= majority:
            found.append(Outage(host, began, at, math.inf))
            began = None
    return found


def first_entries(found: Iterable[Outage], lines: Iterable[Line]) -> tuple[list[float], list[float]]:
    """The seconds from each return of a majority to the first entry of that host; and where another fault took it
    again before that, the seconds until then."""
    entered: dict[int, list[float]] = {}
    for each in lines:
        if "ended" in each:
            entered.setdefault(each["host"], []).append(each["began"])
    waited, again = [], []
    for outage in found:
        first = min((at for at in entered.get(outage.host, []) if at > outage.returned), default=math.inf)
        if first < outage.next:
            waited.append(first - outage.returned)
        elif outage.next < math.inf:  # a host without any later entry is told of as not served
            again.append(outage.next - outage.returned)
    return waited, again


def longest_pause(faults: Sequence[Past], lines: Sequence[Line], hosts: int, nodes: int) -> float:
    """The longest time without an entry of a host while a majority that may vote has no fault for it, and had none for
    SETTLES. first_entries() has what comes before."""
    longest = 0.0
    later = [each._replace(votes=each.votes + SETTLES) for each in faults]
    for host in range(hosts):
        entered = sorted(each["began"] for each in lines if "ended" in each and each["host"] == host)
        for begins, ends in _majorities(_changes(later, host), nodes):
            inside = [at for at in entered if begins <= at <= ends] + [ends] * (ends < math.inf)
            longest = max([longest, *(after - before for before, after in pairwise(inside))])
    return longest


def _majorities(changes: Iterable[tuple[float, int, int, bool]], nodes: int) -> Iterator[tuple[float, float]]:
    """The times in which no more than a minority has a fault. The last one has no end."""
    faulty, since = Counter[int](), None
    for at, begins, node, _ in changes:
        faulty[node] += begins
        if (minority := len(+faulty) <= (nodes - 1) // 2) and since is None:
            since = at
        elif not minority and since is not None:
            yield since, at
            since = None
    if since is not None:
        yield since, math.inf


def spread(seconds: Sequence[float]) -> str:
    """Of waits."""
    if not seconds:
        return "none"
    return f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"


def unserved(lines: Iterable[Line], after: float, hosts: int, tasks: int) -> list[tuple[int, int]]:
    """The tasks (host and number) that had no entry after that moment."""
    served = {(each["host"], each["task"]) for each in lines if each.get("ended") and each["began"] > after}
    return [(host, task) for host in range(hosts) for task in range(tasks) if (host, task) not in served]
