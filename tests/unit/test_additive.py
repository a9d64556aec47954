"""The log-additive term, and how it is mixed with the network."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.ranker import additive
from producers.ranker.additive import WEIGHTS, Additive, Bags, bags_of
from producers.ranker.mix import Mix
from producers.ranker.ranker import Answered, NoBackbone, Ranker, question_of

PROMPTS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12), min_size=1, max_size=9)


@given(PROMPTS)
@settings(max_examples=25, deadline=None)
def test_bags_are_the_matrix_that_they_stand_for(prompts: list[list[int]]) -> None:
    texts = [np.array(prompt, np.int32) for prompt in prompts]
    bags = bags_of(texts)
    alone = [bags_of([text]).each()[0] for text in texts]
    weights = np.random.default_rng(0).normal(size=WEIGHTS)
    dense = np.zeros((len(texts), WEIGHTS))
    for row, bag in zip(dense, alone, strict=True):
        row[bag.places] = bag.values
    np.testing.assert_allclose(bags.times(weights), dense @ weights, atol=1e-9)
    np.testing.assert_allclose(Bags.joined(alone).times(weights), dense @ weights, atol=1e-9)
    rows = np.arange(len(texts)) + 1.0
    np.testing.assert_allclose(bags.gathered(rows), dense.T @ rows, rtol=1e-6)
    np.testing.assert_allclose(bags.gathered(rows, squared=True), (dense**2).T @ rows, rtol=1e-6)


def among_filler(number: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Prompts of 60 words: 5 of a hundred that matter, and filler."""
    factors = np.random.default_rng(9).normal(0, 0.5, 100)
    rng = np.random.default_rng(seed)
    texts = [np.concatenate([rng.integers(0, 100, 5), rng.integers(100, 2000, 55)]) for _ in range(number)]
    return texts, np.array([factors[np.unique(text[:5])].sum() for text in texts])


def test_a_few_words_that_matter_are_found_among_filler() -> None:
    texts, target = among_filler(1000, 1)
    term = Additive.fresh().learned(bags_of(texts), target, np.ones(1000), rounds=12)
    unseen, true = among_filler(300, 2)
    assert np.corrcoef(term.predict(bags_of(unseen)), true)[0, 1] > 0.95


def test_dropped_groups_are_not_forgotten() -> None:
    texts, target = among_filler(1000, 1)
    term = Additive.fresh().learned(bags_of(texts), target, np.ones(1000), rounds=12)
    later, noise = [np.array([5000 + n]) for n in range(50)], np.zeros(50)
    term = term.without(bags_of(texts)).learned(bags_of(later), noise, np.ones(50), rounds=3)
    unseen, true = among_filler(300, 2)
    assert np.corrcoef(term.predict(bags_of(unseen)), true)[0, 1] > 0.9


@pytest.mark.parametrize("seed", range(12))
def test_differences_of_any_size_are_learned_from(seed: int) -> None:
    """Lengths may become equal but for rounding, and steps then too small for a float."""
    rng = np.random.default_rng(seed)
    texts = bags_of([rng.integers(0, 6, size).astype(np.int32) for size in rng.integers(1, 5, 4)])
    for exponent in range(158, 165):
        target = rng.normal(size=4) * 10.0**-exponent
        term = Additive.fresh().learned(texts, target, np.ones(4), rounds=3)
        assert np.isfinite(term.predict(texts)).all()


def test_memory_is_bounded_by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, target = among_filler(200, 1)
    whole = Additive.fresh().learned(bags_of(texts), target, np.ones(200)).predict(bags_of(texts))
    monkeypatch.setattr(additive, "_AT_ONCE", 500)
    parts = Additive.fresh().learned(bags_of(texts), target, np.ones(200)).predict(bags_of(texts))
    np.testing.assert_allclose(parts, whole, atol=1e-6)


def test_the_better_one_is_believed_and_none_is_turned_round() -> None:
    rng = np.random.default_rng(0)
    true, mix = rng.normal(size=400), Mix()
    assert mix.worth.tolist() == [0.5, 0.5, 0.0]
    mix = mix.seen(rng.normal(size=400), true + rng.normal(0, 0.1, 400), true)
    assert mix.worth[0] < 0.1 and mix.worth[1] > 0.9
    mix = Mix().seen(-true, true, true)
    assert mix.worth[:2].min() >= 0
    with pytest.raises(ValueError, match=r"mix\.square"):
        Mix.restored(mix.arrays() | {"square": np.zeros((2, 2))})


def test_many_prompts_at_once_are_predicted_as_alone() -> None:
    texts, target = among_filler(128, 3)
    groups = [
        Answered(question_of(str(n), None, text.tolist()), [int(100 * np.exp(log))] * 2)
        for n, (text, log) in enumerate(zip(texts, target, strict=True))
    ]
    ranker = Ranker.fresh(1, NoBackbone(), typical=100.0).learned(groups[:64]).learned(groups[64:])
    questions = [group.question for group in groups] * 6
    alone = np.concatenate([ranker.predict([question]) for question in questions[:128]])
    np.testing.assert_allclose(ranker.predict(questions), np.tile(alone, 6), rtol=1e-4)
