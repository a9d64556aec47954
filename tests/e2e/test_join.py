"""`streamrl join` from a machine that has neither the run's model nor its task."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from infra.runs import unique_name
from schemas.messages import WeightsAnnouncement
from tests.factories import TASK, make_spec, make_tiny_model
from tests.harness import ROOT, running, trained_ids
from tests.waiting import wait_until


def test_a_far_machine_fetches_what_it_needs(tmp_path: Path, kafka: str) -> None:
    """The run's own files are moved away as soon as its processes have read them."""
    model, home = make_tiny_model(tmp_path / "model"), tmp_path / "far"
    with running(tmp_path / "run", kafka, make_spec(), model, generators=0) as run:
        wait_until(
            lambda: run.check() or run.read("weights", WeightsAnnouncement),
            what="the first weights",
            deadline_s=120,
        )
        model.rename(tmp_path / "away")
        (run.folder / "task.py").unlink()
        home.mkdir()
        (home / "task.py").write_text(TASK)
        words = [
            sys.executable, "-m", "flows.cli", "join", run.record.id, "--store", run.store.url,
            "--site", "far", "--reward", "task.py:reward",
        ]  # fmt: skip
        environment = {**os.environ, "STREAMRL_HOME": str(home), "PYTHONPATH": str(ROOT)}
        with (tmp_path / "join.log").open("w") as log:
            joined = subprocess.Popen(words, cwd=home, env=environment, stdout=log, stderr=log)
        wait_until(lambda: joined.poll() is not None, what="the end of the run", deadline_s=180)
        told = (tmp_path / "join.log").read_text()
        assert joined.returncode == 0, told
        run.wait_for_end()
        assert len(trained_ids(run.steps())) == 3 * 8
    assert (home / "models" / unique_name(run.record) / "config.json").is_file()
    assert "has ended" in told
