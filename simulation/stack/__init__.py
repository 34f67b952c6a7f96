"""The whole stack in virtual time: the real client over simulated sockets and servers. `python -m simulation.stack`."""
