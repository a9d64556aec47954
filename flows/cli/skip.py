"""streamrl skip"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.talk import out, plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(skip))


def skip(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    place: Annotated[
        str, typer.Argument(help="TOPIC[PARTITION]@OFFSET, as the message says that the run stopped with.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also a record that can be read and is of this run.")
    ] = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Let a run go on past a record that it can't use.

    Most records that can't be used are passed over by themselves, and kept among the dead letters. A run
    stops only at one without which nobody knows what was trained: a damaged record of its own ledger. Look at
    the record and at who wrote it; this command puts it on the run's list, and a resumed run goes on behind
    it. A step that is given up is taken anew, or, if weights were published behind it, those are used.

    Example: [bold]streamrl skip count-3 'count-3.ledger[0]@17'[/bold], then
    [bold]streamrl run count.yaml --resume[/bold]
    """
    from flows.run.locations import named_store
    from flows.run.skipping import skipping
    from infra.skipped import parsed_place

    found = skipping(named_store(store), run, parsed_place(place), force=force)
    say = lambda text: out().print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    say(f"{found.place}, {found.size} bytes: {found.why or 'it can be used, and is given up'}")
    say("the run goes on past it from its next start on" if found.new else "it was on the run's list already")
