"""streamrl explain"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.replay_options import ArchiveAlone, OwnCode, RunOrStepFile
from flows.cli.shared.talk import FAILED, error_console, out, plain_errors, say_json

if TYPE_CHECKING:
    from rich.console import Console

    from flows.explain.detector import FaultFound
    from flows.explain.explanation import Explanation

_NAMED = 6  # samples that are named


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(explain))


def explain(
    run: RunOrStepFile,
    as_json: Annotated[bool, typer.Option("--json", help="All findings as one JSON object.")] = False,
    own_code: OwnCode = False,
    archive: ArchiveAlone = False,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
) -> None:
    """Say what went wrong in a run: first bad step, stage, samples, likely cause, evidence, next command.

    It reads the ledger, computes suspect samples anew with transformers' own model, and takes steps again. It
    writes nothing. It ends with 1 if it finds something.

    Examples:

    [bold]streamrl explain count-3[/bold]

    [bold]streamrl explain count-3 --json[/bold]
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from flows.explain.explanation import explain_run
    from flows.explain.run_evidence import RunEvidence
    from flows.run.replaying import opened_source
    from flows.run.suggested_commands import SuggestedCommands

    columns = TextColumn("detectors"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("", total=None)
        with opened_source(run, store, own_code=own_code, archive_alone=archive) as (handle, start):
            commands = SuggestedCommands.as_asked(
                handle.run, run, store, archive_alone=archive, own_code=own_code
            )
            evidence = RunEvidence(handle, start, commands)
            found = explain_run(evidence, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        say_json(_plain(run, found))
    else:
        _show(out(), run, found, commands.command("status"))
    if found.findings:
        raise typer.Exit(FAILED)


def _plain(run: str, found: Explanation) -> dict[str, object]:
    findings = [{"detector": name, **vars(one)} for name, one in found.findings]
    unseen = [{"detector": name, "why": why} for name, why in found.unseen]
    return {"run": run, "steps": found.steps, "findings": findings, "unseen": unseen}


def _show(console: Console, run: str, found: Explanation, status: str) -> None:
    say = lambda text, style="": console.print(  # noqa: E731
        text, style=style, highlight=False, markup=False, soft_wrap=True
    )
    if not found.steps:
        say(
            f"the ledger of {run} has no step: none is taken yet, or its records were removed. There is "
            f"nothing to explain; `{status}` says how far it is",
            "yellow",
        )
    elif not found.findings:
        say(f"nothing is wrong with the {found.steps} steps of {run} that any detector could tell", "green")
    for number, (detector, one) in enumerate(found.findings):
        if number == 1:
            say("\nAlso, perhaps brought about by the first:", "dim")
        _show_one(console, detector, one)
    for name, why in found.unseen:
        say(f"the detector {name!r} could not look: {why}", "yellow")


def _show_one(console: Console, detector: str, one: FaultFound) -> None:
    from schemas.shortening import printable

    say = lambda text, style="": console.print(  # noqa: E731
        printable(text, 1000), style=style, highlight=False, markup=False, soft_wrap=True
    )
    say(f"step {one.step}, {one.stage}: {one.cause}", "bold red")
    for text in one.evidence:
        say(f"  {text}")
    if one.samples:
        more = f" and {len(one.samples) - _NAMED} more" if len(one.samples) > _NAMED else ""
        say(f"  samples: {', '.join(one.samples[:_NAMED])}{more}")
    if one.command:
        say(f"  next: {one.command}")
    say(f"  (detector: {detector})", "dim")
