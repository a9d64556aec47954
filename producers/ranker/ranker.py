"""The length ranker: what the prompt says, and how long its answers were in earlier epochs.

    log length = network(prompt) + beta * (how much longer than that this prompt's answers were before)

The network learns on after every window of groups, from these and from earlier ones. What it can't read in
a prompt, the prompt's own history tells; how far history is to be trusted, beta, is measured too: how much
of an old difference was found again. A ranker never changes: `learned` gives the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from producers.ranker.network import Network, Text, text_of
from schemas.identity import derive_seed

SCHEMA = 1
KEPT = 2048  # groups that the network goes on learning from
_BATCH = 64
_PASSES = 4  # steps of a window: so often its groups, and as many earlier ones
_LEAST_STEPS = 12
_NEWEST = 0.5  # weight of the newest difference in a prompt's history
_DOUBT = 2.0  # squared log units that beta has to see before it is believed


class StateError(ValueError):
    """A stored ranker that can't be used; the message says why and what to do."""


@dataclass(frozen=True)
class Question:
    """A prompt as the ranker knows it."""

    key: int  # of its problem, stable over epochs
    text: np.ndarray  # int32 tokens, at least one
    kind: int = 0  # hash of the task's own word for what kind of problem it is; 0: it has none

    @property
    def tokens(self) -> np.ndarray:
        """As the network reads it: the kind comes first, like one more token."""
        return self.text if not self.kind else np.concatenate([np.array([self.kind], np.int32), self.text])


@dataclass(frozen=True)
class Answered:
    """A group that is finished."""

    question: Question
    lengths: Sequence[int]


class Predictor(Protocol):
    """What a planner needs of a ranker."""

    @property
    def name(self) -> str:
        """Which it is and how much it has seen: prompt records say it."""

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        """Lengths in tokens."""


class Backbone(Protocol):
    """Says more of a prompt than its words: a language model's hidden state, say."""

    @property
    def name(self) -> str:
        """Which: a state of another backbone can't be used."""

    @property
    def width(self) -> int:
        """How many numbers."""

    def of(self, prompts: Sequence[Question]) -> np.ndarray:
        """One row of numbers a prompt, of about unit size."""


class NoBackbone:
    """The network's own embeddings are all there is."""

    name, width = "none", 0

    def of(self, prompts: Sequence[Question]) -> np.ndarray:
        return np.zeros((len(prompts), 0), np.float32)


def question_of(problem_id: str, kind: str | None, tokens: Sequence[int]) -> Question:
    """A problem's prompt, and the task's own word for what kind of problem it is."""
    key = int.from_bytes(hashlib.blake2b(problem_id.encode(), digest_size=8).digest(), "little")
    hashed = 0 if kind is None else 1 + derive_seed("kind", kind) % 0x7FFFFFFF
    return Question(key, np.array(tokens, np.int32), hashed)


@dataclass(frozen=True)
class _Kept:
    question: Question
    target: float  # mean log length
    weight: float


