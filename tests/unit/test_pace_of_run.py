"""A profile learns from a run how far its prediction was off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flows.planning.profile_file import read_profile, write_profile
from flows.planning.profile_identity import profile_identity
from flows.plans.given_split import given_split
from flows.plans.pace_of_run import pace_of_run
from flows.plans.planning_inputs import planning_inputs
from flows.plans.prediction import expected_step
from flows.plans.profiling import write_with_run
from schemas.profile import OverheadsProfile, Profile
from schemas.runspec import RunSpec
from tests.factories import make_model_files, make_spec
from tests.profiles import known_profile

OVERHEADS = OverheadsProfile(steady_cores=0.2, generator_cores=0.1, iteration_s=0.01, samples=100, seconds=20)


class Compared:
    """A profile in a file, and the folder of a run of the same run file."""

    def __init__(self, folder: Path) -> None:
        model = make_model_files(folder / "model")
        self.spec: RunSpec = make_spec(model={"path": str(model)}, algorithm={"groups": 16})
        known = known_profile()
        identity = profile_identity(self.spec, model)
        self.profile: Profile = known.model_copy(update={"identity": identity, "overheads": OVERHEADS})
        self.place, self.run = folder / "profile.yaml", folder / "test-1"
        write_profile(self.profile, self.place)
        self.run.mkdir()
        (self.run / "run.yaml").write_text(yaml.safe_dump(self.spec.model_dump(mode="json")))

    def predicted(self) -> float:
        """Seconds of an iteration."""
        inputs = planning_inputs(self.spec, profile=self.place)
        return expected_step(inputs, given_split(inputs))[0]

    def was(self, step_s: float, *, longer: float = 1.0, iterations: int = 30, **odd: Any) -> None:
        """Write down a run whose iterations took so long."""
        samples = self.spec.algorithm.groups * self.spec.algorithm.group_size
        tokens = samples * float(np.mean(self.profile.lengths.answers)) * longer
        rows = [
            {"iteration": number, "finished_at": 1e9 + 50 * (number > 0) + step_s * number,
             "samples": samples, "tokens": tokens} | odd
            for number in range(iterations)
        ]  # fmt: skip
        (self.run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    return Compared(tmp_path)


@pytest.mark.parametrize("faster", [0.7, 1.0, 1.5])
def test_the_next_prediction_is_the_speed_of_the_run(compared: Compared, faster: float) -> None:
    real_s = compared.predicted() / faster
    compared.was(real_s)
    assert pace_of_run(compared.place, compared.run) == pytest.approx(faster)
    write_with_run(compared.profile, compared.place, compared.run, OVERHEADS)
    overheads = read_profile(compared.place).overheads
    assert overheads is not None and overheads.pace == pytest.approx(faster, rel=0.1)
    assert compared.predicted() == pytest.approx(real_s, rel=0.02)
    assert pace_of_run(compared.place, compared.run) == pytest.approx(1.0, rel=0.02)


def test_a_run_of_another_kind_says_nothing(compared: Compared) -> None:
    """Its answers were longer, it was short, its rows make no sense, or it was of another model."""
    real_s = compared.predicted() / 2
    compared.was(real_s, longer=1.6)
    assert pace_of_run(compared.place, compared.run) == 1.0
    compared.was(real_s, iterations=16)
    assert pace_of_run(compared.place, compared.run) == 1.0
    compared.was(real_s, finished_at="late")
    assert pace_of_run(compared.place, compared.run) == 1.0
    compared.was(real_s)
    other = compared.spec.model_copy(update={"model": make_spec(model={"dtype": "bfloat16"}).model})
    (compared.run / "run.yaml").write_text(yaml.safe_dump(other.model_dump(mode="json")))
    assert pace_of_run(compared.place, compared.run) == 1.0
    (compared.run / "run.yaml").write_text("no: run")
    assert pace_of_run(compared.place, compared.run) == 1.0
    (compared.run / "run.yaml").unlink()
    assert pace_of_run(compared.place, compared.run) == 1.0
    (compared.run / "metrics.jsonl").unlink()
    assert pace_of_run(compared.place, compared.run) == 1.0


def test_a_run_that_was_far_off_counts_up_to_four_times(compared: Compared) -> None:
    compared.was(compared.predicted() / 20)
    write_with_run(compared.profile, compared.place, compared.run, OVERHEADS)
    overheads = read_profile(compared.place).overheads
    assert overheads is not None and overheads.pace == 4.0
