"""streamrl export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.shared.talk import INTERRUPTED, fail, out, plain_errors, shares, sigterm_interrupts


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(export))


def export(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    folder: Annotated[
        Path | None, typer.Argument(help="A new or empty folder; by default RUN-vN here.", show_default=False)
    ] = None,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Which weights version; by default the newest.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with model.lora: the adapter alone, for peft.")
    ] = False,
    store: Annotated[
        str, typer.Option("--store", help="The run's object store, such as s3://bucket/folder.")
    ] = "local",
) -> None:
    """Write a run's model as a Hugging Face folder: config, tokenizer and safetensors, with what was learned.

    It works at any moment, also while the run goes on. A LoRA run's adapter is merged into its base.

    Examples:

    [bold]streamrl export count-1[/bold]   the newest weights, into count-1-v120

    [bold]streamrl export count-1 models/early --version 20[/bold]

    [bold]streamrl export count-1 models/adapter --adapter[/bold]   for peft.PeftModel.from_pretrained
    """
    from flows.checkpoints.export_run import export_run
    from flows.checkpoints.promote import where_to_read
    from flows.run.locations import named_store
    from infra.runs import find

    opened = named_store(store)
    record = find(opened, run)
    try:
        with sigterm_interrupts(), shares() as progress:
            exported = export_run(record, opened, folder, version=version, adapter=adapter, progress=progress)
    except KeyboardInterrupt:
        fail("stopped; nothing was written", INTERRUPTED)
    out().print(
        f"version {exported.version} of {run} is in {exported.folder} ({exported.size / 1e6:.1f} MB). "
        f"Read it with\n  {where_to_read(exported)}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
