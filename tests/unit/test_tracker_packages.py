"""The trackers of other packages, read back from what they wrote. Without a package its test is skipped."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.trackers import feeding
from flows.trackers.feeding import tracking
from flows.view.line_files import METRICS_FILE
from infra.runs import RunRecord
from schemas.loading import RunFileError, load_run_file
from schemas.runspec import RunSpec
from schemas.tracking import TRACKERS
from tests.factories import make_spec
from tests.waiting import wait_until

KINDS = ["tensorboard", "wandb", "mlflow", "trackio"]
ITERATIONS = 4
ODD = "reward_part_../a\n,b"  # as a user's reward may name its part
SERVERS = {"WANDB": "MODE API_KEY", "MLFLOW": "TRACKING_URI", "TRACKIO": "SPACE_ID SERVER_URL"}

pytestmark = pytest.mark.filterwarnings("default")  # the packages warn about each other as they like


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tracker of these tests reaches anything but the test's own folder."""
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(feeding, name, 0.02)
    monkeypatch.setattr(feeding, "LAST_S", 120.0)
    for package, names in SERVERS.items():
        for name in names.split():
            monkeypatch.delenv(f"{package}_{name}", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


class TrackedByPackage:
    """A run that one tracker tracks."""

    def __init__(self, folder: Path, **section: Any) -> None:
        spec = make_spec(trackers=[section], algorithm={"iterations": ITERATIONS, "learning_rate": 0.125})
        self.folder, self.said = folder / "count-1", list[str]()
        self.folder.mkdir()
        self.record = RunRecord(
            id="count-1", spec=spec, bootstrap_servers="", store="", model="", created_at=0.0,
            identity="0123456789abcdef",
        )  # fmt: skip

    def add_steps(self, *steps: int) -> None:
        with (self.folder / METRICS_FILE).open("a") as file:
            for step in steps:
                row = {
                    "step": step,
                    "iteration": step,
                    "reward": step / 2,
                    "entropy": None,
                    "grad_norm": math.nan,
                    ODD: 1.0,
                }
                file.write(json.dumps(row | {"finished_at": 1_000_000.0 + step, "ledger": step + 1}) + "\n")

    def add_evaluation(self, version: int) -> None:
        with (self.folder / "evaluations.jsonl").open("a") as file:
            file.write(json.dumps({"version": version, "reward": version / 4, "samples": 8}) + "\n")

    def track(self) -> None:
        """Track all that there is, as one start of the run."""
        with tracking(self.record, self.folder, self.said.append):
            pass
        assert not self.said

    def forget(self, step: int) -> None:
        """Be killed after the tracker took later steps, and before that was noted."""
        position = next((self.folder / "trackers").glob("*.json"))
        position.write_text(json.dumps({"step": step, "version": 0}))

    def track_with_a_kill(self) -> None:
        """Track a run that is killed in its middle and goes on, so that step 1 comes twice."""
        self.add_steps(0, 1)
        self.add_evaluation(0)
        self.track()
        self.forget(0)
        second = int(time.time())
        wait_until(lambda: int(time.time()) > second, what="the next second: wandb names its files by it")
        self.add_steps(2, 3)
        self.add_evaluation(4)
        self.track()


REWARDS = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}
HELD_OUT = {0: 0.0, 4: 1.0}


def test_tensorboard_has_all_steps_at_their_places_and_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = TrackedByPackage(tmp_path, kind="tensorboard")
    run.track_with_a_kill()
    found = EventAccumulator(str(run.folder / "tensorboard"))
    found.Reload()
    points = [(one.step, one.value) for one in found.Scalars("train/reward")]
    assert dict(points) == REWARDS and set(points) == set(REWARDS.items())
    assert {one.wall_time for one in found.Scalars("train/reward") if one.step == 1} == {1_000_001.0}
    assert {one.step: one.value for one in found.Scalars("evaluation/reward")} == HELD_OUT
    assert not {"train/entropy", "train/grad_norm", "train/ledger"} & set(found.Tags()["scalars"])
    (text,) = found.Tensors("run_file/text_summary")
    assert b"learning_rate: 0.125" in text.tensor_proto.string_val[0]
    assert found.SummaryMetadata("run_file/text_summary").plugin_data.plugin_name == "text"


