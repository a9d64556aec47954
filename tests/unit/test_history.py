"""A prompt's own history: what earlier epochs are worth is measured."""

from __future__ import annotations

import numpy as np
import pytest

from producers.ranker.history import History

KEYS = list(range(200))


def after(rng: np.random.Generator, epochs: int, own: np.ndarray, noise: float, drift: float) -> History:
    """Nothing is read in the prompts; their logs are their own, and noise."""
    history, read = History(), np.zeros(len(KEYS))
    for epoch in range(epochs):
        history = history.seen(KEYS, read, own + drift * epoch + rng.normal(0, noise, len(KEYS)))
    return history


def test_what_stays_is_believed_and_what_is_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    own, nothing = rng.normal(0, 1, len(KEYS)), np.zeros(len(KEYS))
    steady = after(rng, 4, own, 0.1, 0.0)
    assert np.abs(steady.correction(KEYS, nothing) - own).mean() < 0.15
    noisy = after(rng, 8, nothing, 1.0, 0.0)
    assert np.abs(noisy.correction(KEYS, nothing)).mean() < 0.3  # the newest are 0.8 off


def test_a_drift_of_all_is_followed() -> None:
    rng = np.random.default_rng(1)
    own = rng.normal(0, 1, len(KEYS))
    history = after(rng, 6, own, 0.05, 0.3)
    expected = own + 0.3 * 6
    assert np.abs(history.correction(KEYS, np.zeros(len(KEYS))) - expected).mean() < 0.15


def test_new_prompts_are_left_as_they_were_read() -> None:
    history = after(np.random.default_rng(2), 4, np.ones(len(KEYS)), 0.1, 0.2)
    assert history.correction([10_000], np.zeros(1)).tolist() == [0.0]
    assert History().correction(KEYS, np.ones(len(KEYS))).tolist() == [0.0] * len(KEYS)


def test_what_is_stored_is_restored() -> None:
    history = after(np.random.default_rng(3), 3, np.ones(len(KEYS)), 0.3, 0.1)
    again = History.restored(history.arrays())
    read = np.linspace(-1, 1, len(KEYS))
    assert again.correction(KEYS, read).tobytes() == history.correction(KEYS, read).tobytes()
    with pytest.raises(ValueError, match="square"):
        History.restored(history.arrays() | {"square": np.zeros((2, 2))})
    assert History.restored(History().arrays()).arrays()["lengths"].shape == (0, 2)
