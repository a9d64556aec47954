"""Trains a ranker from the samples that runs recorded, so that other runs can start with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from infra.bus import Bus, read_until
from infra.gate import Gate, passed_over
from producers.ranker.ranker import Answered, Backbone, Question, Ranker, question_of, score_of
from schemas.messages import TRAIN, Prompt, Sample
from schemas.topics import Topic, Topics
from schemas.wire import MessageT

_PASSES = 40
_MOST_GROUPS = 1 << 16  # a prompt takes up to 3 KB; the newest are most like the run now
_HELD_OUT = 5  # every fifth problem is kept for judging the ranker

RecordedIterations = list[list[Answered]]  # iterations, in the order in which they were generated


@dataclass(frozen=True)
class Quality:
    """How well a ranker ranks groups."""

    groups: int
    recall: tuple[float, float, float]  # of the longest 20, 10 and 5 %
    tau: float  # Kendall's
    error: float  # root mean square, in log units


def recorded(bus: Bus, topics: Topics, *, deadline_s: float) -> RecordedIterations:
    """Return the complete groups on a run's log, by iteration.

    Only lengths of samples are kept; of very many prompts only the newest.
    """
    asked = _asked(bus, topics, deadline_s)
    lengths: dict[int, dict[int, int]] = {}
    for sample in _messages(bus, topics, topics.samples, Sample, deadline_s):
        found = asked.get(sample.group)
        if found is None or sample.purpose != TRAIN or not sample.tokens.size:
            continue
        if 0 <= sample.index < found.size and sample.problem_id == found.problem_id:
            lengths.setdefault(sample.group, {}).setdefault(sample.index, sample.true_length)
    iterations: dict[int, list[Answered]] = {}
    for group, mine in sorted(lengths.items()):
        found = asked[group]
        if len(mine) == found.size:
            answered = Answered(found.question, [length for _, length in sorted(mine.items())])
            iterations.setdefault(found.iteration, []).append(answered)
    return [iterations[number] for number in sorted(iterations)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The fields of a prompt that are kept."""

    question: Question
    problem_id: str
    iteration: int
    size: int


def _asked(bus: Bus, topics: Topics, deadline_s: float) -> dict[int, _Asked]:
    """Return the training prompts by group. The question of a problem that comes again is kept once."""
    asked: dict[int, _Asked] = {}
    questions: WeakValueDictionary[tuple[str, bytes], Question] = WeakValueDictionary()
    for prompt in _messages(bus, topics, topics.prompts, Prompt, deadline_s):
        if prompt.purpose != TRAIN:
            continue
        question = question_of(prompt.problem_id, _kind_of(prompt), prompt.tokens.tolist())
        question = questions.setdefault((prompt.problem_id, question.tokens.tobytes()), question)
        asked[prompt.group] = _Asked(question, prompt.problem_id, prompt.iteration, prompt.size)
        if len(asked) >= 2 * _MOST_GROUPS:
            for group in sorted(asked, key=lambda one: (asked[one].iteration, one))[:_MOST_GROUPS]:
                del asked[group]
    return asked


def _kind_of(prompt: Prompt) -> object:
    try:
        problem = json.loads(prompt.problem)
    except (ValueError, RecursionError):
        return None
    return problem.get("kind") if isinstance(problem, dict) else None


def _messages(
    bus: Bus, topics: Topics, topic: Topic, kind: type[MessageT], deadline_s: float
) -> Iterator[MessageT]:
    """Yield the messages of a topic one by one, up to its present end. Invalid records are skipped."""
    gate = Gate(kind, topics.prompts.name.removesuffix(".prompts"), passed_over)
    reader = bus.reader(topic)
    try:
        for record in read_until(reader, reader.end_offsets(), topic, deadline_s=deadline_s):
            if (message := gate.take_one(record)) is not None:
                yield message
    finally:
        reader.close()


def train_ranker(
    iterations: RecordedIterations,
    backbone: Backbone,
    *,
    seed: int,
    progress: Callable[[float], None] = lambda _: None,
) -> Ranker:
    """Train a ranker: first iteration by iteration, as in a run, then over all groups many times."""
    typical = float(np.exp(np.mean([np.log(max(1, n)) for w in iterations for g in w for n in g.lengths])))
    ranker = Ranker.fresh(seed, backbone, typical=typical)
    for done, iteration in enumerate(iterations):
        ranker = ranker.learned(iteration)
        progress(0.3 * done / len(iterations))
    return ranker.drilled(
        [group for iteration in iterations for group in iteration],
        _PASSES,
        seed=seed,
        progress=lambda share: progress(0.3 + 0.7 * share),
    )


def split(iterations: RecordedIterations) -> tuple[RecordedIterations, list[Answered]]:
    """Split into groups to learn from, and groups of other problems to judge by."""
    keep = [[g for g in iteration if g.question.key % _HELD_OUT] for iteration in iterations]
    return (
        [iteration for iteration in keep if iteration],
        [g for iteration in iterations for g in iteration if g.question.key % _HELD_OUT == 0],
    )


def judged(ranker: Ranker, groups: Sequence[Answered]) -> Quality:
    """Measure how well a ranker ranks these groups."""
    said = ranker.predict([group.question for group in groups])
    true = np.array([np.mean(group.lengths) for group in groups])
    score = score_of(said, [group.lengths for group in groups])
    return Quality(len(groups), score.recall, tau(said, true), score.error)


def tau(said: np.ndarray, true: np.ndarray) -> float:
    """Return Kendall's tau-b, from -1 to 1: the pairs in right order minus those in wrong order, normalised.

    In the order of `said`, a pair is wrong if its `true` values fall (Knight, 1966). Takes O(n log n).
    """
    said_ranks, true_ranks = _ranks(said), _ranks(true)
    order = np.lexsort((true_ranks, said_ranks))
    wrong = _inversions(true_ranks[order])
    pairs = len(said) * (len(said) - 1) // 2
    both = _ties(said_ranks * (int(true_ranks.max(initial=0)) + 1) + true_ranks)
    told, apart = pairs - _ties(said_ranks), pairs - _ties(true_ranks)  # pairs that are no ties
    right = told + apart - pairs + both - wrong
    return (right - wrong) / math.sqrt(told * apart) if told and apart else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value among the distinct values."""
    return np.asarray(np.unique(values, return_inverse=True)[1], np.int64)


def _ties(ranks: np.ndarray) -> int:
    """Count the pairs of equal ranks."""
    counts = np.unique(ranks, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(ranks: np.ndarray) -> int:
    """Count the pairs that fall. Bit by bit: each 1 before a 0, among ranks that agree in all higher bits."""
    count = 0
    for bit in reversed(range(int(ranks.max(initial=0)).bit_length())):
        higher = ranks >> (bit + 1)
        order = np.argsort(higher, kind="stable")
        ranks, higher = ranks[order], higher[order]
        ones = (ranks >> bit) & 1
        before = np.cumsum(ones) - ones
        _, first, block = np.unique(higher, return_index=True, return_inverse=True)
        count += int(((before - before[first][block]) * (1 - ones)).sum())
    return count
