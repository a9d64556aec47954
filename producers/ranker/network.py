"""A small network that predicts the length of a prompt's answer. It needs only numpy, and trains in seconds.

    a token and its neighbours ──► hidden ─┬─► what it adds, summed over tokens (log-sum-exp) ──┐
                                           └─► max and mean over tokens ──► what scales it all ─┴► log length

An answer's length is mostly a sum, with a term for each thing that is asked; a word like "briefly" or "in
detail" multiplies it. With this shape, hundreds of prompts teach as much as thousands teach to n-gram
weights.

Everything is float32 and nothing depends on time: the same pairs in the same order give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

BUCKETS = 8192  # tokens of any vocabulary, hashed
_EMBEDDING, _HIDDEN, _GLOBAL = 12, 32, 16
_READ = 48  # tokens from the prompt's beginning, and as many from its end; the additive term reads the others
_RATE = 0.02
_DECAY = 0.003
_BEYOND = 2.0  # errors are clipped at so many log units
_TABLES = ("token", "token_adds")  # by bucket: a step changes only the rows of its batch's tokens

Parameters = dict[str, np.ndarray]


@dataclass(frozen=True)
class Text:
    """A batch of prompts, end to end, each between two paddings."""

    ids: np.ndarray
    places: np.ndarray  # in `ids`: where each token that is not padding stands
    counts: np.ndarray  # number of tokens of each prompt
    dense: np.ndarray  # the backbone's numbers for each prompt

    @property
    def rows(self) -> np.ndarray:
        """For each token, the number of its prompt."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def starts(self) -> np.ndarray:
        """For each prompt, the index of its first token."""
        return np.cumsum(self.counts) - self.counts


def text_of(prompts: Sequence[np.ndarray], dense: np.ndarray) -> Text:
    """Prepare prompts for the network. No prompt may be empty."""
    read = [
        prompt if len(prompt) <= 2 * _READ else np.concatenate([prompt[:_READ], prompt[-_READ:]])
        for prompt in prompts
    ]
    counts = np.array([len(prompt) for prompt in read])
    ids = np.zeros(int((counts + 2).sum()), np.int64)
    places = np.arange(int(counts.sum())) + 2 * np.repeat(np.arange(len(counts)), counts) + 1
    hashed = np.concatenate(read).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    ids[places] = 1 + hashed.astype(np.int64) % BUCKETS
    return Text(ids, places, counts, dense.astype(np.float32))


def _bent(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, np.float32(0.1) * values)


def _slope(values: np.ndarray) -> np.ndarray:
    return (values > 0) * np.float32(0.9) + np.float32(0.1)


@dataclass
class _Pass:
    """Results of the forward pass that the backward pass needs."""

    triples: np.ndarray
    hidden_in: np.ndarray
    hidden: np.ndarray
    shares: np.ndarray  # share of each token in its prompt's sum
    largest: np.ndarray
    rows: np.ndarray
    summary: np.ndarray
    scale_in: np.ndarray
    scale: np.ndarray


