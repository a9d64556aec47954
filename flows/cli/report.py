"""streamrl report"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import INTERRUPTED, fail, out, plain_errors, sigterm_interrupts

if TYPE_CHECKING:
    from flows.page.page_data import SaidState
    from infra.runs import RunRecord
    from infra.stores.store import Store


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(report))


def report(
    run: Annotated[str | None, typer.Argument(help="The run's id; the newest if left out.")] = None,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
    file: Annotated[
        Path | None,
        typer.Option("--out", help="The file; by default report.html in the run's report folder."),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve the page on this machine and keep it up to date, until Ctrl-C."),
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="With --live: the port; by default any free one.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> None:
    """Make the page of a run: one HTML file with its curves, the time of its processes, samples and settings.

    It works at any time: while the run goes on, and after it ended, failed or was interrupted. If the broker
    is away, the page is made of the report folder alone, and says what it lacks.

    Examples:

    [bold]streamrl report count-3[/bold]

    [bold]streamrl report count-3 --live --port 8765[/bold]
    """
    from flows.run.locations import named_store, report_folder
    from infra.errors import Explained
    from infra.runs import find, newest_run

    opened = named_store(store)
    record = newest_run(opened) if run is None else find(opened, run)
    if record is None:
        raise Explained(f"no runs in {opened.url} yet: start one with `streamrl run FILE`")
    if live:
        _serve(record, opened, report_folder(record), port, browser=browser)
        return
    from flows.page.page_file import write_page

    try:
        path = write_page(record, opened, report_folder(record), file, said=_state(opened, record.id))
    except OSError as error:
        raise Explained(f"the page can't be written: {error}. Name another file with --out") from error
    _say(str(path))
    if browser:
        typer.launch(str(path))


def _serve(record: RunRecord, store: Store, folder: Path, port: int, *, browser: bool) -> None:
    from flows.page.live_page import LivePage, serving
    from infra.stack.ports import LOOPBACK

    live = LivePage(record, store, folder, lambda: _state(store, record.id))
    try:
        server = serving(live, port)
    except OSError as error:
        fail(f"port {port} of {LOOPBACK} can't be used: {error.strerror}. Take another with --port, or 0")
    try:
        with sigterm_interrupts(), server:
            live.open()
            url = f"http://{LOOPBACK}:{server.server_address[1]}/"
            _say(f"run {record.id} is shown at {url} until Ctrl-C")
            if browser:
                typer.launch(url)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        live.close()


def _state(store: Store, run: str) -> SaidState:
    """Return the state that the run's flow keeps in the store; empty if it can't be read."""
    from flows.page.page_data import RUNNING, SaidState
    from flows.run.run_state import read_state
    from infra.stores.store import StoreError

    try:
        found = read_state(store, run)
    except StoreError:
        found = None
    if found is None:
        return SaidState()
    state = RUNNING if found.now in ("training", "reporting") else found.now
    return SaidState(state, found.why if found.state == "failed" else "")


def _say(text: str) -> None:
    out().print(text, markup=False, highlight=False, soft_wrap=True)
