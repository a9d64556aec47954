"""Flow runs, without a server: orders, names, automations, and the run that a flow run goes on with."""

from __future__ import annotations

import importlib
import logging
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.exceptions import ParameterTypeError, Pause
from prefect.states import Cancelling, Completed, Crashed, Paused, Running, Suspended

from flows.cli.shared.deploying import job_variables
from flows.flow_runs import automations, flow_run_page, watching
from flows.flow_runs.automations import ensure_automations
from flows.flow_runs.prefect_host import PrefectHost, tags_of
from flows.flow_runs.watching import FlowRunWatch
from flows.run import phases
from flows.run.folder_owner import lock_of_run
from flows.run.host import Host, HostOrder
from flows.run.request import RunCancelled, RunRequest, RunSuspended
from flows.run.run_state import ask_to_stop
from flows.view.screen import Nobody
from infra import runs
from infra.files.locks import LockHeld
from infra.runs import RunRecord
from infra.stores.opening import open_store
from tests.factories import make_model_files, make_spec
from tests.waiting import wait_until

FLOW_MODULES = (
    "flows.train",
    "flows.sync_weights",
    "flows.refresh_ranker",
    "flows.weights",
    "flows.archive_run",
    "flows.join_run",
    "flows.rebalance",
)


class Server:
    """What a watch asks a Prefect server for."""

    def __init__(self, *states: State) -> None:
        self.states, self.set, self.updates = list(states), [], []

    def read_flow_run(self, number: object) -> Any:
        return SimpleNamespace(state=self.states.pop(0))

    def set_flow_run_state(self, number: object, state: State) -> Any:
        self.set.append(state)
        return SimpleNamespace(state=state)

    def update_flow_run(self, number: object, **changes: Any) -> None:
        self.updates.append(changes)


def make_watch(*states: State) -> FlowRunWatch:
    watch = FlowRunWatch(FlowRun(flow_id=uuid4(), tags=["mine"], run_count=1), "train")
    server = Server(*states)
    for _ in states:
        watch._ask(server)  # type: ignore[arg-type]
    return watch


def make_record(folder: Path, **fields: Any) -> RunRecord:
    spec = make_spec(report=str(folder))
    values = {"id": "test-1", "bootstrap_servers": "", "store": "", "model": "", "created_at": 0.0}
    return RunRecord(spec=spec, **values | fields)


def test_a_state_is_an_order() -> None:
    assert make_watch().order is HostOrder.GO_ON
    assert make_watch(Running()).order is HostOrder.GO_ON
    assert make_watch(Paused()).order is make_watch(Suspended()).order is HostOrder.PAUSE
    assert make_watch(Suspended(), Running()).order is HostOrder.PAUSE  # another process runs it now
    assert make_watch(Paused(), Running()).order is HostOrder.GO_ON
    assert make_watch(Cancelling()).order is make_watch(Completed()).order is HostOrder.CANCEL


def test_who_is_called_crashed_and_lives_says_so() -> None:
    watch, server = make_watch(), Server(Crashed())
    watch._ask(server)  # type: ignore[arg-type]
    assert [state.type.value for state in server.set] == ["RUNNING"]
    assert watch.order is HostOrder.GO_ON


def test_tags_of_the_users_stay() -> None:
    watch, server = make_watch(), Server()
    watch.show_as("count-1", ["mode:sync"])
    watch._show(server)  # type: ignore[arg-type]
    watch._show(server)  # type: ignore[arg-type]
    assert server.updates == [{"name": "count-1", "tags": ["mine", "mode:sync"]}]


def test_a_flow_run_that_ends_at_once_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    server, watch = Server(Running(), Running()), make_watch()
    monkeypatch.setattr(watching, "get_client", lambda **_: nullcontext(server))
    monkeypatch.setattr(watching, "emit_event", lambda *_, **__: None)
    with watch:
        wait_until(lambda: watch.state is not None, what="the first look")
        watch.show_as("count-1", [])
    assert [one["name"] for one in server.updates] == ["count-1"]


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ({"python": "a/count_task.py"}, "count_task"),
        ({"python": "my.tasks.count"}, "my.tasks.count"),
        ({"python": None, "jsonl": "/data/sums.jsonl", "reward": "r.py:f"}, "sums"),
        ({"python": None, "dataset": "openai/gsm8k", "reward": "r.py:f"}, "gsm8k"),
    ],
)
def test_a_run_is_tagged_with_its_task_and_its_mode(task: dict[str, Any], name: str) -> None:
    assert tags_of("test-1", make_spec(task=task)) == ["run:test-1", f"task:{name}", "mode:sync"]


