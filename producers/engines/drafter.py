"""The interface of a drafter, which guesses how answers go on. A wrong guess costs time, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses how texts go on. A text is a prompt with the tokens of its answer so far."""

    def open(self, name: str, prompt: Sequence[int]) -> None:
        """Begin a text. The prompt is without tokens of an answer that other engines drew."""

    def draft(self, name: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return a guess of at most so many tokens, and how many tokens before it speak for it.

        The text is the one of the last call for this name, and perhaps longer.
        """

    def close(self, name: str, text: Sequence[int]) -> None:
        """End a text; it may be one that is to be learned from."""
