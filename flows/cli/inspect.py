"""streamrl inspect"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.shared.replay_options import ArchiveAlone, OwnCode, RunOrStepFile
from flows.cli.shared.talk import error_console, fail, out, plain_errors, say_json

if TYPE_CHECKING:
    from flows.run.replaying import Replaying

_SHOWN = 20
_COLUMNS = (
    "id", "reward", "advantage", "length", "staleness", "version", "logprob", "trainer_logprob", "gap",
    "finish", "problem",
)  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(inspect))


def inspect(
    run: RunOrStepFile,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="The samples of this step; the newest if left out.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="ID", help="One sample, token by token.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="RUN", help="The difference to another run, by step.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Only those with, for instance, gap>0.01 or text~sorry."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Highest first: advantage, gap, or any field of --json."),
    ] = None,
    lowest: Annotated[bool, typer.Option("--lowest", help="With --sort: lowest first.")] = False,
    page: Annotated[
        Path | None, typer.Option("--page", help="With --sample: write a page to this HTML file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with all fields.")] = False,
    own_code: OwnCode = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Look at samples as the trainer had them: reward, advantage, gap, staleness; one token by token.

    The samples of a step are shown with the marks that the ledger has of them. For `--sample` the steps
    before are taken again, so that each token has the log-probabilities of generator and trainer, their
    ratio, the advantage and the version that drew it.

    Examples:

    [bold]streamrl inspect count-3 --step 12 --sort gap[/bold]

    [bold]streamrl inspect count-3 --sample 0000097-02 --page sample.html[/bold]

    [bold]streamrl inspect count-3 --against count-4[/bold]
    """  # fmt: skip
    from flows.run.replaying import replaying

    if page is not None and sample is None:
        fail("--page shows one sample: name it with --sample")
    if against is not None:
        rows = _differences(run, against, store, archive_alone=archive)
        _show_rows(rows, as_json=as_json, empty="these runs have no step in common")
        return
    said = _progress(sample is not None)
    with replaying(run, store, said, own_code=own_code, archive_alone=archive) as opened:
        if sample is None:
            rows = _step(opened, step, where or [], sort, lowest=lowest)
            _show_rows(rows, as_json=as_json, empty="no sample meets the conditions", columns=_COLUMNS)
        else:
            _sample(opened, sample, step, page, as_json=as_json)


def _progress(shown: bool) -> Any:
    errors = error_console()

    def say(done: int, total: int) -> None:
        if shown and total > 1 and done % max(1, total // 10) == 0:
            errors.print(f"steps before it: {done} of {total}", style="dim", highlight=False)

    return say


def _step(
    opened: Replaying, step: int | None, where: list[str], sort: str | None, *, lowest: bool
) -> list[dict[str, Any]]:
    from consumers.batches.log_places import fetch_rows
    from consumers.stream.recorded_groups import samples_topic
    from flows.run.step_search import step_record_of
    from flows.view.sample_rows import SampleCondition, check_fields, in_order
    from flows.view.token_rows import marked_rows
    from producers.tokenizing import load_to_text

    handle = opened.handle
    record = step_record_of(handle, opened.again.newest() if step is None else step)
    rows = fetch_rows(handle, samples_topic(handle), record)
    found = marked_rows(record, rows, load_to_text(handle.record.model))
    conditions = [SampleCondition.read(one) for one in where]
    check_fields([one.field for one in conditions] + ([sort] if sort else []), found)
    chosen = [row for row in found if all(one.holds(row) for one in conditions)]
    return in_order(chosen, sort, lowest_first=lowest) if sort else chosen


def _sample(opened: Replaying, name: str, step: int | None, page: Path | None, *, as_json: bool) -> None:
    from flows.run.step_search import find_sample
    from flows.view.token_rows import token_rows
    from infra.files.writing import write_whole
    from producers.tokenizing import load_decode, load_to_text

    handle = opened.handle
    record, row = find_sample(handle, name, step)
    found = opened.again.sample(record, row)
    rows = token_rows(found, load_decode(handle.record.model))
    one = found.sample
    facts = (
        f"step {record.step}, iteration {record.iteration}: reward {one.reward:.4g}, {one.true_length} "
        f"tokens, ended by {one.finish}, problem {one.problem_id[:60]}, drawn by {one.generator[:60]}"
    )
    prompt = load_to_text(handle.record.model)(one.prompt_tokens)
    if page is not None:
        from flows.page.token_page import token_page

        write_whole(page, token_page(f"Sample {one.id} of {handle.run}", facts, prompt, rows))
        out().print(f"{page} shows sample {one.id}", highlight=False, markup=False)
        return
    if as_json:
        say_json({"id": one.id, "step": record.step, "prompt": prompt, "tokens": rows})
        return
    out().print(f"sample {one.id}, {facts}", highlight=False, markup=False, soft_wrap=True)
    _show_rows(rows, as_json=False, empty="", most=1 << 30)


def _differences(run: str, other: str, store: str, *, archive_alone: bool) -> Iterable[dict[str, Any]]:
    from flows.run.replaying import opened_source
    from flows.run.run_difference import differences

    with (
        opened_source(run, store, archive_alone=archive_alone) as (ours, _),
        opened_source(other, store, archive_alone=archive_alone) as (theirs, _),
    ):
        yield from differences(ours, theirs)


def _show_rows(
    rows: Iterable[dict[str, Any]],
    *,
    as_json: bool,
    empty: str,
    columns: tuple[str, ...] = (),
    most: int = _SHOWN,
) -> None:
    from rich.table import Table
    from rich.text import Text

    from schemas.shortening import printable

    found = list(rows)
    if as_json:
        for row in found:
            say_json(row)
        return
    console = out()
    if not found:
        console.print(empty, highlight=False)
        return
    names = [name for name in columns or found[0] if any(row.get(name) is not None for row in found)]
    table = Table(*names)
    for row in found[:most]:
        table.add_row(*(Text(printable(_cell(row.get(name)), 60)) for name in names))
    console.print(table)
    if len(found) > most:
        console.print(f"{len(found) - most} more: --json shows all", style="dim", highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " → ".join(_cell(one) for one in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
