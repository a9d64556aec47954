"""streamrl what-if"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.replay_options import ArchiveAlone, OwnCode, RunOrStepFile
from flows.cli.shared.talk import FAILED, check_output, error_console, fail, out, plain_errors, say_json

if TYPE_CHECKING:
    from rich.console import Console

    from consumers.what_if import WhatIfCurve
    from flows.run.suggested_commands import SuggestedCommands

_PICTURES = (".png", ".svg", ".pdf")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("what-if")(plain_errors(what_if))


def what_if(
    run: RunOrStepFile,
    first: Annotated[
        int, typer.Option("--from", metavar="N", min=0, help="The first step to take with other settings.")
    ],
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="M", min=1, help="How many steps; by default 10, or all there are."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=VALUE", help="A changed setting; may be given several times."),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="'A.B=VALUE …'",
            help="One of several variants, with its own changes beside those of --set.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Draw all curves into this file: .png, .svg or .pdf."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all curves.")] = False,
    own_code: OwnCode = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Train a run's recorded samples again from a step on, with other settings, beside what was recorded.

    After a while the samples are no longer those that the changed run would have drawn. The loss corrects for
    that; the effective sample size says how many samples still count, and up to which step to believe a
    curve. Settings that decide which samples are drawn can't change. It writes nothing to the run.

    Examples:

    [bold]streamrl what-if count-3 --from 20 --steps 10 --set loss.clip_high=0.3[/bold]

    [bold]streamrl what-if count-3 --from 20 --variant algorithm.learning_rate=1e-6 \\
      --variant 'algorithm.learning_rate=1e-5 loss.kind=dapo' -o what-if.png[/bold]
    """  # fmt: skip

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from flows.run.asking_what_if import last_step, what_if_curves
    from flows.run.replaying import replaying
    from flows.run.suggested_commands import SuggestedCommands
    from flows.run.what_if_settings import variants_of
    from flows.view.what_if_picture import draw_what_if
    from flows.view.what_if_rows import what_if_row

    if not changes and not variants:
        fail("nothing is changed: say --set A.B=VALUE, such as --set algorithm.learning_rate=1e-6")
    if picture is not None and picture.suffix not in _PICTURES:
        fail(f"-o {picture}: the name of a picture ends with {', '.join(_PICTURES)}")
    check_output("-o", picture)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def shown(words: str, done: int, total: int) -> None:
            bar.update(task, description=words[:40], completed=done, total=total)

        with replaying(
            run, store, lambda done, total: shown("steps before it", done, total),
            read=lambda done, total: shown("bytes of the step file", done, total), own_code=own_code,
            archive_alone=archive,
        ) as opened:  # fmt: skip
            asked = variants_of(opened.handle.spec, changes or [], variants or [])
            last = last_step(opened, first, steps)
            found = what_if_curves(opened, first, last, asked, shown)
            name = opened.handle.run
    if as_json:
        say_json(what_if_row(name, found))
    else:
        commands = SuggestedCommands.as_asked(name, run, store, archive_alone=archive, own_code=own_code)
        _show(out(), name, found, commands)
    if picture is not None:
        draw_what_if(f"run {name}, steps {first} to {last}", found, picture)
        error_console().print(f"drawn into {picture}", highlight=False, markup=False, soft_wrap=True)
    if not all(point.as_expected for point in found[0].points):
        raise typer.Exit(FAILED)


def _show(console: Console, run: str, curves: Sequence[WhatIfCurve], commands: SuggestedCommands) -> None:
    from rich.table import Table

    from flows.view.what_if_rows import conclusion, point_row

    rows = [(curve, point_row(point)) for curve in curves for point in curve.points]
    table = Table(
        "step", "settings", "reward", "±", "samples", "tokens", "loss", "norm", "entropy", "clipped",
        "divergence", "drift", "weights apart", title=f"run {run}",
        caption="samples, tokens: how many count, as a share. *: samples of other weights, corrected. "
        "red: not to be believed",
    )  # fmt: skip
    for curve, row in sorted(rows, key=lambda one: int(one[1]["step"])):
        names = ("reward", "reward_error", "effective_samples", "effective_tokens", "loss", "grad_norm",
                 "entropy", "clip_fraction", "divergence", "logprob_drift", "weights_apart")  # fmt: skip
        table.add_row(
            str(row["step"]), curve.name + (" *" if row["corrected"] else ""),
            *("–" if row[name] is None else f"{row[name]:.3g}" for name in names),
            style="" if row["believable"] else "red",
        )  # fmt: skip
    console.print(table)
    for curve in curves[1:]:
        console.print(
            f"{curve.name}: {conclusion(curve)}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    own = curves[0].points
    other = [point.step for point in own if not point.equal]
    if other and all(point.as_expected for point in own):
        console.print(
            f"{len(other)} of {len(own)} recorded steps came to other bits, first step {other[0]}, within "
            "the tolerances of their records: another kind of machine took them, or its ranks add as floats",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    elif other:
        console.print(
            f"{len(other)} of {len(own)} recorded steps came to OTHER BITS, first step {other[0]}. In which "
            f"stage says\n  {commands.command('replay', '--step', str(other[0]))}",
            style="yellow", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    else:
        console.print("the recorded settings came to the recorded bits", style="green", highlight=False)