def test_wandb_has_all_steps_in_runs_of_one_id_and_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = TrackedByPackage(tmp_path, kind="wandb", mode="offline", project="numbers", tags=["short"])
    run.track_with_a_kill()
    files = sorted(run.folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2, files

    def codes() -> list[int]:
        found = [one for file in files for one in wandb_records(file) if one.HasField("exit")]
        return [one.exit.exit_code for one in found]

    # The first start did not train to the end. wandb writes its files in another process, a moment later.
    wait_until(lambda: codes() == [1, 0], what="the ends of both starts")
    rewards, held_out = dict[int, float](), dict[int, float]()
    for file in files:
        for record in wandb_records(file):
            if record.HasField("run"):
                opened = record.run
                assert (opened.run_id, opened.display_name) == ("count-1-01234567", "count-1")
                assert opened.project == "numbers" and list(opened.tags) == ["short"]
                said = {item.key: json.loads(item.value_json) for item in opened.config.update}
                assert said["algorithm"]["learning_rate"] == 0.125
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                if "train/step" in row:
                    assert rewards.setdefault(row["train/step"], row["train/reward"]) == row["train/reward"]
                    assert not {"train/entropy", "train/grad_norm"} & row.keys()
                else:
                    held_out[row["evaluation/version"]] = row["evaluation/reward"]
    assert rewards == REWARDS and held_out == HELD_OUT


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + size > len(data):
            return  # it is being written
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_without_a_key_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    run = TrackedByPackage(tmp_path, kind="wandb")
    with tracking(run.record, run.folder, run.said.append):
        pass
    (said,) = run.said
    assert said.startswith(
        "tracker wandb: wandb has no key: call `wandb login`, set WANDB_API_KEY, or say mode"
    )


def test_mlflow_has_each_step_once_in_one_run_and_the_settings(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = TrackedByPackage(tmp_path, kind="mlflow", experiment="numbers")
    with kept_logging():
        run.track_with_a_kill()
        client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        experiment = client.get_experiment_by_name("numbers").experiment_id
        (found,) = client.search_runs([experiment])
        history = client.get_metric_history(found.info.run_id, "train/reward")
        held_out = client.get_metric_history(found.info.run_id, "evaluation/reward")
    assert found.info.run_name == "count-1" and found.info.status == "FINISHED"
    assert found.data.params["algorithm.learning_rate"] == "0.125"
    assert sorted((one.step, one.value) for one in history) == list(REWARDS.items())
    assert {one.step: one.value for one in held_out} == HELD_OUT
    assert "train/grad_norm" not in found.data.metrics
    assert found.data.metrics["train/reward_part____a__b"] == 1.0


@contextmanager
def kept_logging() -> Iterator[None]:
    """Undo that mlflow's migrations set up logging for all of the process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def test_trackio_has_each_step_once_also_those_that_a_kill_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    pytest.importorskip("trackio")
    from trackio.utils import TRACKIO_DIR

    run = TrackedByPackage(tmp_path, kind="trackio", project=tmp_path.name)
    run.track_with_a_kill()
    database = Path(TRACKIO_DIR) / f"{tmp_path.name}.db"
    try:
        with sqlite3.connect(database) as there:
            there.execute("delete from metrics where step >= 3")
        run.track()  # the position says that step 3 was taken, and Trackio has not got it
        with sqlite3.connect(database) as there:
            rows = [
                (step, json.loads(said)) for step, said in there.execute("select step, metrics from metrics")
            ]
            ((settings,),) = there.execute("select config from configs").fetchall()
    finally:
        database.unlink()
    trained = [(step, said["train/reward"]) for step, said in rows if "train/reward" in said]
    assert dict(trained) == REWARDS and set(trained) == set(REWARDS.items())
    assert {step: said["evaluation/reward"] for step, said in rows if "evaluation/reward" in said} == {
        0: 0,
        3: 1,
    }
    assert json.loads(settings)["algorithm.learning_rate"] == "0.125"


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_named_before_the_run_starts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == kind else found(name, *rest)
    )
    said = make_spec(trackers=[kind]).model_dump(mode="json", by_alias=True)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(said))
    with pytest.raises(RunFileError) as error:
        load_run_file(file)
    assert f"the package {kind} is not installed: pip install 'streamrl[{kind}]'" in str(error.value)
    assert (
        RunSpec.model_validate(said).trackers[0].kind == kind
    )  # whoever reads the run's record needs no package


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_that_can_t_be_imported_ends_its_tracker_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == kind]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, kind, None)
    run = TrackedByPackage(tmp_path, kind=kind)
    run.add_steps(0)
    with tracking(run.record, run.folder, run.said.append):
        pass
    (said,) = run.said
    assert said.startswith(f"tracker {kind}: the package {kind} is not installed: pip install")


def test_no_package_is_imported_before_its_tracker_is_opened() -> None:
    import subprocess

    code = (
        "import sys\nfrom schemas.tracking import TRACKERS\nfrom schemas.seams import LOAD\n"
        f"for kind in {KINDS}: TRACKERS.class_of(kind).model_validate({{'kind': kind}}, context=LOAD)\n"
        f"assert not set({KINDS}) & set(sys.modules), set({KINDS}) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert sorted(TRACKERS.built_in()) == sorted(["csv", *KINDS])
