"""`streamrl deploy` from a folder that is not a clone; a worker's run that is paused."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
import yaml

from flows.flow_runs.automations import ensure_automations
from flows.run.without_prefect import train_plainly
from infra.runs import find, runs_of
from infra.stack.local import Stack
from infra.stores.opening import open_store
from infra.weights.places import weights_at
from tests.factories import TASK, make_spec, make_tiny_model
from tests.prefect_calls import ask
from tests.stacks import processes_of, words_of
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
POOL, STEPS = "deploying", 40
PROCESSES = ("consumers.trainer", "producers.feeder", "producers.generator", "infra.supervise.guard")


class Site:
    """A user's folder with a run file, a Prefect server and a worker that knows no home of ours."""

    def __init__(self, folder: Path, stack: Stack, servers: str) -> None:
        self.folder, self.home, self.store = folder, folder / "home", f"file://{folder}/elsewhere"
        self.api = str(stack.prefect_api_url)
        self.env = {name: value for name, value in {**os.environ, **stack.env()}.items()
                    if name not in ("STREAMRL_HOME", "PYTHONPATH")} | {"COLUMNS": "500"}  # fmt: skip
        make_tiny_model(folder / "model")
        (folder / "task.py").write_text(TASK)
        spec = make_spec(
            run="deploying",
            algorithm={"iterations": STEPS, "groups": 8, "mode": "sync", "staleness": 0},
            placement={"kafka": {"bootstrap_servers": servers}},
            report=str(folder / "runs"),
        )
        (folder / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))

    def streamrl(self, *words: str) -> str:
        return self._done(
            [sys.executable, "-m", "flows.cli", *words], {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        )

    def prefect(self, *words: str) -> str:
        return self._done([sys.executable, "-m", "prefect", *words], {})

    def _done(self, argv: list[str], more: dict[str, str]) -> str:
        done = subprocess.run(
            argv, cwd=self.folder, env=self.env | more, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def get(self, path: str) -> Any:
        return ask("GET", self.api + path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return ask("POST", self.api + path, body)

    def start(self, deployment: str) -> UUID:
        told = self.prefect("deployment", "run", deployment)
        return UUID(told.rpartition("flow-run/")[2].split()[0])

    def state(self, flow_run: UUID) -> str:
        return str(self.get(f"/flow_runs/{flow_run}")["state"]["name"])

    def reached(self, flow_run: UUID, *states: str, deadline_s: float = 120) -> None:
        def there() -> bool:
            return self.state(flow_run) in states

        try:
            wait_until(there, what=f"the state {states}", deadline_s=deadline_s)
        except AssertionError:
            log = self.post("/logs/filter", {"logs": {"flow_run_id": {"any_": [str(flow_run)]}}})
            print("\n".join(line["message"] for line in log))
            raise

    def steps(self, run: str) -> list[int]:
        file = self.folder / "runs" / run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def processes(self) -> list[psutil.Process]:
        """The processes of the run that are alive."""
        return [one for one in processes_of(self.home) if set(PROCESSES) & set(words_of(one))]


@pytest.fixture(scope="module")
def site(prefect_stack: Stack, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = Site(tmp_path_factory.mktemp("deploying"), prefect_stack, kafka)
    ensure_automations(found.post)
    yield found
    for process in processes_of(found.home):
        process.kill()


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[None]:
    """A worker that was started in another folder, with an environment that says nothing of us."""
    elsewhere = site.folder / "worker"
    elsewhere.mkdir()
    with (site.folder / "worker.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"],
            cwd=elsewhere, env=site.env, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(150)
        finally:
            process.kill()


def test_home_store_and_schedule_are_part_of_a_deployment(site: Site) -> None:
    words = ("--name", "hourly", "--pool", POOL, "--home", str(site.home), "--store", site.store,
             "--set", "algorithm.iterations=2", "--overlap", "skip")  # fmt: skip
    for cron in ("0 2 * * *", "0 3 * * *"):  # the second time changes it
        told = site.streamrl("deploy", "run.yaml", *words, "--cron", cron)
    assert f"worker start --pool {POOL}" in told and "deployment run train/hourly" in told
    found = site.get("/deployments/name/train/hourly")
    assert found["entrypoint"] == "flows.train.train"
    assert found["parameters"]["runfile"] == str(site.folder / "run.yaml")
    assert found["parameters"]["overrides"] == ["algorithm.iterations=2", f"placement.store={site.store}"]
    assert found["job_variables"]["env"]["STREAMRL_HOME"] == str(site.home)
    assert found["job_variables"]["working_dir"] == str(site.folder)
    assert [one["schedule"]["cron"] for one in found["schedules"]] == ["0 3 * * *"]
    assert found["global_concurrency_limit"]["limit"] == 1
    assert found["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"


def test_a_folder_that_would_hide_our_code_is_refused(site: Site, tmp_path: Path) -> None:
    (tmp_path / "flows").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "deploy", str(site.folder / "run.yaml")], cwd=tmp_path, text=True,
        env=site.env | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 2 and "has a folder flows, which would hide" in done.stderr


@pytest.mark.thorough
def test_a_paused_run_of_a_worker_ends_with_the_same_bits(
    site: Site, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(site.home))
    site.streamrl("deploy", "run.yaml", "--pool", POOL, "--home", str(site.home), "--store", site.store)
    flow_run = site.start("train/deploying")
    wait_until(lambda: len(site.steps("deploying-1")) >= 1, what="a step", deadline_s=120)
    suspended = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
    site.post(f"/flow_runs/{flow_run}/set_state", {"state": suspended})  # what the page's button does
    wait_until(lambda: not site.processes(), what="the end of the run's processes", deadline_s=60)
    assert site.state(flow_run) == "Suspended"
    before = len(site.steps("deploying-1"))
    assert before < STEPS

    assert "a worker takes it" in site.streamrl("unpause", "deploying-1")
    wait_until(lambda: len(site.steps("deploying-1")) > before, what="another step", deadline_s=120)
    site.reached(flow_run, "Completed", deadline_s=240)
    found = site.get(f"/flow_runs/{flow_run}")
    assert found["name"] == "deploying-1"
    assert set(found["tags"]) >= {"run:deploying-1", "task:task", "mode:sync"}
    store = open_store(site.store)
    assert runs_of(store) == ["deploying-1"]
    assert find(store, "deploying-1").flow_runs == (str(flow_run),)
    assert site.steps("deploying-1") == list(range(STEPS))

    plain = train_plainly(str(site.folder / "run.yaml"), [f"placement.store={site.store}"])
    assert _last_root(site, plain.run) == _last_root(site, "deploying-1")


def _last_root(site: Site, run: str) -> str:
    weights = weights_at(f"{site.store}/runs/{run}/weights")
    return weights.manifest(STEPS).root


@pytest.mark.thorough
def test_each_scheduled_start_is_a_run_of_its_own_after_the_one_before(site: Site, worker: None) -> None:
    site.streamrl("deploy", "run.yaml", "--name", "often", "--pool", POOL, "--home", str(site.home),
                  "--store", site.store, "--set", "run=often", "--set", "algorithm.iterations=1",
                  "--interval", "5")  # fmt: skip
    found = site.get("/deployments/name/train/often")
    deployment = f"{site.api}/deployments/{found['id']}"
    # The same run with processes that pretend: vLLM's start would take most of the minute.
    fakes = {"entrypoint": "tests.fakes.flow_with_fakes.train"}
    ask("PATCH", deployment, fakes)
    try:
        wait_until(lambda: len(site.steps("often-2")) == 1, what="the second run", deadline_s=180)
    finally:
        ask("DELETE", deployment)
    asked = {"flow_runs": {"name": {"any_": ["often-1", "often-2"]}}, "sort": "START_TIME_ASC"}
    first, second = site.post("/flow_runs/filter", asked)
    assert (first["name"], second["name"]) == ("often-1", "often-2")
    assert first["end_time"] <= second["start_time"]
