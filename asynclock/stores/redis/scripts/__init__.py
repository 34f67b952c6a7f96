"""The Redis script of each kind of lock, joined from its texts when this module loads.

A kind's own text is a Lua file of its name. A line `--@ join PART` in it stands for that part of queue.lua, which all
kinds share, or of holders.lua, which the kinds share that let several ids hold a name. A kind answers the uncontended
calls before it joins the parts that define functions: a server pays for each definition in each call.
"""

from __future__ import annotations

import re
from os.path import dirname, join
from textwrap import indent

_OWN = {"": "mutex", "r": "rwlock", "w": "rwlock", "s": "semaphore"}
"""By a kind's letter, the file of its own text."""


def read(name: str) -> str:
    """The text of that file."""
    with open(join(dirname(__file__), f"{name}.lua"), encoding="utf-8") as file:
        return file.read()


def _parts_of(text: str) -> dict[str, str]:
    """The parts of a shared text, by name. Its head is in none of them."""
    _, *found = re.split(r"^--@ part (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


_PARTS = _parts_of(read("queue")) | _parts_of(read("holders"))


def joined(own: str) -> str:
    """That text, with the shared parts where it joins them."""
    return re.sub(
        r"^( *)--@ join (\w+)\n", lambda line: indent(joined(_PARTS[line[2]]), line[1]), own, flags=re.MULTILINE
    )


def joined_multi(own: str, scripts: dict[str, str]) -> str:
    """That text below a table of the kinds: by a kind's letter, its script as a function."""
    table = ["local kinds = {}\n"]
    for script in dict.fromkeys(scripts.values()):
        first, *others = (letter for letter, its in scripts.items() if its == script)
        table.append(f"kinds['{first}'] = function(KEYS, ARGV)\n{script}\nend\n")
        table += [f"kinds['{letter}'] = kinds['{first}']\n" for letter in others]
    return "\n".join([*table, own])


SCRIPTS = {letter: joined(read(name)) for letter, name in _OWN.items()}
"""By a kind's letter, what a server runs for it."""

SCRIPTS["multi"] = joined_multi(read("multi"), SCRIPTS)
