"""Drafts from the text itself: what came after the same tokens earlier in its prompt or answer."""

from __future__ import annotations

from collections.abc import Sequence

from producers.engines.token_memory import Follower, TokenMemory


class NgramDrafter:
    """One small memory for each text that is drafted for, from its first draft to its end."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._followers: dict[str, tuple[TokenMemory, Follower] | None] = {}

    def open(self, name: str, prompt: Sequence[int]) -> None:
        self._followers[name] = None

    def draft(self, name: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        found = self._followers[name]
        if found is None:
            memory = TokenMemory(self._longest + 64)
            memory.append([], 0)
            found = self._followers[name] = memory, Follower(memory, 0)
        memory, follower = found
        memory.append(text[follower.seen :], 0, goes_on=True)
        return follower.guess(text, most)

    def close(self, name: str, text: Sequence[int]) -> None:
        self._followers.pop(name, None)
