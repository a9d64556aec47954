"""The bug zoo: each planted fault is named with step, stage, sample and cause; healthy runs have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories import make_tiny_model
from tests.zoo.faults import FAULTS, Fault
from tests.zoo.healthy import healthy_runs
from tests.zoo.trying import missed, tried

SEED = 3
A_FAULT_OF_EACH_STAGE = [
    "another tokenizer",
    "an older version served",
    "a forced end left unmasked",
    "a reward that returns NaN",
    "advantages over the wrong batch",
    "a group split over two steps",
    "the clip on the wrong side",
    "a micro-batch counted twice",
    "the learning rate a hundredfold",
    "a master in bf16",
]
HEALTHY = ("grpo with a reference", "async, in order of arrival", "ppo", "lora")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, width=32))


@pytest.mark.thorough(but=A_FAULT_OF_EACH_STAGE)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_explained(tmp_path: Path, model: str, fault: Fault) -> None:
    found = tried(tmp_path, model, fault, seed=SEED)
    assert not missed(fault, found.first)
    assert found.first is not None and found.first.evidence
    assert not found.found.unseen


@pytest.mark.thorough(but=["grpo with a reference", "async, in order of arrival"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(tmp_path: Path, model: str, name: str) -> None:
    found = tried(tmp_path, model, None, healthy_runs(SEED)[name]).found
    assert not found.findings and not found.unseen and found.steps
