"""Messages with only the fields that a test cares about."""

from typing import Any

import msgspec
import numpy as np

_EMPTY: dict[str, Any] = {"str": "", "int": 0, "float": 0.0, "bool": False, "bytes": b""}


def fill(kind: Any, **given: Any) -> Any:
    """A message of a kind; what is not given and has no default is empty."""
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in given:
            name = str(getattr(field.type, "__name__", field.type))
            if name in _EMPTY:
                given[field.name] = _EMPTY[name]
            elif name.startswith("list"):
                given[field.name] = []
            elif name.startswith("dict"):
                given[field.name] = {}
            else:
                given[field.name] = np.zeros(0)
    return kind(**given)
