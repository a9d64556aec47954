"""Remembers the tokens of texts, and finds where some stood before: of fixed size, whatever passes through.

append ──► ring of tokens, the newest over the oldest
             └─► one table for each context length: hash of a text's owner and the tokens before ──► place
find ◄── the longest context that the table knows and the ring confirms

A place that was written over, or that another context took in the table, shows: the tokens in front of it are
then others. So nothing has to be deleted, and nothing is counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONTEXTS = (6, 3)  # tokens that are looked for, the longest first: twice as many as the others
_LONGEST = 32  # to which a match is measured
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FEW = 24  # tokens: for fewer, plain Python is faster than numpy
_BREAK = -1  # stands between two texts


class Match(NamedTuple):
    """A place at which the last tokens of a text stood before."""

    place: int  # of the token that came next
    length: int  # tokens in front of it that agree; longer agreements are not measured


class TokenMemory:
    """The newest `capacity` tokens of texts, rounded up to a power of two, with 20 bytes for each."""

    def __init__(self, capacity: int) -> None:
        bits = max(6, (capacity - 1).bit_length())
        self._size = 1 << bits
        self._shift = 64 - bits
        self._tokens = array("i", bytes(4 * self._size))
        self._tables = {length: array("q", bytes(8 * self._size)) for length in CONTEXTS}
        self._end = 0  # place behind the newest token; a place is the number of tokens before it
        self.append([_BREAK], 0)  # so place 0 is nothing's, and an empty table's zeros lead nowhere

    def append(self, tokens: Sequence[int], owner: int) -> None:
        """Add a text, or more of one, from the tokens on that stand before the new ones."""
        self._put([_BREAK])
        tokens = tokens[-self._size // 2 :]
        first = self._end
        self._put(tokens)
        if len(tokens) < _FEW:
            self._index_few(tokens, first, owner)
        else:
            self._index_many(tokens, first, owner)

    def find(self, text: Sequence[int], owner: int) -> Match | None:
        """Return where the last tokens of a text of this owner stood before; None: nowhere."""
        for length in CONTEXTS:
            if len(text) < length:
                continue
            place = self._tables[length][self._slot(text[-length:], owner)]
            if self._holds(place - length) and (found := self._agreement(text, place)) >= length:
                return Match(place, found)
        return None

    def read(self, place: int, most: int) -> list[int]:
        """Return the tokens from a place on, up to the end of their text; none if they are gone."""
        if not self._holds(place):
            return []
        found = []
        for at in range(place, min(place + most, self._end)):
            token = self._tokens[at % self._size]
            if token == _BREAK:
                break
            found.append(token)
        return found

    def _holds(self, place: int) -> bool:
        return self._end - self._size <= place < self._end and place >= 0

    def _agreement(self, text: Sequence[int], place: int) -> int:
        """Return how many of the text's last tokens stand in front of a place."""
        tokens, size = self._tokens, self._size
        most = min(_LONGEST, len(text), place)
        for count in range(most):
            if tokens[(place - 1 - count) % size] != text[-1 - count]:
                return count
        return most

    def _put(self, tokens: Sequence[int]) -> None:
        start = self._end % self._size
        room = self._size - start
        if len(tokens) > 4:
            whole = np.asarray(tokens, dtype=np.int32)
            view = np.frombuffer(self._tokens, dtype=np.int32)
            view[start : start + min(room, whole.size)] = whole[:room]
            view[: max(0, whole.size - room)] = whole[room:]
        else:
            for number, token in enumerate(tokens):
                self._tokens[(start + number) % self._size] = token
        self._end += len(tokens)

    def _index_few(self, text: Sequence[int], first: int, owner: int) -> None:
        """Note for each token of a text at place `first` which tokens stand before it."""
        for number in range(len(text)):
            for length in CONTEXTS:
                if length <= number:
                    context = text[number - length : number]
                    self._tables[length][self._slot(context, owner)] = first + number

    def _index_many(self, text: Sequence[int], first: int, owner: int) -> None:
        """Do the same for many tokens at once."""
        tokens = np.array(text, dtype=np.int64).astype(np.uint64)
        long, short = CONTEXTS
        factor, shift, mine = np.uint64(_FACTOR), np.uint64(self._shift), np.uint64(owner & _MASK)
        with np.errstate(over="ignore"):
            sums = tokens[: 1 - short] * factor  # at n: of as many tokens from n on as a short context has
            for number in range(1, short):
                sums = (sums ^ tokens[number : tokens.size + 1 - short + number]) * factor
                sums ^= sums >> np.uint64(29)
            both = (sums[: tokens.size - long + 1] * factor) ^ sums[short : tokens.size - long + 1 + short]
            for length, found in ((short, sums[:-1]), (long, both[:-1])):
                slots = ((found ^ mine) * factor) >> shift
                table = np.frombuffer(self._tables[length], dtype=np.int64)
                table[slots] = first + length + np.arange(found.size)

    def _slot(self, context: Sequence[int], owner: int) -> int:
        """Return the context's slot in a table."""
        short = CONTEXTS[1]
        found = _sum(context[:short])
        if len(context) > short:
            found = ((found * _FACTOR) & _MASK) ^ _sum(context[short:])
        return (((found ^ (owner & _MASK)) * _FACTOR) & _MASK) >> self._shift


def _sum(tokens: Sequence[int]) -> int:
    """Return a number of a short context that differs from that of nearly every other."""
    found = (tokens[0] * _FACTOR) & _MASK
    for token in tokens[1:]:
        found = ((found ^ token) * _FACTOR) & _MASK
        found ^= found >> 29
    return found


class TextFollower:
    """Follows one text: where its last tokens stood before, as long as what comes is what came there."""

    def __init__(self, memory: TokenMemory, owner: int) -> None:
        self._memory, self.owner = memory, owner
        self._at: Match | None = None
        self.seen = 0  # tokens of the text that are known here

    def guess(self, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return the tokens that may come next, at most so many, and the length of the match before them.

        The text is the one of the last call, and perhaps longer.
        """
        for token in text[self.seen :] if self._at else ():
            assert self._at is not None
            if self._memory.read(self._at.place, 1) != [token]:
                self._at = None
                break
            self._at = Match(self._at.place + 1, self._at.length + 1)
        self.seen = len(text)
        found = self._memory.read(self._at.place, most) if self._at else []
        if not found:
            self._at = self._memory.find(text, self.owner)
            found = self._memory.read(self._at.place, most) if self._at else []
        return found, self._at.length if self._at else 0
