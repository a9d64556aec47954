"""Takes a run from its run file to its report. With Prefect each phase is a task; without, a call."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from flows.run import locations
from flows.run.checks import check, check_context
from flows.run.folder_owner import lock_of_run, take_report_folder
from flows.run.host import NO_HOST, Host, HostOrder
from flows.run.inspection import inspect_built, inspect_start
from flows.run.locations import Places, report_folder, start_local_stack
from flows.run.rank_calls import RankCalls
from flows.run.report_phase import make_report
from flows.run.request import LastingFailure, RunCancelled, RunFailed, RunRequest, RunResult
from flows.run.run_state import StateKeeper, read_state
from flows.run.start_model import model_at_hand, prepare_model
from flows.run.suggested_commands import SuggestedCommands
from flows.run.training_phase import LOCK_S, run_training
from flows.trackers.feeding import tracking
from flows.view.screen import Screen, Screens
from infra import runs
from infra.archive.segments import ARCHIVES
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

_LOOK_S = 0.2  # between looks whether a paused run may go on


def conduct(request: RunRequest, screen: Screen, host: Host = NO_HOST) -> RunResult:
    """Run a request to its report. However this ends, no process of the run is left."""
    screen, phase = Screens([screen]), host.phase
    spec: RunSpec = phase(check)(request)
    phase(inspect_start)(spec, request.runfile, screen.say)
    built = model_at_hand(spec) is None
    places: Places = phase(start_local_stack)(spec, screen.say)
    model: Path = phase(prepare_model)(spec, screen.progress)
    check_context(spec, model)
    if built:
        inspect_built(spec, model, request.runfile, screen.say)
    request = _of_this_flow_run(request, spec, places, host)
    with ExitStack() as held:
        locks: list[int] = []
        if request.resume:  # before anything is written: another start of the run may be going on
            run = _run_to_resume(request.resume, spec, places)
            request, own = replace(request, resume=run), Path(spec.report).absolute() / run
            before = report_folder(runs.find(places.open_store(), run))
            folders = {own, before} if before.is_dir() else {own}
            locks = [held.enter_context(lock_of_run(run, one, LOCK_S)) for one in sorted(folders)]
        record: RunRecord = phase(create_run)(request, spec, places, model, screen.say, host.flow_run)
        if not locks:
            locks = [held.enter_context(lock_of_run(record.id, report_folder(record), LOCK_S))]
        return _conducted(record, request, places, screen, host, locks)


def _conducted(
    record: RunRecord, request: RunRequest, places: Places, screen: Screens, host: Host, locks: list[int]
) -> RunResult:
    """Train a run that was made or taken up, and make its report."""
    spec, phase = record.spec, host.phase
    take_report_folder(record, report_folder(record), new=not request.resume, say=screen.say)
    host.took_up(record)
    screen.say(f"run {record.id}: its logs are in {locations.logs_folder(record)}")
    go_on = resume_hint(request, record.id)
    done = _is_trained(places.open_store(), record)
    with (
        StateKeeper(record, places.open_store(), go_on) as state,
        tracking(record, locations.report_folder(record), screen.say),
    ):
        screen = Screens([screen, state])
        for site, planned in spec.placement.sites.items():  # which see by the state that the run goes on
            if planned.generators and planned.elsewhere and not _called(host, record, site, screen):
                join = SuggestedCommands(record.id, record.store).command("join", "--site", site)
                screen.say(f"site {site} takes part when this runs there: {join}")
        try:
            if done:
                screen.say(f"run {record.id} is trained to its end: only its report is written again. With "
                           "more algorithm.iterations it is trained on")  # fmt: skip
            else:
                with RankCalls(host, record, screen):
                    _train(record, places, screen, host, state, locks)
        except LastingFailure:
            raise  # no advice to resume: the run would end by the same error
        except Explained as error:
            kind = RunCancelled if isinstance(error, RunCancelled) else RunFailed
            raise kind(f"{error}\n{go_on}") from error
        except BaseException:
            screen.say(go_on)
            raise
        state.trained()
        try:
            result: RunResult = phase(make_report)(record, places)
        except KeyboardInterrupt:
            screen.say(f"run {record.id} is trained to its end, and only its report was interrupted. {go_on}")
            raise
    return result


def _is_trained(store: Store, record: RunRecord) -> bool:
    """Whether an earlier start of a run has trained it to the end that it shall have now."""
    before = read_state(store, record.id)
    return before is not None and before.trained and before.iterations == record.spec.algorithm.iterations


def _train(
    record: RunRecord, places: Places, screen: Screen, host: Host, state: StateKeeper, locks: list[int]
) -> None:
    """Train a run to its end, however often it is paused."""

    def order() -> HostOrder:
        return HostOrder.CANCEL if state.stop_asked else host.order()

    state.phase("training")
    called = host.generators(record)
    while not host.phase(run_training)(record, places, screen, order=order, called=called, locks=locks):
        state.phase("paused")
        screen.say(f"run {record.id} is paused: none of its processes is left")
        host.paused()
        while order() is HostOrder.PAUSE:
            time.sleep(_LOOK_S)
        if order() is HostOrder.CANCEL:
            raise RunCancelled(f"run {record.id} was cancelled while it was paused")
        state.phase("training")
        screen.say(f"run {record.id} goes on")


def _of_this_flow_run(request: RunRequest, spec: RunSpec, places: Places, host: Host) -> RunRequest:
    """Return the request to go on with the run of a flow run that was retried or resumed, if it had one."""
    if not host.started_again:
        return request
    run = runs.of_flow_run(places.open_store(), spec.run, host.flow_run)
    return replace(request, resume=run) if run else request


def _called(host: Host, record: RunRecord, site: str, screen: Screen) -> bool:
    try:
        return host.call_site(record, site)
    except Exception as error:  # such as one of a Prefect server: the site can take part without
        screen.say(f"site {site} can't be told to take part: {type(error).__name__}: {error}")
        return False


def create_run(
    request: RunRequest, spec: RunSpec, places: Places, model: Path, say: Callable[[str], None],
    flow_run: str = "",
) -> RunRecord:  # fmt: skip
    """Make a run's record in the store and its topics on the broker, or take up those of a resumed run.

    `flow_run`: the id of the Prefect flow run that does so.
    """
    store = places.open_store()
    if spec.lengths.start and not request.resume:
        check_start(spec.lengths.start, store, backbone_name(spec.lengths.backbone))
    # Absolute: whoever resumes, reports or reads logs may be in another folder.
    spec = spec.model_copy(update={"report": str(Path(spec.report).absolute())})
    if request.resume:
        run = _run_to_resume(request.resume, spec, places)
        record = runs.resume(store, run, spec, bootstrap_servers=places.bootstrap_servers,
                             model=str(model), say=say, flow_run=flow_run)  # fmt: skip
    else:
        record = runs.create(
            store, spec, bootstrap_servers=places.bootstrap_servers, model=str(model),
            topics=KafkaBus(places.bootstrap_servers, patient=False).topic_names(), flow_run=flow_run,
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
        if left := sweep(store, "runs") + sweep(store, ARCHIVES):
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
    changes = [word for override in request.overrides for word in ("--set", override)]
    words = ["streamrl", "run", request.runfile, *changes, "--resume", run]
    return f"go on with the run: {shlex.join(words)}"
