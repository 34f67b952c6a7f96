"""Names of locks from the arguments of a call: `"order:{order_id}"`.

A template is checked against the signature when it decorates. A value must be of a type whose text is the same in every
process (str, int, UUID, date, enum), so that no object's address gets into a name; and what separates two values in
the template is escaped inside them, as are colons, slashes and percent signs ("a:b" as "a%3Ab"), so that two calls with
different arguments have different names. All else stands as it is: order 42 has the name "order:42", whoever makes it.
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
"""Called with the arguments of a call, it answers the name of its lock."""

_SEPARATORS = ":/%"


def namer(name: str | Callable[..., str], function: Callable[..., Any]) -> Namer:
    """What makes the names for the calls of `function`: from a template, or by a function of its own.

    Raises ConfigError where the template does not fit the signature; the namer, TypeError for a value of another type.
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
        told = (literal + (_text(field, bound.arguments, escaped) if field else "") for literal, field in parts)
        return "".join(told)

    return named


def _parts(template: str, signature: inspect.Signature, function: str) -> list[tuple[str, str]]:
    """(literal, field after it or "") of each part of the template."""
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{template!r} is no template: {error}; write a brace that is meant as {{{{ or }}}}"
        ) from None
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
                raise ConfigError(f"{template!r}: put something between two fields, or their values run together")
        parts.append((literal, field or ""))
    return parts


def _text(field: str, arguments: dict[str, Any], escaped: set[str]) -> str:
    value, _ = Formatter().get_field(field, (), arguments)
    if isinstance(value, Enum):
        value = value.name
    elif isinstance(value, date):  # a datetime, too
        value = value.isoformat()
    if not isinstance(value, (str, int, UUID)):
        raise TypeError(
            f"{field}={type(value).__name__} does not name a lock: give a str, int, UUID, date or enum, "
            "or a function that makes the name"
        )
    return "".join(_escape(each) if each in escaped else each for each in str(value))


def _escape(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())
