"""What a promise of `locks/` and `protocol/` is tested over: one node, several nodes, and nodes in memory. The stores
differ below the port, and their own tests check that."""

from __future__ import annotations

import pytest

each_kind_of_node = pytest.mark.parametrize("make", ["one", "five", "memory"], indirect=True)

in_memory = pytest.mark.parametrize("make", ["memory"], indirect=True)
"""For what no server takes part in."""
