"""streamrl demo"""

from __future__ import annotations

import typer

from flows.cli.shared.talk import out, plain_errors, sigterm_interrupts
from infra.code import EXAMPLES
from infra.gpus import visible_gpus

# With one GPU, engine and learner share it: the model is tiny.
_ONE_GPU = ("placement.share_gpus=true", "generator.gpu_memory=0.5", "generator.gpu_kv_cache_mib=256")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(demo))


def demo() -> None:
    """Do a whole small run: start what is needed, train, show the result, stop what was started.

    A small model learns to count down: first the model is made (a minute or two, once), then
    trained by examples/count.yaml.

    Example: [bold]streamrl demo[/bold]
    """
    from flows.cli.run import carry_out
    from flows.run.request import RunRequest
    from infra.stack import local

    console = out()
    before = {service.name for service in local.stack_state() if service.status == "running"}
    try:
        with sigterm_interrupts():
            local.start_stack(
                kafka=True, prefect=True,
                progress=lambda name, text: console.print(f"[dim]{name}[/dim] {text}", highlight=False),
            )  # fmt: skip
        settings = _ONE_GPU if len(visible_gpus()) == 1 else ()
        carry_out(RunRequest(str(EXAMPLES / "count.yaml"), settings), prefect=True)
    finally:
        local.stop_stack(keep=before)
