"""streamrl sql"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.shared.replay_options import ArchiveAlone
from flows.cli.shared.talk import fail, out, plain_errors, say_json

if TYPE_CHECKING:
    from flows.run.archive_query import QueryAnswer

_SHOWN = 100  # rows of a table in the terminal
_LONGEST = 200  # characters of a value there


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(sql))


def sql(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    query: Annotated[str, typer.Argument(help="One SELECT, in DuckDB's SQL.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, with a head.")] = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Ask about a run in SQL: samples, steps, prompts, evals, dead letters, versions of weights.

    Archive and log are one table each: samples, steps, prompts, evals, dead, weights, rankers. The columns are
    the fields of the messages, as docs/reference/messages.md has them, and log_partition and log_offset.
    A query can't change anything, and sees no files. After `streamrl archive` it is quicker.

    Examples:

    [bold]streamrl sql count-3 'select iteration, avg(reward), max(len(tokens)) from samples group by 1 order by 1'[/bold]

    [bold]streamrl sql count-3 "select step, metrics['grad_norm'] from steps order by 2 desc limit 5"[/bold]

    [bold]streamrl sql count-3 'select * from dead' --json[/bold]
    """  # noqa: E501 - an example stays on its line
    from flows.run.archive_query import query as asked

    if as_json and as_csv:
        fail("the output is either --json or --csv")
    with asked(run, query, store, archive_alone=archive) as answer:
        if as_json:
            _print_json(answer)
        elif as_csv:
            _print_csv(answer)
        else:
            _print_table(answer)


def _print_json(answer: QueryAnswer) -> None:
    for rows in answer.rows:
        for row in rows:
            say_json({name: _plain(value) for name, value in zip(answer.columns, row, strict=True)})


def _plain(value: Any) -> Any:
    """Return a value as JSON can have it: bytes in hexadecimal, and names as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _print_csv(answer: QueryAnswer) -> None:
    import csv

    writer = csv.writer(sys.stdout)
    writer.writerow(answer.columns)
    for rows in answer.rows:
        writer.writerows([one.hex() if isinstance(one, bytes) else one for one in row] for row in rows)


def _print_table(answer: QueryAnswer) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*(escape(name) for name in answer.columns))
    count = 0
    for rows in answer.rows:
        for row in rows[: _SHOWN - count]:
            table.add_row(*(escape(_short(one)) for one in row))
        count += len(rows)
        if count > _SHOWN:
            break
    out().print(table)
    if count > _SHOWN:
        out().print(f"these are the first {_SHOWN} rows; --json and --csv print all")


def _short(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    text = "".join(one if one.isprintable() else " " for one in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
