"""A run's model and reward on a machine that is not the run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.run.far_files import model_here, reward_here
from flows.run.locations import models_folder
from flows.run.request import RunFailed
from infra.runs import RunRecord, unique_name
from infra.stores.opening import open_store
from infra.stores.store import Store
from infra.waiting import WaitedTooLong
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from schemas.runspec import RunSpec
from tests.factories import TASK, make_spec, make_tiny_model


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    return open_store(f"file://{tmp_path}/store")


def record(store: Store, model: Path, spec: RunSpec | None = None) -> RunRecord:
    return RunRecord(
        id="count-1", spec=spec or make_spec(deadlines={"start_s": 0.1}), bootstrap_servers="",
        store=store.url, model=str(model), created_at=0.0,
    )  # fmt: skip


def test_a_model_that_is_not_here_is_fetched_once(tmp_path: Path, store: Store) -> None:
    model = ModelFolder(make_tiny_model(tmp_path / "there"))
    weights = WeightStore(store, "count-1")
    for version in range(3):
        weights.publish_model(version, model.bits(), files=model.beside)
    run = record(store, tmp_path / "nowhere")
    found = model_here(run, None, store, store, lambda done, whole: None)
    assert found is not None
    assert ModelFolder(found).root == model.root
    assert ModelFolder(found).beside == model.beside
    nothing = open_store(f"file://{tmp_path}/nothing")
    assert model_here(run, None, nothing, nothing, lambda done, whole: None) == found


def test_a_site_joins_although_its_first_pull_was_killed(tmp_path: Path, store: Store) -> None:
    """Only its name, which nobody chooses, tells the folder: another one can't be named."""
    model = ModelFolder(make_tiny_model(tmp_path / "there"))
    WeightStore(store, "count-1").publish_model(0, model.bits(), files=model.beside)
    run = record(store, tmp_path / "nowhere")
    folder = models_folder() / unique_name(run)
    folder.mkdir(parents=True)
    for name in ("config.json", "old_tokenizer.json", ".model.safetensors.tmp"):
        (folder / name).write_text("half")
    assert model_here(run, None, store, store, lambda done, whole: None) == str(folder)
    assert ModelFolder(folder).root == model.root
    assert {path.name for path in folder.iterdir()} == {*model.beside, "model.safetensors", "weights.json"}


def test_two_runs_of_one_id_have_their_own_models(tmp_path: Path, store: Store) -> None:
    """Another store's run of that name was served, or the site was stuck for ever."""
    other, roots = open_store(f"file://{tmp_path}/other"), []
    for number, there in enumerate((store, other)):
        model = ModelFolder(make_tiny_model(tmp_path / f"there-{number}", seed=number))
        WeightStore(there, "count-1").publish_model(0, model.bits(), files=model.beside)
        found = model_here(record(there, tmp_path / "nowhere"), None, there, there, lambda done, whole: None)
        assert found is not None and ModelFolder(found).root == model.root
        roots.append(model.root)
    assert len(set(roots)) == 2


def test_a_model_that_is_here_is_not_fetched(tmp_path: Path, store: Store) -> None:
    folder = make_tiny_model(tmp_path / "model")
    run = record(store, folder)
    assert model_here(run, None, store, store, lambda done, whole: None) is None
    assert model_here(run, str(folder), store, store, lambda done, whole: None) == str(folder)
    with pytest.raises(RunFailed, match=r"no config\.json"):
        model_here(run, str(tmp_path), store, store, lambda done, whole: None)


def test_a_run_without_weights_is_waited_for(tmp_path: Path, store: Store) -> None:
    with pytest.raises(WaitedTooLong, match="the first weights of count-1"):
        model_here(record(store, tmp_path), None, store, store, lambda done, whole: None)


def test_the_model_of_an_adapter_has_to_be_brought(tmp_path: Path, store: Store) -> None:
    spec = make_spec(model={"lora": {"rank": 4}})
    with pytest.raises(RunFailed, match="--model FOLDER"):
        model_here(record(store, tmp_path, spec), None, store, store, lambda done, whole: None)


def test_a_reward_has_to_be_brought(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(store, tmp_path, make_spec(task={"python": "/nowhere/task.py"}))
    with pytest.raises(RunFailed, match=r"/nowhere/task.py is not on this machine.*--reward FILE.py:reward"):
        reward_here(run, None)
    (tmp_path / "mine.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    assert reward_here(run, "mine.py:reward") == f"{tmp_path}/mine.py:reward"
    assert reward_here(run, "a.module:reward") == "a.module:reward"
    with pytest.raises(RunFailed, match=r"his\.py is not on this machine"):
        reward_here(run, "his.py:reward")


def test_a_process_is_told_where_they_are(store: Store) -> None:
    run = record(store, Path("/there"))
    here = run.here("/here", "/here/task.py:reward")
    assert (here.model, here.spec.task.reward) == ("/here", "/here/task.py:reward")
    assert run.here(None, None) == run
