"""Values as JSON for other programs, which has no number that is not finite: null stands for those."""

from __future__ import annotations

import json
import math
from typing import Any


def plain_json(value: object, **options: Any) -> str:
    """Return a value as JSON, with null for NaN and infinity. `options`: those of `json.dumps`."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
