"""`streamrl run`: what it refuses before anything is started, and how it ends."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.cli.shared import running
from flows.run.checks import check
from flows.run.inspection import inspect_start
from flows.run.request import RunCancelled, RunFailed, RunRequest, RunResult
from infra.bus import BusError
from infra.kafka_bus import KafkaBus
from tests.factories import make_model_files

RUN = "run: count\ntask: {python: task.py}\nmodel: {path: model}\n"
TASK = """
def problems(split):
    return [{"id": "a", "prompt": "1+1=", "answer": "2"}]

def reward(problem, completion):
    return 0.0
"""
SUMMARY = {
    "result": [
        {
            "what": "all held-out problems",
            "problems": 8,
            "before": 0.25,
            "after": 0.5,
            "gain": 0.25,
            "gain_error": 0.01,
        }
    ],
    "iterations": 3,
    "samples": 96,
    "training_s": 12.0,
    "samples_per_s": 8.0,
    "staleness": 0.5,
    "staleness_max": 1,
    "logprob_gap": 1e-5,
    "trainer_idle": 0.1,
    "generator_idle": 0.0,
    "rewards_failed": 2,
    "dead_letters": 1,
    "dead_letter_reasons": ["not a StreamRL record"],
    "reward_first": 0.1,
    "reward_last": 0.2,
}


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """In a folder with a run file that is fine."""
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "count.yaml").write_text(RUN)
    (tmp_path / "task.py").write_text(TASK)
    make_model_files(tmp_path / "model")
    return CliRunner()


def test_check_changes_nothing(cli: CliRunner, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = cli.invoke(app, ["run", "count.yaml", "--check", "--set", "algorithm.mode=async"])
    assert result.exit_code == 0
    assert result.output.endswith("count.yaml is fine: 100 iterations of 32 × 8 samples, async\n")
    things = [line.split()[1] for line in result.output.splitlines()[:-1]]
    assert things == ["model:", "task:", "tokenizer:", "reward:", "report:", "store:", "broker:"]
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before


def test_check_looks_at_the_ranker_to_start_with(cli: CliRunner) -> None:
    words = ["run", "count.yaml", "--check", "--set", "lengths.start=rankers/count/v000001.safetensors"]
    result = cli.invoke(app, words)
    assert result.exit_code == 2 and "`streamrl ranker RUN` makes one" in result.stderr
    result = cli.invoke(app, [*words, "--resume"])  # its trainer has learned by its own ranker since
    assert result.exit_code == 0, result.output


def test_a_broken_run_file_is_a_user_error(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "count.yaml").write_text(RUN + "algorithm: {mode: asynch}\n")
    result = cli.invoke(app, ["run", "count.yaml", "--check"])
    assert result.exit_code == 2
    assert result.stderr == (
        "count.yaml:4: algorithm.mode: 'asynch' is not one of 'sync', 'async' or 'offline'; "
        "did you mean 'async'?\n"
    )


@pytest.mark.parametrize("more", [[], ["--check"]])
def test_a_launcher_that_would_start_many_runs_is_refused(
    more: list[str], cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "run_here", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setenv("WORLD_SIZE", "16")
    result = cli.invoke(app, ["run", "count.yaml", *more])
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("WORLD_SIZE=16: a launcher has started `streamrl run` 16 times")
    join = "torchrun --nproc-per-node 4 --no-python streamrl join RUN --store URL --ranks 1"
    assert "\n  streamrl run count.yaml\n" in result.stderr and f"\n  {join}\n" in result.stderr
    assert join in (Path(__file__).parents[2] / "docs/how-to/ranks.md").read_text()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("said", ["", "1", "0", "many", "-2", "2.5"])
def test_one_process_of_a_launcher_may_start_a_run(
    said: str, cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    assert cli.invoke(app, ["run", "count.yaml", "--check"]).exit_code == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("task.python=tusk.py", "task.python: there is no file tusk.py; did you mean task.py?"),
        ("task.python=other_task", "task.python: there is no module other_task"),
        ("task.reward=task.py", "task.py' names no function: write it as FILE.py:reward or module:reward"),
        ("task.reward=task.py:rewrad", "task.py has no function rewrad(); did you mean 'reward'?"),
        ("model.path=nowhere", "model.path: there is no folder nowhere"),
        ("lengths.backbone=nowhere", "lengths.backbone: nowhere is not a folder with a Hugging Face model"),
        ("model={build: 'task.py:build'}", "task.py has no function build() (it has: problems, reward)"),
        ("task={jsonl: p.jsonl, reward: 'task.py:reward'}", "task.jsonl: there is no file p.jsonl"),
    ],
)
def test_files_that_are_not_there(change: str, expected: str, cli: CliRunner) -> None:
    result = cli.invoke(app, ["run", "count.yaml", "--check", "--set", change])
    assert result.exit_code == 2
    assert result.stderr.startswith("count.yaml: ")
    assert result.stderr.count(expected) == 1


def test_a_folder_that_is_no_model(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    result = cli.invoke(app, ["run", "count.yaml", "--check"])
    assert "has no config.json: it is not a Hugging Face model" in result.stderr


def test_the_task_is_imported_elsewhere_by_a_check(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK + "\nimport os\nos._exit(3)\n")
    result = cli.invoke(app, ["run", "count.yaml", "--check"])
    assert result.exit_code == 2
    assert "task.py:reward: the process ended with exit code 3" in result.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no')", "reward: .*task.py can't be imported: SystemExit: no"),
        ("import time\ntime.sleep(600)", r"task: the import of .*: it takes longer than 2 s \(deadlines"),
        ("def reward(problem, completion): return problem['x']", "reward: it fails on problem 'a': KeyE"),
        ("def problems(split): return [{'prompt': '1' * 999}]", "tokenizer: .*none of the first 1 could"),
    ],
)
def test_a_start_looks_at_the_task_before_anything_is_started(
    code: str, said: str, cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task.py").write_text(f"{TASK}\n{code}\n")
    monkeypatch.setattr(running, "run_here", lambda *_, **__: pytest.fail("it was started"))
    result = cli.invoke(app, ["run", "count.yaml", "--set", "deadlines.start_s=2"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(f"^count.yaml: {said}", result.stderr, re.MULTILINE), result.stderr
    assert len(result.stderr.splitlines()) <= 2 and "Traceback" not in result.stderr
    assert not (tmp_path / "home").exists()


def test_a_start_says_what_is_odd_and_goes_on(
    cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "[{'id': 'a', 'prompt': '1+1='}, {'id': 'b', 'prompt': '1' * 999}]"
    code = f"def problems(split): return {rows}\ndef reward(problem, completion): return float(completion[0])"
    (tmp_path / "task.py").write_text(code)
    monkeypatch.setattr(running, "run_here", lambda *_, **__: RunResult("count-1", Path("runs"), SUMMARY))
    result = cli.invoke(app, ["run", "count.yaml"])
    assert result.exit_code == 0
    assert "256 are allowed (sampling.max_prompt_tokens): 1 of 2 are left out" in result.stderr
    assert "reward: an empty answer has no reward: it fails on problem 'a': IndexError" in result.stderr


def test_a_start_looks_once_although_its_flow_looks_too(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK + "\nopen('looked', 'a').write('x')\n")
    spec = check(RunRequest("count.yaml"))
    for _ in range(2):
        inspect_start(spec, "count.yaml", lambda text: None)
    assert (tmp_path / "looked").read_text() == "x"


def test_all_that_is_wrong_is_said_at_once(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.replace("return 0.0", "return None"))
    (tmp_path / "model" / "config.json").write_text("{")
    (tmp_path / "model" / "tokenizer.json").unlink()
    changes = ["--set", "placement.kafka.replication=3", "--set", "lengths.backbone=nowhere"]
    result = cli.invoke(app, ["run", "count.yaml", "--check", *changes])
    assert result.exit_code == 2
    said = result.stderr.splitlines()
    assert len(said) == 5
    for line, expected in zip(
        said,
        [
            "count.yaml: model.path: .*config.json is damaged: .* Save the model again",
            "count.yaml: lengths.backbone: nowhere is not a folder",
            "model: .*has no tokenizer: save it there with",
            "reward: problem 'a': the reward is not a number, but a NoneType",
            "broker: the local Kafka .*, and has one broker: placement.kafka.replication is 3, set it to 1",
        ],
        strict=True,
    ):
        assert re.match(expected, line)


def test_a_run_id_needs_resume(cli: CliRunner) -> None:
    result = cli.invoke(app, ["run", "count.yaml", "count-3"])
    assert result.exit_code == 2
    assert "needs --resume before it" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["count.yaml"], RunRequest("count.yaml")),
        (["count.yaml", "--resume"], RunRequest("count.yaml", resume=True)),
        (["count.yaml", "--resume", "count-3"], RunRequest("count.yaml", resume="count-3")),
        (
            ["--set", "seed=2", "--set", "algorithm.groups=8", "count.yaml"],
            RunRequest("count.yaml", ("seed=2", "algorithm.groups=8")),
        ),
    ],
)
def test_what_is_asked_for(
    words: list[str], expected: RunRequest, cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunRequest] = []

    def run_here(request: RunRequest, console: object, *, prefect: bool, news: object) -> RunResult:
        asked.append(request)
        return RunResult("count-1", Path("runs/count-1"), SUMMARY)

    monkeypatch.setattr(running, "run_here", run_here)
    result = cli.invoke(app, ["run", *words])
    assert asked == [expected]
    assert result.exit_code == 0
    assert "+0.250 ± 0.010" in result.output
    assert "report: runs/count-1" in result.output
    assert "1 dead letters: not a StreamRL record" in result.output


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            RunFailed("trainer died\ngo on with the run: streamrl run f --resume count-1"),
            1,
            "go on with the run: streamrl run",
        ),
        (RunCancelled("run count-1 was cancelled"), 130, "was cancelled"),
        (KeyboardInterrupt(), 130, "stopped; every process of the run has ended"),
    ],
)
def test_how_it_ends(
    error: BaseException, code: int, said: str, cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(*_: object, **__: object) -> RunResult:
        raise error

    monkeypatch.setattr(running, "run_here", run_here)
    result = cli.invoke(app, ["run", "count.yaml"])
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_broker_that_does_not_answer_may_answer_later(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(bus: KafkaBus) -> int:
        raise BusError("Kafka at nowhere:9092 can't be reached")

    monkeypatch.setattr(KafkaBus, "broker_count", away)
    servers = ["--set", "placement.kafka.bootstrap_servers=nowhere:9092"]
    for words in (["run", "count.yaml"], ["run", "count.yaml", "--check"]):
        result = cli.invoke(app, words + servers)
        assert result.exit_code == 1
        assert "bootstrap_servers: Kafka at nowhere:9092 can't be reached" in result.stderr


def test_resuming_what_never_ran(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaBus, "broker_count", lambda bus: 1)
    result = cli.invoke(
        app,
        [
            "run",
            "count.yaml",
            "--resume",
            "--no-prefect",
            "--set",
            "placement.kafka.bootstrap_servers=nowhere:9092",
        ],
    )
    assert result.exit_code == 2
    assert "there is no run of the name count in file://" in result.stderr
