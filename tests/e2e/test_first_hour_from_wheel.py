"""The first hour of a user, in an empty folder, from the wheel: every command as the quickstart has it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tests.wheels import env, run


@pytest.fixture
def here(tmp_path: Path, bin_folder: Path) -> Iterator[dict[str, str]]:
    """The user's environment: no setting but the home, for the tests' downloads are elsewhere."""
    found = env(tmp_path) | {"HF_HUB_OFFLINE": "1"}
    try:
        yield found
    finally:
        run(bin_folder / "streamrl", "down", cwd=tmp_path, **found)


@pytest.mark.thorough
def test_the_first_hour(tmp_path: Path, bin_folder: Path, here: dict[str, str]) -> None:
    def streamrl(*words: str, code: int = 0) -> str:
        return run(bin_folder / "streamrl", *words, cwd=tmp_path, code=code, **here)

    assert "streamrl run three/run.yaml --check" in streamrl("init", "three")
    model = tmp_path / "three" / "model.py"
    model.write_text(model.read_text().replace("STEPS, BATCH = 200", "STEPS, BATCH = 80"))
    settings = ("evaluation.problems=16", "algorithm.groups=8", "algorithm.iterations=300")
    fewer = [word for one in settings for word in ("--set", one)]
    assert "three/run.yaml is fine" in streamrl("run", "three/run.yaml", "--check", *fewer)

    words = [bin_folder / "streamrl", "run", "three/run.yaml", "--no-prefect", *fewer]
    with started(words, tmp_path, here) as going_on:

        def steps() -> int:
            assert going_on.poll() is None, (tmp_path / "run.log").read_text()[-4000:]
            file = tmp_path / "runs" / "three-1" / "metrics.jsonl"
            return len(file.read_text().splitlines()) if file.exists() else 0

        wait_until(lambda: steps() >= 3, what="three steps", deadline_s=600)  # the model is built first
        assert "training" in streamrl("runs") and "three-1" in streamrl("runs")
        assert "run three-1: training" in streamrl("status")
        shown = streamrl("samples", "three-1", "--step", "1", "-n", "2")
        assert "62 more; -n 64 shows all" in shown and "reward" in shown and "train-" in shown
        rows = streamrl(
            "samples", "three-1", "--json", "--sort", "reward", "--where", "reward>0.2"
        ).splitlines()
        best = json.loads(rows[0])
        assert best["text"].split(" ")[0] == best["prompt"].rstrip(":") and set(best["parts"]) == {
            "word",
            "three",
        }
        assert "report.html" in streamrl("report", "three-1")
        said = streamrl("stop", "three-1")
        assert "run three-1: interrupted. To go on with the run: streamrl run three/run.yaml" in said
        assert going_on.wait(150) == 130

    assert ">interrupted</span>" in (tmp_path / "runs" / "three-1" / "report.html").read_text()
    done = steps_of(tmp_path)
    assert "three-1: interrupted" in streamrl("status", "three-1")
    fewer[-1] = f"algorithm.iterations={done + 2}"
    said = streamrl("run", "three/run.yaml", "--no-prefect", *fewer, "--resume", "three-1")
    assert "held-out reward" in said and f"{done + 2} iterations" in said
    said = streamrl("run", "three/run.yaml", "--no-prefect", *fewer, "--resume", "three-1")
    assert "is trained to its end: only its report is written again" in said and "held-out reward" in said
    row = json.loads((tmp_path / "runs" / "three-1" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"reward_part_word", "reward_part_three", "loss", "learning_rate", "tokens_per_s"} <= set(row)

    streamrl("export", "three-1", "trained")
    code = (
        "import transformers as t; print(t.AutoModelForCausalLM.from_pretrained('trained').num_parameters())"
    )
    assert int(run(bin_folder / "python", "-c", code, cwd=tmp_path, **here).split()[-1]) > 100_000
    assert "version" in streamrl("weights", "ls", "three-1")

    assert "run three-1 is gone" in streamrl("rm", "three-1", "--yes", "--report")
    assert "there are no runs" in streamrl("runs") and not (tmp_path / "runs" / "three-1").exists()


@contextmanager
def started(words: list[str | Path], folder: Path, here: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on beside the block, and no longer; what it says goes into run.log."""
    with (folder / "run.log").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, env={**os.environ, **here}, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def steps_of(folder: Path) -> int:
    """How many steps are in the report folder's metrics."""
    return len((folder / "runs" / "three-1" / "metrics.jsonl").read_text().splitlines())
