"""The kinds of lock of one name. Of a kind that is stored, the floors above know its entry here: family, letter, rule.
The clients import the kinds that they make.

`docs/extending.md` shows how to add one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asynclock.rules.model import letter_of
from asynclock.rules.mutex import MUTEX
from asynclock.rules.rwlock import READ, WRITE
from asynclock.rules.semaphore import SEMAPHORE

if TYPE_CHECKING:
    from asynclock.rules.model import Rule


class Registered(NamedTuple):
    """One kind."""

    family: str  # the name of the kind in messages and `inspect`; all holds of a name are of one family at a time
    letter: str  # the first character of the mode in its ids; "" for the mutex
    rule: Rule


REGISTRY = (
    Registered("mutex", "", MUTEX),
    Registered("read-write lock", "r", READ),
    Registered("read-write lock", "w", WRITE),
    Registered("semaphore", "s", SEMAPHORE),
)

FAMILIES = {each.letter: each.family for each in REGISTRY}
"""By the letter of a kind."""

RULES: dict[str, Rule] = {each.letter: each.rule for each in REGISTRY}
"""By the letter of a kind."""

RULES_BY_FAMILY: dict[str, Rule] = {each.family: each.rule for each in REGISTRY}
"""One rule of each family, for a break, which is the same for all rules of a family."""


def family_of(id: str) -> str | None:
    """The family of a hold with this id; None if its letter is not registered."""
    return FAMILIES.get(letter_of(id))


def rule_of(mode: str) -> Rule:
    """The rule of a hold whose id has this mode."""
    return RULES.get(mode[:1], MUTEX).of_mode(mode)
