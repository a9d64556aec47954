"""Generators that are flow runs of a Prefect deployment: one is called to grow, and cancelled to shrink."""

from __future__ import annotations

from typing import Any

from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling

from flows.balancing.staff import CannotChange
from flows.flow_runs.called_runs import open_flow_runs
from infra.runs import RunRecord
from schemas.balancing import BalanceSection


def balance_tag(run: str) -> str:
    """Return the tag of the flow runs that were called to balance a run."""
    return f"balance:{run}"


def called_for(record: RunRecord, rule: BalanceSection | None) -> CalledGenerators | None:
    """Return the generators that a run's settings let it call; None if they name no deployment."""
    if rule is None or rule.deployment is None or rule.dry:
        return None
    return CalledGenerators(rule.deployment, record)


class CalledGenerators:
    """Flow runs of one deployment. Their tag names the run, so that any start of it finds them."""

    acts = True

    def __init__(self, deployment: str, record: RunRecord) -> None:
        self._deployment, self._record = deployment, record

    def grow(self) -> None:
        """Call the deployment, unless the flow run that was called last has not begun."""
        try:
            with get_client(sync_client=True) as client:
                found = open_flow_runs(client, balance_tag(self._record.id))
            if found and not (found[0].state and found[0].state.is_running()):
                raise CannotChange(
                    f"the flow run of {self._deployment} that was called last has not begun: has its work "
                    "pool a worker?"
                )  # without one they would become more and more, and begin all at once when it comes
            run_deployment(
                self._deployment, parameters=self._parameters(), timeout=0,
                tags=[balance_tag(self._record.id)],
            )  # fmt: skip
        except CannotChange:
            raise
        except ObjectNotFound:
            raise CannotChange(
                f"there is no Prefect deployment {self._deployment} (placement.balance.deployment)"
            ) from None
        except Exception as error:  # whatever Prefect or its server raises: the run goes on
            raise CannotChange(
                f"{self._deployment} can't be called: {error or type(error).__name__}"
            ) from error

    def shrink(self) -> None:
        """Cancel the flow run that was called last."""
        try:
            with get_client(sync_client=True) as client:
                if found := open_flow_runs(client, balance_tag(self._record.id)):
                    runs = found[0].state is not None and found[0].state.is_running()
                    state = (Cancelling if runs else Cancelled)(message="the run needs it no more")
                    client.set_flow_run_state(found[0].id, state)
                    return
        except Exception as error:
            why = str(error) or type(error).__name__
            raise CannotChange(f"no generator can be cancelled: {why}") from error
        raise CannotChange(f"no flow run of {self._deployment} is left that was called for this run")

    def _parameters(self) -> dict[str, Any]:
        flow, _, name = self._deployment.partition("/")
        asked: dict[str, Any] = {"run": self._record.id, "store": self._record.store, "generators": 1}
        if flow == "sync-weights":
            asked["site"] = name
            if name in self._record.spec.placement.sites:
                asked["relays"] = 0  # the site has those that it was started with
        return asked
