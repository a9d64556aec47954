"""Lengths grow sixfold and fall back: one generator, three, one; nothing is lost, and bits are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from consumers.stream.sample_stream import CAME_BEFORE
from flows.balancing.keeper import BalanceBook
from infra.bus import read_all
from infra.kafka_bus import KafkaBus
from infra.runs import find, runs_of
from infra.stores.opening import open_store
from schemas.messages import BalanceRecord, DeadLetter, Sample, StepRecord
from schemas.topics import Topic, Topics
from schemas.wire import Message, decode
from tests.factories import make_spec
from tests.harness import ROOT, trained_ids
from tests.stacks import processes_of

GROUPS, SIZE = 3, 4
SHORT, LONG = 10, 60  # a short iteration takes little beside the noise of a busy machine
LENGTHS = [SHORT] * 4 + [LONG] * 14 + [SHORT] * 18  # by iteration
SLOTS, PROMPT = 2, 4
CONTEXT = (
    GROUPS * SIZE * sum(PROMPT + place for place in range(LONG))
)  # tokens attended to in a long iteration
TASK = f"""
LENGTHS = {LENGTHS}

def problems(split):
    return [
        {{"id": f"{{iteration}}-{{n}}", "prompt": f"{{length:03d}}:" + "abcdef"[n]}}
        for iteration, length in enumerate(LENGTHS)
        for n in range({GROUPS})
    ]

def reward(problem, completion):
    return {{"digits": sum(c.isdigit() for c in completion) / 16}}
"""


class Whole:
    """A run that has ended."""

    def __init__(
        self, folder: Path, kafka: str, model: Path, *, engine: dict[str, Any], **parts: Any
    ) -> None:
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
        for name in ("paced_engine.py", "paced_loss.py"):
            shutil.copy(ROOT / "tests" / "fakes" / name, folder / name)
        spec = make_spec(
            run="grow", model={"path": str(model)}, task={"python": "task.py", "shuffle": False},
            sampling={"max_tokens": 80, "max_prompt_tokens": 8},
            algorithm={
                "iterations": len(LENGTHS), "groups": GROUPS, "group_size": SIZE, "learning_rate": 1e-3,
            },
            trainer={"microbatch_tokens": 512, "bundle_tokens": 1, "checkpoint_every": 10},
            placement={
                "kafka": {"bootstrap_servers": kafka}, "store": f"file://{folder}/store",
                **parts["placement"],
            },
        ).model_dump(mode="json", exclude_none=True)  # fmt: skip
        spec["generator"] = {"import": "paced_engine.py:PacedSettings", "slots": SLOTS, **engine}
        spec["loss"] = {"import": "paced_loss.py:PacedLossSettings", "group_s": parts["group_s"]}
        (folder / "run.yaml").write_text(yaml.safe_dump(spec))
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "run", "run.yaml"], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "STREAMRL_HOME": str(folder / "home"),
                "COLUMNS": "200",
            },
        )  # fmt: skip
        self.said, self.folder = done.stdout, folder
        assert done.returncode == 0, self.said[-6000:]
        store = open_store(f"file://{folder}/store")
        self.record = find(store, runs_of(store, "grow")[-1])
        self._bus = KafkaBus(kafka)
        self.topics = Topics(self.record.id, self.record.spec.lengths.classes)
        self.steps: list[StepRecord] = self.read(self.topics.ledger, StepRecord)

    def read(self, topic: Topic, kind: type[Message]) -> list[Any]:
        return [decode(one.value, kind) for one in read_all(self._bus, topic, deadline_s=150)]


@pytest.mark.thorough
def test_lengths_grow_sixfold_and_fall_back(tmp_path: Path, kafka: str, tiny_model: Path) -> None:
    fixed = Whole(tmp_path / "fixed", kafka, tiny_model, engine={}, group_s=0.0, placement={"generators": 1})
    # what the trainer really computes is a third of its time at most, and messages take little of the time of
    # an iteration, so that a busy machine decides nothing
    computes_s = float(np.median([step.metrics["compute_s"] for step in fixed.steps]))
    train_s = computes_s + max(1.6, 2 * computes_s)
    balanced = Whole(
        tmp_path / "balanced", kafka, tiny_model, group_s=(train_s - computes_s) / GROUPS,
        engine={"context_s": 3 * 1.35 * train_s / CONTEXT},  # so that with three it takes a third longer
        placement={"generators": 1, "balance": {"most": 3, "smoothed": 2}},
    )  # fmt: skip
    decided: list[BalanceRecord] = BalanceBook(balanced.record).read()
    story = "\n".join(f"{one.before} → {one.after}: {one.reason}" for one in decided)
    assert [one.after for one in decided] == [2, 3, 2, 1], f"{story}\n{balanced.said[-3000:]}"
    for one in decided:
        assert one.delta_s >= one.gain_s if one.after > one.before else one.delta_s < 0, story
        assert LENGTHS[one.iteration] == (LONG if one.after > one.before else SHORT)
        assert one.reason in balanced.said

    expected = [(group, index) for group in range(GROUPS * len(LENGTHS)) for index in range(SIZE)]
    assert sorted(trained_ids(balanced.steps)) == expected == sorted(trained_ids(fixed.steps))
    assert [step.root_out for step in balanced.steps] == [step.root_out for step in fixed.steps]
    letters = balanced.read(balanced.topics.dead, DeadLetter)
    assert all(CAME_BEFORE in one.reason for one in letters)  # its end and its generator's leave may cross
    made_by = {one.generator.partition("@")[0] for one in balanced.read(balanced.topics.samples, Sample)}
    assert made_by == {"generator-0", "generator-1", "generator-2"}
    assert balanced.said.count("has left the run") == 2
    assert not processes_of(balanced.folder)
