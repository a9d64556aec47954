"""The balance of lengths in order arrival: 1 if none is preferred, and nothing as long as it is not known."""

from __future__ import annotations

from consumers.steps.length_balance import LengthBalance
from schemas.messages import StepRecord
from tests.factories import make_sample, make_spec
from tests.feeding import make_step

SPEC = make_spec(
    algorithm={
        "groups": 2, "group_size": 2, "mode": "async", "order": "arrival", "staleness": 1,
        "staleness_cap": 2, "iterations": 20,
    }
)  # fmt: skip


def step(iteration: int, *groups: tuple[int, int]) -> StepRecord:
    """Groups and the length of their samples."""
    return make_step(
        SPEC,
        iteration,
        [make_sample(SPEC, group, i, length=length) for group, length in groups for i in (0, 1)],
    )


def balance(steps: list[StepRecord], first: int = 0) -> list[float | None]:
    found = LengthBalance(SPEC.algorithm, first)
    ratios = []
    for one in steps:
        found.add(one)
        ratios.append(found.ratio(one.iteration))
    return ratios


def test_in_the_order_of_admission_it_is_1_once_three_iterations_and_the_cap_are_there() -> None:
    steps = [step(n, (2 * n, 3 + n), (2 * n + 1, 4)) for n in range(8)]
    assert balance(steps) == [None] * 4 + [1.0] * 4
    assert balance(steps[3:], 3) == [None] * 5  # of the first ones some were trained before


def test_short_ones_that_come_first_and_long_ones_that_come_late_show() -> None:
    long, short = [(0, 9), (1, 9)], [(4 + n, 3) for n in range(12)]
    order = [*short[:6], *long, *short[6:]]
    steps = [step(n, *order[2 * n : 2 * n + 2]) for n in range(7)]
    found = balance(steps)
    assert found[4] is not None and found[4] < 0.7  # iterations 0 to 2 had no long one, and were to have two
    assert found[6] is not None and found[6] > 1.5


def test_it_holds_no_more_of_a_long_run() -> None:
    found = LengthBalance(SPEC.algorithm, 0)
    for n in range(300):
        found.add(step(n, (2 * n, 3), (2 * n + 1, 5)))
    assert len(found._trained) <= 6 and len(found._admitted) <= 8
