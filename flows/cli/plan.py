"""streamrl plan"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.planning_options import (
    AllFigures,
    MeanLength,
    MeasuredProfile,
    PlannedChanges,
    PlannedRunFile,
    say_drawn,
    say_line,
)
from flows.cli.shared.talk import check_output, fail, out, plain_errors, say_json

if TYPE_CHECKING:
    from rich.console import Console

    from flows.plans.run_plan import PlannedSplit, RunPlan

_PICTURES = (".png", ".html")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(plan))


def plan(
    runfile: PlannedRunFile,
    changes: PlannedChanges = None,
    profile: MeasuredProfile = None,
    goal: Annotated[
        str, typer.Option("--goal", metavar="time|cost", help="Least time for a step, or least cost.")
    ] = "time",
    deadline: Annotated[
        float | None, typer.Option("--deadline", metavar="S", help="Seconds that a step may take.")
    ] = None,
    mean_length: MeanLength = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the lengths that are drawn.")] = 0,
    as_json: AllFigures = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A picture of one iteration: .png, or .html.")
    ] = None,
) -> None:
    """Say how to divide machines between generators and trainer, and how fast and dear a run would be.

    It starts nothing. The machines are those of `placement.machines` in the run file, or else this one.
    Thousands of splits are estimated; the best few are simulated by the code that would schedule the run.

    Examples:

    [bold]streamrl plan examples/count.yaml[/bold]

    [bold]streamrl plan examples/count.yaml --goal cost --deadline 60 -o plan.png[/bold]
    """

    from flows.cli.shared.planning_bar import planning_bar
    from flows.planning.allocating import PlanGoal
    from flows.plans.plan_pages import write_plan_picture
    from flows.plans.plan_rows import plan_row
    from flows.plans.planning_inputs import planning_inputs
    from flows.plans.run_plan import plan_run
    from schemas.loading import load_run_file

    if goal not in ("time", "cost"):
        fail(f"--goal {goal}: say time or cost")
    if output is not None and output.suffix not in _PICTURES:
        fail(f"-o {output}: the name of a picture ends with {' or '.join(_PICTURES)}")
    check_output("-o", output)
    wanted = PlanGoal("time" if goal == "time" else "cost", deadline)
    spec = load_run_file(runfile, changes or [])
    with planning_bar() as (say, progress):
        inputs = planning_inputs(
            spec, runfile=runfile, profile=profile, mean_length=mean_length, progress=progress
        )
        found = plan_run(inputs, wanted, seed=seed, say=say)
        if output is not None:
            say("picture", 0, 1)
            write_plan_picture(found, output, seed)
    if as_json:
        say_json(plan_row(found))
    else:
        _show(out(), found)
    say_drawn(output)


_FIGURES = (
    "generators", "their memory", "trainer", "its memory", "a step", "samples/s", "1,000 samples cost",
    "staleness",
)  # fmt: skip


def _figures(found: RunPlan, one: PlannedSplit) -> list[str]:
    """Return the figures of a split; those of the best one with their ranges."""
    from flows.plans.plan_rows import figure, memory_words, range_words, split_words

    (generators, trainer), (theirs, its) = split_words(one.split), memory_words(one.split)
    figures, best = one.figures, one is found.chosen
    cost = range_words(found.cost_per_1000) if best else figure(figures.cost_per_1000)
    return [
        generators, theirs, trainer, its,
        range_words(found.step_s, " s") if best else f"{figure(figures.step_s)} s",
        range_words(found.samples_per_s) if best else figure(figures.samples_per_s),
        cost if one.split.price else "no price",
        f"{figures.staleness:.2f}, at most {figures.staleness_max}",
    ]  # fmt: skip


def _show(console: Console, found: RunPlan) -> None:
    from rich.table import Table

    from flows.plans.plan_rows import (
        best_and_next,
        beyond_settings,
        bubbles_of,
        link_lines,
        settings_words,
        sources_of,
    )

    say = partial(say_line, console)
    goal, deadline = found.goal, found.goal.deadline_s
    title = (
        f"plan of {found.spec.run}: least {goal.least} of a {'step' if goal.least == 'time' else 'sample'}"
    )
    if deadline is not None:
        title += f", at most {deadline:g} s a step"
    shown = best_and_next(found)
    table = Table("", *(name for name, _ in shown), title=title,
                  caption=f"{found.estimated:,} splits estimated, {found.simulated} simulated")  # fmt: skip
    for row in zip(_FIGURES, *(_figures(found, one) for _, one in shown), strict=True):
        table.add_row(*row)
    console.print(table)
    if found.others:
        say(f"the runner-up lost: {found.why}")
    for line in bubbles_of(found.chosen.figures):
        say(line)
    for line in link_lines(found.chosen.split, found.chosen.figures):
        say(line)
    say("in parentheses: nine cases of ten lie between")
    say(f"figures from: {'; '.join(sources_of(found.inputs, found.chosen.split))}")
    say(f"settings: {settings_words(found)}", "green")
    for line in beyond_settings(found.chosen.split, found.spec.placement.store):
        say(line)
