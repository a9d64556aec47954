"""The length ranker: predicts from the prompt, and from the lengths of its answers in earlier epochs.

    said       = a network(prompt) + b additive(prompt) + c
    log length = said + history(prompt, said)

Both learn on after every iteration, from its groups and earlier ones; how much each is worth is measured. The
history tells what neither can read in the prompt. A ranker is immutable: `learned` returns the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from producers.ranker.additive import Additive, Bag, Bags, bags_of
from producers.ranker.history import History
from producers.ranker.mix import Mix
from producers.ranker.network import Network, Text, text_of
from schemas.identity import derive_seed

SCHEMA = 2
KEPT_GROUPS = 2048  # groups that are kept for the network to learn from again
_FIRST, _LAST = 256, 512  # tokens of a prompt that are kept: from its beginning and its end
_BATCH = 64
_PASSES = 4  # how often an iteration's groups are learned, each time with as many earlier ones
_LEAST_STEPS = 8
_FIRST_STEPS = 12  # of the first iteration, half of it of the second, and so on: while few groups are kept
_ROUNDS = 12  # of the additive term's fit to all groups at once
_JUDGED = 8  # one problem in so many judges what network and additive term are worth, before it is learned
_WEIGHED = 1 << 18  # entries of bags that the additive term is fitted to in an iteration
_AT_ONCE = 1 << 15  # tokens that are read at once, so that memory does not grow with the number of prompts


class StateError(ValueError):
    """A stored ranker can't be used; the message says why and what to do."""


@dataclass(frozen=True)
class Question:
    """A prompt in the form that the ranker uses."""

    key: int  # hash of the problem's id, the same in all epochs
    text: np.ndarray  # int32 tokens, at least one
    kind: int = 0  # hash of the problem's "kind" in the task; 0: it has none

    @property
    def tokens(self) -> np.ndarray:
        """The tokens that the network reads: the kind comes first, like one more token."""
        return self.text if not self.kind else np.concatenate([np.array([self.kind], np.int32), self.text])


@dataclass(frozen=True)
class Answered:
    """A finished group: a prompt, and the lengths of its answers."""

    question: Question
    lengths: Sequence[int]


class Predictor(Protocol):
    """The part of a ranker that a planner needs."""

    @property
    def name(self) -> str:
        """The ranker's name, with its version; prompt records carry it."""

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        """Return predicted lengths in tokens."""


class Backbone(Protocol):
    """A model that gives numbers for a prompt, such as a language model's hidden state."""

    @property
    def name(self) -> str:
        """The backbone's name. A stored ranker works only with the backbone that it was trained with."""

    @property
    def width(self) -> int:
        """How many numbers it gives for a prompt."""

    def of(self, prompts: Sequence[Question]) -> np.ndarray:
        """Return one row of numbers for each prompt, of about unit size."""


class NoBackbone:
    """No backbone: the network uses only its own embeddings."""

    name, width = "none", 0

    def of(self, prompts: Sequence[Question]) -> np.ndarray:
        return np.zeros((len(prompts), 0), np.float32)


def question_of(problem_id: str, kind: object, tokens: Sequence[int]) -> Question:
    """Make a question of a prompt. `kind`: the task's word for the kind of its problem, or None."""
    key = int.from_bytes(hashlib.blake2b(problem_id.encode(), digest_size=8).digest(), "little")
    hashed = 0 if kind is None else 1 + derive_seed("kind", str(kind)) % 0x7FFFFFFF
    text = np.array(tokens, np.int32)
    if len(text) > _FIRST + _LAST:  # the network reads no more, and thousands are stored with a ranker
        text = np.concatenate([text[:_FIRST], text[-_LAST:]])
    return Question(key, text, hashed)


@dataclass(frozen=True)
class _Kept:
    question: Question
    bag: Bag
    target: float  # mean log length
    weight: float


def _kept(groups: Sequence[Answered]) -> list[_Kept]:
    bags = [bag for some in _portions([g.question for g in groups]) for bag in _bags(some).each()]
    return [
        _Kept(
            group.question, bag, float(np.mean(np.log(np.maximum(group.lengths, 1)))),
            len(group.lengths) / (1.0 + len(group.lengths)),
        )
        for group, bag in zip(groups, bags, strict=True)
    ]  # fmt: skip


