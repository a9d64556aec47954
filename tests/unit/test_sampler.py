"""Seeded sampling: uniform, right in distribution, and blind to the batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.engines.sampler import StreamSampler, uniforms


def draw(
    logits: torch.Tensor, names: list[str], seeds: list[int], positions: list[int]
) -> tuple[list[int], StreamSampler]:
    sampler = StreamSampler()
    for name, seed in zip(names, seeds, strict=True):
        sampler.open(name, seed)
    sampler.batch = SimpleNamespace(
        req_ids=[f"{name}-12345678" for name in names],
        req_output_token_ids=[[0] * place for place in positions],
    )
    tokens, _ = sampler(logits.clone(), {}, None, None)
    return tokens.tolist(), sampler


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    grid = uniforms(np.repeat(np.arange(200), 50), np.tile(np.arange(50), 200))
    assert 0 <= grid.min() < grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.02
    assert abs(np.histogram(grid, bins=10, range=(0, 1))[0] / grid.size - 0.1).max() < 0.01
    assert np.unique(grid).size == grid.size
    assert (
        abs(np.corrcoef(grid.reshape(200, 50)[:-1].ravel(), grid.reshape(200, 50)[1:].ravel())[0, 1]) < 0.05
    )


def test_tokens_come_with_their_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 8000
    logits = probabilities.log().expand(count, 4)
    names = [f"s{number}" for number in range(count)]
    tokens, sampler = draw(logits, names, list(range(count)), [0] * count)
    found = np.bincount(tokens, minlength=4) / count
    np.testing.assert_allclose(found, probabilities, atol=0.02)
    for name, token in list(zip(names, tokens, strict=True))[:50]:
        np.testing.assert_allclose(sampler.close(name), [probabilities[token].log()], rtol=1e-5)


def test_a_draw_does_not_depend_on_neighbours_or_on_its_row() -> None:
    logits = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    names, seeds = [f"s{number}" for number in range(6)], [5, 2**62 + 1, 7, 8, 9, 10]
    together, _ = draw(logits, names, seeds, [3] * 6)
    for row in range(6):
        alone, _ = draw(logits[row : row + 1], [names[row]], [seeds[row]], [3])
        assert alone[0] == together[row]
    backwards, _ = draw(logits.flip(0), names[::-1], seeds[::-1], [3] * 6)
    assert backwards[::-1] == together


def test_a_position_drawn_again_keeps_one_logprob() -> None:
    logits = torch.zeros(1, 4)
    _, sampler = draw(logits, ["a"], [1], [0])
    sampler.batch.req_output_token_ids = [[]]  # the row of a prompt that was not whole yet is drawn again
    sampler(logits.clone(), {}, None, None)
    assert len(sampler.close("a")) == 1


drafts_of_any_kind = st.lists(st.lists(st.tuples(st.booleans(), st.integers(-1, 30)), max_size=6), min_size=1)


@settings(max_examples=50)
@given(drafts_of_any_kind, st.integers(0, 5), st.integers(0, 3))
def test_drafts_change_no_token_and_no_bit_of_a_logprob(
    drafts: list[list[tuple[bool, int]]], min_tokens: int, before: int
) -> None:
    """Also those of a liar. Here the logits of a token are the same however many go together."""
    vocabulary, most = 6, 8
    table = torch.randn(len(drafts), most, vocabulary, generator=torch.Generator().manual_seed(before))

    def fresh() -> StreamSampler:
        sampler = StreamSampler(min_tokens, [0])
        sampler.batch = SimpleNamespace(
            req_ids=[f"s{number}-12345678" for number in range(len(drafts))],
            req_output_token_ids=[[] for _ in drafts],
        )
        for number in range(len(drafts)):
            sampler.open(f"s{number}", 77 + number, before)
        return sampler

    plain = fresh()
    expected: list[list[int]] = [[] for _ in drafts]
    for step in range(most):
        tokens, _ = plain(table[:, step].clone(), {}, None, None)
        for made, token in zip(expected, tokens.tolist(), strict=True):
            made.append(token)
        plain.batch.req_output_token_ids = [list(made) for made in expected]
    guesses = [
        [right[place] if honest else lie for place, (honest, lie) in enumerate(draft)]
        for draft, right in zip(drafts, expected, strict=True)
    ]
    sampler = fresh()
    counts = np.array([len(guess) + 1 for guess in guesses])
    rows = np.repeat(np.arange(len(drafts)), counts)
    aheads = np.concatenate([np.arange(count) for count in counts])
    flat = np.concatenate([[*guess, -1] for guess in guesses])
    found = sampler.verify(table[rows, aheads].clone(), rows, aheads, flat)
    for number, (guess, right) in enumerate(zip(guesses, expected, strict=True)):
        agree = [one == other for one, other in zip(guess, right, strict=False)]
        count = agree.index(False) + 1 if False in agree else len(guess) + 1
        assert found[number] == right[:count]
        assert np.array_equal(sampler.close(f"s{number}"), plain.close(f"s{number}", count))
