"""Names of locks from the arguments of a call: `"order:{order_id}"`.

The decorator checks a template against the signature of the function. A value must have a type whose text is the same
in every process (str, int, UUID, date, enum), so that a name never contains the address of an object. Inside a value
these characters are escaped: colons, slashes, percent signs ("a:b" becomes "a%3Ab"), and the characters between two
fields of the template. So two calls with different arguments have different names. All other characters stay: order 42
has the name "order:42", as in `redlock("order:42")`. An empty value is refused: all calls without a value would share
one name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import date
from enum import Enum
from string import Formatter
from typing import Any
from uuid import UUID

from asynclock._errors import ConfigError

Namer = Callable[..., str]
"""A function of the arguments of a call. It returns the name of the call's lock."""

_SEPARATORS = ":/%"


def namer(name: str | Callable[..., str], function: Callable[..., Any]) -> Namer:
    """The namer for the calls of `function`: `name` itself, or one made of the template `name`.

    Raises ConfigError if the template does not fit the signature. The namer raises TypeError for a value of another
    type, and ConfigError for an empty one.
    """
    if callable(name):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"the name is a template such as 'order:{{order_id}}', not {type(name).__name__}")
    signature = inspect.signature(function)
    parts = _parts(name, signature, function.__qualname__)
    escaped = set(_SEPARATORS).union(*(literal for literal, field in parts[1:] if field))

    def named(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        texts = (literal + (_text(field, bound.arguments, escaped) if field else "") for literal, field in parts)
        return "".join(texts)

    return named


def _parts(template: str, signature: inspect.Signature, function: str) -> list[tuple[str, str]]:
    """(literal, field after it or "") of each part of the template."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{template!r} is no template: {error}; write a literal brace as {{{{ or }}}}") from None
    parts: list[tuple[str, str]] = []
    for literal, field, spec, conversion in parsed:
        if spec or conversion:
            raise ConfigError(f"{template!r}: a field is a plain {{name}}, without ! or :")
        if field is not None:
            first = field.replace("[", ".").partition(".")[0]
            if first not in signature.parameters:
                has = ", ".join(signature.parameters) or "none"
                raise ConfigError(
                    f"{template!r} names {first!r}, which {function} does not take; its parameters: {has}"
                )
            if parts and parts[-1][1] and not literal:
                raise ConfigError(f"{template!r}: put a character between two fields, so that their values stay apart")
        parts.append((literal, field or ""))
    return parts


def _text(field: str, arguments: dict[str, Any], escaped: set[str]) -> str:
    value, _ = Formatter().get_field(field, (), arguments)
    if isinstance(value, Enum):
        value = value.name
    elif isinstance(value, date):  # or a datetime, which is a date
        value = value.isoformat()
    if not isinstance(value, (str, int, UUID)):
        raise TypeError(
            f"{field}={type(value).__name__} does not name a lock: give a str, int, UUID, date or enum, "
            "or a function that makes the name"
        )
    text = str(value)
    if not text:
        raise ConfigError(
            f"{field}='' does not name a lock, because all calls with an empty {field} would share it: give a value, "
            "or a function that makes the name"
        )
    return "".join(_escape(each) if each in escaped else each for each in text)


def _escape(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())
