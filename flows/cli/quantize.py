"""streamrl quantize"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.shared.talk import INTERRUPTED, fail, out, plain_errors, shares, sigterm_interrupts


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(quantize))


def quantize(
    model: Annotated[Path, typer.Argument(help="A model's folder, with config.json and safetensors.")],
    folder: Annotated[Path, typer.Argument(help="A new or empty folder for the rounded model.")],
) -> None:
    """Round a model's linear layers to four bits (NF4), to train an adapter beside them in little memory.

    The result is a model in bfloat16 like any other. A run with model.lora and model.dtype bfloat16 holds
    its linear layers in four bits in the trainer; generators draw with the same weights.

    Example:

    [bold]streamrl quantize models/base models/base-nf4[/bold]
    """
    from flows.checkpoints.quantizing import quantize_model

    try:
        with sigterm_interrupts(), shares() as progress:
            found = quantize_model(model, folder, progress=progress)
    except KeyboardInterrupt:
        fail("stopped; nothing was written", INTERRUPTED)
    out().print(
        f"{found.layers} linear layers of {model} were rounded; their weights changed by {found.change:.1%}. "
        f"A trainer holds them in {found.held / 1e6:.1f} MB. The model is in {found.folder} "
        f"({found.size / 1e6:.1f} MB).",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
