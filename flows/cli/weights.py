"""streamrl weights"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared import upkeep
from flows.cli.shared.talk import fail, out, plain_errors
from flows.cli.shared.talk_weights import (
    AllowOlder,
    UrlArgument,
    VersionOption,
    bar,
    in_bytes,
    opened_weights,
    say,
    when,
)

if TYPE_CHECKING:
    from infra.weights.bits import Model

_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (ls, show, push, pull, diff, *upkeep.COMMANDS):
        _app.command()(plain_errors(command))
    app.add_typer(
        _app, name="weights",
        help="Versions of a model in an object store: only what changes is sent, every bit is verified.\n\n"
        "They are those of a run, or of any checkpoints of yours:\n\n"
        "[bold]streamrl weights push step-100 s3://bucket/mine[/bold]\n\n"
        "[bold]streamrl weights push step-200 s3://bucket/mine --old step-100[/bold]\n\n"
        "[bold]streamrl weights pull s3://bucket/mine model[/bold]",
    )  # fmt: skip


def ls(url: UrlArgument) -> None:
    """List the versions, and what fetching each takes."""
    from rich.table import Table

    weights = opened_weights(url)
    table = Table("version", "made", "size", "what changed", "whole", "of epoch", box=None)
    for number, manifest in weights.manifests().items():
        ways = [in_bytes(path.size) if path else "" for path in map(manifest.path, (number - 1, None))]
        made, size = when(manifest.created_at), in_bytes(manifest.size)
        table.add_row(str(number), made, size, *ways, str(manifest.trainer_epoch))
    if not table.row_count:
        fail(f"{url} has no versions of weights")
    out().print(table)


def show(url: UrlArgument, version: VersionOption = None) -> None:
    """Show one version: its tensors, the ways to get it, who signed it."""
    from flows.checkpoints.push_and_pull import newest_version

    weights = opened_weights(url)
    manifest = weights.complete(weights.manifest(newest_version(weights, url, version)))
    said = {
        "version": f"{manifest.version} of {manifest.run}, made {when(manifest.created_at)}",
        "root": manifest.root,
        "tensors": f"{len(manifest.tensors)}, {in_bytes(manifest.size)}",
        "types": ", ".join(sorted({tensor.dtype for tensor in manifest.tensors.values()})),
        "files": ", ".join(manifest.files) or "none",
        "adapter of": manifest.base or "no: it is a whole model",
        "signed": "yes" if manifest.signature else "no",
    }
    for path in manifest.paths:
        start = "nothing" if path.since is None else f"version {path.since}"
        said[f"from {start}"] = f"{in_bytes(path.size)} in {len(path.chunks)} chunks"
    for name, value in said.items():
        say(f"{name:<18} {value}")


def push(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face folder with safetensors: a model, or an adapter of peft.")
    ],
    url: UrlArgument,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="By default the one after the newest.")
    ] = None,
    old: Annotated[
        Path | None,
        typer.Option("--old", help="A folder that holds the version before: only what changed is sent."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base", help="Of an adapter: the folder of its model; by default as its configuration says."
        ),
    ] = None,
) -> None:
    """Put a folder's model as a version. The version is there once its manifest is: whole, or not at all."""
    from flows.checkpoints.push_and_pull import push_folder

    with bar(f"sending {folder}") as progress:
        manifest = push_folder(
            folder, opened_weights(url), version=version, old=old, base=base, progress=progress
        )
    path = manifest.paths[0]
    how = "whole" if path.since is None else f"as what changed of version {path.since}"
    size, sent = in_bytes(manifest.size), in_bytes(path.size)
    say(f"version {manifest.version} is in {url}: {size}, sent {how} in {sent}")


def pull(
    url: UrlArgument,
    folder: Annotated[Path, typer.Argument(help="A new folder, or one that holds another version.")],
    version: VersionOption = None,
    allow_older: AllowOlder = False,
) -> None:
    """Fetch a version into a folder. If it holds another version, only what changed is fetched."""
    from flows.checkpoints.push_and_pull import held_version, newest_version, pull_version
    from infra.weights.places import seen_at

    weights, seen = opened_weights(url), seen_at(url)
    number = newest_version(weights, url, version, seen, allow_older=allow_older, held=held_version(folder))
    with bar(f"fetching version {number}") as progress:
        manifest = pull_version(weights, number, folder, progress, seen=seen, lower=allow_older)
    say(f"version {manifest.version} is in {folder} ({in_bytes(manifest.size)}, every bit verified)")


def diff(
    old: Annotated[str, typer.Argument(help="A safetensors file, a folder, or URL@VERSION.")],
    new: Annotated[str, typer.Argument(help="Likewise.")],
) -> None:
    """Say how much two models differ, and what sending the difference takes."""
    from flows.checkpoints.push_and_pull import difference

    found = difference(_model(old), _model(new))
    share = found.changed / max(1, found.elements)
    said = (
        f"{found.changed_tensors} of {found.tensors} tensors differ, in {share:.2%} of {found.elements:,} "
        f"elements\nto send: {in_bytes(found.sent)}, 1/{found.size / max(1, found.sent):.0f} of the whole"
    )
    if found.changed:
        said += f", {found.sent / found.changed:.2f} bytes per changed element"
    say(said)


def _model(said: str) -> Model:
    from infra.weights.bits import file_model
    from infra.weights.folder import opened
    from infra.weights.weights_error import WeightsError

    url, at, version = said.rpartition("@")
    if at and version.isdecimal() and "://" in url:
        return opened_weights(url).update(None, int(version))[1].model
    path = Path(said)
    if path.is_dir():
        return opened(path).bits()
    try:
        return file_model(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{said} can't be read as a safetensors file: {error}") from error
