"""One run file in three placements: in sync mode the same seed gives the same bits in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.roles.turns import OTHERS_TURN
from infra.weights.versions import WeightStore
from schemas.messages import WAIT, Heartbeat, StepRecord
from tests.factories import make_spec
from tests.harness import Run, running, trained_ids

ALGORITHM = {"iterations": 4, "groups": 8, "group_size": 4, "learning_rate": 3e-3, "optimizer_steps": 2}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "disaggregated": {},
    "colocated": {"kind": "colocated"},
    "far site": {"generators": 0, "sites": {"far": {}}},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of turns go into a folder of the test."""
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))


def in_placement(folder: Path, kafka: str, model: Path, placement: dict[str, Any], **sections: Any) -> Run:
    """A whole run with another placement section, and no other change."""
    base: dict[str, Any] = {
        "algorithm": ALGORITHM, "trainer": {"bundle_tokens": 64}, "evaluation": {"problems": 8},
    }  # fmt: skip
    spec = make_spec(**base | sections, placement=placement)
    site = next(iter(placement.get("sites", {})), None)
    generators = max(1, spec.placement.generators)
    with running(folder, kafka, spec, model, site=site, generators=generators) as run:
        run.wait_for_end()
    return run


def roots(steps: list[StepRecord]) -> list[str]:
    return [step.root_out for step in steps]


def seconds_by_cause(run: Run, role: str) -> dict[str, float]:
    """Of a role's first process, as it said last."""
    beats = [beat for beat in run.read("status", Heartbeat) if (beat.role, beat.number) == (role, 0)]
    return dict(beats[-1].causes)


def test_a_seed_gives_the_same_bits_in_every_placement(tmp_path: Path, kafka: str, tiny_model: Path) -> None:
    found = {
        name: in_placement(tmp_path / name.replace(" ", "-"), kafka, tiny_model, placement)
        for name, placement in PLACEMENTS.items()
    }
    steps = {name: run.steps() for name, run in found.items()}
    first = roots(steps["disaggregated"])
    assert len(set(first)) == 8, "nothing was learned, so equal bits would prove nothing"
    final = set()
    for name, run in found.items():
        assert roots(steps[name]) == first, name
        assert sorted(trained_ids(steps[name])) == [(g, i) for g in range(32) for i in range(4)]
        final.add(WeightStore(run.store, run.record.id).fetch(4)[0].root)
        assert not run.dead_letters()
    assert final == {first[-1]}
    together, apart = found["colocated"], found["disaggregated"]
    cause = WAIT + OTHERS_TURN
    assert seconds_by_cause(together, "generator")[cause] > 0
    assert cause not in seconds_by_cause(apart, "generator")
    for step in steps["colocated"]:
        drawn = [s for s in together.samples() if s.iteration == step.iteration]
        began = step.finished_at - step.metrics.get("compute_s", 0.0)
        assert max(sample.finished_at for sample in drawn) <= began


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["window", "arrival"])
def test_several_generators_and_ranks_take_turns_in_async_mode(
    order: str, tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    algorithm = {**ALGORITHM, "mode": "async", "staleness": 1.5, "iterations": 6, "order": order}
    placement = {"kind": "colocated", "generators": 2}
    trainer = {"ranks": 2, "bundle_tokens": 64}
    run = in_placement(
        tmp_path, kafka, tiny_model, placement, algorithm=algorithm, trainer=trainer,
        generator={"slots": 8},
    )  # fmt: skip
    steps = run.steps()
    assert sorted(trained_ids(steps)) == [(g, i) for g in range(48) for i in range(4)]
    staleness = [step.iteration - int(step.versions.min()) for step in steps]
    assert max(staleness) <= (2 if order == "window" else 5) and max(staleness) >= 1
    assert not run.dead_letters()
    assert seconds_by_cause(run, "generator")[WAIT + OTHERS_TURN] > 0
