"""The whole loop with an engine of two ranks: on-policy, and nothing is lost if one of them is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.factories import make_spec
from tests.harness import Run, running, trained_ids

SPEC = make_spec(
    generator={"tensor_parallel": 2, "slots": 16},
    algorithm={"iterations": 3, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
    trainer={"bundle_tokens": 64},
)


def ranks(run: Run) -> list[int]:
    """The processes of all ranks but rank 0."""
    generator = psutil.Process(run.processes["generator-0"].pid)
    return [one.pid for one in generator.children(recursive=True) if "rank_process" in str(one.cmdline())]


@pytest.mark.thorough
def test_a_killed_rank_ends_its_generator_and_the_run_goes_on(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    with running(tmp_path / "ranks", kafka, SPEC, tiny_model) as run:
        run.wait_for_steps(1)
        (rank,) = ranks(run)
        os.kill(rank, signal.SIGKILL)
        assert run.processes["generator-0"].wait(300) != 0
        log = run.log("generator-0").read_text()
        assert f"rank 1 of the engine (process {rank}) ended with status -9" in log
        run.start("generator")
        run.wait_for_end()
        steps = run.steps()
        assert sorted(trained_ids(steps)) == [(group, one) for group in range(24) for one in range(4)]
        assert all(step.metrics["logprob_gap"] < 1e-3 for step in steps)
        assert not run.dead_letters()
