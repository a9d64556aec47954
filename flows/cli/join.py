"""streamrl join"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from flows.cli.shared.talk import out, plain_errors, sigterm_interrupts
from flows.cli.shared.talk_weights import bar


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(join))


def join(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1; with --newest a name.")],
    store: Annotated[
        str, typer.Option("--store", help="The run's object store, such as s3://bucket/folder.")
    ] = "local",
    generators: Annotated[
        int | None,
        typer.Option("--generators", min=0, help="How many generators to start: 1, or as the run file says."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            "--site", help="A site far from the store: its relays fetch weights once for all there."
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option("--cache", help="Where the site keeps weights: a URL, or `local` for this machine."),
    ] = None,
    relays: Annotated[
        int | None, typer.Option("--relays", min=0, help="How many relays to start at the site.")
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks",
            min=0,
            help="How many ranks of the trainer to start, if `placement.ranks` has some elsewhere. "
            "Generators are then started only with --generators.",
        ),
    ] = 0,
    engine_ranks: Annotated[
        int,
        typer.Option(
            "--engine-ranks",
            min=0,
            help="How many ranks of a generator's engine to hold, if `placement.engine_ranks` has some "
            "elsewhere. Generators are then started only with --generators.",
        ),
    ] = 0,
    of_generator: Annotated[
        int | None,
        typer.Option(
            "--of-generator", min=0, help="The number of that generator; by default any that lacks ranks."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Folder of the starting model here. If there is none, generators and ranks of engines fetch "
            "it; ranks of a trainer need it.",
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", help="FILE.py:function, if the reward is elsewhere on this machine."),
    ] = None,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0,
            metavar="SECONDS",
            help="Seconds to wait for the run, if it does not go on yet; 0: do not wait.",
        ),
    ] = 0.0,
    newest: Annotated[
        bool,
        typer.Option(
            "--newest",
            help="Join the newest run of a name, such as count. If it has ended, --wait is for the next one.",
        ),
    ] = False,
) -> None:
    """Start more generators for a run that goes on, here or on any site that reaches its broker and store.

    Or ranks of its trainer or of an engine, on another machine than the trainer's or the generator's.

    The new generators get work within seconds of being ready, and end with the run, or with Ctrl-C: samples
    that they have not finished are then made by others.

    Example: [bold]streamrl join count-3 --store s3://streamrl/runs --generators 2[/bold]

    At a site with one relay: [bold]streamrl join count-3 --store s3://streamrl/runs --site far[/bold]

    Four ranks of the trainer: [bold]streamrl join count-3 --store s3://streamrl/runs --ranks 4[/bold]

    Four ranks of an engine: [bold]streamrl join count-3 --store s3://streamrl/runs --engine-ranks 4[/bold]

    A job that starts all machines at once: [bold]streamrl join count --newest --wait 600 --ranks 4[/bold]
    """
    from flows.run.awaited_run import awaited_run
    from flows.run.commands import ranks_here
    from flows.run.joining import joining, take_part

    console, held = out(), ranks_here(ranks, engine_ranks, of_generator)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with sigterm_interrupts():
        run = awaited_run(run, store=store, wait_s=wait_s, newest=newest, say=say)
        with bar(f"fetching the model of {run}") as progress:
            joined = joining(
                run, store=store, site=site, cache=cache, relays=relays, generators=generators, model=model,
                reward=reward, ranks=held, progress=progress,
            )  # fmt: skip
        take_part(joined, say)
    console.print(f"run {run} has ended")
