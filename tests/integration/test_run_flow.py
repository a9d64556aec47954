"""A whole run with processes that only pretend: what is started again, and what every kind of end leaves."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from flows.run import commands
from flows.run.request import RunFailed
from flows.run.without_prefect import train_plainly
from flows.view.run_view import RunView
from infra.runs import RunError
from schemas.loading import RunFileError
from tests.factories import TASK, make_model_files, make_spec
from tests.stacks import processes_of, words_of
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FAKES = {role: f"tests.fakes.{role}" for role in commands.MODULES}

PROGRAM = """
import sys
from flows.run import commands
commands.MODULES.update({role: f"tests.fakes.{role}" for role in commands.MODULES})
from flows.cli import main
main()
"""


@pytest.fixture
def folder(tmp_path: Path, kafka: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a run file of five iterations; its home is in the environment of all that is started."""
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(commands, "MODULES", FAKES)
    make_model_files(tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK)
    name = re.sub("[^a-z0-9]+", "-", tmp_path.name.lower())
    spec = make_spec(
        run=name[:40].strip("-"),
        algorithm={"iterations": 5, "groups": 2},
        placement={"kafka": {"bootstrap_servers": kafka}, "store": f"file://{tmp_path}/store"},
        report=str(tmp_path / "runs"),
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    yield tmp_path
    for process in processes_of(tmp_path / "home"):
        process.kill()


def working(folder: Path) -> list[str]:
    """What runs for this folder, beside this process."""
    ours = ("tests.fakes", "infra.supervise", "3600")
    words = [word for process in processes_of(folder / "home") for word in words_of(process)]
    return [word for word in words if word.startswith(ours)]


def steps(folder: Path) -> list[dict[str, Any]]:
    (report,) = (folder / "runs").iterdir()
    return [json.loads(line) for line in (report / "metrics.jsonl").read_text().splitlines()]


def page(folder: Path) -> str:
    """The page that the run wrote of itself."""
    (report,) = (folder / "runs").iterdir()
    return (report / "report.html").read_text()


def test_a_run_and_its_report(folder: Path) -> None:
    result = train_plainly(str(folder / "run.yaml"))
    assert working(folder) == []
    assert [row["step"] for row in steps(folder)] == [0, 1, 2, 3, 4]
    assert (result.summary["steps"], result.summary["samples"], result.summary["version"]) == (5, 20, 5)
    assert [row["gain"] for row in result.summary["result"]] == [pytest.approx(0.5), pytest.approx(0.5)]
    files = {path.name for path in result.report.iterdir()}
    assert {
        "metrics.jsonl",
        "curves.png",
        "summary.json",
        "run.yaml",
        "model",
        "logs",
        "processes.jsonl",
        "queues.jsonl",
        "evaluations.jsonl",
    } <= files
    shown = page(folder)
    assert ">ended</span>" in shown and "5 optimizer steps" in shown and "held-out ± standard error" in shown
    assert "trainer-0</b>" in shown and "topics can&#x27;t be read" not in shown
    assert {path.name for path in (result.report / "model").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip


@pytest.mark.thorough
def test_a_trainer_that_is_killed_is_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRAINER_DIES", "2")
    train_plainly(str(folder / "run.yaml"))
    assert [row["step"] for row in steps(folder)] == [0, 1, 2, 3, 4]
    assert working(folder) == []


@pytest.mark.thorough
def test_a_killed_guard_is_started_again_and_the_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.3")
    killed: list[int] = []

    class Killing:
        def say(self, text: str) -> None: ...

        def progress(self, fraction: float, text: str) -> None: ...

        def show(self, view: RunView) -> None:
            if view.last is None or killed:
                return
            for process in processes_of(folder / "home"):
                if "infra.supervise.guard" in words_of(process):
                    killed.append(process.pid)
                    process.kill()

    result = train_plainly(str(folder / "run.yaml"), ["placement.restarts=0"], screen=Killing())
    assert len(killed) == 1 and result.summary["steps"] == 5
    assert [row["step"] for row in steps(folder)] == [0, 1, 2, 3, 4]
    assert working(folder) == []


def test_a_generator_that_can_not_be_kept_alive_is_left_out(folder: Path) -> None:
    class Sabotage:
        said: ClassVar[list[str]] = []

        def say(self, text: str) -> None:
            self.said.append(text)

        def progress(self, fraction: float, text: str) -> None: ...

        def show(self, view: RunView) -> None:
            for process in processes_of(folder / "home"):
                if words_of(process)[-2:] == ["--number", "1"]:
                    process.kill()

    changes = ["placement.restarts=0", "placement.generators=2", "algorithm.iterations=30"]
    result = train_plainly(str(folder / "run.yaml"), changes, screen=Sabotage())
    assert result.summary["steps"] == 30
    assert "died: generator-1" in result.summary["left_out"]["generator-1"]
    assert any("generator-1 is left out" in text for text in Sabotage.said)


def test_a_process_that_can_not_go_on_is_named_with_its_last_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "MODULES", {**FAKES, "feeder": "tests.fakes.no_such_module"})
    with pytest.raises(RunFailed) as caught:
        train_plainly(str(folder / "run.yaml"))
    message = str(caught.value)
    assert "feeder (process " in message
    assert "ended with exit code 1; its log is " in message
    assert "No module named tests.fakes.no_such_module" in message
    assert "go on with the run: streamrl run " in message.splitlines()[-1]
    assert working(folder) == []
    assert ">failed</span>" in page(folder) and "No module named tests.fakes.no_such_module" in page(folder)


def test_resuming_with_other_settings_is_refused(folder: Path) -> None:
    train_plainly(str(folder / "run.yaml"))
    with pytest.raises(RunError, match=r"algorithm\.group_size = 2; the run file now says 4"):
        train_plainly(str(folder / "run.yaml"), ["algorithm.group_size=4"], resume=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.thorough(but=["2"])
def test_a_run_that_is_stopped_leaves_nothing_and_is_resumed(
    number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", str(folder / "run.yaml"), "--no-prefect", "--set", "algorithm.iterations=200"]
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=ROOT, env={**os.environ, "FAKE_STEP_S": "0.2"}, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        wait_until(
            lambda: "iteration" in (folder / "out").read_text(), what="some steps of the run", deadline_s=90
        )
        assert len(working(folder)) == 5, "guard, three roles and the generator's child"
        process.send_signal(number)
        code = process.wait(200)
    finally:
        process.kill()
    wait_until(lambda: working(folder) == [], what="the end of every process", deadline_s=40)
    told = (folder / "out").read_text()
    if number != signal.SIGKILL:
        assert code == 130
        assert "stopped; every process of the run has ended" in told
        assert "--set algorithm.iterations=200 --resume " in told
        assert ">interrupted</span>" in page(folder) and "optimizer steps" in page(folder)
    done = train_plainly(str(folder / "run.yaml"), ["algorithm.iterations=30"], resume=True)
    assert [row["step"] for row in steps(folder)] == list(range(done.summary["steps"]))
    assert done.summary["steps"] >= 30
    assert ">ended</span>" in page(folder)


FAILING = """
import sys
from infra.roles.entry import run_role
from producers.problems import TaskError

def body(context):
    raise TaskError("problem 3 of task.jsonl has no text in 'prompt'")

sys.exit(run_role("ROLE", body))
"""


@pytest.mark.parametrize("role", ["feeder", "generator"])
@pytest.mark.thorough(but=["generator"])
def test_an_error_that_comes_again_ends_the_command_at_once_in_one_paragraph(
    role: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"failing_{role}.py").write_text(FAILING.replace("ROLE", role))
    program = PROGRAM.replace(
        "from flows.cli", f"commands.MODULES['{role}'] = 'failing_{role}'\nfrom flows.cli"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder)]))
    done = subprocess.run(
        [sys.executable, "-c", program, "run", str(folder / "run.yaml"), "--no-prefect"],
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    first, second, *others = done.stderr.strip().splitlines()
    assert not others, done.stderr
    name = "feeder" if role == "feeder" else "generator-0"
    (report,) = (folder / "runs").iterdir()
    assert first == "problem 3 of task.jsonl has no text in 'prompt'"
    assert second == (
        f"({name} ended by this error, and another start would, too; the log is {report}/logs/{name}.log)"
    )
    for word in ("started again", "left out", "resume", "Traceback", "problem 3"):
        assert word not in done.stdout, word
    assert (report / "logs" / f"{name}.log").read_text().count("problem 3") == 1
    assert working(folder) == []


def test_nothing_is_started_if_something_is_wrong(folder: Path) -> None:
    (folder / "task.py").write_text(TASK + "\nraise OSError('no such disk')\n")
    with pytest.raises(RunFileError, match=r"reward: .*task.py can't be imported: OSError: no such disk"):
        train_plainly(str(folder / "run.yaml"))
    assert not (folder / "runs").exists() and not (folder / "store").exists()


@pytest.mark.thorough
def test_failing_rewards_are_said_once_each_and_in_the_summary(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake trainer's records have a reason; the flow says it, and the summary keeps it."""
    monkeypatch.setenv("FAKE_REWARDS_FAIL", "KeyError: 'solution'")
    said: list[str] = []

    class Listening:
        def say(self, text: str) -> None:
            said.append(text)

        def progress(self, fraction: float, text: str) -> None: ...

        def show(self, view: RunView) -> None: ...

    result = train_plainly(str(folder / "run.yaml"), screen=Listening())
    (line,) = [text for text in said if "have no reward" in text]
    assert re.fullmatch(
        r"1 of the \d samples of iteration \d have no reward: KeyError: 'solution' \(as of sample s-\d\)",
        line,
    )
    assert result.summary["told"] == [line]
    assert result.summary["rewards_failed"] == 5
