"""streamrl bisect"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.replay_options import ArchiveAlone
from flows.cli.shared.talk import FAILED, error_console, out, plain_errors, say_json


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(bisect))


def bisect(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    when: Annotated[
        str,
        typer.Option(
            "--when",
            metavar="CONDITION",
            help="Over metrics, such as 'grad_norm > 10', 'nan' or 'gap > 0.1'; over a replay, such as "
            "'different' or 'apart_logprobs > 1e-4'; or FILE.py:function, which gets the values.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Find the first step of a run for which a condition holds.

    If the ledger says it, nothing is taken again. Otherwise steps are replayed, each time in the middle of
    what is left. It ends with 1 if the condition holds for no step.

    Examples:

    [bold]streamrl bisect count-3 --when 'grad_norm > 10 or nan'[/bold]

    [bold]streamrl bisect count-3 --when different[/bold]   the first step that comes to other bits
    """  # fmt: skip
    from flows.run.bisecting import bisect_run
    from flows.run.predicates import predicate
    from flows.run.replaying import replaying
    from flows.run.suggested_commands import SuggestedCommands

    condition, errors = predicate(when), error_console()

    def probed(step: int, holds: bool) -> None:
        errors.print(f"step {step}: {'yes' if holds else 'no'}", highlight=False, style="dim")

    with replaying(run, store, lambda done, total: None, archive_alone=archive) as opened:
        found = bisect_run(opened.again, opened.handle, condition, probed)
    commands = SuggestedCommands(run, store, archive_alone=archive)
    if as_json:
        say_json({"run": run, "when": when, **vars(found)})
    elif found.step is None:
        out().print(
            f"'{when}' holds for none of the {found.looked_at} steps of {run} (replayed: {found.replays})",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    else:
        out().print(
            f"'{when}' holds first at step {found.step} of {run} (replayed: {found.replays}). Next:\n"
            f"  {commands.command('replay', '--step', str(found.step))}",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    if found.step is None:
        raise typer.Exit(FAILED)
