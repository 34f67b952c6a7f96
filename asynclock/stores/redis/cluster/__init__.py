"""A Redis cluster as one node: each op goes to the master of its slot, and follows the slot when it moves."""
