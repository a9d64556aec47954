"""Each of the seven examples of docs/extending is one new file, and works."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import flows.cli
from consumers.learners.learner import LocalLearner
from consumers.ranks.choose_learner import local_learner
from flows.cli import add_installed_commands
from infra.stores.opening import open_store
from infra.stores.store import StoreError
from producers.dispatch.policies.policy import policy_of
from schemas.importing import load_module
from schemas.loading import load_run_file
from schemas.registry import Registry
from schemas.runspec import SEAMS, RunSpec
from schemas.stores import OWN_STORES
from tests.examples import settings_of, write_examples
from tests.factories import TASK, make_spec, make_tiny_model
from tests.long.test_losses_optimum import REWARDS, learned
from tests.training import rows_of
from tests.unit.test_dispatch import CURVE, generate, job

RUN_FILE = "run: test\ntask: {python: task.py}\nmodel: {path: model}\n"
OF_SECTIONS = {"loss": "loss", "learner": "trainer", "engine": "generator", "policy": "dispatch"}


def spec_of(page: str, folder: Path, *changes: str) -> RunSpec:
    """The run file with the part that a page shows, and its file beside it."""
    write_examples(f"extending/{page}", folder)
    (folder / "task.py").write_text(TASK)
    (folder / "run.yaml").write_text(RUN_FILE)
    return load_run_file(folder / "run.yaml", [*(f"{key}={value}" for key, value in _said(page)), *changes])


def _said(page: str) -> list[tuple[str, Any]]:
    found = settings_of(f"extending/{page}")
    return [
        (f"{section}.{key}", value)
        for section, settings in found.items() for key, value in settings.items() if value is not None
    ]  # fmt: skip


def test_a_loss_learns(tmp_path: Path) -> None:
    spec_of("loss", tmp_path)
    section = {"import": f"{tmp_path}/my_loss.py:PositiveSettings", "negative": 0.0}
    assert learned(section, steps=80, rate=0.2)[-1] > 0.5 > 1 / len(REWARDS)


def test_a_learner_leaves_frozen_layers_alone(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    spec = spec_of("learner", tmp_path, "algorithm.learning_rate=0.01", "sampling.max_tokens=16")
    learner = local_learner(str(model), spec)
    before, rows = learner.weights(), rows_of(make_spec())
    step(learner, rows)
    changed = {name for name, tensor in learner.weights().items() if not tensor.equal(before[name])}
    assert changed and not [name for name in changed if "embed_tokens" in name or "layers.0" in name]


def step(learner: LocalLearner, rows: Any) -> None:
    from consumers.batches.micro_batches import plan

    learner.accumulate(plan(rows, learner.loss, 64, 0).batches)
    learner.step(learner.loss.total([row.sample for row in rows]))


def test_an_engine_is_chosen_by_its_file(tmp_path: Path) -> None:
    spec = spec_of("engine", tmp_path)
    assert spec.generator.engine == "PlainSettings" and spec.generator.slots == 8


def test_a_policy_dispatches_all_samples(tmp_path: Path) -> None:
    spec = spec_of("policy", tmp_path)
    jobs = [job(group, 10.0 + group) for group in range(40)]
    truth = {one.key: 10 + one.key[0] for one in jobs}
    seconds = generate(jobs, truth, [CURVE.table(4)] * 2, policy_of(spec))
    assert 0 < seconds < 60


def test_a_store_holds_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_examples("extending/store", tmp_path)
    monkeypatch.setenv(OWN_STORES, f"sqlite={file}:SqliteStore")
    url = f"sqlite://{tmp_path}/objects.db"
    open_store(url).put("a/b", b"123")
    assert open_store(url).get_part("a/b", 1, 1) == b"2" and open_store(url).list("a") == ["a/b"]
    assert make_spec(placement={"store": url}).placement.store == url
    monkeypatch.setenv(OWN_STORES, f"sqlite={file}:Nothing")
    with pytest.raises(StoreError, match=r"Nothing is no store: .*STREAMRL_STORES"):
        open_store(url)
    file.write_text("class HalfAStore:\n    def get(self, key): ...\n")
    monkeypatch.setenv(OWN_STORES, f"half={shutil.move(file, tmp_path / 'half.py')}:HalfAStore")
    with pytest.raises(StoreError, match=r"HalfAStore has no get_part, put, put_new, .*docs/extending/store"):
        open_store("half://x")


def test_commands_of_packages_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examples("extending/command", tmp_path)
    (tmp_path / "taken.py").write_text("def add_to(app):\n    @app.command()\n    def run(): ...\n")
    (tmp_path / "x-1.dist-info").mkdir()
    (tmp_path / "x-1.dist-info" / "METADATA").write_text("Name: x\nVersion: 1\n")
    (tmp_path / "x-1.dist-info" / "entry_points.txt").write_text(
        "[streamrl.commands]\nbroken = longest:nothing\nlongest = longest:add_to\ntaken = taken:add_to\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    app = typer.Typer()
    app.command("run")(lambda: None)
    add_installed_commands(app)
    said = CliRunner().invoke(app, ["--help"]).output
    assert "Show the longest sample of a step." in said
    assert [one.name for one in app.registered_commands] == ["run", None]


def test_a_command_that_can_t_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test_commands_of_packages_are_there(tmp_path, monkeypatch)
    said = capsys.readouterr().err
    assert "the command broken (longest:nothing) can't be loaded: AttributeError" in said
    assert (
        "the command taken (taken:add_to) can't be loaded: ValueError: there is a command run already" in said
    )


@pytest.mark.parametrize("page", OF_SECTIONS)
def test_in_our_own_folder_it_is_one_new_file_too(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example's file is put where ours are. Then its name is enough, and lists of them have it."""
    seam = SEAMS[OF_SECTIONS[page]]
    folder = load_module(seam.folder)
    write_examples(f"extending/{page}", tmp_path)
    (tmp_path / f"my_{page}.py").rename(tmp_path / f"mine_{page}.py")
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    assert "mine" in seam.built_in()
    section = getattr(make_spec(**{OF_SECTIONS[page]: {seam.key: "mine"}}), OF_SECTIONS[page])
    assert type(section).__module__ == f"{seam.folder}.mine_{page}"
    with pytest.raises(ValueError, match=r"'yours' is not one of .*'mine'"):
        seam.read({seam.key: "yours"})


def test_every_command_is_one_file() -> None:
    assert {one.callback.__name__ for one in flows.cli.app.registered_commands if one.callback} == {
        file.stem for file in Path(flows.cli.__file__).parent.glob("[a-z]*.py") if file.stem != "weights"
    }


def test_a_folder_with_two_things_in_a_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "two_thing.py").write_text("class OneThing: ...\nclass TwoThing: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(word="thing", folder="things", ending="thing")
    assert registry.built_in() == ["two"]
    with pytest.raises(TypeError, match=r"two_thing\.py: a class is expected whose name ends with Thing"):
        registry.own_class("two")


def test_a_weight_of_positive_samples(tmp_path: Path) -> None:
    """The page's formula: answers below the mean weigh `negative`."""
    module = load_module(str(write_examples("extending/loss", tmp_path)))
    loss = module.PositiveSettings(negative=0.25).make(make_spec())
    tokens = type(
        "Tokens", (), {"advantage": torch.tensor([1.0, -1.0]), "logprobs": torch.tensor([-2.0, -2.0])}
    )
    assert np.allclose(loss.of_tokens(tokens).numpy(), [2.0, -0.5])
