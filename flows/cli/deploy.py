"""streamrl deploy"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.pause import use_server
from flows.cli.shared.prefect_setup import POOL
from flows.cli.shared.talk import fail, out, plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(deploy))


def deploy(
    runfile: Annotated[str, typer.Argument(help="The run file, such as count.yaml.")],
    name: Annotated[str | None, typer.Option("--name", help="By default the run's name.")] = None,
    pool: Annotated[str, typer.Option("--pool", help="Its work pool, made if it is not there.")] = POOL,
    cron: Annotated[
        str | None,
        typer.Option("--cron", help="Start at these times of this machine's time zone, such as '0 2 * * 6'."),
    ] = None,
    interval: Annotated[
        float | None, typer.Option("--interval", min=1, metavar="SECONDS", help="Start at this interval.")
    ] = None,
    overlap: Annotated[
        Literal["wait", "skip", "allow"],
        typer.Option("--overlap", help="Whether a start waits while a run of the deployment goes on."),
    ] = "wait",
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting; may be repeated.")
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", help="The runs' object store, instead of the run file's.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option("--home", help="STREAMRL_HOME of the runs; by default this command's.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Each start goes on with the newest run of the run file.")
    ] = False,
) -> None:
    """Register a run file as a Prefect deployment, from any folder. A deployment of that name is changed.

    Home, store, run file and this folder are part of the deployment; credentials are not: they come from the
    worker's environment.

    Examples:

    [bold]streamrl deploy count.yaml[/bold]

    [bold]streamrl deploy count.yaml --name nightly --cron '0 2 * * *' --overlap skip[/bold]
    """
    from infra.stack.paths import StackPaths
    from schemas.loading import load_run_file

    if cron and interval:
        fail("a schedule is either --cron or --interval, not both")
    _check_folder()
    use_server()
    overrides = [*(changes or ()), *([f"placement.store={store}"] if store else ())]
    file = Path(runfile).absolute()
    spec = load_run_file(str(file), overrides)
    from flows.cli.shared.deploying import Deploying, deploy_run_file

    wanted = Deploying(
        file, spec, name or spec.run, pool, StackPaths.locate(home).home, overrides, resume or None, cron,
        interval, overlap,
    )  # fmt: skip
    deploy_run_file(wanted)
    _say_how(wanted.full_name, pool, wanted.home)


def _check_folder() -> None:
    """Exit if this folder would hide our code: Prefect looks for modules in a deployment's folder first."""
    from infra.code import ROOT, module

    here = Path.cwd()
    rooms = ("flows", "infra", "schemas", "producers", "consumers")
    ours = {module(room).partition(".")[0] for room in rooms}
    hidden = sorted(name for name in ours if (here / name).is_dir())
    if hidden and here != ROOT:
        fail(
            f"{here} has a folder {hidden[0]}, which would hide StreamRL's own from the flow run: call "
            "`streamrl deploy` in another folder"
        )


def _say_how(deployment: str, pool: str, home: Path) -> None:
    """Print the commands that start a worker and a run."""
    import os
    import shlex
    import sys

    server = f"PREFECT_API_URL={shlex.quote(os.environ['PREFECT_API_URL'])}"
    prefect = f"{server} {shlex.quote(str(Path(sys.executable).with_name('prefect')))}"
    lines = [
        f"deployment {deployment}: work pool {pool}, home {home}",
        "start a worker, with the credentials of Kafka and of the store in its environment if they need any:",
        f"  {prefect} worker start --pool {pool} --type process",
        "start a run:",
        f"  {prefect} deployment run {shlex.quote(deployment)}",
    ]
    for line in lines:
        out().print(line, markup=False, highlight=False, soft_wrap=True)
