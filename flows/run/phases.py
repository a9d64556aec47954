"""Takes a run from its run file to its report. With Prefect each phase is a task; without, a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flows.run import locations
from flows.run.checks import check, check_context
from flows.run.locations import Places, start_local_stack
from flows.run.report_phase import make_report
from flows.run.request import RunCancelled, RunFailed, RunRequest, RunResult
from flows.run.start_model import prepare_model
from flows.run.training_phase import run_training
from flows.trackers.feeding import tracking
from flows.view.screen import Screen, Screens
from infra import runs
from infra.errors import Explained
from infra.kafka_bus import KafkaBus
from infra.ownership import claim
from infra.run_bus import connect
from infra.runs import RunRecord
from infra.stores.orphans import sweep
from infra.stores.store import Store, StoreError
from producers.ranker.states import backbone_name, check_start
from schemas.runspec import RunSpec
from schemas.topics import Topics

F = TypeVar("F", bound=Callable[..., Any])
AsPhase = Callable[[F], F]


def conduct(
    request: RunRequest,
    screen: Screen,
    *,
    as_phase: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    told_to_stop: Callable[[], bool] = lambda: False,
    call_site: Callable[[RunRecord, str], bool] = lambda record, site: False,
) -> RunResult:
    """Run a request to its report. However this ends, no process of the run is left.

    `as_phase` wraps each phase. `told_to_stop`: whether the run shall be cancelled. `call_site` has a site
    that is elsewhere take part, and returns False if it can't.
    """
    screen = Screens([screen])
    spec: RunSpec = as_phase(check)(request)
    places: Places = as_phase(start_local_stack)(spec, screen.say)
    model: Path = as_phase(prepare_model)(spec, screen.progress)
    check_context(spec, model)
    record: RunRecord = as_phase(create_run)(request, spec, places, model, screen.say)
    screen.say(f"run {record.id}: its logs are in {locations.logs_folder(record)}")
    for site, planned in spec.placement.sites.items():
        if planned.elsewhere and not _called(call_site, record, site, screen):
            screen.say(f"site {site} takes part when this runs there: streamrl join {record.id} "
                       f"--store {record.store} --site {site}")  # fmt: skip
    with tracking(record, locations.report_folder(record), screen.say):
        try:
            as_phase(run_training)(record, places, screen, told_to_stop=told_to_stop)
        except Explained as error:
            kind = RunCancelled if isinstance(error, RunCancelled) else RunFailed
            raise kind(f"{error}\n{resume_hint(request, record.id)}") from error
        except BaseException:
            screen.say(resume_hint(request, record.id))
            raise
        result: RunResult = as_phase(make_report)(record, places)
    return result


def _called(
    call_site: Callable[[RunRecord, str], bool], record: RunRecord, site: str, screen: Screen
) -> bool:
    try:
        return call_site(record, site)
    except Exception as error:  # such as one of a Prefect server: the site can take part without
        screen.say(f"site {site} can't be told to take part: {type(error).__name__}: {error}")
        return False


def create_run(
    request: RunRequest, spec: RunSpec, places: Places, model: Path, say: Callable[[str], None]
) -> RunRecord:
    """Make a run's record in the store and its topics on the broker, or take up those of a resumed run."""
    store = places.open_store()
    if spec.lengths.start and not request.resume:
        check_start(spec.lengths.start, store, backbone_name(spec.lengths.backbone))
    # Absolute: whoever resumes, reports or reads logs may be in another folder.
    spec = spec.model_copy(update={"report": str(Path(spec.report).absolute())})
    if request.resume:
        run = _run_to_resume(request.resume, spec, places)
        record = runs.resume(store, run, spec, bootstrap_servers=places.bootstrap_servers,
                             model=str(model), say=say)  # fmt: skip
    else:
        record = runs.create(
            store, spec, bootstrap_servers=places.bootstrap_servers, model=str(model),
            topics=KafkaBus(places.bootstrap_servers).topic_names(),
        )  # fmt: skip
    bus = connect(record, "streamrl-run")
    topics = Topics(record.id, spec.lengths.classes)
    try:
        bus.create_topics(topics.all())
        claim(bus, record, topics)
    finally:
        bus.close()
    _clear(store, say)
    return record


def _clear(store: Store, say: Callable[[str], None]) -> None:
    """Remove leftovers of killed writes. If the store refuses, the run goes on without."""
    try:
        if left := sweep(store, "runs"):
            say(f"{left} leftovers of killed writes were removed from {store.url}")
    except StoreError as error:
        say(f"leftovers of killed writes can't be removed: {error}")


def _run_to_resume(resume: str | bool, spec: RunSpec, places: Places) -> str:
    if isinstance(resume, str):
        return resume
    known = runs.runs_of(places.open_store(), spec.run)
    if not known:
        raise runs.RunError(f"there is no run of the name {spec.run} in {places.store_url} to resume")
    return known[-1]


def resume_hint(request: RunRequest, run: str) -> str:
    """Return the command that goes on with a run."""
    changes = "".join(f" --set {override}" for override in request.overrides)
    return f"go on with the run: streamrl run {request.runfile}{changes} --resume {run}"
