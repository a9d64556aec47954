"""The Prefect flow `sync-weights`: a site takes part in a run, with relays that follow its weights.

The flow runs at the site, as a deployment with that site's work pool: see prefect.yaml. Its artifact shows
how far each site is. `streamrl join RUN --site NAME` does the same with no Prefect installed or running.
"""

# Annotations are no text here: `serve()` pickles a flow's function, without the names that only text says.

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field

from flows.flow_runs.watching import watched
from flows.run.joining import joining, take_part
from flows.view.follow import Follower, look_once
from flows.view.live import site_row
from flows.view.run_view import RunView
from infra.weights.garbage import ByteProgress

_EVERY_S = 10.0


@flow(name="sync-weights", description="A site takes part in a run, with relays that follow its weights.")
def sync_weights(
    run: Annotated[str, Field(min_length=1, description="The run's id, such as count-1.")],
    site: Annotated[str, Field(min_length=1, description="The site's name.")],
    store: Annotated[str, Field(description="The run's object store.")] = "local",
    cache: Annotated[str | None, Field(description="Where the site keeps weights; a URL or local.")] = None,
    relays: Annotated[int | None, Field(ge=0, description="By default as the run file says, or 1.")] = None,
    generators: Annotated[
        int | None, Field(ge=0, description="By default as the run file says, or 1; 0: relays alone.")
    ] = None,
    model: Annotated[
        str | None, Field(description="Folder of the starting model here; if there is none, it is fetched.")
    ] = None,
    reward: Annotated[
        str | None, Field(description="FILE.py:function, if the reward is elsewhere on this machine.")
    ] = None,
) -> list[dict[str, str]]:
    """Take part in a run until it has ended. Returns a row for each relay, as it was then.

    A flow run that is cancelled leaves no process behind.
    """
    with watched():
        log = get_run_logger()
        joined = joining(
            run, store=store, site=site, cache=cache, relays=relays, generators=generators, model=model,
            reward=reward, progress=_tenths(partial(log.info, "%d %% of the model is here")),
        )  # fmt: skip
        with Follower(joined.record) as follower:
            due = time.monotonic() + _EVERY_S

            def show() -> None:
                nonlocal due
                if time.monotonic() >= due:
                    due = time.monotonic() + _EVERY_S
                    _publish(run, follower.see(_rows))

            take_part(joined, lambda text: log.info("%s", text), tick=show)
        rows = _rows(look_once(joined.record))  # read again: the follower may have missed the end
        _publish(run, rows)
        return rows


def _tenths(say: Callable[[int], None]) -> ByteProgress:
    """Return a function that calls `say` with the percentage when another tenth of the bytes is done."""
    said = 0

    def progress(done: int, whole: int) -> None:
        nonlocal said
        if whole and (tenths := done * 10 // whole) > said:
            said = tenths
            say(tenths * 10)

    return progress


def _rows(view: RunView) -> list[dict[str, str]]:
    return [site_row(report) for _, report in sorted(view.sites.items())]


def _publish(run: str, rows: list[dict[str, Any]]) -> None:
    with suppress(Exception):  # an artifact must not end the flow: the server may be busy or away
        create_table_artifact(rows, key=f"{run}-sites", description=f"Weights of {run} by site")
