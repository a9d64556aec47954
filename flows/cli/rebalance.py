"""streamrl rebalance"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.talk import out, plain_errors, sigterm_interrupts


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(rebalance))


def rebalance(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    store: Annotated[
        str, typer.Option("--store", help="The run's object store, such as s3://bucket/folder.")
    ] = "local",
    most: Annotated[
        int | None, typer.Option("--most", min=1, help="The most generators; or as placement.balance says.")
    ] = None,
    least: Annotated[int | None, typer.Option("--least", min=1, help="The fewest generators.")] = None,
    deployment: Annotated[
        str | None,
        typer.Option("--deployment", help="A Prefect deployment that adds one, such as join-run/far."),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Only recommend.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Judge the run as it is now, and end.")] = False,
) -> None:
    """Watch both sides of a run that goes on, and add or take back generators from here, until it ends.

    Each change is on the run's record with its reason: `streamrl status` shows the newest. A run with
    placement.balance does this by itself.

    Examples:

    [bold]streamrl rebalance count-3 --once --most 4[/bold]

    [bold]streamrl rebalance count-3 --most 4 --store s3://streamrl/runs[/bold]
    """
    from flows.run.locations import named_store
    from flows.run.watching_balance import keep_balanced, rule_for, verdict_now
    from flows.view.balance_words import verdict_in_words
    from infra.runs import find

    console = out()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    record = find(named_store(store), run)
    rule = rule_for(record, dry=dry or once, most=most, least=least, deployment=deployment)
    if once:
        verdict = verdict_now(record, rule)
        say(verdict_in_words(verdict.iteration, verdict.before, verdict.after, verdict.reason))
        return
    called = None
    if rule.deployment and not dry:
        from flows.cli.pause import use_server

        use_server()
        from flows.flow_runs.called_generators import called_for

        called = called_for(record, rule)
    with sigterm_interrupts():
        keep_balanced(record, rule, store=store, say=say, decided_by="streamrl rebalance", called=called)
    say(f"run {run} has ended")
