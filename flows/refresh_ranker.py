"""The Prefect flow `refresh-ranker` trains a length ranker anew from the samples that runs recorded.

`flows.run.retrain.retrain` does the same with no Prefect installed or running.
"""

# Annotations are no text here: `serve()` pickles a flow's function, without the names that only text says.

from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.flow_runs.watching import watched
from flows.run.retrain import retrain


@flow(name="refresh-ranker", description="Train a length ranker from runs' recorded samples.")
def refresh_ranker(
    runs: Annotated[list[str], Field(min_length=1, description="Ids of runs, such as count-1.")],
    store: Annotated[str, Field(description="The runs' object store.")] = "local",
    name: Annotated[str | None, Field(description="Name of the ranker; by default the run's.")] = None,
) -> dict[str, Any]:
    """Train and keep a ranker. Returns how well it ranks and, as `start`, its key for `lengths.start`."""
    with watched():
        result = retrain(runs, store=store, name=name)
        quality = result.quality
        get_run_logger().info("%s/%s: trained from %d groups", result.url, result.key, result.groups)
        row = {
            "ranker": result.key, "trained from groups": result.groups, "judged by groups": quality.groups,
            "recall of the longest 20 %": round(quality.recall[0], 3),
            "10 %": round(quality.recall[1], 3), "5 %": round(quality.recall[2], 3),
            "Kendall's tau": round(quality.tau, 3), "error (log)": round(quality.error, 3),
        }  # fmt: skip
        create_table_artifact([row], key="ranker", description=f"Length ranker {result.key}")
        return {"start": result.key, **row}
