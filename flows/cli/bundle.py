"""streamrl bundle"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.replay import steps_of
from flows.cli.shared.replay_options import ArchiveAlone, StepRange
from flows.cli.shared.talk import (
    INTERRUPTED,
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
    app.command()(plain_errors(bundle))


def bundle(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    step: StepRange = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The file to write; by default RUN-stepN.tar.zst here.", show_default=False
        ),
    ] = None,
    failed: Annotated[
        bool,
        typer.Option("--failed", help="A step that could not be taken; the newest if --step is left out."),
    ] = False,
    regenerate: Annotated[
        bool,
        typer.Option("--regenerate", help="Also the weights of all versions that drew the samples."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Write a step file: one file by which a step can be replayed on any machine, and attached to an issue.

    It holds samples, prompts, weights and optimizer state before the step, config, tokenizer, settings and
    digests. The samples of a step of sync mode were drawn by these weights; those of async mode were drawn by
    older ones, too, which `--regenerate` puts beside them, so that they can be sampled again. If the step's
    log-probabilities are far from its generators', some older weights are in the file anyhow, for `explain`.
    `streamrl replay FILE` needs no broker, no store and no network, and runs no code of the file. Prompts and
    answers are in it: do not give it to people who may not see them.

    Examples:

    [bold]streamrl bundle count-3 --step 12 -o step.tar.zst[/bold]

    [bold]streamrl bundle count-3 --failed[/bold]
    """  # fmt: skip
    import shlex

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from flows.run.bundling import make_step_file
    from flows.run.replaying import replaying
    from flows.run.versions_beside import versions_named

    first, last = steps_of(step)
    check_output("-o", file)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    try:
        with sigterm_interrupts(), Progress(*columns, console=error_console(), transient=True) as bar:
            task = bar.add_task("steps before it", total=None)

            def stepping(done: int, total: int) -> None:
                bar.update(task, description="steps before it", completed=done, total=total)

            def writing(done: int, total: int) -> None:
                bar.update(task, description="writing", completed=done, total=total)

            with replaying(run, store, stepping, archive_alone=archive) as opened:
                made = make_step_file(
                    opened.again,
                    opened.handle,
                    file,
                    first,
                    last,
                    failed=failed,
                    regenerate=regenerate,
                    written=writing,
                )
    except KeyboardInterrupt:
        fail("stopped; nothing was written", INTERRUPTED)
    beside = f"; it has also the weights of {versions_named(made.versions)}" if made.versions else ""
    steps = f"step {made.last}" if made.first == made.last else f"steps {made.first} to {made.last}"
    if made.prompts_missing:
        warn(f"the file has no prompts, so rewards can't be computed again from it: {made.prompts_missing}")
    if as_json:
        say_json({**vars(made), "path": str(made.path), "run": run})
        return
    out().print(
        f"{made.path} has {steps} of {run} ({made.size / 1e6:.1f} MB; in the log, the samples have "
        f"{made.samples_size / 1e6:.1f} MB){beside}\n"
        f"Replay it, on any machine, with\n  {shlex.join(['streamrl', 'replay', str(made.path)])}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
