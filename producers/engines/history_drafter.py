"""Drafts what came after the same tokens before: in other answers to the prompt, in this one, in the prompt.

answers that end here ──► memory of fixed size: the newest over the oldest ──► drafts
answers that run and are drafted for ──► every few tokens ──┘

The other answers are those of the group, as far as they are made here, and those of earlier epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from producers.engines.token_memory import CONTEXTS, TextFollower, TokenMemory

_TOKENS = 1 << 21  # that are remembered: 40 MiB
_CHUNK = 32  # tokens of a running answer that are written at once


@dataclass
class _Answer:
    follower: TextFollower
    written: int = 0  # tokens of the text that the memory has


class HistoryDrafter:
    """One memory for all texts of a generator."""

    def __init__(self, tokens: int = _TOKENS) -> None:
        self._memory = TokenMemory(tokens)
        self._answers: dict[str, _Answer] = {}

    def open(self, name: str, prompt: Sequence[int]) -> None:
        self._answers[name] = _Answer(TextFollower(self._memory, self.owner(name, prompt)))

    def owner(self, name: str, prompt: Sequence[int]) -> int:
        """Return a number that the texts have in common which tell of each other."""
        return hash(tuple(prompt))  # by its tokens: so it is the same prompt in all epochs

    def draft(self, name: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        answer = self._answers[name]
        if len(text) >= answer.written + _CHUNK:
            self._write(answer, text)
        return answer.follower.guess(text, most)

    def close(self, name: str, text: Sequence[int]) -> None:
        answer = self._answers.pop(name, None)
        if answer and len(text) > answer.written:
            self._write(answer, text)

    def _write(self, answer: _Answer, text: Sequence[int]) -> None:
        """Write what is new of the text, and the tokens before it that make contexts."""
        self._memory.append(text[max(0, answer.written - CONTEXTS[0]) :], answer.follower.owner)
        answer.written = len(text)
