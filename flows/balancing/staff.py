"""The ways in which the number of a run's generators is changed.

LocalGenerators      processes that the run starts and stops on its own machine (flows.run.run_balance)
JoinedGenerators     processes that join the run from another machine (flows.run.watching_balance)
CalledGenerators     flow runs of a Prefect deployment (flows.flow_runs.called_generators)
NoGenerators         none: an autoscaler, or a person, follows what is recommended
"""

from __future__ import annotations

from typing import Protocol

from infra.errors import Explained

LEAVING_S = 30.0  # for a generator to hand over what it has
BALANCER = "balancer"  # the role of which the newest start acts: that of a run, or one outside it


class CannotChange(Explained):
    """The number of generators can't be changed; the message says why."""


class Staff(Protocol):
    """A way in which the number of generators is changed by one."""

    acts: bool  # whether it changes anything; else it only recommends

    def grow(self) -> None:
        """Add a generator. Raises CannotChange."""

    def shrink(self) -> None:
        """Have a generator leave. Raises CannotChange."""


class NoGenerators:
    """Changes nothing."""

    acts = False

    def grow(self) -> None:
        """Do nothing."""

    def shrink(self) -> None:
        """Do nothing."""
