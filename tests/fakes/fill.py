"""Messages with only the fields that a test cares about."""

from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, get_args, get_origin

import msgspec
import numpy as np

_EMPTY: dict[str, Any] = {"str": "", "int": 0, "float": 0.0, "bool": False, "bytes": b""}


def fill(kind: Any, **given: Any) -> Any:
    """A message of a kind; what is not given and has no default is empty, or the least that it may be."""
    return kind(**{name: make() for name, make in _required(kind).items() if name not in given} | given)


@cache
def _required(kind: Any) -> dict[str, Callable[[], Any]]:
    """How to make what has no default."""
    return {
        field.name: (lambda: 1.0)
        if (field.name, field.type) == ("predicted", float)
        else partial(_least, field.type)
        for field in msgspec.structs.fields(kind)
        if field.required
    }


def _least(hint: Any) -> Any:
    base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    bounds = marks[0] if marks and isinstance(marks[0], msgspec.Meta) else msgspec.Meta()
    name = str(getattr(base, "__name__", base))
    if name == "str" and bounds.min_length:
        return "x" * bounds.min_length
    if name == "int" and (bounds.ge or 0) > 0:
        return bounds.ge
    if name in _EMPTY:
        return _EMPTY[name]
    if name.startswith("list"):
        return []
    return {} if name.startswith("dict") else np.zeros(0)
