"""streamrl replay"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import FAILED, out, plain_errors

if TYPE_CHECKING:
    from rich.console import Console

    from consumers.replay import Replayed, Spoilt

_NAMED = 12  # maximum samples that are named


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(replay))


def replay(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Which optimizer step; the newest if left out.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="A step that could not be taken: which samples spoil it?")
    ] = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Take an optimizer step again, from the log and the object store, and compare its bits.

    The replay begins at the newest checkpoint before the step or at the run's first model. It writes nothing.

    Example: [bold]streamrl replay count-3 --step 12[/bold]
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from flows.run.replaying import replaying

    console = out()
    columns = TextColumn("steps before it"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        with replaying(
            run, store, lambda done, total: bar.update(task, completed=done, total=total)
        ) as again:
            found = again.failed(step) if failed else None
            taken = None if failed else again.step(step)
    if found is not None:
        _show_spoilt(console, found)
        fine = bool(found.reason)
    else:
        assert taken is not None
        _show(console, taken)
        fine = taken.equal
    if not fine:
        raise typer.Exit(FAILED)


def _show(console: Console, found: Replayed) -> None:
    from rich.table import Table

    record, taken = found.record, found.taken
    groups = sorted(set(record.groups.tolist()))
    console.print(
        f"step {record.step} of iteration {record.iteration}, run {record.run}: {len(record.groups)} samples "
        f"of {len(groups)} groups, {groups[0]} to {groups[-1]}; from {found.start}",
        highlight=False,
    )
    table = Table("micro-batch", "samples", "tokens", "loss recorded", "loss found", "")
    recorded = record.losses.tolist()
    for number, (batch, stat) in enumerate(zip(taken.batches, taken.stats, strict=True)):
        loss = recorded[number] if number < len(recorded) else float("nan")
        table.add_row(
            str(number), str(len(batch.rows)), str(stat.tokens), repr(loss), repr(stat.loss),
            "equal" if loss == stat.loss else "OTHER",
        )  # fmt: skip
    console.print(table)
    norm = record.metrics.get("grad_norm")
    console.print(f"gradient norm: recorded {norm!r}, found {taken.update.norm!r}", highlight=False)
    console.print(f"root: recorded {record.root_out}, found {taken.root}", highlight=False)
    if found.others:
        names = ", ".join(map(str, found.others[:_NAMED]))
        console.print(f"steps before it have other bits already: {names}", style="yellow", highlight=False)
    if not found.same_recipe:
        console.print(
            "the ledger says that this step was taken with other settings, or by another version of StreamRL",
            style="yellow", highlight=False,
        )  # fmt: skip
    if found.equal:
        console.print("the replay came to the same bits", style="green")
    else:
        console.print(
            "OTHER BITS: to be expected on another kind of machine, or with another version of torch",
            style="red", highlight=False,
        )  # fmt: skip


def _show_spoilt(console: Console, found: Spoilt) -> None:
    record = found.record
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    say(
        f"step {record.step} of iteration {record.iteration}, run {record.run}, which could not be taken: "
        f"{found.samples} samples in {found.batches} micro-batches; from {found.start}"
    )
    if not found.reason:
        say("the step can be taken this time: its samples are not the reason that it failed")
    elif found.batch is None:
        say(f"each micro-batch can be trained by itself, but not all together: {found.reason}")
    else:
        say(f"micro-batch {found.batch}: {found.reason}; its samples: {_names(found.members)}")
        if found.alone:
            for name, reason in found.alone[:_NAMED]:
                say(f"  sample {name}, by itself: {reason}")
            if len(found.alone) > _NAMED:
                say(f"  and {len(found.alone) - _NAMED} more")
        else:
            say("  each of these samples can be trained by itself")


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
