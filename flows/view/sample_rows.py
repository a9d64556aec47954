"""Samples as rows: text beside numbers, for people and programs, with conditions and an order."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.errors import Explained
from schemas.messages import Sample
from schemas.shortening import shown

SampleRow = dict[str, Any]
ToText = Callable[[np.ndarray], str]

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "==": operator.eq,
    "<": operator.lt, ">": operator.gt, "=": operator.eq,
    "~": lambda value, text: str(text) in str(value),
}  # fmt: skip
_CONDITION = re.compile(rf"\s*([\w.-]+)\s*({'|'.join(_OPERATORS)})(.*)", re.DOTALL)


class BadCondition(Explained):
    """A condition, or a field to sort by, that can't be understood."""


def sample_row(sample: Sample, to_text: ToText, iteration: int | None = None) -> SampleRow:
    """Return a sample's row. Its texts are as the model drew them: whoever shows them makes them harmless.

    `iteration`: the one that trained the sample, if that is known and the sample itself does not say it.
    """
    iteration = sample.iteration if iteration is None else iteration
    return {
        "id": sample.id,
        "problem": sample.problem_id,
        "iteration": iteration,
        "epoch": sample.epoch,
        "group": sample.group,
        "index": sample.index,
        "purpose": sample.purpose,
        "reward": None if sample.reward_error else sample.reward,
        "parts": sample.reward_parts,
        "error": sample.reward_error,
        "length": sample.true_length,
        "predicted": sample.predicted,
        "class": sample.length_class,
        "prompt_length": int(sample.prompt_tokens.size),
        "finish": sample.finish,
        "version": int(sample.versions.min()),
        "versions": sample.versions.tolist(),
        "staleness": iteration - int(sample.versions.min()),
        "logprob": float(sample.logprobs.mean()) if sample.logprobs.size else None,
        "seconds": sample.finished_at - sample.started_at,
        "finished_at": sample.finished_at,
        "generator": sample.generator,
        "prompt": to_text(sample.prompt_tokens),
        "text": to_text(sample.tokens),
    }


def field_of(row: SampleRow, name: str) -> Any:
    """Return a field of a row, or a part of its reward by the part's name; None if it has neither."""
    return row[name] if name in row else row["parts"].get(name)


@dataclass(frozen=True, slots=True)
class SampleCondition:
    """A condition on a field, such as reward<0.5, finish=length or text~sorry."""

    field: str
    sign: str
    value: str

    @classmethod
    def read(cls, text: str) -> SampleCondition:
        """Return the condition that a text says."""
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise BadCondition(
                f"{shown(text)} is no condition: write a field, one of {' '.join(_OPERATORS)} and a value, "
                "such as reward<0.5, finish=length or text~sorry"
            )
        return cls(found[1], found[2], found[3].strip())

    def holds(self, row: SampleRow) -> bool:
        """Whether it holds for a row. It does not hold where the row lacks the field."""
        have = field_of(row, self.field)
        if have is None:
            return False
        if self.sign == "~" or isinstance(have, str):
            return _OPERATORS[self.sign](have, self.value)
        try:
            return _OPERATORS[self.sign](have, float(self.value))
        except (ValueError, TypeError):
            raise BadCondition(
                f"{self.field}{self.sign}{self.value}: {self.field} is a number, and "
                f"{shown(self.value)} is none"
            ) from None


def in_order(rows: Iterable[SampleRow], field: str, *, lowest_first: bool) -> list[SampleRow]:
    """Return rows in the order of a field, highest first by default. Rows that lack it come last."""
    rows = list(rows)
    lacking = [row for row in rows if field_of(row, field) is None]
    having = [row for row in rows if field_of(row, field) is not None]
    try:
        having.sort(key=lambda row: field_of(row, field), reverse=not lowest_first)
    except TypeError:
        raise BadCondition(f"samples can't be sorted by {field}: it is no number and no text") from None
    return having + lacking


def check_fields(names: Sequence[str], rows: Iterable[SampleRow]) -> None:
    """Raise BadCondition for a name that is no field of any of the rows, if there are rows."""
    known: dict[str, None] = {}
    for row in rows:
        known |= dict.fromkeys((*row, *row["parts"]))
    for name in names:
        if known and name not in known:
            raise BadCondition(f"samples have no field {shown(name)}; their fields are {', '.join(known)}")
