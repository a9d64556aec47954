"""The Prefect flow `archive-run` archives what runs have recorded, before Kafka's retention removes it.

Give its deployment a schedule, such as once an hour. `flows.run.archiving.archive_now` does the same with no
Prefect installed or running, and with `placement.archive` a run does it by itself.
"""

# Annotations are no text here: `serve()` pickles a flow's function, without the names that only text says.

from contextlib import suppress
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.flow_runs.watching import watched
from flows.run.archiving import archive_now, lost_in_words, pass_in_words


@flow(name="archive-run", description="Archive what runs have recorded, before Kafka's retention removes it.")
def archive_run(
    runs: Annotated[list[str], Field(min_length=1, description="Ids of runs, such as count-1.")],
    store: Annotated[str, Field(description="The runs' object store.")] = "local",
) -> list[dict[str, Any]]:
    """Make a pass over each run. Returns a row for each: its records, and bytes in log and archive."""
    with watched():
        log, rows = get_run_logger(), list[dict[str, Any]]()
        for run in runs:
            done = archive_now(run, store)
            log.info("%s", pass_in_words(run, done))
            if lost := lost_in_words(run, done):
                log.warning("%s", lost)
            rows.append({
                "run": run, "records": done.records, "bytes in the log": done.log_bytes,
                "bytes in the archive": done.file_bytes, "lost": sum(done.lost.values()),
            })  # fmt: skip
        with suppress(Exception):  # the work is done: an artifact that can't be made does not undo it
            create_table_artifact(rows, key="archive", description="What was archived")
        return rows
