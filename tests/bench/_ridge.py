"""Ridge regression of log lengths over bags of words: the plain way, which a ranker has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from producers.ranker.ranker import Answered

_STRENGTHS = (1.0, 10.0, 100.0)
_STEPS = 40  # of conjugate gradients


def ridge(learn: Sequence[Answered], rest: Sequence[Answered]) -> np.ndarray:
    """Return predicted lengths of `rest`. A fifth of `learn` chooses the strength."""
    cut = len(learn) // 5
    errors = [
        float(np.square(_fitted(learn[cut:], learn[:cut], one) - _logs(learn[:cut])).mean())
        for one in _STRENGTHS
    ]
    return np.exp(_fitted(learn, rest, _STRENGTHS[int(np.argmin(errors))]))


def _logs(groups: Sequence[Answered]) -> np.ndarray:
    return np.array([np.mean(np.log(np.maximum(group.lengths, 1))) for group in groups])


def _fitted(learn: Sequence[Answered], rest: Sequence[Answered], strength: float) -> np.ndarray:
    words = np.unique(np.concatenate([group.question.tokens for group in learn]))
    rows, places = _words(learn, words)
    target = _logs(learn)

    def said(weights: np.ndarray, rows: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
        return np.bincount(rows, weights[places], count)

    def gathered(values: np.ndarray) -> np.ndarray:
        return np.bincount(places, values[rows], len(words))

    weights = np.zeros(len(words))
    left = gathered(target - target.mean())
    step, size = left, float(left @ left)
    for _ in range(_STEPS):
        along = said(step, rows, places, len(learn))
        image = gathered(along - along.mean()) + strength * step
        share = size / float(step @ image)
        weights, left = weights + share * step, left - share * image
        last, size = size, float(left @ left)
        step = left + size / last * step
    bias = target.mean() - said(weights, rows, places, len(learn)).mean()
    return bias + said(weights, *_words(rest, words), len(rest))


def _words(groups: Sequence[Answered], words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each word of each prompt the number of the prompt and of the word, if it is known."""
    tokens = np.concatenate([group.question.tokens for group in groups])
    rows = np.repeat(np.arange(len(groups)), [len(group.question.tokens) for group in groups])
    known = np.isin(tokens, words)
    return rows[known], np.searchsorted(words, tokens[known])
