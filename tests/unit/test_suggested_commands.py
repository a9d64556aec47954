"""Commands that are suggested can be copied as they are: each is taken by the command that it names."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flows.cli import app
from flows.cli.shared.talk import shares
from flows.run.failure_page import page_on_failure
from flows.run.locations import Places, named_as
from flows.run.phases import resume_hint
from flows.run.recorded_samples import recorded_samples
from flows.run.replaying import opened_source
from flows.run.request import RunFailed, RunRequest
from flows.run.suggested_commands import (
    OF_ARCHIVES,
    OF_OWN_CODE,
    OF_STEP_FILES,
    SuggestedCommands,
)
from infra import runs
from schemas.topics import Topics
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World

URL = "s3://bucket/a store"


def all_commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_which_commands_have_which_options() -> None:
    options = {
        name: {option for one in command.params for option in one.opts}
        for name, command in all_commands().items()
    }
    having = {option: {name for name, known in options.items() if option in known} for option in (
        "--archive", "--own-code", "--store",
    )}  # fmt: skip
    assert having["--archive"] == OF_ARCHIVES
    assert having["--own-code"] == OF_OWN_CODE
    assert OF_ARCHIVES | OF_STEP_FILES | {"logs", "status", "archive"} <= having["--store"]


@pytest.mark.parametrize("name", sorted(OF_ARCHIVES | {"logs", "status"}))
def test_what_was_asked_for_is_asked_for_again(name: str) -> None:
    words = shlex.split(SuggestedCommands("a-1", URL, archive_alone=True).command(name, "--x", "b; c"))
    assert words[:5] == ["streamrl", name, "a-1", "--x", "b; c"] and words[-2:] == ["--store", URL]
    assert ("--archive" in words) == (name in OF_ARCHIVES)


def test_of_a_step_file_it_names_the_file_or_else_the_run(tmp_path: Path) -> None:
    file = str(tmp_path / "my step.tar.zst")
    said = SuggestedCommands.as_asked("a-1", file, "local", own_code=True)
    assert shlex.split(said.command("replay", "--step", "3")) == [
        "streamrl", "replay", file, "--step", "3", "--own-code",
    ]  # fmt: skip
    assert shlex.split(said.command("samples", "--step", "3"))[:3] == ["streamrl", "inspect", file]
    assert said.command("bundle", "--step", "3") == "streamrl bundle a-1 --step 3"


def test_a_suggested_command_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(make_tiny_model(tmp_path / "model", layers=1, width=16))
    algorithm = {"iterations": 2, "groups": 2, "group_size": 2, "learning_rate": 1e-2}
    spec = make_spec(algorithm=algorithm, trainer={"checkpoint_every": 1, "keep_checkpoints": 2})
    context = make_context(spec, tmp_path / "a run")
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    World(context, model).live()
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    cli = lambda *words: CliRunner().invoke(app, list(words))  # noqa: E731
    found = cli("bisect", "test-1", "--when", "reward > -1e9", "--store", context.store.url)
    suggested = shlex.split(found.stdout.strip().splitlines()[-1])
    assert suggested[-2:] == ["--store", context.store.url]
    assert cli(*suggested[1:]).exit_code == 0
    assert "--store" in cli("replay", "test-1", "--step", "9", "--store", context.store.url).output


def test_hints_of_a_replay_name_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(make_spec(), tmp_path)
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    for name, model in (("test-1", "nowhere"), ("test-2", str(tmp_path))):
        runs.create(
            context.store, context.spec, bootstrap_servers="none", model=model, topics=set(), run_id=name
        )
    url = context.store.url
    with (
        pytest.raises(RunFailed, match=f"`streamrl bundle test-1 --archive --store {url}`"),
        opened_source("test-1", url, archive_alone=True),
    ):
        pass
    monkeypatch.setattr("flows.run.recorded_samples.samples_topic", lambda handle: Topics("a-1", 1).samples)
    with (
        pytest.raises(RunFailed, match=f"`streamrl replay a-1 --sample ID --store {url}`"),
        recorded_samples("test-2", url, None, None),
    ):
        pass


def test_how_to_go_on_with_a_run_can_be_copied() -> None:
    request = RunRequest("my runs/a.yaml", ("task.system=Be brief", "algorithm.mode=sync"))
    said = resume_hint(request, "a-1").removeprefix("go on with the run: ")
    assert shlex.split(said) == [
        "streamrl", "run", "my runs/a.yaml", "--set", "task.system=Be brief", "--set", "algorithm.mode=sync",
        "--resume", "a-1",
    ]  # fmt: skip


def test_the_store_is_named_unless_it_is_that_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    assert (
        SuggestedCommands("a-1", named_as(f"file://{tmp_path}/home/store")).command("rm") == "streamrl rm a-1"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.run.failure_page.write_page", lambda *_, **__: 1 / 0)
    record = make_context(make_spec(), tmp_path).record
    said: list[str] = []
    with pytest.raises(RunFailed), page_on_failure(record, Places("none", URL), said.append):
        raise RunFailed("the trainer died")
    assert said == [f"the page of the run: streamrl report {record.id} --store '{URL}' writes it"]


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "run.yaml"], ["simulate", "run.yaml"], ["bundle", "a-1"],
        ["what-if", "a-1", "--from", "1", "--set", "algorithm.learning_rate=1"],
    ],
)  # fmt: skip
def test_a_file_without_a_folder_is_refused_before_any_work(words: list[str]) -> None:
    result = CliRunner().invoke(app, [*words, "-o", "nowhere/at/all.png"])
    assert result.exit_code == 2 and "-o nowhere/at/all.png: there is no folder nowhere/at" in result.stderr


def test_a_bar_leaves_standard_output_to_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    with shares() as progress:
        progress(0.5, "trial")
    print("{}")
    assert capfd.readouterr().out == "{}\n"
