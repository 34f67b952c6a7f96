"""How far a server is, by the round trips to it. The default node_timeout on a quorum follows it (`_options.py`).

After RFC 6298, with three differences: the limit has a floor; it never falls below the round trip, although the round
trip does not vary; and one sample raises it at most twofold, because a sample may be wrong."""

from __future__ import annotations

from asynclock._options import QUORUM_TIMEOUT

_ROOM = 4
"""A node_timeout should be this number of round trips."""


class Distance:
    """The round trips to one server, in seconds. Pure."""

    __slots__ = ("_variation", "limit", "usual")

    def __init__(self) -> None:
        self.usual: float | None = None  # SRTT; None: not measured yet
        self._variation = 0.0  # RTTVAR
        self.limit = QUORUM_TIMEOUT  # its answers come within so many seconds

    def add(self, seconds: float) -> None:
        """A round trip took so long."""
        if self.usual is None:
            self.usual, self._variation = seconds, seconds / 2
        else:
            self._variation += (abs(seconds - self.usual) - self._variation) / 4
            self.usual += (seconds - self.usual) / 8
        wanted = max(QUORUM_TIMEOUT, 2 * self.usual + 4 * self._variation)
        # Only a sample that comes near the limit raises it: else one wrong sample would raise it again and again.
        self.limit = min(wanted, 2 * self.limit if 2 * seconds > self.limit else self.limit)


def late(label: str, waited: float, limit: float, distance: Distance) -> TimeoutError:
    """The error of a server that did not answer in time, after `waited` seconds. If that is because it is too far for
    the limit, the error says how far it is, and what to set."""
    said = f"{label} did not answer within {waited:.3g} s"
    if distance.usual is None or distance.usual <= limit:
        return TimeoutError(said)
    return TimeoutError(f"{said}: its answers take {distance.usual:.3g} s; {advice(distance.usual)}")


def advice(usual: float) -> str:
    """What to set, if answers take so long."""
    least = _ROOM * usual
    return f"set node_timeout to {least:.2g} or more, with a lease of at least {3 * least:.2g} s"
