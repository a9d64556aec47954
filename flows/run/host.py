"""The host of a run: a service that runs it as a job, and may pause or cancel it. Prefect is one."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from flows.balancing.staff import Staff
from infra.errors import Explained
from infra.runs import RunRecord


class CannotCall(Explained):
    """A host can't call a deployment, and may call others; the message says why."""


class HostOrder(Enum):
    """The orders that a host may give to a run that goes on."""

    GO_ON = "go on"
    PAUSE = "pause"
    CANCEL = "cancel"


class Host:
    """A host that knows nothing and wants nothing: that of a run without Prefect."""

    flow_run = ""  # the id of the job that the host runs; "": there is none
    started_again = False  # whether the job ran before: it goes on with its run instead of starting another

    def phase(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a phase of the run as the host calls it."""
        return function

    def took_up(self, record: RunRecord) -> None:
        """Hear which run the job has made or goes on with."""

    def order(self) -> HostOrder:
        """Return the host's newest order. Called a few times a second: it must not wait for anything."""
        return HostOrder.GO_ON

    def paused(self) -> None:
        """Hear that the run is paused: no process of it is left. Raises RunSuspended if the job ends here."""

    def call_site(self, record: RunRecord, site: str) -> bool:
        """Have a site that is elsewhere take part in a run. Returns False if the host can't."""
        return False

    def call_ranks(self, record: RunRecord, deployment: str, ranks: int) -> bool:
        """Have one of `placement.ranks.deployments` hold ranks elsewhere. Returns False if it still does.

        Raises CannotCall if it never can.
        """
        raise CannotCall("only Prefect can call placement.ranks.deployments")

    def generators(self, record: RunRecord) -> Staff | None:
        """Return the generators that `placement.balance.deployment` calls; None: the host can't call any."""
        return None


NO_HOST = Host()