def _bags(questions: Sequence[Question]) -> Bags:
    return bags_of([question.tokens for question in questions])


def _portions(questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
    """Cut questions into portions of a bounded number of tokens."""
    first, tokens = 0, 0
    for place, question in enumerate(questions):
        if place > first and tokens + len(question.text) > _AT_ONCE:
            yield questions[first:place]
            first, tokens = place, 0
        tokens += len(question.text) + 1
    if first < len(questions):
        yield questions[first:]


@dataclass(frozen=True)
class PromptReading:
    """Predictions from prompts alone: the logs that network and additive term say, less the centre."""

    network: np.ndarray
    additive: np.ndarray


class Ranker:
    """Predicts lengths; `version` is the number of iterations that it has learned from."""

    def __init__(
        self,
        network: Network,
        backbone: Backbone,
        *,
        version: int = 0,
        centre: float = 0.0,
        additive: Additive | None = None,
        mix: Mix | None = None,
        history: History | None = None,
        kept: Mapping[int, _Kept] | None = None,
    ) -> None:
        self._network, self.backbone = network, backbone
        self.version, self._centre = version, centre
        self._additive, self._mix = additive or Additive.fresh(), mix or Mix()
        self._history = history or History()
        self._kept = dict(kept or {})

    @classmethod
    def fresh(cls, seed: int, backbone: Backbone, *, typical: float) -> Ranker:
        """Return a ranker that knows nothing: it predicts `typical` tokens for every answer."""
        return cls(Network.fresh(seed, backbone.width), backbone, centre=float(np.log(typical)))

    @property
    def name(self) -> str:
        """The backbone's name and the version."""
        return f"{self.backbone.name}/{self.version}"

    def _next(self, **changes: Any) -> Ranker:
        """Return this ranker with changes."""
        same: dict[str, Any] = {
            "network": self._network, "version": self.version, "centre": self._centre, "kept": self._kept,
            "additive": self._additive, "mix": self._mix, "history": self._history,
        }  # fmt: skip
        return Ranker(backbone=self.backbone, **(same | changes))

    def renumbered(self, version: int) -> Ranker:
        """Return this ranker as another version, for a run whose own version is not kept."""
        return self._next(version=version)

    def as_start(self) -> Ranker:
        """Return this ranker as version 0, for a run that begins."""
        return self._next(version=0)

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        """Return predicted lengths in tokens."""
        if self._network.steps == 0 or not questions:
            return np.full(len(questions), np.exp(self._centre))
        read = self._said(self.read(questions))
        return np.exp(read + self._history.correction([question.key for question in questions], read))

    def _said(self, read: PromptReading) -> np.ndarray:
        return self._mix.of(read.network, read.additive) + self._centre

    def read(self, questions: Sequence[Question]) -> PromptReading:
        """Return what the network and the additive term say of prompts, each for itself."""
        network, additive = [np.zeros(0)], [np.zeros(0)]
        for some in _portions(questions):
            network.append(self._network.predict(self._text(some)))
            additive.append(self._additive.predict(_bags(some)))
        return PromptReading(np.concatenate(network), np.concatenate(additive))

    def _text(self, questions: Sequence[Question]) -> Text:
        return text_of([question.tokens for question in questions], self.backbone.of(questions))

    def learned(self, iteration: Sequence[Answered]) -> Ranker:
        """Return a ranker that also learned from these groups. It depends only on them and their order."""
        if not iteration:
            return self._next(version=self.version + 1)
        groups = {group.question.key: group for group in iteration}
        fresh = dict(zip(groups, _kept(list(groups.values())), strict=True))
        found = np.array([group.target for group in fresh.values()])
        read = self.read([group.question for group in fresh.values()])
        centre, mix, history = self._centre, self._mix, self._history
        if self._network.steps == 0:  # it knows nothing: these groups give the typical length
            centre = float(np.mean(found - read.network))
        else:
            mix = mix.seen(read.network, read.additive, found - centre)
            history = history.seen(list(fresh), self._said(read), found)
        kept = {key: group for key, group in self._kept.items() if key not in fresh} | fresh
        for key in list(kept)[: max(0, len(kept) - KEPT_GROUPS)]:
            del kept[key]
        network = self._network.copy()
        rng = np.random.default_rng([self.version, network.steps])
        steps = max(_LEAST_STEPS, _PASSES * 2 * len(fresh) // _BATCH, _FIRST_STEPS // (1 + self.version))
        batches = _batches(list(fresh), list(kept), steps, rng)
        known = kept | fresh
        self._teach(network, [[known[key] for key in keys] for keys in batches], centre)
        weighed = _newest(kept)
        left = [one.bag for key, one in _newest(self._kept).items() if key not in weighed | fresh]
        additive = self._additive.without(Bags.joined(left))
        additive = _fitted(additive, list(weighed.values()), centre)
        return self._next(
            network=network, additive=additive, mix=mix, history=history, kept=kept, centre=centre,
            version=self.version + 1,
        )  # fmt: skip

    def drilled(
        self, groups: Sequence[Answered], passes: int, *, seed: int, progress: Callable[[float], None]
    ) -> Ranker:
        """Return a ranker that reads what these groups taught in `passes` passes. For offline training.

        It begins anew, without some of the problems: these tell how much the network and the additive term
        are worth after so many passes. Then they are learned too.
        """
        everything = _kept(groups)
        judges = [group for group in everything if group.question.key % _JUDGED == 0]
        others = [group for group in everything if group.question.key % _JUDGED]
        network, mix = Network.fresh(seed, self.backbone.width), self._mix
        if judges and others:
            self._drill(network, others, passes, 1.0, lambda share: progress(0.8 * share))
            first = self._next(
                network=network, additive=_fitted(Additive.fresh(), others, self._centre, _ROUNDS)
            )
            read = first.read([group.question for group in judges])
            found = np.array([group.target for group in judges])
            mix = Mix().seen(read.network, read.additive, found - self._centre)
            passes = -(-passes // 5)
        self._drill(network, everything, passes, 0.3, lambda share: progress(0.8 + 0.2 * share))
        additive = _fitted(Additive.fresh(), everything, self._centre, _ROUNDS)
        weighed = _newest(self._kept)
        left = [group.bag for group in everything if group.question.key not in weighed]
        return self._next(network=network, additive=additive.without(Bags.joined(left)), mix=mix)

    def _drill(
        self, network: Network, groups: Sequence[_Kept], passes: int, pace: float,
        progress: Callable[[float], None],
    ) -> None:  # fmt: skip
        rng = np.random.default_rng([self.version, network.steps])
        order = np.concatenate([rng.permutation(len(groups)) for _ in range(passes)])
        batches = [
            [groups[place] for place in order[start : start + _BATCH]]
            for start in range(0, len(order), _BATCH)
        ]
        self._teach(network, batches, self._centre, pace, progress)

    def _teach(
        self,
        network: Network,
        batches: Sequence[Sequence[_Kept]],
        centre: float,
        pace: float = 1.0,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Make one step for each batch, with a falling rate."""
        for done, groups in enumerate(batches):
            target, weight = _targets(groups, centre)
            text = self._text([group.question for group in groups])
            network.learn(text, target, weight, pace * (1 - done / len(batches)))
            progress(done / len(batches))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the whole ranker as arrays, for a file."""
        questions = [group.question for group in self._kept.values()]
        return {
            **{f"network.{name}": value for name, value in self._network.arrays().items()},
            **{f"additive.{name}": value for name, value in self._additive.arrays().items()},
            **{f"mix.{name}": value for name, value in self._mix.arrays().items()},
            **{f"history.{name}": value for name, value in self._history.arrays().items()},
            "numbers": np.array([self.version, self._network.steps, self._centre], np.float64),
            "kept.keys": np.array([question.key for question in questions], np.uint64),
            "kept.kinds": np.array([question.kind for question in questions], np.int32),
            "kept.counts": np.array([len(question.text) for question in questions], np.int64),
            "kept.texts": np.concatenate([np.zeros(0, np.int32), *(q.text for q in questions)]),
            "kept.targets": np.array([group.target for group in self._kept.values()], np.float64),
            "kept.weights": np.array([group.weight for group in self._kept.values()], np.float64),
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray], backbone: Backbone) -> Ranker:
        """Restore a ranker from `arrays`. Raises StateError if one is missing or does not fit."""
        try:
            version, steps, centre = arrays["numbers"].tolist()
            network = Network.restored(_of("network", arrays), int(steps), backbone.width)
            additive = Additive.restored(_of("additive", arrays))
            mix = Mix.restored(_of("mix", arrays))
            history = History.restored(_of("history", arrays))
            ends = np.cumsum(arrays["kept.counts"]).tolist()
            texts = np.split(arrays["kept.texts"], ends[:-1]) if ends else []
            columns = [arrays[f"kept.{name}"].tolist() for name in ("keys", "kinds", "targets", "weights")]
            questions = [
                Question(key, text, kind) for key, kind, text in zip(*columns[:2], texts, strict=True)
            ]
            bags = [bag for some in _portions(questions) for bag in _bags(some).each()]
            groups = map(_Kept, questions, bags, *columns[2:])
            kept = dict(zip(columns[0], groups, strict=True))
        except KeyError as error:
            raise StateError(f"{error.args[0]} is missing") from error
        except ValueError as error:
            raise StateError(str(error)) from error
        return cls(
            network, backbone, version=int(version), centre=centre, additive=additive, mix=mix,
            history=history, kept=kept,
        )  # fmt: skip


def _of(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n.removeprefix(f"{part}."): value for n, value in arrays.items() if n.startswith(f"{part}.")}


def _targets(groups: Sequence[_Kept], centre: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([g.target for g in groups]) - centre, np.array([g.weight for g in groups])


def _newest(kept: dict[int, _Kept]) -> dict[int, _Kept]:
    """Return the newest kept groups, as many as the additive term is fitted to."""
    found: list[int] = []
    entries = 0
    for key in reversed(kept):
        entries += len(kept[key].bag.places)
        if entries > _WEIGHED and found:
            break
        found.append(key)
    return {key: kept[key] for key in reversed(found)}


def _fitted(additive: Additive, groups: Sequence[_Kept], centre: float, rounds: int = 1) -> Additive:
    return additive.learned(
        Bags.joined([group.bag for group in groups]), *_targets(groups, centre), rounds=rounds
    )


def _batches(
    fresh: Sequence[int], kept: Sequence[int], steps: int, rng: np.random.Generator
) -> list[list[int]]:
    """Make batches: half of each from this iteration, as far as it goes, the rest from all kept groups."""
    half = min(_BATCH // 2, len(fresh))
    order = np.concatenate([rng.permutation(len(fresh)) for _ in range(-(-steps * half // len(fresh)))])
    batches = []
    for step in range(steps):
        mine = [fresh[place] for place in order[step * half : (step + 1) * half]]
        rest = rng.integers(len(kept), size=min(_BATCH - half, len(kept)))
        batches.append(mine + [kept[place] for place in rest])
    return batches


def recall_of_longest(predicted: Iterable[float], true: Iterable[float], share: float) -> float:
    """Return what part of the longest `share` is also among the `share` predicted to be longest."""
    said, found = np.asarray(list(predicted)), np.asarray(list(true))
    count = max(1, round(share * len(found)))
    longest = np.argsort(-found, kind="stable")[:count]
    return float(np.isin(np.argsort(-said, kind="stable")[:count], longest).mean())


@dataclass(frozen=True)
class RankingScore:
    """How well groups were ranked."""

    recall: tuple[float, float, float]  # of the longest 20, 10 and 5 %
    error: float  # root mean square, in log units


def score_of(predicted: Sequence[float] | np.ndarray, lengths: Sequence[Sequence[int]]) -> RankingScore:
    """Compare predictions of groups with the lengths that their samples came to have."""
    true = [float(np.mean(mine)) for mine in lengths]
    logs = np.array([np.mean(np.log(np.maximum(mine, 1))) for mine in lengths])
    recall = [recall_of_longest(predicted, true, share) for share in (0.2, 0.1, 0.05)]
    error = np.sqrt(np.mean((np.log(np.maximum(predicted, 1e-9)) - logs) ** 2))
    return RankingScore((recall[0], recall[1], recall[2]), float(error))
