"""The Redis script of each kind of lock, joined from its texts when this module loads.

The kind's own text is a Lua file with its name. A line `--@ join PART` in it is replaced by that part of queue.lua,
which all kinds share, or of holders.lua, for kinds whose name several ids can hold. A kind answers the uncontended
calls before it joins the parts that define functions, because each call executes the definitions that it reaches.
"""

from __future__ import annotations

import re
from importlib.resources import files
from textwrap import indent

_OWN = {"": "mutex", "r": "rwlock", "w": "rwlock", "s": "semaphore"}
"""By a kind's letter, the file of its own text."""


def read(name: str) -> str:
    """The text of the Lua file `name`, also where the package is imported from a zip file."""
    return files(__name__).joinpath(f"{name}.lua").read_text("utf-8")


def _parts_of(text: str) -> dict[str, str]:
    """The parts of a shared text, by name. The text before the first part is left out."""
    _, *found = re.split(r"^--@ part (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


_PARTS = _parts_of(read("queue")) | _parts_of(read("holders"))


_IN_SHARD = _PARTS | {"notify": _PARTS["notify_in_shard"]}


def joined(own: str, parts: dict[str, str] = _PARTS) -> str:
    """The text `own`, with the shared parts in place of its join lines."""
    return re.sub(
        r"^( *)--@ join (\w+)\n",
        lambda line: indent(joined(parts[line[2]], parts), line[1]),
        own,
        flags=re.MULTILINE,
    )


def joined_multi(own: str, scripts: dict[str, str]) -> str:
    """The text `own` after a table of the kinds: by a kind's letter, its script as a function."""
    table = ["local kinds = {}\n"]
    for script in dict.fromkeys(scripts.values()):
        first, *others = (letter for letter, its in scripts.items() if its == script)
        table.append(f"kinds['{first}'] = function(KEYS, ARGV)\n{script}\nend\n")
        table += [f"kinds['{letter}'] = kinds['{first}']\n" for letter in others]
    return "\n".join([*table, own])


SCRIPTS = {letter: joined(read(name)) for letter, name in _OWN.items()}
"""By a kind's letter, the script that a server runs for it."""

PROBE_SCRIPT = read("probe")
"""The script that checks whether a server votes."""

SCRIPTS["multi"] = joined_multi(read("multi"), SCRIPTS)

_SHARDED = {letter: joined(read(name), _IN_SHARD) for letter, name in _OWN.items()}
_SHARDED["multi"] = joined_multi(read("multi"), _SHARDED)
SHARDED_SCRIPTS = {letter: f"local shard = ARGV[#ARGV]\n{script}" for letter, script in _SHARDED.items()}
"""The same for a server of a cluster with sharded pub/sub. They have one more argument at the end: a hash tag in one of
the slots of that server."""
