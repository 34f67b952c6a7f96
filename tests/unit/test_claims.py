"""Acquisitions and adoptions, as they are made."""

from __future__ import annotations

import pytest

from asynclock._options import LockSettings
from asynclock.protocol.acquisition import Acquisition
from asynclock.protocol.machine import Claim
from asynclock.protocol.terms import Terms
from asynclock.rules.mutex import MUTEX
from tests.support.stepped_quorum import NAME, clients_over


@pytest.mark.parametrize("made_as", [Acquisition, Claim])
def test_each_attribute_of_a_claim_has_a_value(made_as: type[Claim]) -> None:
    """An acquisition sets those of a claim itself, and forgets none."""
    client, _, _ = clients_over(3)
    claim = made_as(client.machine, Terms(NAME, MUTEX, LockSettings(), None, None))
    slots = [slot for each in made_as.__mro__ for slot in getattr(each, "__slots__", ())]
    assert len(slots) > 7
    assert [slot for slot in slots if not hasattr(claim, slot)] == []
