"""A ranker trained at leisure from what runs recorded, to start other runs with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from infra.bus import Bus, read_until
from producers.ranker.ranker import Answered, Backbone, Question, Ranker, question_of, score_of
from schemas.messages import TRAIN, Prompt, Sample
from schemas.topics import Topic, Topics
from schemas.wire import MessageT, Unreadable, decode

_PASSES = 25
_HELD_OUT = 5  # every fifth problem judges a ranker that has not seen it

Windows = list[list[Answered]]  # in the order in which they were generated


@dataclass(frozen=True)
class Quality:
    """How well groups are ranked."""

    groups: int
    recall: tuple[float, float, float]  # of the longest 20, 10 and 5 %
    tau: float  # Kendall's
    error: float  # root mean square, in log units


def recorded(bus: Bus, topics: Topics, *, deadline_s: float) -> Windows:
    """All whole groups on a run's log. Of its samples only the lengths are kept in memory."""
    asked: dict[int, tuple[Question, int, int]] = {}  # with its window and how many samples were wanted
    for prompt in _messages(bus, topics.prompts, Prompt, deadline_s):
        if prompt.purpose == TRAIN:
            kind = json.loads(prompt.problem).get("kind")
            question = question_of(prompt.problem_id, kind, prompt.tokens.tolist())
            asked[prompt.group] = question, prompt.window, prompt.size
    lengths: dict[int, dict[int, int]] = {}
    for sample in _messages(bus, topics.samples, Sample, deadline_s):
        if sample.purpose == TRAIN:
            lengths.setdefault(sample.group, {}).setdefault(sample.index, sample.true_length)
    windows: dict[int, list[Answered]] = {}
    for group, mine in sorted(lengths.items()):
        found = asked.get(group)
        if found is not None and len(mine) == found[2]:
            answered = Answered(found[0], [length for _, length in sorted(mine.items())])
            windows.setdefault(found[1], []).append(answered)
    return [windows[number] for number in sorted(windows)]


def _messages(bus: Bus, topic: Topic, kind: type[MessageT], deadline_s: float) -> Iterator[MessageT]:
    """One after the other, up to the topic's end as it is now."""
    reader = bus.reader(topic)
    try:
        for record in read_until(reader, reader.end_offsets(), topic, deadline_s=deadline_s):
            with suppress(Unreadable):
                yield decode(record.value, kind)
    finally:
        reader.close()


def train(
    windows: Windows, backbone: Backbone, *, seed: int, progress: Callable[[float], None] = lambda _: None
) -> Ranker:
    """First as a run learns, window by window; then over all of it, again and again."""
    typical = float(np.exp(np.mean([np.log(max(1, n)) for w in windows for g in w for n in g.lengths])))
    ranker = Ranker.fresh(seed, backbone, typical=typical)
    for done, window in enumerate(windows):
        ranker = ranker.learned(window)
        progress(0.3 * done / len(windows))
    return ranker.drilled(
        [group for window in windows for group in window],
        _PASSES,
        progress=lambda share: progress(0.3 + 0.7 * share),
    )


def split(windows: Windows) -> tuple[Windows, list[Answered]]:
    """What to learn from, and groups of other problems to judge by."""
    keep = [[g for g in window if g.question.key % _HELD_OUT] for window in windows]
    return (
        [window for window in keep if window],
        [g for window in windows for g in window if g.question.key % _HELD_OUT == 0],
    )


def judged(ranker: Ranker, groups: Sequence[Answered]) -> Quality:
    """How well a ranker ranks them."""
    said = ranker.predict([group.question for group in groups])
    true = np.array([np.mean(group.lengths) for group in groups])
    score = score_of(said, [group.lengths for group in groups])
    return Quality(len(groups), score.recall, tau(said, true), score.error)


def tau(said: np.ndarray, true: np.ndarray) -> float:
    """Kendall's tau-b: pairs in the right order minus pairs in the wrong one."""
    above, right = np.sign(said[:, None] - said[None]), np.sign(true[:, None] - true[None])
    pairs = np.sqrt(float(np.abs(above).sum()) * float(np.abs(right).sum()))
    return float((above * right).sum() / pairs) if pairs else 0.0
