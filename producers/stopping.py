"""Finds where an answer ends besides its longest length: at stop strings, and never in its first tokens.

Token n of an answer completes a stop string if the text of the first n tokens contains one that ends behind
the text of the first n - 1. Half characters at the end of a text don't count. So the end depends on the
answer's tokens alone: not on the batch, and not on which engine drew which of them.

    last token ── may it complete one? by its own text, remembered ──► no: nearly always
        └── yes ──► the text of the last few tokens ──► the whole text
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from infra.end_tokens import end_tokens
from producers.tokenizing import load_decode, special_tokens
from schemas.runspec import RunSpec

_HALF = "\ufffd"  # stands for the bytes of a character that is not whole
_TAIL = 16  # tokens that are looked at first
_MARGIN = 8  # characters: the first ones of a cut text may differ from those in the whole text


class Stopping:
    """Says whether an answer has ended, and what its text is."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        min_tokens: int = 0,
        end_tokens: Sequence[int] = (),
    ) -> None:
        self.min_tokens = min_tokens
        self.end_tokens = list(end_tokens)  # have no probability among the first `min_tokens` tokens
        self._decode, self._stop, self._stop_tokens = decode, list(stop), frozenset(stop_tokens)
        self._last = frozenset(one[-1] for one in stop)
        self._longest = max(map(len, stop), default=0)
        self._may: dict[int, bool] = {}  # by token

    @property
    def looks(self) -> bool:
        """Whether there is anything that can end an answer: else `ends` is always False."""
        return bool(self._stop or self._stop_tokens)

    def ends(self, drawn: Sequence[int], made: Sequence[int] = ()) -> bool:
        """Return whether the last token ends the answer. `made`: tokens before `drawn`, of other engines."""
        if not len(drawn) or len(made) + len(drawn) <= self.min_tokens:
            return False
        last = int(drawn[-1])
        if last in self._stop_tokens:
            return True
        if not self._may_complete(last):
            return False
        tokens = [*made, *drawn]
        return self._in_tail(tokens) and self._start(tokens) is not None

    def first_end(self, drawn: Sequence[int], made: Sequence[int], since: int) -> int | None:
        """Return how many tokens of `drawn` end the answer, if one behind the first `since` ends it."""
        for count in range(since + 1, len(drawn) + 1):
            if self.ends(drawn if count == len(drawn) else drawn[:count], made):
                return count
        return None

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of an answer, without the stop string that ended it and without special tokens."""
        whole = tokens.tolist()
        start = self._start(whole) if self._stop and len(whole) > self.min_tokens else None
        return self._decode(whole)[:start]

    def _may_complete(self, token: int) -> bool:
        """Return whether the token's text has the last character of a stop string, or a part of one."""
        found = self._may.get(token)
        if found is None:
            # twice: some decoders drop the space before the first token
            text = self._decode([token, token])
            found = self._may[token] = _HALF in text or not self._last.isdisjoint(text)
        return found

    def _in_tail(self, tokens: list[int]) -> bool:
        """Return whether the last token completes a stop string, as far as the end of the text shows it."""
        size = _TAIL
        while size < len(tokens):
            tail = tokens[-size:]
            if len(self._decode(tail[:-1])) >= self._longest + _MARGIN:
                return self._start(tail) is not None
            size *= 2
        return True

    def _start(self, tokens: list[int]) -> int | None:
        """Return where the first stop string that the last token completes begins in the text."""
        text, before = self._decode(tokens), len(self._decode(tokens[:-1]).rstrip(_HALF))
        found = [text.find(one, max(0, before - len(one) + 1)) for one in self._stop]
        return min((start for start in found if start >= 0), default=None)


def stopping_of(model: str, spec: RunSpec) -> Stopping:
    """Return where answers of a run end. `model`: the folder with the tokenizer."""
    sampling = spec.sampling
    special = special_tokens(model) if sampling.stop else {}
    return Stopping(
        load_decode(model), stop=[one for one in sampling.stop if one not in special],
        stop_tokens=[special[one] for one in sampling.stop if one in special],
        min_tokens=sampling.min_tokens, end_tokens=end_tokens(model) if sampling.min_tokens else (),
    )  # fmt: skip
