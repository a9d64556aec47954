"""Rewards that fail or never differ: what is said of them, where, and when a run ends."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from consumers.steps.failed_rewards import FailedRewards, RewardsFail, example_of
from flows.cli.shared.result import show_result
from flows.run.request import RunResult
from flows.view.live import one_line, picture
from flows.view.reward_trouble import RewardSayings, told
from flows.view.run_view import RunView
from flows.view.totals import Totals
from schemas.messages import Heartbeat, StepRecord
from tests.factories import make_sample, make_spec
from tests.fakes.fill import fill
from tests.unit.test_cli_run import SUMMARY

NAN = np.nan
SPEC = make_spec()


def step(iteration: int, rewards: list[float], *, skipped: bool = False, **fields: Any) -> StepRecord:
    size = len(rewards)
    found = {"failed_reason": "KeyError: 'solution'", "failed_sample": f"{iteration:07d}-01"}
    given = {"step": iteration, "last_of_iteration": True, **(found if np.isnan(rewards).any() else {})}
    return fill(
        StepRecord, iteration=iteration, groups=np.zeros(size), rewards=np.array(rewards),
        lengths=np.full(size, 7), versions=np.zeros(size), finished_at=float(iteration),
        metrics={"skipped": float(skipped)}, **{**given, **fields},
    )  # fmt: skip


def beat(trouble: str, number: int = 0, state: str = "generating") -> Heartbeat:
    return fill(Heartbeat, role="generator", number=number, state=state, trouble=trouble)


@pytest.fixture
def view() -> RunView:
    return RunView("test-1", SPEC)


def shown(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(view))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_the_example_is_of_the_most_frequent_reason_whatever_came_first() -> None:
    samples = [
        make_sample(SPEC, 0, 0), make_sample(SPEC, 5, 1, reward_error="slow"),
        make_sample(SPEC, 3, 0, reward_error="KeyError"), make_sample(SPEC, 2, 1, reward_error="\x1b[2J"),
        make_sample(SPEC, 1, 1, reward_error="KeyError"),
    ]  # fmt: skip
    assert example_of(samples) == example_of(samples[::-1]) == ("KeyError", "0000001-01")
    assert example_of(samples[:1]) == ("", "")
    assert example_of([make_sample(SPEC, 0, 0, reward_error="\x1b" * 10**6)])[0].startswith("\\x1b")
    assert len(example_of([make_sample(SPEC, 0, 0, reward_error="x" * 10**6)])[0]) == 500


def test_more_than_half_of_two_iterations_end_the_run_with_reason_example_and_advice() -> None:
    watch = FailedRewards("test-1", 0.5)
    watch.took(step(0, [NAN, NAN, NAN, NAN]))
    watch.took(step(1, [0.0, 1.0, 0.5, 0.0]))  # half, and not more
    watch.took(step(2, [NAN, NAN, 0.0, 1.0]))
    with pytest.raises(RewardsFail) as caught:
        watch.took(step(3, [NAN, NAN, NAN, 1.0]))
    assert str(caught.value) == (
        "5 of the 8 samples of iterations 2 and 3 have no reward; more than 50% end a run "
        "(task.max_failed_rewards). The most frequent reason is: KeyError: 'solution'. An example is sample "
        "0000003-01, which this shows: streamrl samples test-1 --step 3 --where id=0000003-01. Mend the "
        "reward and start a new run; to go on with this one as it is, resume it with --set "
        "task.max_failed_rewards=1"
    )
    assert caught.value.lasting


def test_an_iteration_of_several_steps_counts_once() -> None:
    watch = FailedRewards("test-1", 0.5)
    for number in range(4):
        watch.took(step(0, [NAN, NAN], step=number, last_of_iteration=number == 3))
    watch.took(step(1, [NAN, 0.0], step=4, last_of_iteration=False))
    with pytest.raises(RewardsFail, match=r"^10 of the 12 samples of iterations 0 and 1 "):
        watch.took(step(1, [NAN, 0.0], step=5))


def test_a_share_of_one_never_ends_a_run() -> None:
    watch = FailedRewards("test-1", 1.0)
    for number in range(20):
        watch.took(step(number, [NAN, NAN]))


def test_none_are_allowed() -> None:
    watch = FailedRewards("test-1", 0.0)
    watch.took(step(0, [0.0] * 50))
    with pytest.raises(RewardsFail, match=r"^1 of the 100 samples"):
        watch.took(step(1, [NAN] + [0.0] * 49))


def test_old_records_say_no_reason() -> None:
    view = RunView("test-1", SPEC)
    view.take(step(1, [NAN, 1.0], failed_reason="", failed_sample=""))
    (said,) = view.rewards.sentences()
    assert said.text == (
        "1 of the 2 samples of iteration 1 have no reward: the reason is in the generators' logs"
    )


def test_the_live_view_says_why_rewards_fail(view: RunView) -> None:
    view.take(step(0, [1.0, 0.5]))
    assert "reward:" not in shown(view)
    view.take(step(1, [NAN, 0.5]))
    said = "1 of the 2 samples of iteration 1 have no reward: KeyError: 'solution' (as of sample 0000001-01)"
    assert said in shown(view)
    assert ", 1 without a reward" in one_line(view)
    view.take(step(2, [1.0, 0.5]))
    assert "have no reward" not in shown(view) and "without a reward" not in one_line(view)


def test_a_hanging_reward_is_said_before_any_step_is_taken(
    view: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "sample 0000002-01 has no reward: no answer within 10 s (task.reward_deadline_s)"
    view.take(beat(hangs))
    view.take(beat(hangs.replace("02-01", "05-00"), 1))
    assert [one.text for one in view.rewards.sentences()] == [
        f"generator-1: {hangs.replace('02-01', '05-00')}"
    ]
    view.take(beat("", 1))
    assert f"generator-0: {hangs}" in shown(view)
    view.take(beat(hangs, 0, state="ended"))
    assert "generator-0: sample" not in shown(view)
    for number in range(3000):
        view.take(beat(hangs, number))
    assert len(view.rewards._generators) == 50 and len(view.rewards.sentences()) == 1
    monkeypatch.setattr("flows.view.reward_trouble._STALE_S", 0.0)
    assert view.rewards.sentences() == []


def test_that_there_is_no_gradient_is_said(view: RunView) -> None:
    view.take(step(0, [0.0, 1.0]))
    view.take(step(1, [0.25, 0.25], skipped=True))
    assert "no group of the last iteration has rewards that differ (every reward is 0.25)" in shown(view)
    view.take(step(2, [0.25, 0.25], skipped=True))
    view.take(step(3, [0.25, 0.25], skipped=True))
    said = (
        "no group of the last 3 iterations has rewards that differ (every reward is 0.25): there is no "
        "gradient, and the weights stay as they are. The reward may be constant, or the task too hard or too "
        "easy for the model"
    )
    assert [one.text for one in view.rewards.sentences()] == [said]
    assert "no gradient in 3 iterations" in one_line(view)
    view.take(step(4, [0.0, 1.0]))
    assert view.rewards.sentences() == []


def test_each_reason_is_said_once(view: RunView, tmp_path: Path) -> None:
    said: list[str] = []
    sayings = RewardSayings(tmp_path, said.append)

    def take(*messages: object) -> None:
        for message in messages:
            view.take(message)
            sayings.see(view.rewards)

    take(step(0, [NAN, 0.5]), step(1, [NAN, 0.5]), beat("sample 0000009-01 has no reward: ValueError: '7'"))
    take(beat("sample 0000010-01 has no reward: ValueError: '8'"), step(2, [NAN, 1.0]))
    assert len(said) == 2
    take(step(3, [0.0, 0.0], skipped=True))
    assert len(said) == 2  # one iteration without a gradient happens
    take(*(step(number, [0.0, 0.0], skipped=True) for number in range(4, 9)))
    assert len(said) == 3 and said[-1].startswith("no group of the last 2 iterations has rewards that differ")
    take(step(9, [0.0, 1.0]), *(step(number, [0.0, 0.0], skipped=True) for number in range(10, 14)))
    assert len(said) == 4
    assert told(tmp_path) == list(dict.fromkeys(said))
    assert told(tmp_path / "nowhere") == []


def test_a_liar_fills_neither_the_terminal_nor_memory(view: RunView, tmp_path: Path) -> None:
    said: list[str] = []
    sayings = RewardSayings(tmp_path, said.append)
    for number in range(300):
        letters = "".join(chr(97 + int(digit)) for digit in str(number))
        view.take(step(number, [NAN, 1.0], failed_reason=f"\x1b[2J{letters}" + "x" * 4000))
        sayings.see(view.rewards)
    assert len(said) == 50
    assert all(len(one) < 1_000 and one.isprintable() for one in said)
    assert len(told(tmp_path)) == 10


def test_the_summary_and_the_result_say_it() -> None:
    totals = Totals()
    for number, skipped in enumerate([1.0, 0.0, 1.0, 1.0]):
        totals.add({"step": number, "iteration": number, "samples": 4, "skipped": skipped, "reward": 0.5})
    summary = totals.summary()
    assert (summary["steps_without_gradient"], summary["steps_without_gradient_at_end"]) == (3, 2)
    console = Console(file=io.StringIO(), width=200)
    about = {"told": ["1 of the 2 samples of iteration 1 have no reward: KeyError: 'x'"]}
    show_result(console, RunResult("test-1", Path("runs"), {**SUMMARY, "steps": 4, **summary, **about,
                                                           "samples": 96, "rewards_failed": 2}))  # fmt: skip
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue()
    assert "2 of 96 samples had no reward\n" in lines
    assert "3 of 4 steps had no gradient, 2 of them at the end, and left the weights as they were\n" in lines
    assert "have no reward: KeyError: 'x'\n" in lines


def test_the_result_of_a_single_step_compares_nothing() -> None:
    totals = Totals()
    totals.add({"step": 0, "iteration": 0, "samples": 4, "reward": 0.5})
    console = Console(file=io.StringIO(), width=200)
    summary = {**SUMMARY, **totals.summary(), "result": []}
    show_result(console, RunResult("test-1", Path("runs"), summary))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("run test-1: reward of the only step 0.500")
    assert lines[1].startswith("1 iteration, 4 samples; staleness")
