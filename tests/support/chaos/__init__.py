"""Clients on hosts of their own, which use a few names, while the links between them and the servers fail, and the
servers are frozen and killed. `python -m tests.support.chaos --help` says how it is run.

    network.py    the hosts: network namespaces of this machine, joined by a switch, with faults on their links
    servers.py    the servers, each on a host: five Redis, or one PostgreSQL or ZooKeeper
    faults.py     which faults there are, and when: drawn from a seed
    client.py     the program of a client host; its oracle is a locked file for each name
    verdict.py    what the lines of the clients and the times of the faults say
    container.py  a run in a container, for a user who is not root
    __main__.py   one run
"""
