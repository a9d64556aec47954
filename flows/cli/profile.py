"""streamrl profile"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import (
    INTERRUPTED,
    fail,
    out,
    plain_errors,
    sigterm_interrupts,
    warn,
)

if TYPE_CHECKING:
    from rich.console import Console

    from schemas.profile import Profile

_DISTURBED = 0.1  # share of the time beyond which figures are not to be relied on


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(profile))


def profile(
    runfile: Annotated[str, typer.Argument(help="The run file, such as examples/count.yaml.")],
    file: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The file to write: .yaml or .json. By default one in .streamrl/profiles.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting; may be repeated.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure, though there is a profile already.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=5, max=3600, help="How long to measure, without the starts.")
    ] = 40.0,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="FOLDER",
            help="The report folder of a run, such as runs/count-1: the profile gets its overheads. By "
            "default the newest run of the run file, if there is one.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The profile as one JSON object.")] = False,
) -> None:
    """Measure how fast the parts of a run are on this machine: engine, learner, weights, rewards.

    It takes about a minute, with the engine and the learner that the run would have, each in a process of its
    own; no broker is needed. The result is a file that plans and simulations read. There is one for each
    model, machine, and set of settings that matter. Do it while the machine has nothing else to do.

    Examples:

    [bold]streamrl profile examples/count.yaml[/bold]

    [bold]streamrl profile examples/count.yaml --set generator.slots=64 --again -o profile.yaml[/bold]

    [bold]streamrl profile examples/count.yaml --run runs/count-1[/bold]
    """  # fmt: skip
    from flows.cli.shared.planning_bar import planning_bar
    from flows.planning.profile_file import read_profile
    from flows.plans.profiling import ProfileAsked, profile_of_run

    asked = ProfileAsked(runfile, tuple(changes or ()), file, again=again, seconds=seconds, run=run)
    if file is not None and file.suffix not in (".yaml", ".yml", ".json"):
        fail(f"-o {file}: the name of a profile ends with .yaml, .yml or .json")
    try:
        with sigterm_interrupts(), planning_bar() as (_, progress):
            place, made = profile_of_run(asked, progress, warn)
    except KeyboardInterrupt:
        fail("stopped; nothing was written", INTERRUPTED)
    found = read_profile(place)
    if as_json:
        typer.echo(found.model_dump_json())
        return
    _show(out(), found)
    done = "written to" if made else "measured before; --again measures anew:"
    out().print(f"{done} {place}", highlight=False, markup=False, soft_wrap=True)
    disturbed = max(found.generation.disturbed, found.training.disturbed)
    if disturbed > _DISTURBED:
        warn(
            f"other programs had the cores in {disturbed:.0%} of the time, so the figures may be wrong: "
            "measure again with --again when the machine has nothing else to do"
        )


def _show(console: Console, found: Profile) -> None:
    from rich.table import Table

    from flows.planning.profile_view import profile_rows

    table = Table("part", "measured", "", title=f"profile of {found.identity.parameters:,} parameters")
    for part, figure, remark in profile_rows(found):
        table.add_row(part, figure, remark)
    console.print(table)
