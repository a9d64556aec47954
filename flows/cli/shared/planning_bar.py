"""The progress of a plan, a simulation or a profile, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flows.cli.shared.talk import error_console


@contextmanager
def planning_bar() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[float, str], None]]]:
    """Show a bar. Yields a function for how many of how many are done, and one for a share of a whole."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def say(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield say, lambda share, text: bar.update(task, description=text, completed=share, total=1.0)
