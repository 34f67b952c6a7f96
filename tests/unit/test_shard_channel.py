"""The hash tag that the scripts of a cluster get as one more argument."""

from __future__ import annotations

from hashlib import sha1

import pytest

from asynclock.stores.redis.cluster.shard_channel import with_tag
from asynclock.stores.redis.encoding import pack
from asynclock.stores.redis.scripts import SCRIPTS, SHARDED_SCRIPTS

TAG = pack("17").partition(b"\r\n")[2]


def sha(script: str) -> str:
    return sha1(script.encode()).hexdigest()


@pytest.mark.parametrize("letter", SCRIPTS)
@pytest.mark.parametrize("arguments", [("1", "key"), ("30", *map(str, range(120)))])
def test_a_script(letter: str, arguments: tuple[str, ...]) -> None:
    """The sharded script of the same kind, and the tag as its last argument."""
    wire = pack("EVALSHA", sha(SCRIPTS[letter]), *arguments)
    assert with_tag(wire, TAG) == pack("EVALSHA", sha(SHARDED_SCRIPTS[letter]), *arguments, "17")


@pytest.mark.parametrize(
    "command", [("PING",), ("SET", "EVALSHA", "x"), ("EVALSHA", "0" * 40, "0"), ("EVAL", SCRIPTS[""], "0")]
)
def test_another_command(command: tuple[str, ...]) -> None:
    assert with_tag(pack(*command), TAG) == pack(*command)


def test_only_the_scripts_of_a_cluster_use_sharded_pubsub() -> None:
    """The text for a single server is as short as before."""
    assert all("SPUBLISH" not in script and "shard" not in script for script in SCRIPTS.values())
    assert all(script.count("'SPUBLISH'") >= 1 for script in SHARDED_SCRIPTS.values())
