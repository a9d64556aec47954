"""The Prefect flow `train`: a run, with its phases as tasks.

`flows.run.without_prefect.train_plainly` does the same with no Prefect installed or running.
"""

# Annotations are no text here: `serve()` pickles a flow's function, without the names that only text says.

from contextlib import suppress
from typing import Annotated, Any

from prefect import Flow, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled as PrefectCancelled
from prefect.states import Failed as PrefectFailed
from pydantic import Field

from flows.flow_runs.flow_run_page import PrefectScreen, show_failure, show_links, show_result_artifacts
from flows.flow_runs.prefect_host import PrefectHost
from flows.flow_runs.watching import watched
from flows.run.phases import conduct
from flows.run.request import RunCancelled, RunRequest, RunResult, RunSuspended
from flows.run.without_prefect import train_plainly
from flows.view.screen import Screen, Screens
from infra.errors import Explained

__all__ = ["train", "train_plainly"]

STOPPED = "stopped; every process of the run has ended"

# More screens: the command line adds its terminal. Not a parameter, since Prefect shows and stores those.
watchers: list[Screen] = []


def _say_why(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Make the reason alone the message of a failed flow run's state. Prefect calls this."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, Explained):
        with suppress(Exception), get_client(sync_client=True) as client:
            said = PrefectFailed(message=_first_line(error), data=state.data)
            client.set_flow_run_state(flow_run.id, said, force=True)


@flow(
    name="train", description="Train a language model by a run file, and watch over all its processes.",
    on_failure=[_say_why],
)  # fmt: skip
def train(
    runfile: Annotated[str, Field(min_length=1, description="The run file: a YAML file.")],
    overrides: Annotated[list[str], Field(description="Settings of the run file to change: a.b=c.")] = [],  # noqa: B006 - never changed; Prefect shows it
    resume: Annotated[
        str | bool | None, Field(description="A run's id to go on with; true: the newest.")
    ] = None,
) -> Any:
    """Run a run file to its end. If it is cancelled or killed, the flow leaves no process of the run.

    A flow run that is retried, or resumed after a pause, goes on with its run.
    """
    request = RunRequest(runfile, tuple(overrides), resume)
    with watched() as watch:
        host = PrefectHost(watch)
        try:
            result = conduct(request, Screens([PrefectScreen(), *watchers]), host)
        except RunCancelled as cancelled:
            return PrefectCancelled(message=str(cancelled))
        except KeyboardInterrupt:
            return PrefectCancelled(message=STOPPED)
        except RunSuspended:
            assert host.suspension is not None
            raise host.suspension from None
        except Explained as error:
            if host.record is not None:
                show_failure(host.record, str(error))
            raise
        finally:
            if host.record is not None:
                show_links(host.record)
        show_result_artifacts(result)
    return _answer(result)


def _answer(result: RunResult) -> dict[str, Any]:
    return {"run": result.run, "report": str(result.report), **result.summary}


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
