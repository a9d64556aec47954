"""A few runs of the chaos bench: whole ones under random kills, stops, twins, poison and lost stores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_some_runs_of_chaos(tmp_path: Path) -> None:
    arguments = ["--minutes", "0.5", "--seed", "5", "--iterations", "12", "--keep", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "chaos", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("BENCH chaos ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[-1].removeprefix("BENCH chaos "))
    assert not found["problems"], f"{found['problems']}; logs are in {tmp_path}"
    assert found["runs"] >= 2 and found["events"] >= 5