class Ranker:
    """Predicts lengths; `version` is the number of windows that it has learned from."""

    def __init__(
        self,
        network: Network,
        backbone: Backbone,
        *,
        version: int = 0,
        centre: float = 0.0,
        history: Mapping[int, float] | None = None,
        found_again: tuple[float, float] = (0.0, 0.0),
        kept: Mapping[int, _Kept] | None = None,
    ) -> None:
        self._network, self.backbone = network, backbone
        self.version, self._centre = version, centre
        self._history, self._found_again = dict(history or {}), found_again
        self._kept = dict(kept or {})

    @classmethod
    def fresh(cls, seed: int, backbone: Backbone, *, typical: float) -> Ranker:
        """One that knows nothing: every answer is `typical` tokens long."""
        return cls(Network.fresh(seed, backbone.width), backbone, centre=float(np.log(typical)))

    @property
    def name(self) -> str:
        """What it reads prompts with beside its network, and how many windows it has seen."""
        return f"{self.backbone.name}/{self.version}"

    @property
    def trust(self) -> float:
        """How much of a prompt's old difference is found again."""
        both, old = self._found_again
        return min(1.0, max(0.0, both / (old + _DOUBT)))

    def as_start(self) -> Ranker:
        """The same, for a run that begins."""
        return Ranker(
            self._network, self.backbone, centre=self._centre, history=self._history,
            found_again=self._found_again, kept=self._kept,
        )  # fmt: skip

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        """Lengths in tokens."""
        if self._network.steps == 0 or not questions:
            return np.full(len(questions), np.exp(self._centre))
        old = np.array([self._history.get(question.key, 0.0) for question in questions])
        return np.exp(self._read(questions) + self.trust * old)

    def _read(self, questions: Sequence[Question]) -> np.ndarray:
        return self._network.predict(self._text(questions)) + self._centre

    def _text(self, questions: Sequence[Question]) -> Text:
        return text_of([question.tokens for question in questions], self.backbone.of(questions))

    def learned(self, window: Sequence[Answered]) -> Ranker:
        """The ranker that has also seen these groups. It follows from them and their order alone."""
        fresh = {
            group.question.key: _Kept(
                group.question,
                float(np.mean(np.log(np.maximum(group.lengths, 1)))),
                len(group.lengths) / (1.0 + len(group.lengths)),
            )
            for group in window
        }
        centre, history, found_again = self._centre, dict(self._history), self._found_again
        questions = [group.question for group in fresh.values()]
        if self._network.steps == 0:
            read = float(np.mean(self._network.predict(self._text(questions))))
            centre = float(np.mean([group.target for group in fresh.values()])) - read
        else:
            found_again = self._compare(fresh, history)
        kept = {key: group for key, group in self._kept.items() if key not in fresh} | fresh
        for key in list(kept)[: max(0, len(kept) - KEPT)]:
            del kept[key]
        network = self._network.copy()
        rng = np.random.default_rng([self.version, network.steps])
        batches = _batches(list(fresh), list(kept), rng)
        for done, keys in enumerate(batches):
            groups = [kept[key] for key in keys]
            target = np.array([group.target for group in groups]) - centre
            weight = np.array([group.weight for group in groups])
            network.learn(
                self._text([group.question for group in groups]), target, weight, 1 - done / len(batches)
            )
        return Ranker(
            network, self.backbone, version=self.version + 1, centre=centre, history=history,
            found_again=found_again, kept=kept,
        )  # fmt: skip

    def _compare(self, fresh: Mapping[int, _Kept], history: dict[int, float]) -> tuple[float, float]:
        """Bring the prompts' history up to date, and what it would have told this time."""
        both, old = self._found_again
        read = self._read([group.question for group in fresh.values()])
        for (key, group), said in zip(fresh.items(), read.tolist(), strict=True):
            difference = group.target - said
            if (before := history.get(key)) is not None:
                both, old = both + before * difference, old + before * before
                difference = _NEWEST * difference + (1 - _NEWEST) * before
            history[key] = difference
        return both, old

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it, for a file."""
        questions = [group.question for group in self._kept.values()]
        return {
            **{f"network.{name}": value for name, value in self._network.arrays().items()},
            "numbers": np.array(
                [self.version, self._network.steps, self._centre, *self._found_again], np.float64
            ),
            "history.keys": np.array(list(self._history), np.uint64),
            "history.values": np.array(list(self._history.values()), np.float64),
            "kept.keys": np.array([question.key for question in questions], np.uint64),
            "kept.kinds": np.array([question.kind for question in questions], np.int32),
            "kept.counts": np.array([len(question.text) for question in questions], np.int64),
            "kept.texts": np.concatenate([np.zeros(0, np.int32), *(q.text for q in questions)]),
            "kept.targets": np.array([group.target for group in self._kept.values()], np.float64),
            "kept.weights": np.array([group.weight for group in self._kept.values()], np.float64),
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], backbone: Backbone) -> Ranker:
        """From `arrays`; a StateError says what is wrong with them."""
        try:
            version, steps, centre, both, old = arrays["numbers"].tolist()
            inside = {n.removeprefix("network."): v for n, v in arrays.items() if n.startswith("network.")}
            network = Network.restored(inside, int(steps), backbone.width)
            ends = np.cumsum(arrays["kept.counts"]).tolist()
            texts = np.split(arrays["kept.texts"], ends[:-1]) if ends else []
            columns = [arrays[f"kept.{name}"].tolist() for name in ("keys", "kinds", "targets", "weights")]
            kept = {
                key: _Kept(Question(key, text, kind), target, weight)
                for key, kind, target, weight, text in zip(*columns, texts, strict=True)
            }
            history = dict(
                zip(arrays["history.keys"].tolist(), arrays["history.values"].tolist(), strict=True)
            )
        except KeyError as error:
            raise StateError(f"{error.args[0]} is missing") from error
        except ValueError as error:
            raise StateError(str(error)) from error
        return cls(
            network, backbone, version=int(version), centre=centre, history=history,
            found_again=(both, old), kept=kept,
        )  # fmt: skip


def _batches(fresh: Sequence[int], kept: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Half of each batch from this window, as far as it goes, the rest from all that is kept."""
    steps = max(_LEAST_STEPS, -(-_PASSES * len(fresh) * 2 // _BATCH))
    half = min(_BATCH // 2, len(fresh))
    order = np.concatenate([rng.permutation(len(fresh)) for _ in range(-(-steps * half // len(fresh)))])
    batches = []
    for step in range(steps):
        mine = [fresh[place] for place in order[step * half : (step + 1) * half]]
        rest = rng.integers(len(kept), size=min(_BATCH - half, len(kept)))
        batches.append(mine + [kept[place] for place in rest])
    return batches


def recall_of_longest(predicted: Iterable[float], true: Iterable[float], share: float) -> float:
    """How many of the longest `share` are among the `share` predicted to be longest."""
    said, found = np.asarray(list(predicted)), np.asarray(list(true))
    count = max(1, round(share * len(found)))
    longest = np.argsort(-found, kind="stable")[:count]
    return float(np.isin(np.argsort(-said, kind="stable")[:count], longest).mean())
