"""Grade-school mathematics: an answer is right if its last number is that of the solution."""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number in a text; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def reward(problem: dict[str, Any], completion: str) -> float:
    """Return 1 for the right number, else 0. A solution of GSM8K ends with `#### NUMBER`."""
    wanted = last_number(problem["answer"])
    return float(wanted is not None and last_number(completion) == wanted)
