"""The Prefect flow `join-run`: generators or ranks take part in a run, on the machine of the worker that
starts it.

A run with `placement.balance.deployment: join-run/NAME` calls it when it needs one more. `streamrl join RUN`
does the same with no Prefect installed or running.
"""

# Annotations are no text here: `serve()` pickles a flow's function, without the names that only text says.

from functools import partial
from typing import Annotated

from prefect import flow, get_run_logger
from pydantic import Field

from flows.flow_runs.watching import watched
from flows.run.awaited_run import awaited_run
from flows.run.commands import ranks_here
from flows.run.joining import joining, take_part


@flow(name="join-run", description="Generators or ranks take part in a run.")
def join_run(
    run: Annotated[str, Field(min_length=1, description="The run's id, such as count-1, or a name.")],
    store: Annotated[str, Field(description="The run's object store.")] = "local",
    generators: Annotated[
        int | None, Field(ge=0, description="How many; by default 1, and 0 where there are ranks.")
    ] = None,
    ranks: Annotated[int, Field(ge=0, description="How many ranks of the trainer.")] = 0,
    engine_ranks: Annotated[int, Field(ge=0, description="How many ranks of a generator's engine.")] = 0,
    of_generator: Annotated[
        int | None, Field(ge=0, description="The number of that generator; by default any that lacks ranks.")
    ] = None,
    model: Annotated[
        str | None, Field(description="Folder of the starting model here; if there is none, it is fetched.")
    ] = None,
    reward: Annotated[
        str | None, Field(description="FILE.py:function, if the reward is elsewhere on this machine.")
    ] = None,
    wait_s: Annotated[
        float, Field(ge=0, description="Seconds to wait for the run, if it does not go on yet.")
    ] = 0.0,
    newest: Annotated[
        bool, Field(description="Join the newest run of a name; if it has ended, wait for the next one.")
    ] = False,
) -> None:
    """Take part in a run until it has ended, or until this flow run is cancelled: no process is left."""
    with watched():
        log = get_run_logger()
        say = partial(log.info, "%s")
        held = ranks_here(ranks, engine_ranks, of_generator)
        run = awaited_run(run, store=store, wait_s=wait_s, newest=newest, say=say)
        joined = joining(
            run, store=store, generators=generators, model=model, reward=reward, ranks=held
        )  # fmt: skip
        take_part(joined, say)
