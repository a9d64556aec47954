"""A run in which a user has brought everything: the seven examples of docs/extending, each one file."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from schemas.stores import OWN_STORES
from tests.examples import settings_of, write_examples
from tests.factories import TASK, make_spec
from tests.stacks import processes_of

ROOT = Path(__file__).parents[2]
SEAMS = ("loss", "learner", "engine", "policy", "store", "tracker", "command")
ITERATIONS = 3


@pytest.fixture
def own(tmp_path: Path, kafka: str, tiny_model: Path) -> Path:
    """A folder with the files of all examples, and a run file that uses them."""
    for seam in SEAMS:
        write_examples(f"extending/{seam}", tmp_path)
    (tmp_path / "pyproject.toml").unlink()
    (tmp_path / "task.py").write_text(TASK)
    said = {key: value for seam in SEAMS[:4] for key, value in settings_of(f"extending/{seam}").items()}
    said |= settings_of("extending/tracker")
    spec = make_spec(
        run="own",  # no other test's: a broker that has seen "test" before would make this one "test-2"
        model={"path": str(tiny_model)},
        algorithm={"iterations": ITERATIONS, "groups": 4, "group_size": 4, "learning_rate": 1e-2},
        placement={"kafka": {"bootstrap_servers": kafka}},
    ).model_dump(mode="json", exclude_none=True)
    for section, settings in said.items():
        spec[section] = settings if section in ("loss", "trackers") else {**spec[section], **settings}
    for section, choice in (("trainer", "learner"), ("generator", "engine"), ("dispatch", "policy")):
        del spec[section][choice]
    spec["trainer"] = {key: value for key, value in spec["trainer"].items() if key != "zero_stage"}
    spec["generator"] = {key: spec["generator"][key] for key in ("import", "slots")}
    del spec["dispatch"]["moves"]  # the default policy's
    spec["placement"]["store"] = f"sqlite://{tmp_path}/runs.db"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    package = tmp_path / "site" / "their_package-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: their-package\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[streamrl.commands]\nlongest = longest:add_to\n")
    (tmp_path / "longest.py").rename(tmp_path / "site" / "longest.py")
    return tmp_path


def streamrl(own: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={
            **os.environ, "PYTHONPATH": f"{ROOT}:{own / 'site'}", "STREAMRL_HOME": str(own / "home"),
            OWN_STORES: f"sqlite={own}/my_store.py:SqliteStore", "COLUMNS": "200",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.thorough
def test_everything_of_a_user_s_own_in_one_run(own: Path, tiny_model: Path) -> None:
    streamrl(own, "-m", "streamrl", "run", "run.yaml")
    report, store = own / "runs" / "own-1", f"sqlite://{own}/runs.db"

    rows = [json.loads(line) for line in (report / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    for row in rows:  # the engine draws what the trainer computes, of every token
        assert row["logprob_gap"] < 1e-3 and row["gap_tokens"] == row["trained_tokens"]

    before, after = (
        load_file(tiny_model / "model.safetensors"),
        load_file(report / "model" / "model.safetensors"),
    )
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert changed and not [name for name in changed if "embed_tokens" in name or "layers.0" in name]

    with sqlite3.connect(own / "runs.db") as db:
        keys = [key for (key,) in db.execute("select key from objects")]
    assert "runs/own-1/run.json" in keys and not (own / "home" / "store").exists()

    best = json.loads((report / "best.json").read_text())
    assert best["reward"] == max(row["reward"] for row in rows)
    assert len((report / "metrics.csv").read_text().splitlines()) == 1 + ITERATIONS

    assert "tokens, reward" in streamrl(own, "-m", "streamrl", "longest", "own-1", "--store", store)
    assert "the same bits" in streamrl(own, "-m", "streamrl", "replay", "own-1", "--store", store).lower()
    page = write_examples("python", own).read_text().replace('"count-1"', f'"own-1", "{store}"', 1)
    said = streamrl(own, "-c", page.replace("step=3", "step=2")).splitlines()
    assert len(said) >= 16 + 2 * ITERATIONS and said[-1].startswith(f"{ITERATIONS - 1} ")
    assert not processes_of(own / "home")
