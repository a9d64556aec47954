"""A colocated run whose trainer or engine is killed in either turn goes on, to the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.files.locks import SharedLock
from infra.roles.turns import turn_files
from schemas.runspec import RunSpec
from tests.factories import make_spec
from tests.harness import Run, running, trained_ids
from tests.waiting import wait_until

ITERATIONS = 10


def spec(kind: str) -> RunSpec:
    return make_spec(
        algorithm={"iterations": ITERATIONS, "groups": 8, "group_size": 4, "learning_rate": 1e-3},
        trainer={"checkpoint_every": 3, "bundle_tokens": 64},
        placement={"kind": kind},
    )  # fmt: skip


class Watched:
    """Whose turn it is in a run, by its locks."""

    def __init__(self, run: Run) -> None:
        self._wanted, self._working = (SharedLock(file, what="the turn") for file in turn_files(run.record))

    def learner(self) -> bool:
        """Whether the learner computes."""
        return not self._free(self._wanted, alone=False) and not self._free(self._working, alone=False)

    def engines(self) -> bool:
        """Whether an engine may draw."""
        return not self._free(self._working, alone=True) and self._free(self._working, alone=False)

    def _free(self, lock: SharedLock, *, alone: bool) -> bool:
        if not lock.take(alone=alone):
            return False
        lock.give()
        return True


def kill_in_turn(run: Run, name: str, turn: Callable[[], bool]) -> None:
    """kill -9 in this turn, and start the process again."""

    def come() -> bool:
        until = time.monotonic() + 1.0
        while not turn():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    wait_until(lambda: run.check() or come(), what=f"the turn in which {name} is killed", deadline_s=120)
    run.kill(name)
    run.start(name.rpartition("-")[0])


@pytest.mark.thorough
def test_whoever_is_killed_in_either_turn_changes_nothing(
    tmp_path: Path, kafka: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    with running(tmp_path / "calm", kafka, spec("disaggregated"), tiny_model) as run:
        run.wait_for_end()
        undisturbed = [step.root_out for step in run.steps()]
    with running(tmp_path / "killed", kafka, spec("colocated"), tiny_model) as run:
        watched = Watched(run)
        for step, name, turn in (
            (1, "trainer-0", watched.learner),
            (3, "generator-0", watched.learner),
            (5, "trainer-0", watched.engines),
            (7, "generator-0", watched.engines),
        ):
            run.wait_for_steps(step)
            kill_in_turn(run, name, turn)
        run.wait_for_end(deadline_s=300)
        steps = run.steps()
        assert [step.root_out for step in steps] == undisturbed
        assert sorted(trained_ids(steps)) == [(g, i) for g in range(8 * ITERATIONS) for i in range(4)]
        assert not run.dead_letters()
