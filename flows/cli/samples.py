"""streamrl samples"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.shared.replay_options import ArchiveAlone
from flows.cli.shared.talk import fail, out, plain_errors, say_json, warn

if TYPE_CHECKING:
    from rich.console import Console

    from flows.run.reading import OpenRun
    from flows.view.sample_rows import SampleRow

_SHOWN = 10
_MOST_PARTS = 8  # of a reward, on one line
_LONGEST = 2_000  # characters of a text; --full shows all


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(samples))


def samples(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="The samples of this optimizer step; the newest if left out."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Samples as generators finish them, until Ctrl-C.")
    ] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only those with, for instance, reward<0.5, finish=length or "
            "text~sorry (contains). May be repeated: all must hold.",
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Highest first: reward, length, or any field of --json."),
    ] = None,
    lowest: Annotated[bool, typer.Option("--lowest", help="With --sort: lowest first.")] = False,
    most: Annotated[
        int | None,
        typer.Option("--number", "-n", min=1, help="How many: 10 by default, with --json and --follow all."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not cut long texts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with all fields.")] = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Show samples of a run: prompt, answer, reward and its parts, length, weights version.

    Examples:

    [bold]streamrl samples count-3[/bold]

    [bold]streamrl samples count-3 --step 12 --sort reward --lowest[/bold]

    [bold]streamrl samples count-3 --follow --where finish=length[/bold]

    [bold]streamrl samples count-3 --json --where 'reward<0.5' > low.jsonl[/bold]
    """  # fmt: skip
    from flows.run.reading import open_run
    from flows.view.sample_rows import SampleCondition, in_order

    if follow and (sort or step is not None):
        fail(
            f"{'--sort' if sort else '--step'} can't be used with --follow, which shows samples as they come"
        )
    if follow and archive:
        fail("--follow waits for new samples on the broker: an archive alone has none")
    conditions = [SampleCondition.read(one) for one in where or ()]
    names = [one.field for one in conditions] + ([sort] if sort else [])
    with open_run(run, store, archive_alone=archive) as opened:
        rows = _rows(opened, step, follow=follow, names=names)
        chosen: Iterable[SampleRow] = (row for row in rows if all(one.holds(row) for one in conditions))
        if sort:
            chosen = in_order(chosen, sort, lowest_first=lowest)
        shown = most or (None if as_json or follow else _SHOWN)
        _print(chosen, shown, full=full, as_json=as_json, count_more=not (as_json or follow))


def _rows(opened: OpenRun, step: int | None, *, follow: bool, names: list[str]) -> Iterator[SampleRow]:
    from flows.view.sample_rows import check_fields, sample_row

    if follow:
        yield from _followed(opened, names)
        return
    newest = opened.newest_step()
    if newest is None:
        fail(f"run {opened.id} has trained no step yet; --follow shows samples as generators finish them", 1)
    if step is not None and step > newest:
        fail(f"run {opened.id} has no step {step} yet: its newest is {newest}{opened.more_words}", 1)
    number, algorithm = newest if step is None else step, opened.spec.algorithm
    # with order arrival a sample knows only which iteration may train it at the latest
    iteration = number // algorithm.optimizer_steps if algorithm.order == "arrival" else None
    rows = [sample_row(sample, opened.text, iteration) for sample in opened.samples(number)]
    if not rows:
        fail(
            f"the ledger of run {opened.id} has no step {step} any more (placement.kafka.retention_hours)", 1
        )
    check_fields(names, rows)
    yield from rows


def _followed(opened: OpenRun, names: list[str]) -> Iterator[SampleRow]:
    """Yield samples as they come, and warn once of a name that the newest ones lack."""
    from flows.view.sample_rows import sample_row

    checked = not names or _warned(names, _newest(opened))
    for sample in opened.new_samples():
        row = sample_row(sample, opened.text)
        checked = checked or _warned(names, [row])
        yield row


def _newest(opened: OpenRun) -> list[SampleRow]:
    """Return the samples of the newest step, without texts; none if there are none that can be read."""
    from flows.view.sample_rows import sample_row
    from infra.errors import Explained

    try:
        newest = opened.newest_step()
        found = () if newest is None else opened.samples(newest)
        return [sample_row(sample, lambda tokens: "") for sample in found]
    except Explained:  # the log may keep them no longer
        return []


def _warned(names: list[str], rows: list[SampleRow]) -> bool:
    """Warn of names that are no field of samples with a reward. Return whether any of the rows has one."""
    from flows.view.sample_rows import BadCondition, check_fields

    rewarded = [row for row in rows if not row["error"]]
    try:
        check_fields(names, rewarded)
    except BadCondition as error:
        warn(f"{error}. Nothing is shown unless the rewards of later samples have a part of this name")
    return bool(rewarded)


def _print(
    rows: Iterable[SampleRow], most: int | None, *, full: bool, as_json: bool, count_more: bool
) -> None:
    """Print rows. `count_more`: say how many are left, or that there is none; not of rows without end."""
    from itertools import islice

    console, left = out(), iter(rows)
    count = 0
    for row in islice(left, most):
        count += 1
        if as_json:
            say_json(row)
        else:
            _show(console, row, full=full)
    if not count_more:
        return
    if not count:
        console.print("no sample meets the conditions", highlight=False)
    elif more := sum(1 for _ in left):
        console.print(f"{more} more; -n {count + more} shows all", style="dim", highlight=False)


def _show(console: Console, row: SampleRow, *, full: bool) -> None:
    from rich.text import Text

    from schemas.shortening import printable

    longest = 1 << 30 if full else _LONGEST
    console.print(Text.assemble((row["id"], "bold"), "  ", _facts(row)), soft_wrap=True)
    if row["error"]:
        console.print(Text(f"no reward: {printable(row['error'])}", style="red"), soft_wrap=True)
    console.print(Text(printable(row["prompt"], longest), style="dim"), soft_wrap=True)
    console.print(Text(printable(row["text"], longest)), soft_wrap=True)
    console.print()


def _facts(row: SampleRow) -> str:
    def number(value: Any) -> str:
        return "–" if value is None else f"{value:.4g}"

    from schemas.shortening import printable

    parts = ", ".join(
        f"{printable(name, 40)} {number(value)}" for name, value in list(row["parts"].items())[:8]
    )
    versions = row["versions"]
    drawn = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    return "  ".join([
        f"reward {number(row['reward'])}" + (f" ({parts})" if parts else ""),
        f"length {row['length']} (expected {number(row['predicted'])})", drawn, f"ended by {row['finish']}",
        f"iteration {row['iteration']}", f"problem {printable(row['problem'], 60)}", row["purpose"],
    ])  # fmt: skip
