"""streamrl join"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.talk import FAILED, fail, out, plain_errors, sigterm_interrupts

if TYPE_CHECKING:
    from infra.bus import Record

READ_S = 30.0


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(join))


def join(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    store: Annotated[
        str, typer.Option("--store", help="The run's object store, such as s3://bucket/folder.")
    ] = "local",
    instances: Annotated[int, typer.Option("--instances", min=1, help="How many generators to start.")] = 1,
) -> None:
    """Start more generators for a run that goes on, here or on any site that reaches its broker and store.

    They get work within seconds of being ready, and end with the run, or with Ctrl-C: what they were at is
    made by others.

    Example: [bold]streamrl join count-3 --store s3://streamrl/runs --instances 2[/bold]
    """
    from flows.places import Places, logs_folder, store_url
    from flows.workers import GENERATOR, worker
    from infra.bus import read_all
    from infra.process import connect
    from infra.runs import find
    from infra.stack.paths import StackPaths
    from infra.store import open_store
    from infra.supervise.team import Team
    from schemas.topics import Topics

    url = store_url(store)
    record = find(open_store(url), run)
    places = Places(record.bootstrap_servers, url, {"STREAMRL_HOME": str(StackPaths.locate().home)})
    first = random.randrange(1000, 1_000_000)  # the run numbers its own from 0
    console, failed = out(), 0
    logs = logs_folder(record)
    if not logs.is_dir():  # another machine than the run's: its report folder is not here
        logs = StackPaths.locate().logs / run
    bus, topic = connect(record, "streamrl-join"), Topics(run, record.spec.lengths.classes).status
    said = read_all(bus, topic, deadline_s=READ_S)
    if _over(said):
        fail(f"run {run} has ended or was stopped; `streamrl run RUNFILE --resume {run}` goes on with it")
    status = bus.reader(topic, {0: said[-1].offset + 1} if said else None)
    with sigterm_interrupts(), Team(logs) as team:
        for number in range(instances):
            found = worker(GENERATOR, first + number, record, places)
            team.start(found.name, found.argv, found.env)
            console.print(f"{found.name} is process {team.running[found.name]}; log: {team.log(found.name)}")
        while team.running and not _over(status.poll(0.2)):
            for ended in team.poll(0.5):
                failed += bool(ended.code or ended.signal)
                console.print(ended.story, markup=False)
    if failed:
        fail(f"{failed} of {instances} generators died", FAILED)
    console.print(f"run {run} has ended")


def _over(records: list[Record]) -> bool:
    """Whether the feeder's newest heartbeat says that it has ended: then nobody is given work any more."""
    from schemas.messages import Heartbeat
    from schemas.wire import decode

    beats = [decode(record.value, Heartbeat) for record in records]
    states = [beat.state for beat in beats if beat.role == "feeder"]
    return bool(states) and states[-1] == "ended"