class Network:
    """The parameters, and the optimizer's state of each."""

    def __init__(self, parameters: Parameters, moments: Parameters, steps: int) -> None:
        self._at, self._moments, self.steps = parameters, moments, steps

    @classmethod
    def fresh(cls, seed: int, dense: int) -> Self:
        """Return an untrained network; `dense`: how many numbers the backbone gives for a prompt."""
        rng = np.random.default_rng(seed)

        def normal(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            return (rng.normal(0, scale / np.sqrt(rows), (rows, columns))).astype(np.float32)

        parameters = {
            "token": rng.normal(0, 0.5, (BUCKETS + 1, _EMBEDDING)).astype(np.float32),
            "token_adds": np.zeros((BUCKETS + 1, 1), np.float32),
            "hidden": normal(3 * _EMBEDDING, _HIDDEN), "hidden_bias": np.zeros((1, _HIDDEN), np.float32),
            "adds": normal(_HIDDEN, 1, 0.3),
            "scale": normal(2 * _HIDDEN + 1 + dense, _GLOBAL),
            "scale_bias": np.zeros((1, _GLOBAL), np.float32),
            "scales": normal(_GLOBAL, 1, 0.3), "scales_bias": np.zeros((1, 1), np.float32),
        }  # fmt: skip
        parameters["token"][0] = 0
        moments = {f"square.{name}": np.zeros_like(value) for name, value in parameters.items()}
        moments |= {
            f"mean.{name}": np.zeros_like(value) for name, value in parameters.items() if name not in _TABLES
        }
        return cls(parameters, moments, 0)

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], steps: int, dense: int) -> Self:
        """Restore a network from `arrays`.

        Raises ValueError with the name that is missing or does not fit.
        """
        fresh = cls.fresh(0, dense)
        wanted = fresh.arrays()
        for name, value in wanted.items():
            if name not in arrays:
                raise ValueError(f"{name} is missing")
            if arrays[name].shape != value.shape or arrays[name].dtype != value.dtype:
                raise ValueError(
                    f"{name} is {arrays[name].dtype} {arrays[name].shape}, not {value.dtype} {value.shape}"
                )
        at, moments = ({n: arrays[n].copy() for n in part} for part in (fresh._at, fresh._moments))
        return cls(at, moments, steps)

    def arrays(self) -> Parameters:
        """Return all that `restored` needs, except the number of steps."""
        return self._at | self._moments

    def copy(self) -> Network:
        """Return a copy, which can learn without changing this one."""
        return Network(
            {n: value.copy() for n, value in self._at.items()},
            {n: value.copy() for n, value in self._moments.items()},
            self.steps,
        )

    def predict(self, text: Text) -> np.ndarray:
        """Return the log of each prompt's answer length, less a constant that the ranker adds."""
        return self._forward(text)[0].astype(np.float64)

    def learn(self, text: Text, target: np.ndarray, weight: np.ndarray, pace: float) -> None:
        """Make one step towards the targets; `pace` is 1 at the beginning of a lesson and falls towards 0."""
        said, done = self._forward(text)
        pull = np.clip(said - target, -_BEYOND, _BEYOND) * weight / weight.sum()
        self.steps += 1
        self._apply(*self._backward(text, done, pull.astype(np.float32)), np.float32(_RATE * pace))

    def _forward(self, text: Text) -> tuple[np.ndarray, _Pass]:
        at, places = self._at, text.places
        rows, starts = text.rows, text.starts
        around = sliding_window_view(at["token"][text.ids].ravel(), 3 * _EMBEDDING)[::_EMBEDDING]
        triples = around[places - 1]  # each token between its neighbours
        hidden_in = triples @ at["hidden"] + at["hidden_bias"]
        hidden = _bent(hidden_in)
        adds = (hidden @ at["adds"] + at["token_adds"][text.ids[places]])[:, 0]
        most = np.maximum.reduceat(adds, starts)
        parts = np.exp(adds - most[rows])
        total = np.add.reduceat(parts, starts)
        largest = np.maximum.reduceat(hidden, starts)
        mean = np.add.reduceat(hidden, starts) / text.counts[:, None].astype(np.float32)
        length = np.log(text.counts)[:, None].astype(np.float32) / 3
        summary = np.concatenate([largest, mean, length, text.dense], axis=1)
        scale_in = summary @ at["scale"] + at["scale_bias"]
        scale = _bent(scale_in)
        said = most + np.log(total) + (scale @ at["scales"] + at["scales_bias"])[:, 0]
        shares = parts / total[rows]
        return said, _Pass(triples, hidden_in, hidden, shares, largest, rows, summary, scale_in, scale)

    def _backward(
        self, text: Text, done: _Pass, pull: np.ndarray
    ) -> tuple[Parameters, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return gradients of the dense parameters, and of the tables' rows as (rows, gradients)."""
        at, rows, places = self._at, done.rows, text.places
        to_scale = pull[:, None] * at["scales"].T * _slope(done.scale_in)
        to_summary = to_scale @ at["scale"].T
        to_largest, to_mean = to_summary[:, :_HIDDEN], to_summary[:, _HIDDEN : 2 * _HIDDEN]
        to_adds = pull[rows] * done.shares
        to_hidden = (to_mean / text.counts[:, None].astype(np.float32))[rows]
        to_hidden += to_adds[:, None] * at["adds"].T
        token, unit = np.divmod(np.flatnonzero(done.hidden == done.largest[rows]), _HIDDEN)
        to_hidden[token, unit] += to_largest[rows[token], unit]
        to_hidden *= _slope(done.hidden_in)
        to_triples = to_hidden @ at["hidden"].T
        dense = {
            "scales": done.scale.T @ pull[:, None], "scales_bias": pull.sum(keepdims=True)[None],
            "scale": done.summary.T @ to_scale, "scale_bias": to_scale.sum(0, keepdims=True),
            "adds": done.hidden.T @ to_adds[:, None],
            "hidden": done.triples.T @ to_hidden, "hidden_bias": to_hidden.sum(0, keepdims=True),
        }  # fmt: skip
        ends = np.cumsum(text.counts) - 1
        to_triples[text.starts, :_EMBEDDING] = to_triples[ends, -_EMBEDDING:] = 0  # of the paddings
        to_token = np.empty((len(rows), _EMBEDDING + 1), to_triples.dtype)
        to_token[:, :_EMBEDDING] = to_triples[:, _EMBEDDING : 2 * _EMBEDDING]
        to_token[:-1, :_EMBEDDING] += to_triples[1:, :_EMBEDDING]  # a token is its right neighbour's left one
        to_token[1:, :_EMBEDDING] += to_triples[:-1, 2 * _EMBEDDING :]
        to_token[:, _EMBEDDING] = to_adds
        found, gradient = _sum_by(text.ids[places], to_token)
        return dense, {
            "token": (found, gradient[:, :_EMBEDDING]), "token_adds": (found, gradient[:, _EMBEDDING:])
        }  # fmt: skip

    def _apply(
        self, dense: Parameters, tables: dict[str, tuple[np.ndarray, np.ndarray]], rate: np.float32
    ) -> None:
        """Apply gradients. Dense parameters use Adam; the tables' rows use slowly fading sums of squares."""
        for name, gradient in dense.items():
            if not name.endswith("_bias"):
                gradient = gradient + np.float32(_DECAY) * self._at[name]
            square, mean = self._moments[f"square.{name}"], self._moments[f"mean.{name}"]
            square += np.float32(0.02) * (gradient * gradient - square)
            mean += np.float32(0.1) * (gradient - mean)
            step = (mean / (1 - 0.9**self.steps)) / (np.sqrt(square / (1 - 0.98**self.steps)) + 1e-8)
            self._at[name] -= rate * step.astype(np.float32)
        for name, (rows, gradient) in tables.items():
            gradient = gradient + np.float32(_DECAY) * self._at[name][rows]
            square = self._moments[f"square.{name}"]
            square[rows] = np.float32(0.999) * square[rows] + np.float32(0.05) * gradient * gradient
            self._at[name][rows] -= rate * gradient / (np.sqrt(square[rows]) + np.float32(1e-6))


def _sum_by(ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(ids.astype(np.uint16), kind="stable")  # of 16 bits, numpy sorts by radix
    ordered = ids[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return ordered[first], np.add.reduceat(values[order], first)
