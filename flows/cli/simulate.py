"""streamrl simulate"""

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

    from flows.plans.asked_simulation import AskedSimulation


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(simulate))


def simulate(
    runfile: PlannedRunFile,
    changes: PlannedChanges = None,
    profile: MeasuredProfile = None,
    generators: Annotated[
        list[str] | None,
        typer.Option("--generators", metavar="[NAME=]N", help="How many, on all or on named machines."),
    ] = None,
    failures: Annotated[
        list[str] | None,
        typer.Option(
            "--fail", metavar="G@S[+S]", help="Generator G dies at second S, and is back after some more."
        ),
    ] = None,
    preempted: Annotated[
        list[str] | None,
        typer.Option(
            "--preempt",
            metavar="[NAME=]R[,notice=S][,back=S]",
            help="Each machine is taken away R times an hour.",
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            metavar="F[,F…]",
            help="Answers are longer by this factor; by several, one after the other over the run.",
        ),
    ] = "1",
    mean_length: MeanLength = None,
    iterations: Annotated[
        int | None, typer.Option("--iterations", min=1, max=100_000, help="How many are simulated.")
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(
            "--start",
            metavar="S",
            min=0,
            max=86_400,
            help="Seconds until a new generator is ready. By default as profiled, else 30.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same figures.")] = 0,
    as_json: AllFigures = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A picture of one iteration: .png.")
    ] = None,
) -> None:
    """Simulate a run as its run file describes it, or with other generators, failures or lengths.

    The scheduling is the run's own code, in virtual time, with measured or computed times of its parts. It
    starts nothing. With `placement.balance` in the run file generators come and go as in the run.

    Examples:

    [bold]streamrl simulate examples/count.yaml --generators 3 --lengths 2[/bold]

    [bold]streamrl simulate examples/count.yaml --fail 0@30+20 --seed 7 --json[/bold]

    [bold]streamrl simulate examples/count.yaml --preempt 20/h,notice=30,back=120[/bold]

    [bold]streamrl simulate examples/count.yaml --set placement.balance.most=3 --lengths 1,3,1[/bold]
    """

    from flows.cli.shared.planning_bar import planning_bar
    from flows.plans.asked_simulation import asked_row, simulate_asked
    from flows.plans.plan_pages import draw_simulation
    from flows.plans.planning_inputs import planning_inputs
    from schemas.loading import load_run_file

    if output is not None and output.suffix != ".png":
        fail(f"-o {output}: the name of a picture ends with .png")
    check_output("-o", output)
    spec = load_run_file(runfile, changes or [])
    with planning_bar() as (say, progress):
        inputs = planning_inputs(
            spec, runfile=runfile, profile=profile, mean_length=mean_length, progress=progress
        )
        say("simulated iterations", 0, 1)
        found = simulate_asked(
            inputs, generators=generators or [], failures=failures or [],
            preempted=preempted or [], lengths=lengths,
            iterations=iterations, seed=seed, start_s=start, picture=output is not None,
        )  # fmt: skip
        if output is not None:
            draw_simulation(found.result, found.split, found.middle, found.title, output)
    if as_json:
        say_json(asked_row(found))
    else:
        _show(out(), found)
    say_drawn(output)


def _show(console: Console, found: AskedSimulation) -> None:
    from flows.plans.asked_simulation import generators_words
    from flows.plans.plan_rows import bubbles_of, figure, link_lines, sources_of, split_words

    say = partial(say_line, console)
    figures, result = found.figures, found.result
    generators, trainer = split_words(found.split)
    say(f"simulated {found.inputs.spec.run}: generators {generators}; trainer {trainer}", "bold")
    say(
        f"{len(result.steps)} iterations with {result.samples:,} samples took {figure(result.ended_at)} "
        "virtual seconds"
    )
    cost = f", 1,000 samples cost {figure(found.cost_per_1000)}" if found.split.price else ""
    say(
        f"a step takes {figure(figures.step_s)} s, {figure(figures.samples_per_s)} samples/s{cost}; "
        f"staleness {figures.staleness:.2f}, at most {figures.staleness_max}"
    )
    for line in [*bubbles_of(figures), *link_lines(found.split, figures)]:
        say(line)
    if found.is_balanced:
        for at_s, line in result.said:
            say(f"at {figure(at_s)} s {line}")
        say(generators_words(result))
    if result.preempted:
        say(f"machines were taken away {result.preempted} times")
    if result.handed_over:
        say(f"{result.handed_over} samples were handed over by generators that left")
    if result.drawn_again or result.moves:
        say(
            f"{result.moves} samples moved to another generator; {result.drawn_again} were drawn again, for "
            "their generator had died"
        )
    say(f"figures from: {'; '.join(sources_of(found.inputs, found.split))}")
