"""Flow runs on a real server: their names, tags, states and pages, with processes that only pretend."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.flow_runs.automations import ensure_automations
from flows.run import commands
from infra.stack.local import Stack
from tests.factories import TASK, make_model_files, make_spec
from tests.prefect_calls import ask
from tests.stacks import processes_of, words_of
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import tests.fakes.flow_with_fakes; from flows.cli import main; main()"


class Place:
    """A folder with a run file of many short iterations, and a Prefect server."""

    def __init__(self, folder: Path, stack: Stack, servers: str, name: str) -> None:
        self.folder, self.name, self.home = folder, name, folder / "home"
        self.api = str(stack.prefect_api_url)
        self.env = {**os.environ, **stack.env(), "STREAMRL_HOME": str(self.home), "PYTHONPATH": str(ROOT),
                    "FAKE_STEP_S": "0.3", "COLUMNS": "500"}  # fmt: skip
        make_model_files(folder / "model")
        (folder / "task.py").write_text(TASK)
        spec = make_spec(
            run=name, algorithm={"iterations": 300, "groups": 2},
            placement={"kafka": {"bootstrap_servers": servers}, "store": f"file://{folder}/store"},
            report=str(folder / "runs"),
        )  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))

    def streamrl(self, *words: str, code: int = 0) -> str:
        """What a user types."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words], cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    @contextmanager
    def terminal(self, *words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
        """A run in a terminal, as a flow run."""
        with (self.folder / "out").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "run", "run.yaml", *words],
                cwd=self.folder, env={**self.env, **env}, stdout=out, stderr=out,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def said(self) -> str:
        return (self.folder / "out").read_text()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return ask("POST", self.api + path, body)

    def flow_runs(self) -> list[dict[str, Any]]:
        """The flow runs of this place's runs."""
        found = self.post("/flow_runs/filter", {"flow_runs": {"name": {"like_": f"{self.name}-"}}})
        return [dict(one) for one in found]

    def flow_run(self) -> dict[str, Any]:
        (found,) = self.flow_runs()
        return found

    def state(self) -> str:
        found = self.flow_runs()
        return str(found[0]["state_type"]) if found else ""

    def set_state(self, **state: Any) -> None:
        self.post(f"/flow_runs/{self.flow_run()['id']}/set_state", {"state": state})

    def roles(self) -> set[str]:
        """The roles that have a process now."""
        words = {word for process in processes_of(self.home) for word in words_of(process)}
        return {role for role in (*commands.MODULES, "trainer") if f"tests.fakes.{role}" in words}

    def steps(self) -> list[int]:
        file = self.folder / "runs" / f"{self.name}-1" / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def trained(self, steps: int) -> None:
        def there() -> bool:
            return len(self.steps()) >= steps

        try:
            wait_until(there, what=f"{steps} steps", deadline_s=150)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()[-4000:]}") from None

    def reached(self, state: str, deadline_s: float = 60) -> None:
        wait_until(lambda: self.state() == state, what=f"the state {state}", deadline_s=deadline_s)


@pytest.fixture
def place(
    tmp_path: Path, prefect_stack: Stack, kafka: str, request: pytest.FixtureRequest
) -> Iterator[Place]:
    # a name of its own: the run of another test may have this one on the same broker, and the number 1
    name = request.node.name.replace("test_", "flow-", 1).replace("_", "-")[:30].strip("-")
    found = Place(tmp_path, prefect_stack, kafka, name)
    yield found
    for process in processes_of(found.home):
        process.kill()


@pytest.fixture
def impatient(place: Place) -> Iterator[None]:
    """Automations that wait for seconds, not for minutes. Only while no other flow run is there."""
    forget_automations(place)
    ensure_automations(place.post, silent_s=20.0)
    yield
    forget_automations(place)


def forget_automations(place: Place) -> None:
    for one in place.post("/automations/filter", {}):
        ask("DELETE", f"{place.api}/automations/{one['id']}")


def test_paused_in_a_terminal_and_cancelled(place: Place) -> None:
    with place.terminal() as process:
        place.trained(3)
        place.reached("RUNNING")
        run = place.flow_run()
        assert run["name"] == f"{place.name}-1"
        assert set(run["tags"]) == {f"run:{place.name}-1", "task:task", "mode:sync"}

        place.set_state(type="CRASHED", name="Crashed")  # by mistake: it is alive
        place.reached("RUNNING")

        assert "its terminal waits" in place.streamrl("pause", f"{place.name}-1")
        place.reached("PAUSED")
        wait_until(lambda: not place.roles(), what="the end of the run's processes", deadline_s=30)
        before = len(place.steps())
        assert process.poll() is None

        assert "goes on in its terminal" in place.streamrl("unpause", f"{place.name}-1")
        place.trained(before + 3)
        assert place.steps() == list(range(len(place.steps())))
        assert "no paused flow run" in place.streamrl("unpause", f"{place.name}-1", code=2)

        place.set_state(type="CANCELLING", name="Cancelling")
        assert process.wait(300) == 130
    assert place.state() == "CANCELLED"
    assert place.roles() == set()
    assert f"--resume {place.name}-1" in place.said()


@pytest.mark.thorough
def test_killed(place: Place, impatient: None) -> None:
    with place.terminal() as process:
        place.trained(1)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not place.roles(), what="the end of the run's processes", deadline_s=30)
    assert place.state() == "RUNNING"
    place.reached("CRASHED")
    assert "A retry goes on" in place.flow_run()["state"]["message"]


def test_stopped_by_ctrl_c(place: Place) -> None:
    with place.terminal() as process:
        place.trained(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    assert place.state() == "CANCELLED"
    assert "stopped; every process of the run has ended" in place.said()


@pytest.mark.thorough
def test_failed_and_retried_by_itself(place: Place) -> None:
    changes = ("--set", "placement.restarts=0", "--set", "algorithm.iterations=6")
    with place.terminal(*changes, FAKE_TRAINER_DIES="3", PREFECT_FLOWS_DEFAULT_RETRIES="1") as process:
        assert process.wait(600) == 0, place.said()
    run = place.flow_run()
    assert (run["state_type"], run["run_count"]) == ("COMPLETED", 2)
    assert place.steps() == list(range(6))
    assert [path.name for path in (place.folder / "runs").iterdir()] == [f"{place.name}-1"]


def test_failed_for_good(place: Place) -> None:
    with place.terminal("--set", "placement.restarts=0", FAKE_TRAINER_DIES="1") as process:
        assert process.wait(450) == 1, place.said()
    run = place.flow_run()
    assert run["state_type"] == "FAILED"
    assert run["state"]["message"].startswith("trainer is not started again, since it died: trainer (process")
    assert "\n" not in run["state"]["message"]
    pages = {one["key"]: one for one in place.post("/artifacts/filter", {"sort": "CREATED_DESC"})}
    assert "trainer is not started again" in pages[f"{place.name}-1-report"]["data"]
    assert f"{place.name}-1-folder" in pages
