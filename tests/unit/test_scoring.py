"""What is scored together never depends on when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from consumers.batches.training_rows import Scores, TrainingRow
from consumers.learners.learner import Learner
from consumers.losses.loss import Needs
from consumers.steps.scoring import Scoring
from tests.factories import make_sample, make_spec

GROUPS, SIZE = 3, 4
SPEC = make_spec(algorithm={"groups": GROUPS, "group_size": SIZE}, sampling={"max_tokens": 900},
                 trainer={"microbatch_tokens": 2048})  # fmt: skip
NEEDS = Needs(reference=True)


class Noting:
    """A learner whose scores say who was scored together."""

    def score(self, parts: Sequence[Sequence[TrainingRow]], needs: Needs) -> list[list[TrainingRow]]:
        assert needs is NEEDS
        return [
            [replace(row, scores=Scores(reference=np.array([r.offset for r in rows]))) for row in rows]
            for rows in parts
        ]


def rows_of(lengths: Sequence[int]) -> list[TrainingRow]:
    samples = [make_sample(SPEC, n // SIZE, n % SIZE, length=length) for n, length in enumerate(lengths)]
    return [TrainingRow(sample, 0, number) for number, sample in enumerate(samples)]


def scoring(needs: Needs = NEEDS, at_once: int = 2) -> Scoring:
    return Scoring(cast(Learner, Noting()), needs, at_once=at_once)


lengths = st.lists(st.sampled_from([5, 30, 600, 800]), min_size=GROUPS * SIZE, max_size=GROUPS * SIZE)


@given(lengths, st.permutations(range(GROUPS * SIZE)), st.data())
def test_scores_are_the_same_whenever_they_are_made(
    lengths: list[int], order: list[int], data: st.DataObject
) -> None:
    rows = rows_of(lengths)
    late, soon = scoring(), scoring()
    for count in sorted(data.draw(st.sets(st.integers(1, len(rows))))):
        here = sorted(order[:count])
        groups = [[rows[n] for n in here if n // SIZE == group] for group in range(GROUPS)]
        while parts := soon.missing([group for group in groups if group]):
            assert len(parts) <= 2
            soon.score(parts)

    def said(one: Scoring) -> list[Any]:
        return [row.scores.reference.tolist() for row in one.scored(rows)]  # type: ignore[union-attr]

    assert said(soon) == said(late)


def test_a_long_sample_is_scored_as_it_comes() -> None:
    rows = rows_of([800, 5, 30, 5] * GROUPS)
    one = scoring()
    assert one.missing([rows[:1]]) == [[rows[0]]]
    assert one.missing([rows[1:3]]) == [], "short ones wait for their group"
    one.score([[rows[0]]])
    assert one.missing([rows[:SIZE]]) == [[rows[1], rows[3], rows[2]]], "by length"
    one.begin()
    assert one.missing([rows[:1]]) == [[rows[0]]]
    assert scoring(Needs()).missing([rows[:SIZE]]) == []


def test_many_short_samples_are_scored_in_parts_that_fit() -> None:
    samples = [make_sample(SPEC, 0, n, length=300, size=100) for n in range(100)]
    rows = [TrainingRow(sample, 0, n) for n, sample in enumerate(samples)]
    one = scoring(at_once=9)
    first, second = one.missing([rows])
    assert len(first) == (1 << 14) // rows[0].size and [*first, *second] == rows
    one.score([first])
    assert one.missing([rows]) == [second]
    assert one.missing([rows[:99]]) == []


def test_a_sample_that_takes_another_s_place_is_scored_itself() -> None:
    forged, *others = rows_of([800] * SIZE + [5] * SIZE * (GROUPS - 1))
    one = scoring()
    one.score([[forged]])
    real = replace(forged, offset=77)
    assert one.missing([[real]]) == [[real]]
    first = one.scored([real, *others])[0]
    assert first.scores.reference.tolist() == [77]  # type: ignore[union-attr]
