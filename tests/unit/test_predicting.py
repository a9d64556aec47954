"""A run's prediction comes from a process beside it: it says a line, and keeps nothing waiting."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from flows.cli.shared import predicting
from flows.cli.shared.predicting import PredictionBeside
from flows.planning.workload import LogNormalLengths, Workload
from flows.plans.given_split import given_split
from flows.plans.planning_inputs import KnownLengths, PlanningInputs, demand_of_workload
from flows.plans.predicted_iteration import iteration_row, share_range
from flows.plans.prediction import predictions
from flows.run.request import RunRequest
from flows.view.run_view import RunView
from flows.view.screen import Nobody
from tests.factories import make_spec
from tests.planning import TableOfTests, pool_of
from tests.waiting import wait_until

LINE = json.dumps({
    "step_s": {"value": 2.0, "low": 1.5, "high": 3.0},
    "samples_per_s": {"value": 50.0, "low": 40.0, "high": 60.0}, "simulated": True,
})  # fmt: skip


class Listener(Nobody):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.heard = threading.Event()

    def say(self, text: str) -> None:
        self.said.append(text)
        self.heard.set()


@pytest.fixture
def request_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRequest:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "run.yaml").write_text("run: told\ntask: {python: task.py}\nmodel: {path: model}\n")
    monkeypatch.setattr(predicting, "module", lambda name: "fake_prediction")
    return RunRequest(str(tmp_path / "run.yaml"))


def have_a_profile(folder: Path) -> None:
    profiles = folder / "home" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "told-123.yaml").write_text("")


def test_without_a_profile_nothing_is_started(request_here: RunRequest, tmp_path: Path) -> None:
    (tmp_path / "fake_prediction.py").write_text(f"print({LINE!r})")
    listener = Listener()
    with PredictionBeside(request_here) as beside:
        beside.tell(listener)
    assert beside.prediction is None
    assert not listener.said


def test_a_prediction_is_said_when_it_is_known(request_here: RunRequest, tmp_path: Path) -> None:
    have_a_profile(tmp_path)
    (tmp_path / "fake_prediction.py").write_text(f"print({LINE!r})")
    listener = Listener()
    with PredictionBeside(request_here) as beside:
        beside.tell(listener)
        assert listener.heard.wait(60)
    assert listener.said == ["predicted: 50 samples/s (40 to 60), 2 s a step"]
    assert beside.prediction is not None
    assert beside.prediction.step_s.high == 3.0


def test_a_run_that_ends_first_waits_for_no_prediction(request_here: RunRequest, tmp_path: Path) -> None:
    have_a_profile(tmp_path)
    (tmp_path / "fake_prediction.py").write_text("import threading; threading.Event().wait()")
    with PredictionBeside(request_here) as beside:
        beside.tell(Listener())
    assert beside.prediction is None


def test_a_run_without_profile_or_model_has_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    assert not list(predictions(make_spec(), "run.yaml"))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "test-1.yaml").write_text("no profile")
    assert not list(predictions(make_spec(), "run.yaml"))


@pytest.mark.parametrize("shown_first", [True, False], ids=["a run that was seen before", "or after"])
def test_a_prediction_is_kept_in_the_folder_of_the_run(
    request_here: RunRequest, tmp_path: Path, shown_first: bool
) -> None:
    have_a_profile(tmp_path)
    more = {
        "trainer": {"waiting for samples": {"value": 0.2, "low": 0.1, "high": 0.3}},
        "picture": "iVBORw==",
    }
    (tmp_path / "fake_prediction.py").write_text(f"print({LINE!r})\nprint({json.dumps(more)!r})")
    view, listener = RunView("told-1", make_spec(report=str(tmp_path / "runs"))), Listener()
    kept = tmp_path / "runs" / "told-1"
    with PredictionBeside(request_here) as beside:
        screen = beside.tell(listener)
        if not shown_first:
            assert listener.heard.wait(60)
        screen.show(view)
        wait_until((kept / "prediction.png").exists, what="the picture")
    assert json.loads((kept / "prediction.json").read_text()) == {
        **json.loads(LINE), "trainer": more["trainer"],
    }  # fmt: skip
    assert (kept / "prediction.png").read_bytes() == b"\x89PNG"


@pytest.mark.parametrize("line", ["", "no json", "[1]", '{"picture": 5}', '{"picture": "?"}'])
def test_a_second_line_that_makes_no_sense_ends_nothing(
    request_here: RunRequest, tmp_path: Path, line: str
) -> None:
    have_a_profile(tmp_path)
    (tmp_path / "fake_prediction.py").write_text(f"print({LINE!r})\nprint({line!r})")
    with PredictionBeside(request_here) as beside:
        beside.tell(Nobody()).show(RunView("told-1", make_spec(report=str(tmp_path / "runs"))))
        wait_until((tmp_path / "runs" / "told-1" / "prediction.json").exists, what="the speed")
    assert beside.prediction is not None


def test_a_predicted_iteration_has_waits_with_ranges_and_a_picture() -> None:
    workload = Workload(LogNormalLengths(300, 0.5, 600), LogNormalLengths(50))
    spec = make_spec(
        algorithm={"mode": "async", "staleness": 1, "iterations": 8, "groups": 8, "group_size": 4},
        sampling={"max_tokens": 2000, "max_prompt_tokens": 100},
        trainer={"microbatch_tokens": 4096, "bundle_tokens": 1024},
    )
    inputs = PlanningInputs(
        spec, (pool_of("a", 3, 1),), TableOfTests({"fast": 1.0}, slots=16, token_s=1e-4),
        KnownLengths(workload, "of the test", 0.05), demand_of_workload(spec, workload),
    )  # fmt: skip
    row = iteration_row(inputs, given_split(inputs), iterations=8)
    assert isinstance(row["picture"], str) and row["picture"].startswith("iVBOR"), "a PNG"
    for side in ("generators", "trainer"):
        shares = row[side]
        assert isinstance(shares, dict) and shares
        for one in shares.values():
            assert 0 <= one["low"] <= one["value"] <= one["high"] <= 1
    assert row["trainer"].keys() <= {"waiting for samples"}, "training is no wait"  # type: ignore[union-attr]


def test_the_range_of_a_share_holds_other_draws_and_stays_a_share() -> None:
    found = share_range(0.05, [0.0, 0.1, 0.02, 0.08, 0.04, 0.06])
    assert found.low == 0.0 and 0.08 < found.high < 0.2 and found.value == 0.05
    assert share_range(0.0, [0.0] * 4).high == 0.0
