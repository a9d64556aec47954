"""Output of all commands: results to standard output, errors in red to standard error, no tracebacks."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

FAILED, USER_ERROR, LASTING, INTERRUPTED = 1, 2, 3, 130
EXIT_CODES = {
    0: "It is done.",
    FAILED: "It failed. Trying again, or resuming the run, may go well.",
    USER_ERROR: "The command line, the run file, or something that it names is wrong. Nothing was started.",
    LASTING: "It failed by an error that comes again until something is changed. The message says what.",
    INTERRUPTED: "It was interrupted (Ctrl-C, SIGTERM, a closed terminal) or cancelled; it can be resumed.",
}


def out() -> Console:
    """Return a console on standard output."""
    from rich.console import Console

    return Console()


def error_console() -> Console:
    """Return a console on standard error, for progress and messages beside the result."""
    from rich.console import Console

    return Console(stderr=True)


def fail(message: str, code: int = USER_ERROR) -> NoReturn:
    """Print a message in red to standard error, and exit with a code."""
    _say(message, "red")
    raise typer.Exit(code)


def warn(message: str) -> None:
    """Print a message in yellow to standard error."""
    _say(message, "yellow")


def _say(message: str, colour: str) -> None:
    error_console().print(message, style=colour, markup=False, highlight=False, soft_wrap=True)


def say_json(value: object) -> None:
    """Print a value as a line of JSON, with null for a number that is not finite."""
    from flows.view.plain_json import plain_json

    typer.echo(plain_json(value, default=str))


def check_output(option: str, file: Path | None) -> None:
    """Exit if a file that is to be written at the end has no folder: so nothing is done in vain."""
    if file is not None and not file.absolute().parent.is_dir():
        fail(f"{option} {file}: there is no folder {file.parent}")


def each_run(runs: Iterable[str], work: Callable[[str], None]) -> None:
    """Do something with each of several runs. An error with one is shown, and the others have their turn."""
    codes = []
    for run in runs:
        try:
            work(run)
        except Exception as error:
            if (code := _code_of(error)) is None:
                raise
            _say(str(error), "red")
            codes.append(code)
    if codes:
        raise typer.Exit(codes[0])


def plain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that errors with a message for people are shown without a traceback.

    The command then exits with one of `EXIT_CODES`. Other errors are raised.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except Exception as error:
            code = _code_of(error)
            if code is None:
                raise
            fail(str(error), code)

    return wrapped


def _code_of(error: Exception) -> int | None:
    """The exit code for an error that is shown without a traceback; None for a bug of ours."""
    from infra.errors import Explained
    from infra.runs import RunError
    from schemas.loading import RunFileError

    if isinstance(error, RunFileError | RunError):
        return USER_ERROR
    if isinstance(error, Explained):
        return LASTING if error.lasting else FAILED
    return None


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Have SIGTERM and a closed terminal end the block like Ctrl-C: in order, with all cleared away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A shell starts a background command with SIGINT ignored; a SIGINT that is sent by hand must work too.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shares() -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar. Yields a function that takes the share that is done, from 0 to 1, and a text."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=error_console(), transient=True) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda share, text: shown.update(task, completed=share, description=text)


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()
