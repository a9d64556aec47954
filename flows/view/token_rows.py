"""A trained sample token by token, and a step's samples with the marks that the ledger has of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from consumers.batches.training_rows import TrainingRow
from consumers.replay import TrainedSample
from flows.view.sample_rows import SampleRow, ToText, sample_row
from schemas.messages import StepRecord

TokenRow = dict[str, Any]


def token_rows(found: TrainedSample, decode: Callable[[Sequence[int]], str]) -> list[TokenRow]:
    """Return a row for each drawn token."""
    sample = found.sample
    starts = sample.version_starts
    place = np.searchsorted(starts, np.arange(sample.tokens.size), side="right") - 1
    rows = []
    for number, token in enumerate(sample.tokens.tolist()):
        behaviour, trainer = float(sample.logprobs[number]), float(found.logprobs[number])
        rows.append({
            "place": number, "token": token, "text": decode([token]),
            "version": int(sample.versions[place[number]]), "logprob": behaviour, "trainer_logprob": trainer,
            "ratio": math.exp(min(50.0, trainer - behaviour)),
            "advantage": None if found.advantage is None else float(found.advantage[number]),
            "reference_logprob": None if found.reference is None else float(found.reference[number]),
        })  # fmt: skip
    return rows


def marked_rows(record: StepRecord, rows: Sequence[TrainingRow], to_text: ToText) -> list[SampleRow]:
    """Return the samples of a step with advantage, mean logprob and gap, as the ledger has them."""
    found = []
    for number, row in enumerate(rows):
        one = sample_row(row.sample, to_text, record.iteration)
        for name in ("advantages", "logprobs", "gaps", "scores"):
            values = getattr(record, name)
            value = float(values[number]) if values.size else math.nan
            one[_NAMES[name]] = None if math.isnan(value) else value
        found.append(one | {"step": record.step})
    return found


_NAMES = {
    "advantages": "advantage", "logprobs": "trainer_logprob", "gaps": "gap", "scores": "score",
}  # fmt: skip
