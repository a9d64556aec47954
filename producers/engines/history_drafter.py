"""Drafts from other answers to the same prompt: of its group, as far as they are made here, and of earlier epochs.

answers that end here ──► memory of fixed size: the newest over the oldest ──► drafts
answers that run and are drafted for ──► every few tokens ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from producers.engines.token_memory import CONTEXTS, Follower, TokenMemory

TOKENS = 1 << 21  # that are remembered: 56 MiB
_CHUNK = 32  # tokens of a running answer that are written at once


@dataclass
class _Answer:
    follower: Follower
    written: int  # tokens of the text that the memory has


class HistoryDrafter:
    """One memory for all prompts of a generator."""

    def __init__(self, tokens: int = TOKENS) -> None:
        self._memory = TokenMemory(tokens)
        self._answers: dict[str, _Answer] = {}

    def open(self, name: str, prompt: Sequence[int]) -> None:
        owner = hash(tuple(prompt))  # by its tokens: so it is the same prompt in all epochs
        self._answers[name] = _Answer(Follower(self._memory, owner), len(prompt))

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
