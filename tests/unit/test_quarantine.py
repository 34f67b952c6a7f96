"""Which servers cast no vote after a restart, and until when: by table, and for all facts that are possible."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from asynclock._options import client_settings
from asynclock.quorum.quarantine import VOTES, Quarantine, judge
from asynclock.rules.model import Notice
from asynclock.runtime.opening import quorum_over
from asynclock.stores import MemoryStore, stores_for
from asynclock.stores.port import Facts, Node, NodeConfig
from asynclock.stores.redis.sentinel.masters import Master
from tests.support.fake_clock import FakeClock

NOW = 1_000.0
LENGTH = 61.0
YOUNG, OLD = NOW - 1.0, NOW - 100.0

NEW = Facts("run", "", YOUNG)
"""A server that nobody has used."""


@pytest.mark.parametrize(
    ("facts", "until"),
    [
        (NEW, NOW + 60.0),
        (Facts("run", "", OLD), VOTES),
        (Facts("run", "", NOW - LENGTH), VOTES),  # it has just become old enough
        (Facts("run", "", -math.inf), VOTES),  # a server that does not tell its age
        (Facts("run", "run", YOUNG), VOTES),  # its own mark: a client found the deployment new
        (Facts("run", "before", YOUNG), NOW + 60.0),  # the mark of the server before the restart
        (Facts("run", "before", OLD), VOTES),
        (Facts("run", "", YOUNG, replaced=NOW), NOW + LENGTH),
        (Facts("run", "run", OLD, replaced=NOW - 1.0), NOW + 60.0),  # a replica that was promoted: neither helps
        (Facts("run", "", OLD, replaced=NOW - LENGTH), VOTES),
        (Facts("", "", YOUNG), NOW + 60.0),  # without a run_id there is no mark
        (Facts("", "", OLD), VOTES),
        (None, VOTES),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_how_long_one_server_casts_no_vote(facts: Facts | None, until: float, complete: bool) -> None:
    """Beside old servers, whether or not all have answered."""
    old = Facts("other", "other", OLD)
    assert judge([old, facts, old], NOW, LENGTH, complete=complete).until == (VOTES, until, VOTES)


KINDS: list[Facts | None] = [
    None,
    *(
        Facts("run", mark, started, replaced)
        for mark in ("", "run", "before")
        for started in (YOUNG, OLD)
        for replaced in (None, NOW - 1.0)
    ),
]


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_deployment_is_new_only_where_all_that_answer_are(nodes: int) -> None:
    """All servers just started, unused, and the first that was met there: then all vote at once, if every server was
    waited for. Otherwise each server is judged for itself."""
    for facts in itertools.product(KINDS, repeat=nodes):
        known = [each for each in facts if each is not None]
        alone = tuple(judge([each], NOW, LENGTH, complete=False).until[0] for each in facts)
        for complete in (False, True):
            ruling = judge(facts, NOW, LENGTH, complete=complete)
            assert ruling.new is (known != [] and all(each == NEW for each in known))
            assert ruling.until == ((VOTES,) * nodes if ruling.new and complete else alone)


@pytest.mark.parametrize(
    ("facts", "doubtful"),
    [
        ([NEW, NEW, NEW], False),
        ([NEW, NEW, None], False),
        ([NEW, NEW, Facts("run", "run", YOUNG)], True),  # another client leaves its marks right now
        ([NEW, Facts("run", "run", OLD), Facts("run", "run", OLD)], True),
        ([NEW, Facts("run", "run", YOUNG), None], True),
        ([Facts("run", "before", YOUNG)] * 3, False),  # all have restarted: no mark can come
        ([Facts("run", "run", OLD)] * 3, False),
    ],
)
def test_marks_are_read_again_where_another_client_may_be_leaving_them(
    facts: list[Facts | None], doubtful: bool
) -> None:
    """Some servers have their own mark, or are old, and others have just started and have none."""
    assert judge(facts, NOW, LENGTH, complete=True).doubtful is doubtful


def test_a_server_is_old_once_the_length_has_passed() -> None:
    """At that very moment each hold that it may have forgotten has ended. So the deployment is not new, and no mark is
    waited for."""
    old = Facts("run", "", NOW - LENGTH)
    for facts in ([old] * 3, [NEW, NEW, old]):
        assert not judge(facts, NOW, LENGTH, complete=True).new
    assert not judge([Facts("run", "run", OLD), old, old], NOW, LENGTH, complete=True).doubtful


def test_all_servers_of_a_new_deployment_vote_although_one_does_not_answer() -> None:
    """The ruling over all nodes is the last one: each that can answer has answered. A server that connects is judged
    alone: it casts no vote yet."""
    quarantine = Quarantine(LENGTH, FakeClock(NOW))
    assert quarantine.judge([NEW, NEW, None]) == ((VOTES,) * 3, True, False)
    assert quarantine.until(NEW) == NOW + 60.0


def test_no_quarantine_where_restarts_are_trusted() -> None:
    """Its length is 0 then. No deployment is new: no mark is set or waited for, not even at the moment of a start."""
    quarantine = Quarantine(0.0, FakeClock(NOW))
    for facts in [*KINDS[1:], Facts("run", "", NOW)]:
        assert facts is not None
        assert quarantine.until(facts) == VOTES
        assert quarantine.judge([facts, facts, None]) == ((VOTES,) * 3, False, False)


def test_d3_a_cluster_whose_masters_show_no_run_id_has_no_mark() -> None:
    """The facts about its masters are one: what none of them has, the cluster does not have."""
    config = NodeConfig(0, "", FakeClock(), Nobody(), {}, Quarantine(LENGTH, FakeClock()).until)
    (store,) = stores_for(("redis+cluster://127.0.0.1:1",))
    node: Any = store.open(config)
    node._masters.all = [SimpleNamespace(facts=Facts("", "", YOUNG)) for _ in range(3)]  # noqa: SLF001
    assert not node.facts.is_marked


@pytest.mark.parametrize("epoch", [3, 4], ids=["as known", "again"])
def test_d5_a_master_that_was_promoted_again_is_new_to_another_event_loop(epoch: int) -> None:
    """The loop before has noted its first promotion, in an earlier epoch. The quarantine counts from the last one."""
    clock = FakeClock()
    (store,) = stores_for(("redis+sentinel://127.0.0.1:1/main",))
    config = NodeConfig(0, "", clock, Nobody(), {}, Quarantine(LENGTH, clock).until)
    before: Any = store.open(config)
    before._master = Master(("a", 1), 3, age=1.0)  # noqa: SLF001
    before._note_promotion("run", 100.0)  # noqa: SLF001
    clock.advance(50.0)
    after: Any = store.open(config)
    after._master = Master(("a", 1), epoch, age=51.0 if epoch == 3 else 2.0)  # noqa: SLF001
    after._note_promotion("run", 150.0)  # noqa: SLF001
    promoted = clock.now() - (51.0 if epoch == 3 else 2.0)
    assert after._managed.replaced == ("run", promoted)  # noqa: SLF001


class Nobody:
    """A listener of nodes that send nothing."""

    tag = "nobody"

    def received(self, index: int, notice: Notice) -> None: ...

    def connected(self, index: int, *, missed: bool = True) -> None: ...


async def test_d3_a_server_that_reports_a_second_after_a_moment() -> None:
    """A server counts its uptime in whole seconds of its clock. One that restarted a moment ago, right after it had
    granted a lease of one second, may report an uptime of a second: it casts no vote until that lease is over."""
    configs, clock = list[NodeConfig](), FakeClock()

    class Watched(MemoryStore):
        def open(self, config: NodeConfig) -> Node:
            configs.append(config)
            return super().open(config)

    settings = client_settings({"lease": 1.0, "max_lease": 1.0})
    quorum_over([Watched(clock) for _ in range(3)], settings, clock, Nobody(), lambda event: None)
    for each in configs:
        assert each.quarantine is not None
        assert each.quarantine(Facts("run", "", clock.now() - 1.0)) >= clock.now() + 1.0
