"""The losses, by the names of the run file."""

from __future__ import annotations

from consumers.losses.cispo import Cispo
from consumers.losses.dapo import Dapo
from consumers.losses.dr_grpo import DrGrpo
from consumers.losses.grpo import Grpo
from consumers.losses.gspo import Gspo
from consumers.losses.loss import Loss
from consumers.losses.ppo import Ppo
from consumers.losses.reinforce_pp import ReinforcePlusPlus
from consumers.losses.rloo import Rloo
from consumers.losses.trajectory_balance import TrajectoryBalance
from schemas.runspec import RunSpec

_LOSSES: dict[str, type[Loss]] = {
    "grpo": Grpo, "dr_grpo": DrGrpo, "dapo": Dapo, "rloo": Rloo, "reinforce_pp": ReinforcePlusPlus,
    "ppo": Ppo, "cispo": Cispo, "gspo": Gspo, "tb": TrajectoryBalance,
}  # fmt: skip


def loss_of(spec: RunSpec) -> Loss:
    """Return the run's loss."""
    return _LOSSES[spec.loss.kind](spec)
