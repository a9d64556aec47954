"""The command line: help that teaches, errors in a line, and quick to be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.stack import doctor
from infra.stack.doctor import Check

COMMANDS = (
    "up",
    "down",
    "status",
    "run",
    "join",
    "doctor",
    "schema",
    "demo",
    "logs",
    "export",
    "rm",
    "skip",
    "runs",
    "samples",
    "stop",
    "archive",
    "sql",
    "profile",
    "plan",
    "simulate",
)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_help_names_every_command(cli: CliRunner) -> None:
    result = cli.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f" {command} " in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(command: str, cli: CliRunner) -> None:
    result = cli.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"streamrl {command}" in result.output.partition("Example")[2]


def test_an_unknown_command_is_a_user_error(cli: CliRunner) -> None:
    result = cli.invoke(app, ["trian"])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_what_is_heavy_is_not_imported_for_help() -> None:
    heavy = {
        "torch",
        "prefect",
        "kafka",
        "matplotlib",
        "transformers",
        "numpy",
        "fsspec",
        "pydantic",
        "pyarrow",
        "duckdb",
    }
    code = f"import sys, flows.cli; print(sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert found.stdout.strip() == "[]"


def test_a_check_imports_neither_torch_nor_prefect(tmp_path: Path) -> None:
    code = (
        "import sys; from flows.cli import app\n"
        "try: app(['run', 'nothing.yaml', '--check'])\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'prefect'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert found.stdout.strip() == "2 []"
    assert "nothing.yaml: no such file" in found.stderr


def test_schema_is_a_schema(cli: CliRunner) -> None:
    schema = json.loads(cli.invoke(app, ["schema"]).output)
    assert schema["title"] == "StreamRL run file"
    assert {"run", "task", "model"} <= set(schema["required"])


def test_status_with_nothing_there(cli: CliRunner, tmp_path: Path) -> None:
    result = cli.invoke(app, ["status"])
    assert result.exit_code == 0
    assert result.output.count("stopped") == 3
    assert f"no runs in file://{tmp_path}/home/store yet" in result.output
    found = json.loads(cli.invoke(app, ["status", "--json"]).output)
    assert {service["status"] for service in found.pop("services")} == {"stopped"}
    assert not found


@pytest.mark.parametrize(
    "words",
    [["status", "count-7"], ["logs", "count-7"], ["join", "count-7"], ["export", "count-7"]],
)
def test_a_run_that_is_not_there(words: list[str], cli: CliRunner) -> None:
    result = cli.invoke(app, words)
    assert result.exit_code == 2
    assert "there is no run count-7 in file://" in result.output
    assert "Traceback" not in result.output


def test_down_with_nothing_up(cli: CliRunner) -> None:
    result = cli.invoke(app, ["down"])
    assert (result.exit_code, result.output.strip()) == (0, "nothing was running")


def test_doctor_says_what_to_do(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Check("python", ok=True, found="3.11"),
        Check("java", ok=False, found="not found", fix="install Java 17"),
        Check("deepspeed", ok=False, found="not installed", fix="make setup", optional=True),
    ]
    monkeypatch.setattr(doctor, "checks", lambda *, deep: iter(found))
    result = cli.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "✗ java not found\n  → install Java 17" in result.output
    assert "– deepspeed" in result.output


def test_doctor_is_content_without_what_is_optional(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Check("deepspeed", ok=False, found="not installed", fix="make setup", optional=True)]
    monkeypatch.setattr(doctor, "checks", lambda *, deep: iter(found))
    assert cli.invoke(app, ["doctor", "--deep"]).exit_code == 0


def test_a_bug_of_ours_shows_its_traceback(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*, deep: bool) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "checks", broken)
    assert isinstance(cli.invoke(app, ["doctor"]).exception, ZeroDivisionError)
