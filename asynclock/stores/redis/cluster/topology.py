"""What the nodes of a cluster say about its slots: the answer to CLUSTER SLOTS, and redirections. Pure."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from asynclock._errors import ConfigError
from asynclock.stores.redis.keys import slot_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SLOTS = 16384
"""The number of slots of each cluster."""


class Address(NamedTuple):
    """Where a node of a cluster listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Range(NamedTuple):
    """Slots that lie together, with the same master."""

    first: int
    last: int
    master: Address | None
    """None: the cluster gives host names to its clients, and knows none of this node."""
    replicas: tuple[Address, ...]


class Redirect(NamedTuple):
    """A node did nothing, because it does not have the slot, or not all of its keys."""

    code: str  # MOVED, ASK, TRYAGAIN or CLUSTERDOWN
    to: Address | None  # the master of the slot; None: the node does not say


def ranges_of(slots: Any, asked: Address) -> tuple[Range, ...]:
    """Read the answer of the node `asked`. Raises ValueError if it is none."""
    try:
        found = [(int(first), int(last), [_address(each, asked) for each in nodes]) for first, last, *nodes in slots]
    except (AttributeError, IndexError, TypeError, ValueError):
        raise ValueError(f"no answer to CLUSTER SLOTS: {slots!r:.99}") from None
    return tuple(
        Range(first, last, nodes[0], tuple(each for each in nodes[1:] if each is not None))
        for first, last, nodes in found
        if nodes
    )


def without_host_name(label: str, slots: str) -> ConfigError:
    """The error for slots whose master has no host name."""
    return ConfigError(
        f"{label} does not say where the master of slots {slots} is: cluster-preferred-endpoint-type is hostname, and "
        "this node has no host name; set cluster-announce-hostname on each node, or cluster-preferred-endpoint-type ip"
    )


def one_address(label: str, moved: str) -> ConnectionError:
    """The error for a node that names its own address as that of another node."""
    return ConnectionError(
        f"{label} says that another node has the slot, and names its own address ({moved}): several nodes of the "
        "cluster announce one address; set cluster-announce-ip and cluster-announce-port on each node"
    )


def _address(node: Any, asked: Address) -> Address | None:
    """The address of a node; None: it has no host name, and the cluster is set to give nothing else. An empty host
    means the host that was asked."""
    host = node[0].decode() if node[0] else asked.host
    return None if host == "?" else Address(host, int(node[1]))


def redirect_of(error: str, asked: Address) -> Redirect:
    """Read an error reply: "MOVED 3999 host:port", "ASK 3999 host:port", "TRYAGAIN ...", "CLUSTERDOWN ..."."""
    code, *words = error.split()
    if code not in ("MOVED", "ASK") or len(words) < 2:
        return Redirect(code, None)
    host, _, port = words[1].rpartition(":")
    if host == "?" or not port.isdigit():
        return Redirect(code, None)
    return Redirect(code, Address(host.strip("[]") or asked.host, int(port)))


def uncovered(ranges: Iterable[Range]) -> int:
    """The number of slots that no node has."""
    return SLOTS - sum(each.last - each.first + 1 for each in ranges)


def span_of(slots: Sequence[int]) -> str:
    """Slots in words, for a message: "0-5460, 16383". They are sorted."""
    runs: list[list[int]] = []
    for each in slots:
        if runs and runs[-1][1] == each - 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:4]]
    return ", ".join(shown) + (f" and {len(runs) - 4} more ranges" if len(runs) > 4 else "")


def apart(prefix: str, names: Sequence[str]) -> str | None:
    """Why one lock cannot have these names; None: it can, because all are in one slot."""
    if len(names) < 2 or len({slot_of(prefix, name) for name in names}) < 2:
        return None
    shown = ", ".join(f'"{_tagged(each, names)}"' for each in names[:3]) + ", ..." * (len(names) > 3)
    return (
        "the names are in different slots of the cluster, and no command reaches several slots: give them the same "
        f"hash tag, for example redlock.multi({shown})"
    )


_ENDS = ":/.-_ "
"""The characters that end a part of a name."""


def _tagged(name: str, names: Sequence[str]) -> str:
    """The name with a hash tag that all of `names` can have: their common beginning."""
    bares = [each.replace("{", "").replace("}", "") for each in names]
    same = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*bares, strict=False)))
    tag = max((bares[0][:at] for at in range(same) if bares[0][at] in _ENDS), key=len, default="")
    bare = name.replace("{", "").replace("}", "")
    return f"{{{tag}}}{bare[len(tag) :]}" if tag else f"{{together}}:{bare}"
