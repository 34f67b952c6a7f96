"""`asynclock demo`: all that only the demo needs. `show.py` runs it; `worker.py` is the program of its workers."""

SHORTEST = 6.0
LONGEST = 15.0
"""How many seconds the workers may be told to work."""