def test_a_suspended_flow_run_ends_and_a_paused_one_stays() -> None:
    host = PrefectHost(make_watch(Suspended()))
    with pytest.raises(RunSuspended):
        host.paused()
    assert isinstance(host.suspension, Pause)
    PrefectHost(make_watch(Paused())).paused()


def test_automations_are_made_once_and_prefect_takes_them() -> None:
    there: dict[str, Any] = {}

    def call(path: str, body: dict[str, Any]) -> list[Any]:
        if path == "/automations/":
            assert body["name"] not in there
            there[body["name"]] = body
            return []
        return [there[name] for name in body["automations"]["name"]["any_"] if name in there]

    ensure_automations(call)
    ensure_automations(call)
    died, cancelled = (AutomationCore.model_validate(one) for one in there.values())
    assert isinstance(died.trigger, EventTrigger) and isinstance(cancelled.trigger, EventTrigger)
    assert died.trigger.after == {automations.ALIVE} < died.trigger.expect
    assert cancelled.trigger.after == {"prefect.flow-run.Cancelling"}


def test_automations_are_about_every_flow_of_ours() -> None:
    assert {flow.name for flow in all_flows()} == set(automations.FLOWS)


def test_prefect_checks_the_parameters_of_each_flow() -> None:
    for flow in all_flows():
        empty = dict.fromkeys(flow.parameters.required, "")
        with pytest.raises(ParameterTypeError, match=r"should (have at least 1|be a valid list)"):
            flow.validate_parameters(empty)


def all_flows() -> list[Flow[..., Any]]:
    found = [value for name in FLOW_MODULES for value in vars(importlib.import_module(name)).values()]
    return [one for one in found if isinstance(one, Flow)]


def test_a_deployment_holds_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("STREAMRL_KAFKA_PASSWORD", "secret")
    found = job_variables(tmp_path)
    assert found["env"]["STREAMRL_HOME"] == str(tmp_path) and "secret" not in str(found)


def test_a_run_is_found_by_each_flow_run_that_worked_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spec = open_store(f"file://{tmp_path}/store"), make_spec()
    model = str(make_model_files(tmp_path / "model"))
    for number in (1, 2):
        runs.create(store, spec, bootstrap_servers="", model=model, flow_run=f"first-{number}")
    runs.resume(store, "test-1", spec, bootstrap_servers="", flow_run="second")
    assert runs.of_flow_run(store, "test", "first-1") == runs.of_flow_run(store, "test", "second") == "test-1"
    assert runs.of_flow_run(store, "test", "first-2") == "test-2"
    assert runs.of_flow_run(store, "test", "another") is None
    monkeypatch.setattr(runs, "_MOST_FLOW_RUNS", 3)
    for number in range(4):
        record = runs.resume(store, "test-1", spec, bootstrap_servers="", flow_run=f"f{number}")
    assert record.flow_runs == ("f1", "f2", "f3")


class Pausing(Host):
    """A flow run that ran before. It pauses, looks once more, and then follows the last order."""

    flow_run, started_again = "me", True

    def __init__(self, last: HostOrder) -> None:
        self.orders, self.last = [HostOrder.PAUSE], last

    def order(self) -> HostOrder:
        return self.orders.pop() if self.orders else self.last


def with_stub_phases(folder: Path, monkeypatch: pytest.MonkeyPatch, ends: list[bool]) -> list[str | bool]:
    """Put stubs in the place of phases, and the record of a run in a store. Return the runs taken up by then.

    `ends`: the results of training.
    """
    record, taken = make_record(folder), list[str | bool]()
    store = open_store(f"file://{folder}/store")
    runs.create(store, record.spec, bootstrap_servers="", model="", run_id=record.id)

    @contextmanager
    def tracked(*_: object) -> Any:
        yield

    def create_run(request: RunRequest, *_: object) -> RunRecord:
        taken.append(request.resume)
        return record

    places = SimpleNamespace(open_store=lambda: store)
    for name, stub in {
        "check": lambda request: record.spec, "start_local_stack": lambda *_: places,
        "prepare_model": lambda *_: folder, "check_context": lambda *_: None, "create_run": create_run,
        "run_training": lambda *_, order, called, locks: ends.pop(0), "make_report": lambda *_: "the result",
        "tracking": tracked, "inspect_start": lambda *_: None, "model_at_hand": lambda *_: folder,
    }.items():  # fmt: skip
        stub.__name__ = name
        monkeypatch.setattr(phases, name, stub)
    monkeypatch.setattr(runs, "of_flow_run", lambda store, name, flow_run: "test-1")
    return taken


