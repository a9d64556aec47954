"""Groups that told nothing: follows `<run>.samples` and says in whose place another one is to be drawn.

Which ones that are depends on the samples alone, and what is drawn instead on its number: so a feeder that
starts again finds the same, and the trainer knows without being told what it has to wait for. Both count only
samples that are fit, by the same rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.process import Context
from infra.weights.versions import WeightStore
from producers.dispatch.recovery import behind
from schemas.admission import tells_nothing
from schemas.fitness import contradiction, fault, weights_fault
from schemas.identity import round_of
from schemas.messages import TRAIN, Prompt, Sample, StepRecord
from schemas.wire import Unreadable, decode


@dataclass(frozen=True)
class Place:
    """A group, and where it belongs."""

    group: int
    window: int
    mini: int


class Resampling:
    """`found` is called now and then; each place is said once."""

    def __init__(
        self, context: Context, steps: Sequence[StepRecord], trained: int, prompts: Iterable[Prompt]
    ) -> None:
        """`steps`: the ledger; `prompts`: what was admitted before."""
        self._context, self._trained = context, trained
        self._weights = WeightStore(context.store, context.run)
        self._roots: dict[int, str] = {}
        self._vocabulary = _vocabulary(context.record.model)
        self._prompts: dict[int, Prompt] = {}
        self._most = context.spec.loss.resample or 0
        self._size = context.spec.algorithm.group_size
        lookahead = context.spec.algorithm.lookahead
        start = behind(steps, trained, lookahead)
        self._reader = context.bus.reader(context.topics.samples, start) if self._most else None
        self._rewards: dict[Place, dict[int, float]] = {}
        self.admitted(prompts)

    def admitted(self, prompts: Iterable[Prompt]) -> None:
        """Groups whose samples may come now."""
        if self._most:
            self._prompts |= {p.group: p for p in prompts if p.purpose == TRAIN and p.window >= self._trained}

    def found(self, trained: int) -> list[Place]:
        """Groups that are whole now and told nothing; `trained` iterations need no more."""
        if self._reader is None:
            return []
        if trained > self._trained:
            self._trained = trained
            self._rewards = {
                place: known for place, known in self._rewards.items() if place.window >= trained
            }
            self._prompts = {
                group: prompt for group, prompt in self._prompts.items() if prompt.window >= trained
            }
        result = []
        while records := self._reader.poll(0.0):
            for record in records:
                try:
                    sample = decode(record.value, Sample)
                except Unreadable:
                    continue  # the trainer reports it
                if (place := self._take(sample)) is not None:
                    result.append(place)
        return result

    def _take(self, sample: Sample) -> Place | None:
        """Its place, if it was the last of a group that told nothing."""
        if sample.run != self._context.run or sample.purpose != TRAIN or sample.window < self._trained:
            return None
        if round_of(sample.group) >= self._most or not self._is_fit(sample):
            return None  # what is unfit the trainer reports, and it is made again
        place = Place(sample.group, sample.window, sample.mini)
        known = self._rewards.setdefault(place, {})
        if sample.index in known:
            return None
        known[sample.index] = math.nan if sample.reward_error else sample.reward
        if len(known) < self._size or not tells_nothing(known.values()):
            return None
        return place

    def _is_fit(self, sample: Sample) -> bool:
        spec, prompt = self._context.spec, self._prompts.get(sample.group)
        newest = spec.algorithm.iterations  # which one is there the trainer knows before we do
        reason = fault(sample, spec, self._vocabulary) or weights_fault(sample, spec, newest, self._root)
        return not (reason or prompt is None or contradiction(sample, prompt))

    def _root(self, version: int) -> str | None:
        if version not in self._roots and (found := self._weights.find(version)):
            self._roots[version] = found.root
        return self._roots.get(version)

    def close(self) -> None:
        """Let go of the reader."""
        if self._reader is not None:
            self._reader.close()


def _vocabulary(model: str) -> float:
    file = Path(model) / "config.json"
    return float(json.loads(file.read_text()).get("vocab_size", math.inf)) if file.is_file() else math.inf
