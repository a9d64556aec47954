"""Errors about weights. A module of its own, so that naming them does not import torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from infra.errors import Explained


class WeightsError(Explained):
    """Weights that can't be used; the message names version, object and reason."""


_OF_BYTES = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError,
    BufferError, SystemError, struct.error,
)  # fmt: skip


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Turn what bad bytes make Python and its libraries raise into a WeightsError that names the object."""
    try:
        yield
    except _OF_BYTES as error:
        raise WeightsError(f"{what} is damaged: {type(error).__name__}: {str(error)[:500]}") from error
