"""numba's `njit`, where loops are compiled (`STREAMRL_NUMBA`); else functions stay as they are.

Decided when a module with such loops is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from infra import choices

Function = TypeVar("Function", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[Function], Function]:
    """A decorator. Options as numba's."""
    if not choices.compiles():
        return lambda function: function
    import numba

    made: Callable[[Function], Function] = numba.njit(**options)
    return made
