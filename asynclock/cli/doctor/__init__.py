"""`asynclock doctor`: `facts.py` asks the servers, `findings.py` says what the facts mean, `command.py` shows it."""
