"""Of each step the first record counts, and a trainer whose record is not the first one stops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from consumers.steps.ledger import AnotherTrainer, Ledger
from infra.roles.context import RoleContext
from schemas.messages import StepRecord
from tests.factories import make_context, make_spec
from tests.fakes.fill import fill


def step(context: RoleContext, number: int, root: str, epoch: int) -> StepRecord:
    return fill(
        StepRecord, run=context.run, step=number, root_out=root, trainer_epoch=epoch, iteration=number,
        last_of_iteration=True, version_in=number, version_out=number + 1, predicted=np.zeros(0),
    )  # fmt: skip


def started(context: RoleContext, epoch: int) -> tuple[Ledger, list[str]]:
    ledger = Ledger(context, epoch)
    return ledger, [f"{one.step} {one.root_out}" for one in ledger.rest(0)]


def test_who_is_second_with_other_bits_stops(tmp_path: Path) -> None:
    context = make_context(make_spec(), tmp_path)
    old, _ = started(context, 0)
    new, there = started(context, 1)
    assert not there
    old.append(step(context, 0, "a", 0))
    new.append(step(context, 0, "a", 1))  # the same bits: whoever redoes the first one gets them too
    assert (old.end, new.end) == (1, 2)
    with pytest.raises(AnotherTrainer, match=r"newer start of the trainer \(1; this is start 0\)"):
        old.append(step(context, 1, "b", 0))
    with pytest.raises(AnotherTrainer, match="another trainer took step 1 before this one"):
        new.append(step(context, 1, "other", 1))
    again, there = started(context, 2)
    assert there == ["0 a", "1 b"]
    again.append(step(context, 2, "c", 2))
    assert again.end == 5
