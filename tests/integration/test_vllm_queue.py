"""vLLM with asynchronous scheduling, as on a GPU: what holds between steps holds with a batch under way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_what_holds_without_batches_under_way_holds_with_them() -> None:
    """In a process of its own: what stands in for streams of a GPU stands in for those of all tests there."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.fakes.queue_on_cpu", "-p", "no:cacheprovider",
         "tests/integration/test_vllm_engine.py", "-k", "not sizes_of_heads"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "; 0 were waited for" in done.stdout
