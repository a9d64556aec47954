"""Before and after, and the lines of metrics.jsonl."""

import numpy as np
import pytest

from flows.view.held_out_results import comparison, known_lengths, longest
from flows.view.metric_rows import step_row, with_rates
from schemas.messages import Evaluation, StepRecord
from tests.fakes.fill import fill


def evaluation(version: int, rewards: list[float], lengths: list[int], names: list[str]) -> Evaluation:
    return fill(
        Evaluation,
        version=version,
        problem_ids=names,
        rewards=np.array(rewards, dtype=np.float32),
        lengths=np.array(lengths),
    )


def step(number: int, epoch: int = 0, **fields: object) -> StepRecord:
    given = {
        "step": number,
        "iteration": number,
        "trainer_epoch": epoch,
        "groups": np.zeros(4),
        "rewards": np.array([0.0, 1.0, np.nan, 0.5]),
        "lengths": np.array([2, 4, 6, 8]),
        "version_in": 5,
        "versions": np.array([5, 5, 4, 3]),
        "finished_at": 10.0 * number,
        "metrics": {"waited_s": 2.5, "reward": 9.0},
    }
    return fill(StepRecord, **{**given, **fields})


def test_first_and_last_version_are_compared_and_ties_go_by_name() -> None:
    names = [f"p{number}" for number in range(10)]
    records = [
        evaluation(0, [0.0] * 10, [5] * 10, names),
        evaluation(4, [0.9] * 10, [5] * 10, names),
        evaluation(8, [0.5, 0.7] + [0.1] * 8, [9, 9] + [1] * 8, names),
    ]
    problems = [{"id": name, "length": 60 if name in ("p8", "p9") else 3} for name in names]
    whole, by_answer, by_sampled = comparison(records, problems)
    assert (whole["problems"], whole["before"], whole["after"]) == (10, 0.0, pytest.approx(0.2))
    assert (by_answer["problems"], by_answer["gain"]) == (2, pytest.approx(0.1))
    assert (by_sampled["problems"], by_sampled["gain"]) == (2, pytest.approx(0.6))
    assert longest(["b", "a", "c"], {"a": 1, "b": 1, "c": 1}) == ["a"]


def test_an_evaluation_that_was_done_twice_counts_once() -> None:
    first = evaluation(0, [0.0], [1], ["p"])
    rows = comparison([first, evaluation(2, [0.3], [1], ["p"]), evaluation(2, [0.4], [1], ["p"])], [])
    assert rows[0]["after"] == pytest.approx(0.4)


def test_samples_without_a_reward_are_left_out() -> None:
    records = [evaluation(v, [np.nan, 0.5, np.nan], [1, 1, 1], ["p", "p", "q"]) for v in (0, 1)]
    assert (comparison(records, [])[0]["problems"], comparison(records, [])[0]["before"]) == (1, 0.5)


def test_nothing_to_compare() -> None:
    assert comparison([], []) == []
    assert comparison([evaluation(0, [1.0], [1], ["p"])], []) == []


def test_known_lengths() -> None:
    problems = [{"id": 1, "length": 7}, {"id": 2, "answer": "four"}, {"id": 3, "length": True}, {"id": 4}]
    assert known_lengths(problems) == {"1": 7.0, "2": 4.0}


def test_a_row_of_a_step() -> None:
    row = step_row(step(3))
    assert (row["reward"], row["rewards_failed"], row["samples"]) == (0.5, 1, 4)
    assert (row["tokens"], row["length"], row["length_p50"], row["length_max"]) == (20, 5.0, 5.0, 8)
    assert (row["staleness"], row["staleness_max"], row["waited_s"]) == (0.75, 2, 2.5)


def test_rates_are_not_taken_over_a_restart() -> None:
    rows = with_rates([step_row(step(n, epoch=n // 2)) for n in range(4)])
    assert [row["samples_per_s"] for row in rows] == [None, 0.4, None, 0.4]
    assert rows[1]["idle"] == 0.25
