"""The Prefect flow `rebalance`: watches a run that goes on, and changes the number of its generators.

Its deployment may run on any machine that reaches the run's broker and store. A run with `placement.balance`
does this by itself. `streamrl rebalance RUN` does the same with no Prefect installed or running.
"""

# Annotations are no text here: `serve()` pickles a flow's function, without the names that only text says.

from contextlib import suppress
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.flow_runs.called_generators import called_for
from flows.flow_runs.watching import watched
from flows.run.locations import named_store
from flows.run.watching_balance import keep_balanced, rule_for, verdict_now
from flows.view.balance_words import balance_row
from infra.runs import find
from schemas.messages import BalanceRecord


@flow(name="rebalance", description="Watch a run, and change the number of its generators.")
def rebalance(
    run: Annotated[str, Field(min_length=1, description="The run's id, such as count-1.")],
    store: Annotated[str, Field(description="The run's object store.")] = "local",
    most: Annotated[
        int | None, Field(ge=1, description="The most generators; by default as placement.balance says.")
    ] = None,
    least: Annotated[int | None, Field(ge=1, description="The fewest generators.")] = None,
    deployment: Annotated[
        str | None, Field(description="The deployment that adds a generator; by default this machine does.")
    ] = None,
    dry: Annotated[bool, Field(description="Only recommend.")] = False,
    once: Annotated[bool, Field(description="Judge the run as it is now, change nothing, and end.")] = False,
) -> list[dict[str, Any]]:
    """Watch a run until it has ended. Returns a row for each change.

    A flow run that is cancelled leaves no process behind.
    """
    with watched():
        log, record = get_run_logger(), find(named_store(store), run)
        rule = rule_for(record, dry=dry or once, most=most, least=least, deployment=deployment)
        if once:
            verdict = verdict_now(record, rule)
            log.info("%s", verdict.reason)
            return [{"iteration": verdict.iteration, "generators": verdict.before, "should be": verdict.after,
                     "why": verdict.reason}]  # fmt: skip
        rows: list[dict[str, Any]] = []

        def show(decided: list[BalanceRecord]) -> None:
            if decided:
                rows.extend(map(balance_row, decided))
                with suppress(Exception):  # the server may be busy or away: that must not end the flow
                    create_table_artifact(rows, key=f"{run}-balance", description=f"Generators of {run}")

        keep_balanced(
            record, rule, store=store, say=lambda text: log.info("%s", text), decided_by="the flow rebalance",
            called=called_for(record, rule), tick=show,
        )  # fmt: skip
        return rows
