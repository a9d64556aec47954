"""Helpers of the commands about weights: arguments, progress bars, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import error_console, out, sigterm_interrupts

if TYPE_CHECKING:
    from infra.weights.garbage import ByteProgress
    from infra.weights.versions import WeightStore


def _url(said: str) -> str:
    from flows.run.series_url import series_url
    from infra.errors import Explained

    try:
        return series_url(said)
    except Explained as error:
        raise typer.BadParameter(str(error)) from None


UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="WHERE", callback=_url,
        help="Versions of weights: a run of this machine such as count-1, a path such as ./mine, or a URL: "
        "s3://bucket/models/mine or s3://bucket/store/runs/count-1/weights.",
    ),
]  # fmt: skip
VersionOption = Annotated[int | None, typer.Option("--version", min=0, help="By default the newest.")]

AllowOlder = Annotated[
    bool,
    typer.Option(
        "--allow-older",
        help="Take the newest that is there, though a newer one was verified on this machine.",
    ),
]


def opened_weights(url: str) -> WeightStore:
    """Open the versions at a URL. Half of the cores will work on them."""
    from infra.choices import cores
    from infra.weights.places import weights_at

    return weights_at(url, threads=max(1, cores() // 2))


def say(text: str) -> None:
    """Print a text to standard output as it is, without markup."""
    out().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def bar(text: str) -> Iterator[ByteProgress]:
    """Show a progress bar. Yields a function that takes the bytes that are done, and all bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with sigterm_interrupts(), Progress(*columns, console=error_console(), transient=True) as shown:
        task = shown.add_task(text, total=None)
        yield lambda done, whole: shown.update(task, completed=done, total=whole or None)


def in_bytes(count: float) -> str:
    """Write a number of bytes for people, such as "12.3 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def when(at: float) -> str:
    """Write a Unix time as date and time of this time zone; as it is if no calendar has it."""
    import datetime

    try:
        return datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a manifest may say any finite number
        return f"at Unix time {at:g}"
