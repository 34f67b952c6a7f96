"""`asynclock demo`: all that only the demo needs. `show.py` runs it; `worker.py` is the program of its workers."""
