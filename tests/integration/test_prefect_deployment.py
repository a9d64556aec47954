"""The deployment of prefect.yaml on a real server with a worker: a run to its end, and one cancelled."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml

from flows.cli.shared.prefect_setup import POOL, ensure_pool
from infra.bus import read_all
from infra.kafka_bus import KafkaBus
from infra.runs import find, runs_of
from infra.stack.local import Stack
from infra.stores.opening import open_store
from producers.ranker.states import States
from schemas.messages import BalanceRecord, Sample
from schemas.topics import Topics
from schemas.wire import decode
from tests.factories import TASK, make_spec, make_tiny_model
from tests.prefect_calls import ask
from tests.stacks import processes_of, words_of
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Deployed:
    """A deployment with a worker; every process of its runs has `home` in its environment."""

    api: str
    env: dict[str, str]
    home: Path
    runfile: Path

    def typed(self, *overrides: str) -> UUID:
        """Start a run as a user does in a terminal; the flow run's id."""
        words = ("-p", f"runfile={self.runfile}", "-p", f"overrides={json.dumps(overrides)}")
        told = self.prefect("deployment", "run", "train/local", *words)
        return UUID(told.rpartition("flow-run/")[2].split()[0])

    def start(self, *overrides: str) -> UUID:
        """Start a run as the server's page does, without the seconds that a command takes to be loaded."""
        return self.call("train", runfile=str(self.runfile), overrides=overrides)

    def call(self, flow: str, **parameters: Any) -> UUID:
        """Run the local deployment of a flow."""
        deployment = self.get(f"deployments/name/{flow}/local")["id"]
        made = self.post(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})
        return UUID(made["id"])

    def table(self, key: str) -> dict[str, Any]:
        """The first row of the newest artifact of that name."""
        shown = [artifact for artifact in self.post("artifacts/filter", {}) if artifact["key"] == key]
        return dict(json.loads(max(shown, key=lambda artifact: artifact["created"])["data"])[0])

    def prefect(self, *words: str) -> str:
        found = subprocess.run(
            [sys.executable, "-m", "prefect", *words], cwd=ROOT, env=self.env, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def get(self, path: str) -> Any:
        return ask("GET", f"{self.api}/{path}")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return ask("POST", f"{self.api}/{path}", body)

    def state(self, run: UUID) -> str:
        return str(self.get(f"flow_runs/{run}")["state"]["type"])

    def ended(self, run: UUID) -> None:
        """Wait until a flow has ended well."""
        wait_until(
            lambda: self.state(run) in ("COMPLETED", "FAILED", "CRASHED"), what="the end of the flow",
            deadline_s=240,
        )  # fmt: skip
        assert self.state(run) == "COMPLETED", self.said([str(run)])

    def said(self, runs: Sequence[str]) -> str:
        """The states of some flow runs, and their logs."""
        states = [f"{run}: {self.state(UUID(run))}" for run in runs]
        log = self.post(
            "logs/filter", {"logs": {"flow_run_id": {"any_": list(runs)}}, "sort": "TIMESTAMP_ASC"}
        )
        return "\n".join([*states, *(f"{line['timestamp'][11:19]} {line['message']}" for line in log)])

    def roles(self) -> set[str]:
        """The roles of a run that have a process now."""
        wanted = ("consumers.trainer", "producers.feeder", "producers.generator", "infra.supervise.guard")
        words = [word for process in processes_of(self.home) for word in words_of(process)]
        return {role for role in wanted if role in words}


@pytest.fixture(scope="module")
def deployed(
    prefect_stack: Stack, kafka: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    make_tiny_model(folder / "model")
    (folder / "task.py").write_text(TASK)
    spec = make_spec(
        run="deployed",
        evaluation={"problems": 8},
        placement={"kafka": {"bootstrap_servers": kafka}, "store": f"file://{folder}/store"},
        report=str(folder / "runs"),
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    home = folder / "home"
    env = {**os.environ, **prefect_stack.env(), "STREAMRL_HOME": str(home), "PYTHONPATH": str(ROOT)}
    assert prefect_stack.prefect_api_url is not None
    found = Deployed(prefect_stack.prefect_api_url, env, home, folder / "run.yaml")
    ensure_pool(found.api)  # what `streamrl up` does
    ensure_pool(found.api)
    found.prefect("deploy", "--all", "--no-prompt")
    with working(found, POOL):
        yield found


@contextmanager
def working(deployed: Deployed, pool: str) -> Iterator[None]:
    """A worker of a pool."""
    words = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
    with (deployed.runfile.parent / f"worker-{pool}.log").open("w") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=deployed.env, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(150)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def finished(deployed: Deployed) -> Deployed:
    """With deployed-1 behind it, a run that recorded enough for a ranker to learn from."""
    deployed.ended(deployed.typed("algorithm.iterations=16", "algorithm.groups=8"))
    return deployed


def test_a_run_by_deployment(finished: Deployed) -> None:
    deployed = finished
    report = deployed.runfile.parent / "runs" / "deployed-1"
    assert {"metrics.jsonl", "curves.png", "summary.json", "run.yaml", "model"} <= set(os.listdir(report))
    summary = json.loads((report / "summary.json").read_text())
    assert (summary["steps"], summary["samples"], summary["version"]) == (16, 256, 16)
    assert summary["result"][0]["problems"] == 8
    artifacts = deployed.post("artifacts/filter", {})
    kinds = {artifact["key"]: artifact["type"] for artifact in artifacts}
    assert kinds["deployed-1-result"] == "table"
    assert kinds["deployed-1-report"] == "markdown"
    assert kinds["deployed-1-progress"] == "progress"
    assert next(a["data"] for a in artifacts if a["key"] == "deployed-1-progress") == 100.0
    assert deployed.roles() == set()


@pytest.mark.thorough
def test_a_ranker_is_trained_by_deployment_from_what_a_run_recorded(finished: Deployed) -> None:
    deployed = finished
    store = f"file://{deployed.runfile.parent}/store"
    deployed.ended(deployed.call("refresh-ranker", runs=["deployed-1"], store=store))
    start = States.to_start_from(open_store(store), "deployed").key(1)
    assert deployed.table("ranker")["ranker"] == start
    deployed.ended(deployed.start("algorithm.iterations=1", f"lengths.start={start}"))
    last = sorted(os.listdir(deployed.runfile.parent / "runs"))[-1]
    rows = (deployed.runfile.parent / "runs" / last / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["ranker_error"] < 1.0  # the first iteration is ranked


@pytest.mark.thorough
def test_weights_are_looked_after_by_deployment(finished: Deployed) -> None:
    folder = finished.runfile.parent
    url, target = f"file://{folder}/store/runs/deployed-1/weights", folder / "promoted"
    calls = {"keyframe": {}, "verify": {}, "collect": {"keep": 4}, "promote": {"folder": str(target)}}
    for name, more in calls.items():
        finished.ended(finished.call(name, url=url, **more))
        assert finished.table(name)["version"] == 16
    assert finished.table("verify")["wrong"] == 0
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(os.listdir(target))


@pytest.mark.thorough
def test_a_far_site_takes_part_by_a_work_pool_of_its_own(deployed: Deployed) -> None:
    for pool in ("near", "far"):
        deployed.post("work_pools/", {"name": pool, "type": "process"})
    deployed.prefect("deploy", "--all", "--no-prompt", "--prefect-file", "examples/prefect/two_sites.yaml")
    with working(deployed, "far"):
        deployed.ended(deployed.start("placement.generators=0", "placement.sites={far: {elsewhere: true}}"))
        flows = deployed.post("flow_runs/filter", {"deployments": {"name": {"any_": ["far"]}}})
        assert len(flows) == 1
        deployed.ended(UUID(flows[0]["id"]))
    run = sorted(os.listdir(deployed.runfile.parent / "runs"))[-1]
    row = deployed.table(f"{run}-sites")
    assert (row["site"], row["version"]) == ("site far", "weights 3")
    (cache,) = (deployed.home / "sites" / "far").glob(f"{run}-*")  # of this run, of this store
    assert (cache / "runs" / run / "weights").is_dir()


@pytest.mark.thorough
def test_the_flow_rebalance_calls_a_deployment_for_a_second_generator(deployed: Deployed, kafka: str) -> None:
    """Of a run in async mode; the one that was called makes samples, and both flows end when the run does."""
    store = open_store(f"file://{deployed.runfile.parent}/store")
    before = set(runs_of(store, "deployed"))
    train = deployed.start(
        "algorithm.iterations=100000", "algorithm.mode=async", "algorithm.staleness=1",
        "evaluation.problems=0",
    )  # fmt: skip
    wait_until(lambda: set(runs_of(store, "deployed")) - before, what="the run", deadline_s=60)
    (run,) = set(runs_of(store, "deployed")) - before
    balancing = deployed.call(
        "rebalance", run=run, store=store.url, least=2, most=2, deployment="join-run/local"
    )
    with closing(KafkaBus(kafka)) as bus:
        topics = Topics(run, find(store, run).spec.lengths.classes)

        def generators() -> set[str]:
            return {
                decode(one.value, Sample).generator for one in read_all(bus, topics.samples, deadline_s=150)
            }

        try:
            wait_until(lambda: len(generators()) == 2, what="samples of the second one", deadline_s=180)
        except AssertionError as error:
            flows = [
                one["id"]
                for one in deployed.post("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 3})
            ]
            raise AssertionError(f"{error}\n{deployed.said(flows)}") from None
        (decided,) = [
            decode(one.value, BalanceRecord) for one in read_all(bus, topics.balance, deadline_s=150)
        ]
    assert (decided.before, decided.after) == (1, 2), decided.reason
    assert decided.decided_by == "the flow rebalance"
    (called,) = deployed.post("flow_runs/filter", {"flow_runs": {"tags": {"all_": [f"balance:{run}"]}}})
    assert called["state"]["type"] == "RUNNING"
    deployed.post(f"flow_runs/{train}/set_state", {"state": {"type": "CANCELLING"}})
    wait_until(lambda: not deployed.roles(), what="the end of every process", deadline_s=90)
    wait_until(
        lambda: deployed.state(UUID(called["id"])) not in ("RUNNING", "CANCELLING"),
        what="the end of the flow run that was called", deadline_s=60,
    )  # fmt: skip
    deployed.ended(balancing)
    assert deployed.table(f"{run}-balance")["generators"] == "1 → 2"


def test_a_bad_parameter_is_refused_before_there_is_a_run(deployed: Deployed) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "prefect", "deployment", "run", "train/local", "-p", "runfile=5"],
        cwd=ROOT, env=deployed.env, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode != 0
    assert "runfile" in found.stdout + found.stderr


def test_a_cancelled_run_leaves_nothing_behind(deployed: Deployed) -> None:
    run = deployed.start("algorithm.iterations=100000", "evaluation.problems=0")
    wait_until(lambda: len(deployed.roles()) == 4, what="every process of the run", deadline_s=120)
    deployed.prefect("flow-run", "cancel", str(run))
    wait_until(lambda: not deployed.roles(), what="the end of every process", deadline_s=90)
    wait_until(lambda: deployed.state(run) == "CANCELLED", what="the state of the flow run", deadline_s=60)
