"""Trackers get every step once, whatever they do, and stop nothing."""

from __future__ import annotations

import csv
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.trackers import feeding as module
from flows.trackers.csv_tracker import CsvTracker
from flows.trackers.feeding import tracking
from flows.view.line_files import METRICS_FILE
from flows.view.process_notes import EVALUATIONS_FILE
from infra.runs import RunRecord
from tests.examples import write_examples
from tests.factories import make_spec
from tests.waiting import wait_until

NOTED = """
import json, time
from pathlib import Path
from streamrl.trackers import TrackerSettings

class Noting(TrackerSettings):
    where: str

    def make(self, run):
        if Path(self.where, "broken").exists():
            raise OSError("the server is away")
        return Tracker(Path(self.where))

class Tracker:
    def __init__(self, folder):
        self.folder = folder

    def step(self, row):
        if (self.folder / "hang").exists():
            time.sleep(3600)
        if (self.folder / "fails").exists():
            raise ValueError(f"step {row['step']} is too much")
        with (self.folder / "noted").open("a") as file:
            file.write(f"{row['step']}\\n")

    def evaluation(self, row):
        with (self.folder / "evaluated").open("a") as file:
            file.write(f"{row['version']}\\n")

    def close(self):
        (self.folder / "closed").touch()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(module, name, 0.02)


def record_of(tracker: dict[str, Any]) -> RunRecord:
    spec = make_spec(trackers=[tracker])
    return RunRecord(id="test-1", spec=spec, bootstrap_servers="", store="", model="", created_at=0.0)


class Tracked:
    """A run whose metrics grow, and a tracker that notes the steps that it gets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        (folder / "noting.py").write_text(NOTED)
        own = {"import": f"{folder}/noting.py:Noting", "where": str(folder)}
        self.record = record_of(own)

    def add(self, *steps: int, tail: str = "\n") -> None:
        with (self.folder / METRICS_FILE).open("a") as file:
            file.write("".join(json.dumps({"step": step, "reward": step / 2}) + tail for step in steps))

    def noted(self) -> list[int]:
        file = self.folder / "noted"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def running(self) -> Any:
        return tracking(self.record, self.folder, self.said.append)

    def wait_for(self, *steps: int) -> None:
        wait_until(lambda: self.noted() == list(steps), what=f"steps {steps}")


@pytest.fixture
def tracked(tmp_path: Path) -> Iterator[Tracked]:
    yield Tracked(tmp_path)


def test_every_step_comes_once_over_restarts_and_torn_lines(tracked: Tracked) -> None:
    tracked.add(0, 1)
    with tracked.running():
        tracked.wait_for(0, 1)
        tracked.add(2, tail="")
        tracked.add(3)  # one line with step 2, which was torn: neither is JSON
        tracked.add(4)
        tracked.wait_for(0, 1, 4)
    assert (tracked.folder / "closed").exists()
    tracked.add(5)
    with tracked.running():
        pass  # the end, too, gives what is left
    assert tracked.noted() == [0, 1, 4, 5] and not tracked.said


def test_a_late_evaluation_comes_too_and_each_comes_once(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE", 3)
    position = tracked.folder / "trackers" / f"{tracked.record.spec.trackers[0].kind}.json"
    position.parent.mkdir()
    position.write_text('{"step": 4, "version": 2}')  # as StreamRL wrote it before
    file, noted = tracked.folder / EVALUATIONS_FILE, tracked.folder / "evaluated"

    def add(*versions: int) -> None:
        with file.open("a") as end:
            end.write("".join(json.dumps({"version": version}) + "\n" for version in versions))
        with tracked.running():
            pass

    add(0, 2, 3, 6, 5)
    add(4, 5, 7)
    add(3, 9, 8, 10)
    assert [int(line) for line in noted.read_text().split()] == [3, 6, 5, 4, 7, 9, 8, 10]


def test_a_file_that_is_replaced_gives_only_new_steps(tracked: Tracked) -> None:
    tracked.add(0, 1)
    with tracked.running():
        tracked.wait_for(0, 1)
        whole = tracked.folder / "whole"
        whole.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
        whole.replace(tracked.folder / METRICS_FILE)
        tracked.wait_for(0, 1, 2, 3)


@pytest.mark.parametrize("trouble", ["broken", "fails"])
def test_one_that_fails_says_so_once_and_gets_all_later(tracked: Tracked, trouble: str) -> None:
    (tracked.folder / trouble).touch()
    tracked.add(0)
    with tracked.running():
        wait_until(lambda: bool(tracked.said), what="the message")
        tracked.add(1)
        (tracked.folder / trouble).unlink()
        tracked.wait_for(0, 1)
    assert len(tracked.said) == 1 and tracked.said[0].startswith(
        "tracker Noting failed, and is tried again: "
    )


def test_one_that_hangs_is_left_when_the_run_ends(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_S", 0.2)
    (tracked.folder / "hang").touch()
    tracked.add(0)
    with tracked.running():
        wait_until(lambda: "tracker Noting" in {one.name for one in threading.enumerate()}, what="the thread")
    assert tracked.said == ["tracker Noting did not end within 0.2 s: it may lack the last steps"]


def test_one_whose_code_is_not_here_says_so(tracked: Tracked) -> None:
    spec = tracked.record.spec
    tracked.record = RunRecord.model_validate(tracked.record.model_dump(mode="json"))
    assert not tracked.record.spec.trackers[0].is_read and spec.trackers
    (tracked.folder / "noting.py").write_text("")
    for name in [name for name in sys.modules if name.startswith("streamrl_user_noting")]:
        del sys.modules[name]
    with tracked.running():
        wait_until(lambda: bool(tracked.said), what="the message")
    assert "noting.py:Noting is no tracker" in tracked.said[0]


def test_two_of_one_kind_keep_their_own_places(tmp_path: Path) -> None:
    spec = make_spec(trackers=["csv", {"kind": "csv"}])
    assert [name for name, _ in module._named(spec.trackers)] == ["csv", "csv-2"]


def test_the_table_grows_by_metrics_and_is_taken_up_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    first = CsvTracker(file)
    first.step({"step": 0, "reward": 0.5})
    first.step({"step": 1, "reward": None, "value_explained": 0.25})
    second = CsvTracker(file)
    second.step({"step": 1, "reward": 9.0})  # it has this one already
    second.step({"step": 2, "reward": 1.0})
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert rows == [
        {"step": "0", "reward": "0.5", "value_explained": ""},
        {"step": "1", "reward": "", "value_explained": "0.25"},
        {"step": "2", "reward": "1.0", "value_explained": ""},
    ]


def test_the_page_s_tracker_keeps_the_best_step(tmp_path: Path) -> None:
    write_examples("extending/tracker", tmp_path)
    own = {"import": f"{tmp_path}/my_tracker.py:BestSettings"}
    record = record_of(own)
    with (tmp_path / METRICS_FILE).open("w") as file:
        for number, reward in enumerate([0.1, 0.7, None, 0.3]):
            file.write(json.dumps({"step": number, "reward": reward}) + "\n")
    with tracking(record, tmp_path, lambda text: None):
        wait_until(lambda: (tmp_path / "best.json").exists(), what="the file")
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 1


@pytest.mark.parametrize("torn", ["2", "2,"])
def test_a_table_whose_last_line_is_torn_goes_on(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(f"iteration,step,reward\n0,0,0.5\n1,1,0.5\n{torn}")
    tracker = CsvTracker(file)
    tracker.step({"iteration": 2, "step": 2, "reward": 0.5, "entropy": 1.0})
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["step"] for row in rows] == ["0", "1", "2"] and rows[2]["entropy"] == "1.0"
