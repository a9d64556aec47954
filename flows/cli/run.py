"""streamrl run"""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from flows.cli.shared.talk import (
    FAILED,
    INTERRUPTED,
    USER_ERROR,
    fail,
    out,
    plain_errors,
    sigterm_interrupts,
    warn,
)

NEWEST = ""


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(run))


def run(
    runfile: Annotated[str, typer.Argument(help="The run file, such as examples/count.yaml.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only look whether it could run; start nothing.")
    ] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting; may be repeated.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a run: the newest of this run file, or --resume RUN-ID."),
    ] = False,
    resume_id: Annotated[
        str | None, typer.Argument(metavar="[RUN-ID]", help="With --resume: which run.")
    ] = None,
    prefect: Annotated[
        bool,
        typer.Option(
            "--prefect/--no-prefect", help="Run it as a flow of the Prefect server that `up` started."
        ),
    ] = True,
) -> None:
    """Train by a run file, and watch. Ctrl-C stops it in order; it can be resumed.

    Examples:

    [bold]streamrl run examples/count.yaml[/bold]

    [bold]streamrl run examples/count.yaml --check --set algorithm.mode=sync[/bold]

    [bold]streamrl run examples/count.yaml --resume count-3[/bold]
    """
    refuse_many(runfile)
    from flows.run.checks import check as look_at
    from flows.run.inspection import inspect_start
    from flows.run.request import RunRequest
    from schemas.loading import RunFileError

    if resume_id and not resume:
        raise RunFileError(f"{resume_id}: the id of a run to go on with needs --resume before it")
    request = RunRequest(runfile, tuple(changes or ()), (resume_id or True) if resume else None)
    if check:
        check_only(request)
        return
    inspect_start(look_at(request), runfile, warn)
    carry_out(request, prefect=prefect)


def refuse_many(runfile: str) -> None:
    """Exit if a launcher has started this command many times: each would be a run of its own."""
    from infra.ranks.launcher import processes_everywhere

    if (count := processes_everywhere()) > 1:
        fail(
            f"WORLD_SIZE={count}: a launcher has started `streamrl run` {count} times, and each would be a "
            "run of its own. Say on one machine, once and without the launcher:\n"
            f"  {shlex.join(['streamrl', 'run', runfile])}\n"
            "and on each of the other machines that have ranks of it (placement.ranks.elsewhere):\n"
            "  torchrun --nproc-per-node 4 --no-python streamrl join RUN --store URL --ranks 1\n"
            "Where it is started once, and WORLD_SIZE is for something else: env -u WORLD_SIZE streamrl run …"
        )


def check_only(request: object) -> None:
    """Print a line for each thing that was looked at; start nothing.

    Exits with 2 if something must be changed before a run can start, with 1 if a server does not answer.
    """
    from rich.console import Console

    from flows.run.checks import problems_of
    from flows.run.inspection import Finding, inspect_run
    from flows.run.inspection.store_and_broker import look_at_first_ranker
    from flows.run.request import RunRequest
    from schemas.loading import load_run_file

    assert isinstance(request, RunRequest)
    spec = load_run_file(request.runfile, request.overrides)
    problems, errors = problems_of(spec), Console(stderr=True)
    named = [Finding(request.runfile, problem, wrong=True) for problem in problems]
    findings = [*named, *inspect_run(spec, problems)]
    if not request.resume:
        findings += look_at_first_ranker(spec)
    for finding in findings:
        console, sign = (errors, "") if finding.wrong else (out(), "✓ ")
        style = "red" if finding.wrong else None
        console.print(f"{sign}{finding.line}", style=style, markup=False, highlight=False, soft_wrap=True)
    if any(finding.wrong for finding in findings):
        raise typer.Exit(FAILED if all(one.away for one in findings if one.wrong) else USER_ERROR)
    out().print(
        f"{request.runfile} is fine: {spec.algorithm.iterations} iterations of {spec.algorithm.groups} × "
        f"{spec.algorithm.group_size} samples, {spec.algorithm.mode}",
        highlight=False,
    )


def carry_out(request: object, *, prefect: bool) -> None:
    """Run a request with the terminal as its screen, and show the result."""
    from flows.cli.shared.predicting import PredictionBeside
    from flows.cli.shared.result import show_result
    from flows.cli.shared.running import run_here
    from flows.run.request import RunCancelled, RunRequest

    assert isinstance(request, RunRequest)
    console = out()
    try:
        with sigterm_interrupts(), PredictionBeside(request) as beside:
            result = run_here(request, console, prefect=prefect, news=beside.tell)
            prediction = beside.prediction
    except KeyboardInterrupt:
        fail("stopped; every process of the run has ended", INTERRUPTED)
    except RunCancelled as cancelled:
        fail(str(cancelled), INTERRUPTED)
    show_result(console, result, prediction)