@pytest.mark.parametrize("last", [HostOrder.GO_ON, HostOrder.CANCEL])
def test_a_paused_run_goes_on_and_a_flow_run_that_starts_again_takes_its_run(
    last: HostOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [False, True]
    taken = with_stub_phases(tmp_path, monkeypatch, ends)
    if last is HostOrder.CANCEL:
        with pytest.raises(RunCancelled, match="cancelled while it was paused"):
            phases.conduct(RunRequest("run.yaml"), Nobody(), Pausing(last))
    else:
        assert phases.conduct(RunRequest("run.yaml"), Nobody(), Pausing(last)) == "the result"
        assert ends == []
    assert taken == ["test-1"]


def test_a_second_start_of_a_run_changes_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its record nor its state, nor a request to stop it."""
    taken = with_stub_phases(tmp_path, monkeypatch, [True])
    store = open_store(f"file://{tmp_path}/store")
    ask_to_stop(store, "test-1")
    before = {name: store.get(name) for name in store.list("runs")}
    monkeypatch.setattr(phases, "LOCK_S", 0.0)
    with (
        lock_of_run("test-1", tmp_path / "test-1", 0.0),
        pytest.raises(LockHeld, match=r"run test-1 is locked by process"),
    ):
        phases.conduct(RunRequest("run.yaml", resume="test-1"), Nobody())
    assert taken == [] and {name: store.get(name) for name in store.list("runs")} == before
    assert phases.conduct(RunRequest("run.yaml", resume="test-1"), Nobody()) == "the result"


def test_a_new_run_takes_its_folder_and_a_resumed_one_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_stub_phases(tmp_path, monkeypatch, [True, True])
    record = make_record(tmp_path, identity="drawn")
    monkeypatch.setattr(phases, "create_run", lambda *_: record)
    monkeypatch.setattr(phases.create_run, "__name__", "create_run")
    folder = tmp_path / "test-1"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("of a removed run")
    phases.conduct(RunRequest("run.yaml"), Nobody())
    assert {path.name for path in folder.iterdir()} == {".lock", "identity"}
    (folder / "metrics.jsonl").write_text("of this run")
    (folder / "identity").unlink()  # as if by an older release
    phases.conduct(RunRequest("run.yaml", resume="test-1"), Nobody())
    assert {path.name for path in folder.iterdir()} == {".lock", "identity", "metrics.jsonl"}


def test_a_server_that_hangs_does_not_hold_up_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes minutes then. The newest state is sent as soon as the server answers again."""
    answers, sent = threading.Event(), list[float]()

    def send(progress: float) -> str:
        sent.append(progress)
        assert answers.wait(300)
        return str(uuid4())

    monkeypatch.setattr(flow_run_page, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(flow_run_page, "create_progress_artifact", lambda percent, **said: send(percent))
    monkeypatch.setattr(
        flow_run_page, "update_progress_artifact", lambda name, **said: send(said["progress"])
    )
    monkeypatch.setattr(flow_run_page, "one_line", str)
    monkeypatch.setattr(flow_run_page, "ARTIFACT_EVERY_S", 0.0)
    monkeypatch.setattr(flow_run_page, "_LAST_S", 0.0)
    screen = flow_run_page.PrefectScreen()
    algorithm = SimpleNamespace(iterations=4)
    for begun in range(5):
        view = SimpleNamespace(
            run="test-1", iterations_begun=lambda n=begun: n, spec=SimpleNamespace(algorithm=algorithm)
        )
        screen.show(view)  # type: ignore[arg-type]
        wait_until(lambda: sent == [0.0], what="the first state")
    answers.set()
    screen._bar.wait(300)
    assert sent == [0.0, 100.0]
    screen.show(view)  # type: ignore[arg-type]
    screen._bar.wait(300)
    assert sent == [0.0, 100.0, 100.0]


def test_a_page_shows_a_reason_as_it_is(tmp_path: Path) -> None:
    shown = flow_run_page.failure_page(make_record(tmp_path), "died: ```\n# not a title <script>")
    assert shown.count("```") == 2 and shown.index("```") < shown.index("# not a title")
