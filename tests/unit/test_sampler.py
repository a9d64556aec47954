"""Seeded sampling: uniform, right in distribution, and blind to the batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

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
