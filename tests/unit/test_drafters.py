"""Drafters: which texts they learn from, and what a draft costs in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.engines.drafter import Drafter
from producers.engines.history_drafter import HistoryDrafter
from tests.bench._ngram_drafter import NgramDrafter

PROMPT, OTHER = [50, 51, 52, 53, 54, 55], [60, 61, 62, 63, 64, 65]
ANSWER = list(range(1, 41))


def test_an_answer_to_the_same_prompt_is_drafted_from_its_first_token_on() -> None:
    drafter = HistoryDrafter(1024)
    drafter.open("a", PROMPT)
    drafter.close("a", [*PROMPT, *ANSWER])
    drafter.open("b", PROMPT)
    assert drafter.draft("b", PROMPT, 5)[0] == ANSWER[:5]
    assert drafter.draft("b", [*PROMPT, *ANSWER[:10]], 5) == (ANSWER[10:15], 16)
    drafter.open("c", OTHER)
    assert drafter.draft("c", [*OTHER, *ANSWER[:10]], 5) == ([], 0)


def test_an_answer_that_is_being_made_is_drafted_from_too() -> None:
    drafter = HistoryDrafter(1024)
    drafter.open("a", PROMPT)
    drafter.draft("a", [*PROMPT, *ANSWER], 5)
    drafter.open("b", PROMPT)
    assert drafter.draft("b", [*PROMPT, *ANSWER[:3]], 4)[0] == ANSWER[3:7]


def test_the_newer_of_two_answers_is_followed_until_another_token_comes() -> None:
    drafter = HistoryDrafter(1024)
    for name, answer in (("a", [1, 2, 3, 4, 5, 6, 7, 8]), ("b", [1, 2, 3, 4, 9, 9, 9, 9])):
        drafter.open(name, PROMPT)
        drafter.close(name, [*PROMPT, *answer])
    drafter.open("c", PROMPT)
    assert drafter.draft("c", [*PROMPT, 1, 2], 4)[0] == [3, 4, 9, 9]
    assert drafter.draft("c", [*PROMPT, 1, 2, 3, 4, 5], 4)[0] == [6, 7, 8]


def test_ngrams_are_of_the_own_text_alone() -> None:
    drafter = NgramDrafter(1024)
    drafter.open("a", PROMPT)
    drafter.close("a", [*PROMPT, *ANSWER])
    drafter.open("b", PROMPT)
    assert drafter.draft("b", PROMPT, 5)[0] == []
    text = [*PROMPT, *ANSWER, *ANSWER[:6]]
    assert drafter.draft("b", text, 3)[0] == ANSWER[6:9]


@pytest.mark.parametrize("kind", [HistoryDrafter, NgramDrafter])
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=40)), max_size=30))
def test_any_order_of_texts_is_borne_and_no_draft_is_too_long(
    kind: type[HistoryDrafter], turns: list[tuple[int, list[int]]]
) -> None:
    drafter: Drafter = kind(128)
    texts: dict[str, list[int]] = {}
    for number, more in turns:
        name = str(number)
        if name not in texts:
            texts[name] = [number % 2] * 4
            drafter.open(name, texts[name])
        elif len(texts[name]) > 60:
            drafter.close(name, texts.pop(name))
            continue
        texts[name] = texts[name] + more
        draft, match = drafter.draft(name, texts[name], 7)
        assert len(draft) <= 7 and (match > 0) >= bool(draft)
        assert all(0 <= token <= 3 for token in draft)
