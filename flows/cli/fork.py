"""streamrl fork"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.shared.talk import (
    check_output,
    error_console,
    fail,
    out,
    plain_errors,
    say_json,
    sigterm_interrupts,
    warn,
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(fork))


def fork(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-3.")],
    at: Annotated[
        int, typer.Option("--at", metavar="N", min=0, help="The first step that is the fork's own.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Change a setting from there on; may be repeated."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="A name for the fork's id, NAME-1; by default that of the run."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The fork's run file to write; by default FORK.yaml here.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Go on with the fork at once, and watch.")] = False,
    prefect: Annotated[
        bool, typer.Option("--prefect/--no-prefect", help="With --start: as a flow of the Prefect server.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="The new run as one JSON object; not with --start.")
    ] = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:  # fmt: skip
    """Make a new run that goes on from a step of another one: the same past, and topics of its own.

    It begins with the weights, the optimizer's state and the problems that the run had before that step, at
    the beginning of an iteration, and counts steps on. Nothing of the run is changed.

    Examples:

    [bold]streamrl fork count-3 --at 40 --set algorithm.learning_rate=1e-6 --start[/bold]

    [bold]streamrl fork count-3 --at 40 --name careful[/bold]   makes careful-1
    """  # fmt: skip
    import shlex

    import yaml
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from flows.cli.run import carry_out
    from flows.run.forking import ForkRequest, make_fork
    from flows.run.replaying import replaying
    from flows.run.request import RunFailed, RunRequest
    from flows.run.suggested_commands import SuggestedCommands
    from infra.step_file.unpacking import is_step_file

    if is_step_file(run):
        fail(f"{run} is a step file, and a fork lies in the store of its run: name a run")
    if as_json and start:
        fail("--json says which run was made, and --start watches it: leave one out")
    if name is not None and not _is_name(name):
        fail(f"--name {name}: small letters, digits and dashes, beginning with a letter")
    if file is not None and file.exists():
        fail(f"-o {file}: it exists already")
    check_output("-o", file)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with sigterm_interrupts(), Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("steps before it", total=None)

        def stepping(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        def copying(done: int, total: int) -> None:
            bar.update(task, description="earlier groups", completed=done, total=total)

        with replaying(run, store, stepping) as opened:
            request = ForkRequest(at, tuple(changes or ()), name)
            made = make_fork(opened.again, opened.handle, request, say=warn, copying=copying)
    file = file or _free_name(f"{made.id}.yaml")
    try:
        with file.open("x") as target:
            yaml.safe_dump(made.spec.model_dump(mode="json", by_alias=True), target, sort_keys=False)
    except OSError as error:
        raise RunFailed(
            f"{made.id} is made, but its run file can't be written: {error}. Remove the fork with "
            f"`{SuggestedCommands(made.id, store).command('rm')}`, and make it again with another -o"
        ) from error
    if as_json:
        origin = made.fork.model_dump(exclude={"identity"}) if made.fork else {}
        say_json({"id": made.id, "run_file": str(file), "fork": origin})
        return
    out().print(
        f"{made.id} is a fork of {made.fork.words if made.fork else run}; its run file is {file}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if start:
        carry_out(RunRequest(str(file), (), made.id), prefect=prefect)
    else:
        out().print(
            f"Go on with it:\n  {shlex.join(['streamrl', 'run', str(file), '--resume', made.id])}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def _free_name(name: str) -> Path:
    """Return a name that no file here has: that of a run with this id, now removed, may be left."""
    number, found = 1, Path(name)
    while found.exists():
        number += 1
        found = Path(name).with_stem(f"{Path(name).stem}-{number}")
    return found


def _is_name(name: str) -> bool:
    from pydantic import TypeAdapter, ValidationError

    from schemas.runspec import PlainName

    try:
        TypeAdapter(PlainName).validate_python(name)
    except ValidationError:
        return False
    return True
