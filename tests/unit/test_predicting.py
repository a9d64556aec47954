"""A run's prediction comes from a process beside it: it says a line, and keeps nothing waiting."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from flows.cli.shared import predicting
from flows.cli.shared.predicting import PredictionBeside
from flows.plans.prediction import predicted
from flows.run.request import RunRequest
from flows.view.screen import Nobody
from tests.factories import make_spec

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


def test_without_a_profile_nothing_is_started(request_here: RunRequest, tmp_path: Path) -> None:
    (tmp_path / "fake_prediction.py").write_text(f"print({LINE!r})")
    listener = Listener()
    with PredictionBeside(request_here) as beside:
        beside.tell(listener)
    assert beside.prediction is None
    assert not listener.said


def test_a_prediction_is_said_when_it_is_known(request_here: RunRequest, tmp_path: Path) -> None:
    profiles = tmp_path / "home" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "told-123.yaml").write_text("")
    (tmp_path / "fake_prediction.py").write_text(f"print({LINE!r})")
    listener = Listener()
    with PredictionBeside(request_here) as beside:
        beside.tell(listener)
        assert listener.heard.wait(60)
    assert listener.said == ["predicted: 50 samples/s (40 to 60), 2 s a step"]
    assert beside.prediction is not None
    assert beside.prediction.step_s.high == 3.0


def test_a_run_that_ends_first_waits_for_no_prediction(request_here: RunRequest, tmp_path: Path) -> None:
    profiles = tmp_path / "home" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "told-123.yaml").write_text("")
    (tmp_path / "fake_prediction.py").write_text("import threading; threading.Event().wait()")
    with PredictionBeside(request_here) as beside:
        beside.tell(Listener())
    assert beside.prediction is None


def test_a_run_without_profile_or_model_has_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    assert predicted(make_spec(), "run.yaml") is None
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "test-1.yaml").write_text("no profile")
    assert predicted(make_spec(), "run.yaml") is None
