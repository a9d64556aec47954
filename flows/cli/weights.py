"""streamrl weights"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.talk import FAILED, fail, out, plain_errors, sigterm_interrupts

if TYPE_CHECKING:
    from infra.weights.bits import Model
    from infra.weights.garbage import Progress
    from infra.weights.versions import WeightStore

Url = Annotated[
    str,
    typer.Argument(
        help="A folder of versions, such as s3://bucket/models/mine, or s3://bucket/store/runs/count-1/weights."
    ),
]
Version = Annotated[int | None, typer.Option("--version", min=0, help="By default the newest.")]

_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (ls, show, push, pull, diff, verify):
        _app.command()(plain_errors(command))
    app.add_typer(
        _app, name="weights",
        help="Versions of a model in an object store: only what changes is sent, every bit is verified.\n\n"
        "They are those of a run, or of any checkpoints of yours:\n\n"
        "[bold]streamrl weights push step-100 s3://bucket/mine[/bold]\n\n"
        "[bold]streamrl weights push step-200 s3://bucket/mine --old step-100[/bold]\n\n"
        "[bold]streamrl weights pull s3://bucket/mine model[/bold]",
    )  # fmt: skip


def ls(url: Url) -> None:
    """List the versions, and what fetching each takes."""
    from rich.table import Table

    weights = _weights(url)
    table = Table("version", "made", "size", "what changed", "whole", "of epoch", box=None)
    for number in weights.versions():
        manifest = weights.manifest(number)
        ways = [_bytes(path.size) if path else "" for path in map(manifest.path, (number - 1, None))]
        made, size = _when(manifest.created_at), _bytes(manifest.size)
        table.add_row(str(number), made, size, *ways, str(manifest.trainer_epoch))
    if not table.row_count:
        fail(f"{url} has no versions of weights")
    out().print(table)


def show(url: Url, version: Version = None) -> None:
    """Show one version: its tensors, the ways to get it, who signed it."""
    from flows.weights import newest

    weights, console = _weights(url), out()
    manifest = weights.manifest(newest(weights, url, version))
    said = {
        "version": f"{manifest.version} of {manifest.run}, made {_when(manifest.created_at)}",
        "root": manifest.root,
        "tensors": f"{len(manifest.tensors)}, {_bytes(manifest.size)}",
        "types": ", ".join(sorted({tensor.dtype for tensor in manifest.tensors.values()})),
        "files": ", ".join(manifest.files) or "none",
        "adapter of": manifest.base or "no: it is a whole model",
        "signed": "yes" if manifest.signature else "no",
    }
    for path in manifest.paths:
        start = "nothing" if path.since is None else f"version {path.since}"
        said[f"from {start}"] = f"{_bytes(path.size)} in {len(path.chunks)} chunks"
    for name, value in said.items():
        console.print(f"{name:<18} {value}", markup=False, highlight=False, soft_wrap=True)


def push(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder with safetensors.")],
    url: Url,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="By default the one after the newest.")
    ] = None,
    old: Annotated[
        Path | None,
        typer.Option("--old", help="A folder that holds the version before: only what changed is sent."),
    ] = None,
) -> None:
    """Put a folder's model as a version. It is there when its manifest is: whole, or not at all."""
    from flows.weights import push as put

    with _bar(f"sending {folder}") as progress:
        manifest = put(folder, _weights(url), version=version, old=old, progress=progress)
    path = manifest.paths[0]
    how = "whole" if path.since is None else f"as what changed of version {path.since}"
    out().print(
        f"version {manifest.version} is in {url}: {_bytes(manifest.size)}, sent {how} in {_bytes(path.size)}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def pull(
    url: Url,
    folder: Annotated[Path, typer.Argument(help="A new folder, or one that holds another version.")],
    version: Version = None,
) -> None:
    """Fetch a version into a folder. What the folder holds already is not fetched again."""
    from flows.weights import newest
    from flows.weights import pull as get

    weights = _weights(url)
    number = newest(weights, url, version)
    with _bar(f"fetching version {number}") as progress:
        manifest = get(weights, number, folder, progress)
    out().print(
        f"version {manifest.version} is in {folder} ({_bytes(manifest.size)}, every bit verified)",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def diff(
    old: Annotated[str, typer.Argument(help="A safetensors file, a folder, or URL@VERSION.")],
    new: Annotated[str, typer.Argument(help="Likewise.")],
) -> None:
    """Say how much two models differ, and what sending the difference takes."""
    from flows.weights import difference

    found = difference(_model(old), _model(new))
    share = found.changed / max(1, found.elements)
    said = (
        f"{found.changed_tensors} of {found.tensors} tensors differ, in {share:.2%} of {found.elements:,} "
        f"elements\nto send: {_bytes(found.sent)}, 1/{found.size / max(1, found.sent):.0f} of the whole"
    )
    if found.changed:
        said += f", {found.sent / found.changed:.2f} bytes per changed element"
    out().print(said, markup=False, highlight=False, soft_wrap=True)


def verify(url: Url) -> None:
    """Audit everything: manifests and their chain, every chunk, and that each way leads to its version."""
    from flows.weights import verify as audit

    weights, wrong = _weights(url), 0
    count = len(weights.versions())
    if not count:
        fail(f"{url} has no versions of weights")
    with _bar("verifying") as progress:
        for problem in audit(weights, progress):
            wrong += 1
            out().print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if wrong:
        fail(f"{wrong} things are wrong with {url}", FAILED)
    out().print(f"{count} versions, all whole", markup=False, highlight=False)


def _weights(url: str) -> WeightStore:
    import os

    from infra.weights.places import weights_at

    return weights_at(url, threads=max(1, (os.cpu_count() or 1) // 2))


def _model(said: str) -> Model:
    from infra.weights.bits import file_model
    from infra.weights.errors import WeightsError
    from infra.weights.folder import ModelFolder

    url, at, version = said.rpartition("@")
    if at and version.isdecimal() and "://" in url:
        return _weights(url).update(None, int(version))[1].model
    path = Path(said)
    if path.is_dir():
        return ModelFolder(path).bits()
    try:
        return file_model(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{said} can't be read as a safetensors file: {error}") from error


@contextmanager
def _bar(text: str) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with sigterm_interrupts(), Progress(*columns, console=out(), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole or None)


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"


def _when(at: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
