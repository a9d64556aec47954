"""Some samples of the newest optimizer step as text, for people who read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from consumers.batches.log_places import fetch
from consumers.stream.recorded_groups import samples_topic
from infra.bus import near_ends, read_all
from infra.gate import Gate, passed_over
from infra.run_handle import RunHandle
from producers.tokenizing import load_to_text
from schemas.messages import Sample, StepRecord

_LONGEST = 6000  # characters of a text
_TOKENS = 8192  # tokens of it that are decoded


@dataclass
class ReadSample:
    """A sample as people read it."""

    why: str  # it was chosen
    step: int
    id: str
    problem: str
    prompt: str
    completion: str
    length: int
    predicted: float
    finish: str
    reward: float
    reward_error: str
    version: int
    parts: dict[str, float] = field(default_factory=dict)


def samples_to_read(handle: RunHandle, *, deadline_s: float) -> list[ReadSample]:
    """Return a handful of samples of the newest step: the best, the worst, the longest and so on.

    Raises Explained if the samples or the tokenizer can't be had.
    """
    topic = handle.topics.ledger
    records = read_all(handle.bus, topic, near_ends(handle.bus, topic, 1), deadline_s=deadline_s)
    steps = Gate(StepRecord, handle.run, passed_over).messages(records)
    if not steps or not steps[-1].groups.size:
        return []
    step, to_text = steps[-1], load_to_text(handle.record.model)
    chosen = _chosen(step)
    places = [(int(step.partitions[row]), int(step.offsets[row])) for row in chosen]
    what = f"samples of step {step.step}"
    rows = fetch(handle.bus, samples_topic(handle), places, what=what, deadline_s=deadline_s)
    found = []
    for why, row in zip(chosen.values(), rows, strict=True):
        one = row.sample
        found.append(
            ReadSample(
                why=why, step=step.step, id=one.id, problem=one.problem_id[:200],
                prompt=_short(to_text(one.prompt_tokens[:_TOKENS])),
                completion=_text(one, to_text(one.tokens[:_TOKENS])),
                length=one.true_length, predicted=one.predicted, finish=one.finish[:20], reward=one.reward,
                reward_error=one.reward_error[:500], version=int(one.versions[0]),
                parts={name[:80]: value for name, value in list(one.reward_parts.items())[:12]},
            )
        )  # fmt: skip
    return found


def _chosen(step: StepRecord) -> dict[int, str]:
    """Return rows of the step, each with the reason. No row is chosen twice."""
    rewards = np.nan_to_num(step.rewards, nan=-np.inf)
    order, lengths = np.argsort(rewards, kind="stable"), step.lengths
    wishes = [
        (int(order[-1]), "best"), (int(order[0]), "worst"), (int(order[order.size // 2]), "median reward"),
        (int(lengths.argmax()), "longest"), (int(lengths.argmin()), "shortest"),
        (int(np.abs(lengths - step.predicted).argmax()), "length least expected"),
    ]  # fmt: skip
    found: dict[int, str] = {}
    for row, why in wishes:
        found[row] = f"{found[row]}, {why}" if row in found else why
    return found


def _text(sample: Sample, text: str) -> str:
    return _short(text) if sample.true_length <= _TOKENS else f"{_short(text)} …"


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} … ({len(text) - _LONGEST} more characters)"
