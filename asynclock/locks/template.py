"""Names of locks from the arguments of a call: `"order:{order_id}"`.

The decorator checks a template against the signature of the function. A value must have a type whose text is the same
in every process (str, int, UUID, date, enum), so that a name never contains the address of an object. Inside a value
these characters are escaped: colons, slashes, percent signs ("a:b" becomes "a%3Ab"), and the characters between two
fields of the template. So two calls with different arguments have different names. All other characters stay: order 42
has the name "order:42", as in `redlock("order:42")`. An empty value is refused: all calls without a value would share
one name.

Equal values have one name: a member of a StrEnum and its str, a member of an IntEnum and its int, datetimes of one
instant in different zones. A bool is refused, because True equals 1.

For a functools.partial, the arguments that it binds are used, too. A function that takes (*args, **kwargs), such as an
AsyncMock, does not say what its parameters are. There a field is a keyword argument of the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from inspect import Parameter
from string import Formatter
from typing import Any, get_origin
from uuid import UUID

from asynclock._errors import ConfigError
from asynclock._options import check_name

Namer = Callable[..., str]
"""A function of the arguments of a call. It returns the name of the call's lock."""

NAMES = "give a str, int, UUID, date or enum, or a function that makes the name"
"""What an error says of a value that names no lock."""

_SEPARATORS = ":/%"


class _Anything:
    """In the place of a value, of which the fields of a template take any attribute and any item."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self


def parse(template: str) -> list[tuple[str, str]]:
    """(literal, field after it or "") of each part of the template. Raises ConfigError for a template that makes no
    name, whatever the function and the values are."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{template!r} is no template: {error}; write a literal brace as {{{{ or }}}}") from None
    parts: list[tuple[str, str]] = []
    before = ""  # an escaped brace ends a literal: this is the text since the last field
    for literal, field, spec, conversion in parsed:
        before += literal
        if spec or conversion:
            raise ConfigError(f"{template!r}: a field is a plain {{name}}, without ! or :")
        if field is None:
            continue
        _check_field(template, field)
        if parts and not before:
            raise ConfigError(f"{template!r}: put a character between two fields, so that their values stay apart")
        parts.append((before, field))
        before = ""
    if before or not parts:
        parts.append((before, ""))
    check_name(fill(parts, "{{{}}}".format))
    return parts


def fill(parts: Sequence[tuple[str, str]], text_of: Callable[[str], str]) -> str:
    """The template with `text_of(field)` in the place of each field."""
    return "".join(literal + (text_of(field) if field else "") for literal, field in parts)


def _check_field(template: str, field: str) -> None:
    first = _first(field)
    if not first or first.isdecimal():
        raise ConfigError(f"{template!r}: a field needs the name of a parameter, such as {{order_id}}")
    try:
        Formatter().get_field(field, (), {first: _Anything()})
    except ValueError as error:
        raise ConfigError(f"{template!r}: the field {{{field}}} cannot be read: {error}") from None


def namer(name: str | Callable[..., str], function: Callable[..., Any]) -> Namer:
    """The namer for the calls of `function`: `name` itself, or one made of the template `name`.

    Raises ConfigError if the template does not fit the signature. The namer raises TypeError for a value of a type that
    does not name a lock, and ConfigError for an empty one.
    """
    if callable(name):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"the name is a template such as 'order:{{order_id}}', not {type(name).__name__}")
    given = function if isinstance(function, partial) else partial(function)
    signature = inspect.signature(given.func)
    bind = partial(signature.bind, *given.args, **given.keywords)  # the arguments that a partial binds are used, too
    parts = _parts(name, signature, getattr(given.func, "__qualname__", repr(given.func)))
    escaped = set(_SEPARATORS).union(*(_apart(literal) for literal, field in parts[1:] if field))

    def named(*args: Any, **kwargs: Any) -> str:
        bound = bind(*args, **kwargs)
        bound.apply_defaults()
        values = {**bound.kwargs, **bound.arguments}
        return fill(parts, lambda field: _text(field, values, escaped))

    return named


def _parts(template: str, signature: inspect.Signature, function: str) -> list[tuple[str, str]]:
    """As `parse`. Raises ConfigError for a field that the function does not take, too."""
    takes_all = [each.kind for each in signature.parameters.values()] == [
        Parameter.VAR_POSITIONAL,
        Parameter.VAR_KEYWORD,
    ]
    parts = parse(template)
    for first in [_first(field) for _, field in parts if field]:
        if first not in signature.parameters and not takes_all:
            has = ", ".join(signature.parameters) or "none"
            raise ConfigError(f"{template!r} names {first!r}, which {function} does not take; its parameters: {has}")
    return parts


def _apart(literal: str) -> str:
    """The characters of the text between two fields that a value must not contain, so that the values stay apart. The
    last piece of the text, which begins after a literal brace, is enough."""
    last = literal[max(literal.rfind("{"), literal.rfind("}")) + 1 :]
    return literal if not last and not set(literal) & set(_SEPARATORS) else last


def _first(field: str) -> str:
    """The parameter that a field begins with."""
    return field.replace("[", ".").partition(".")[0]


def _text(field: str, arguments: dict[str, Any], escaped: set[str]) -> str:
    if (first := _first(field)) not in arguments:
        raise TypeError(f"the name of the lock needs {first!r}: give it as a keyword argument, {first}=...")
    value, _ = Formatter().get_field(field, (), arguments)
    text = _plain(value)
    if text is None:
        why = "True equals 1, and its text is 'True'; " if isinstance(value, bool) else ""
        raise TypeError(f"{field}={type(value).__name__} does not name a lock: {why}{NAMES}")
    if not text:
        raise ConfigError(
            f"{field}='' does not name a lock, because all calls with an empty {field} would share it: give a value, "
            "or a function that makes the name"
        )
    return "".join(_escape(each) if each in escaped else each for each in text)


def _plain(value: object) -> str | None:
    """The text of a value, which is the same for equal values; None: values of its type do not name a lock. A subclass
    of str or int may have another text (an enum has), so this is the text of the str or int itself."""
    match value:
        case bool():
            return None
        case str():
            return str.__str__(value)
        case int():
            return int.__repr__(value)
        case datetime() if value.utcoffset() is not None:
            return value.astimezone(UTC).isoformat()
        case date():
            return value.isoformat()
        case UUID():
            return str(value)
        case Enum():
            return value.name
    return None


def never_names(kind: object) -> bool:
    """Whether no value of that type names a lock, as far as an annotation says so."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type) or issubclass(origin, Enum):
        return False
    return issubclass(origin, (bool, float, complex, Decimal, bytes, list, tuple, dict, set, frozenset))


def _escape(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())
