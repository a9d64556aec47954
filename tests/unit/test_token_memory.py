"""The memory that drafts come from: what it finds was there, whatever went through it."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.engines import token_memory
from producers.engines.token_memory import CONTEXTS, TextFollower, TokenMemory

tokens = st.lists(st.integers(0, 3), max_size=80)
texts = st.lists(st.tuples(tokens, st.integers(-(2**63), 2**63 - 1)), max_size=12)


@given(texts, tokens, st.integers(0, 3))
def test_a_match_is_a_place_that_these_tokens_stand_before(
    texts: list[tuple[list[int], int]], text: list[int], owner: int
) -> None:
    memory = TokenMemory(256)
    for other, its_owner in texts:
        memory.append(other, its_owner % 4)
    found = memory.find(text, owner)
    if found:
        assert found.length >= CONTEXTS[-1]
        before = memory.read(found.place - found.length, found.length)
        assert before == text[-found.length :]
        assert memory.read(found.place, 5)


@given(tokens, st.integers(0, 2**64))
def test_few_tokens_are_found_as_many_are(text: list[int], owner: int) -> None:
    """Few tokens are hashed by Python, and many by numpy: the slots must be the same."""
    few, many = TokenMemory(512), TokenMemory(512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_memory, "_FEW", len(text) + 1)
        few.append(text, owner)
        patch.setattr(token_memory, "_FEW", CONTEXTS[0] + 1)
        many.append(text, owner)
    for end in range(len(text) + 1):
        assert few.find(text[:end], owner) == many.find(text[:end], owner)


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=60))
def test_the_newest_text_of_an_owner_is_found_and_followed(text: list[int]) -> None:
    memory = TokenMemory(1024)
    memory.append(text, 7)
    cut = CONTEXTS[0]
    follower = TextFollower(memory, 7)
    for end in range(cut, len(text)):
        guess, match = follower.guess(text[:end], 4)
        assert match >= CONTEXTS[-1]
        assert guess
    assert memory.find(text[:cut], 8) is None


def test_a_text_that_was_written_over_is_gone_and_the_size_stays() -> None:
    memory = TokenMemory(256)
    memory.append(list(range(100, 130)), 1)
    assert memory.find(list(range(100, 110)), 1)
    size = sys.getsizeof(memory._tokens)
    for number in range(200):
        memory.append([number % 7] * 40, 2)
    assert memory.find(list(range(100, 110)), 1) is None
    assert memory.read(5, 3) == []
    assert sys.getsizeof(memory._tokens) == size


def test_a_text_ends_where_the_next_begins() -> None:
    memory = TokenMemory(256)
    memory.append([1, 2, 3, 4], 1)
    memory.append([5, 6, 7, 8], 1)
    found = memory.find([1, 2, 3], 1)
    assert found and memory.read(found.place, 10) == [4]
    assert memory.find([2, 3, 4], 1) is None
