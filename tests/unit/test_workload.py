"""Drawn lengths are those of their source, alike within groups as wanted, and foretold as well as wanted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.planning.workload import (
    LengthHistogram,
    LengthSource,
    LogNormalLengths,
    ObservedLengths,
    RecordedLengths,
    Workload,
    WorkloadError,
)
from schemas.runspec import RunSpec
from tests.factories import make_spec

NORMAL = LogNormalLengths(500, 0.5)


def spec_of(groups: int = 500, size: int = 8, iterations: int = 4, longest: int = 100_000) -> RunSpec:
    return make_spec(
        sampling={"max_tokens": longest, "max_prompt_tokens": 1000},
        trainer={"microbatch_tokens": longest + 1000},
        algorithm={"groups": groups, "group_size": size, "iterations": iterations},
    )  # fmt: skip


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values))


@pytest.mark.parametrize(
    ("source", "mean", "median"),
    [
        (LengthHistogram((0, 100, 1100), (1, 3)), 0.25 * 50 + 0.75 * 600, 100 + 1000 / 3),
        (ObservedLengths((10, 20, 90)), 40, 20),
        (LogNormalLengths(500, 0.5), 500, 500 * np.exp(-0.125)),
        (RecordedLengths(((10, 20), (90, 40))), 40, 30),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_drawn_lengths_are_those_of_their_source(
    source: LengthSource, mean: float, median: float, share: float
) -> None:
    spec = spec_of(groups=2000)
    workload = Workload(source, between_groups=share)
    drawn = workload.draw(spec, 3)
    assert drawn.answers.shape == (8000, 8)
    assert drawn.answers.mean() == pytest.approx(mean, rel=0.04)
    assert workload.mean_answer(spec) == pytest.approx(mean, rel=0.03)
    assert np.median(drawn.answers) == pytest.approx(median, rel=0.5 if mean == 40 else 0.05)
    assert drawn.prompts.mean() == pytest.approx(workload.mean_prompt(spec), rel=0.02)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_so_much_of_the_variance_lies_between_groups(share: float) -> None:
    logs = np.log(Workload(NORMAL, between_groups=share).draw(spec_of(), 1).answers)
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 8
    assert between / logs.var() == pytest.approx(share, abs=0.05)


def test_groups_of_a_record_stay_together() -> None:
    recorded = RecordedLengths(((1, 2), (30, 40), (500, 600)), in_order=True)
    assert Workload(recorded).draw(spec_of(4, 2, 1), 0).answers.tolist() == [
        [1, 2], [30, 40], [500, 600], [1, 2],
    ]  # fmt: skip
    drawn = Workload(RecordedLengths(recorded.groups)).draw(spec_of(50, 2, 1), 0).answers.tolist()
    assert {tuple(group) for group in drawn} == set(recorded.groups)
    larger = Workload(RecordedLengths(recorded.groups)).draw(spec_of(50, 5, 1), 0).answers.tolist()
    assert all(any(set(group) <= set(known) for known in recorded.groups) for group in larger)


@pytest.mark.parametrize("wanted", [-0.5, 0.0, 0.6, 0.9, 1.0])
def test_a_ranker_is_as_good_as_wanted(wanted: float) -> None:
    drawn = Workload(NORMAL, ranker_correlation=wanted).draw(spec_of(groups=1000), 2)
    means = drawn.answers.mean(axis=1)
    assert np.corrcoef(ranks(drawn.predicted), ranks(means))[0, 1] == pytest.approx(wanted, abs=0.03)
    assert sorted(drawn.predicted) == pytest.approx(sorted(means))


def test_a_rankers_error_has_the_wanted_deviation() -> None:
    exact, rough = (Workload(NORMAL, ranker_sigma=sigma).draw(spec_of(), 2) for sigma in (0.0, 0.4))
    assert (exact.predicted == exact.answers.mean(axis=1)).all()
    assert np.log(rough.predicted / exact.predicted).std() == pytest.approx(0.4, rel=0.05)
    assert (rough.answers == exact.answers).all(), "the ranker's error changes no length"


def test_lengths_grow_and_end_at_the_longest_answer() -> None:
    means = Workload(NORMAL, growth=1.5).draw(spec_of(), 0).answers.reshape(4, -1).mean(axis=1)
    assert means[1:] / means[:-1] == pytest.approx([1.5] * 3, rel=0.05)
    assert Workload(NORMAL, growth=1.5).draw(spec_of(longest=600), 0).answers.max() == 600


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.floats(0, 1))
def test_a_longer_run_begins_with_other_lengths_only_if_the_seed_is_another(
    seed: int, iterations: int, share: float
) -> None:
    workload, spec = Workload(NORMAL, between_groups=share), spec_of(4, 2)
    one, other = workload.draw(spec, seed, iterations), workload.draw(spec, seed, iterations)
    assert (one.answers == other.answers).all() and (one.prompts == other.prompts).all()
    assert len(one.answers) == iterations * 4
    assert (one.answers != workload.draw(spec, seed + 1, iterations).answers).any()


def test_attended_tokens_are_the_mean_over_all_steps() -> None:
    drawn = Workload(RecordedLengths(((3, 5),), in_order=True), LogNormalLengths(7)).draw(spec_of(1, 2, 1), 0)
    steps = [7 + made for length in (3, 5) for made in range(length)]
    assert drawn.attended == pytest.approx(np.mean(steps))
    assert drawn.answer((0, 1)) == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LengthHistogram((1, 2), (1, 2)), "one edge more"),
        (lambda: LengthHistogram((2, 1), (1,)), "must grow"),
        (lambda: LengthHistogram((0, 1e9), (1,)), "must lie between"),
        (lambda: LengthHistogram((0, 1), (0,)), "not all 0"),
        (lambda: LengthHistogram((0, 1), (float("nan"),)), "weights"),
        (lambda: ObservedLengths(()), "at least one length"),
        (lambda: ObservedLengths((0,)), "at least one length"),
        (lambda: LogNormalLengths(-1), "mean"),
        (lambda: LogNormalLengths(float("nan")), "mean"),
        (lambda: RecordedLengths(((),)), "each group a length"),
        (lambda: RecordedLengths(((0,),)), "between 1"),
        (lambda: Workload(NORMAL, between_groups=1.5), "between_groups"),
        (lambda: Workload(NORMAL, ranker_sigma=-1), "ranker_sigma"),
        (lambda: Workload(NORMAL, ranker_sigma=1, ranker_correlation=0.5), "ranker_correlation"),
        (lambda: Workload(NORMAL, growth=0), "growth"),
    ],
)
def test_impossible_workloads_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        make()
