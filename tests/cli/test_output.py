"""What the commands print for people: durations, and sentences about holders and servers."""

from __future__ import annotations

import pytest

from asynclock.cli.doctor.facts import NodeFacts
from asynclock.cli.doctor.findings import findings
from asynclock.cli.doctor.severity import Terms
from asynclock.cli.output import taken, why
from asynclock.info import Holder, NodeHealth


@pytest.mark.parametrize(
    ("holders", "text"),
    [
        ([], "k is held by another owner"),
        ([Holder("k", "web-1", 812, 100.0, 9.0, "")], "k is held by web-1, pid 812, which asked for it 41s ago"),
        ([Holder("k", "", 0, 0.0, 90.0, "")], "k is held by a key of another program for another 1m30s"),
        (
            [Holder("k", "", 0, 0.0, None, "")],
            (
                "k is held by a key of another program, without an expiry: if nothing needs it, delete it with "
                "asynclock break --foreign"
            ),
        ),
        ([Holder("k", "", 0, 0.0, 3594.0, "(done)")], "k is taken for another 59m54s: a --once run has succeeded"),
        ([Holder("k", "", 0, 0.0, 5.0, "(resting)")], "k is taken for another 5s: it rests after a release (min_hold)"),
    ],
)
def test_why_a_name_could_not_be_had(holders: list[Holder], text: str) -> None:
    """By a holder, by a key of another program, or by a mark that nobody holds."""
    assert taken("k", holders, 141.0) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("", ""),
        ("a:1 refused the connection", "refused the connection"),
        ("a:1: READONLY replica", "READONLY replica"),
        ("no embedded server", "no embedded server"),
    ],
)
def test_a_server_is_named_once(error: str, text: str) -> None:
    """Its address stands beside its error."""
    assert why(NodeHealth("a:1", not error, None, error)) == text


@pytest.mark.parametrize(("servers", "fewer"), [(2, "1 server."), (4, "3 servers.")])
def test_an_even_number_of_servers(servers: int, fewer: str) -> None:
    """The singular and the plural."""
    facts = [NodeFacts(f"a:{number}") for number in range(servers)]
    (found,) = findings(facts, Terms("lock:", 30.0, 60.0, 0.05))
    assert found.risk.endswith(f"than {fewer}")
