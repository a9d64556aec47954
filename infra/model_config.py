"""Reads the config.json of a model's folder, which may be anybody's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LARGEST = 8 << 20  # bytes


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a model's config says. Raises OSError or ValueError if it can't be read."""
    with (folder / "config.json").open("rb") as opened:
        text = opened.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def count_in(config: dict[str, Any], *keys: str) -> int:
    """Return the number that a config has under the first of some keys; 0 if it has none that makes sense."""
    found = (config.get(key) for key in keys)
    counts = (one for one in found if isinstance(one, int) and not isinstance(one, bool))
    return next((one for one in counts if 0 < one < 1 << 16), 0)
