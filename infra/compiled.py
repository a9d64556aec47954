"""numba's `njit` if loops are compiled (`STREAMRL_NUMBA`); otherwise a decorator that changes nothing.

The choice is made when a module with such loops is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from infra import choices

Function = TypeVar("Function", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[Function], Function]:
    """Return numba's `njit` with these options, or a decorator that returns the function unchanged."""
    if not choices.compiles():
        return lambda function: function
    import numba

    made: Callable[[Function], Function] = numba.njit(**options)
    return made
