"""The rules of the kinds of lock: which attempt a node grants. Pure: no I/O, no clock."""
