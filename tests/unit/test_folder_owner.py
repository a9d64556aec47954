"""A run's report folder has the files of this run alone, also if another run had its id."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flows.run.folder_owner import IDENTITY_FILE, take_report_folder
from flows.run.request import RunFailed
from infra.files.locks import LockHeld, locked
from infra.runs import ForkOrigin, RunRecord
from tests.factories import make_spec


def record(identity: str) -> RunRecord:
    return RunRecord(
        id="count-1", spec=make_spec(), bootstrap_servers="", store="", model="", created_at=0.0,
        identity=identity,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "count-1"
    (found / "trackers").mkdir(parents=True)
    (found / "trackers" / "wandb.json").write_text('{"step": 19}')
    (found / "metrics.jsonl").write_text('{"step": 19}\n')
    (found / ".lock").write_text("1")
    return found


def take(folder: Path, identity: str, *, new: bool = True) -> list[str]:
    said: list[str] = []
    take_report_folder(record(identity), folder, new=new, say=said.append)
    return said


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("old", ["", "old\n"])
def test_the_files_of_a_removed_run_are_put_aside(folder: Path, old: str) -> None:
    if old:
        (folder / IDENTITY_FILE).write_text(old)
    before, aside = names(folder), folder.with_name("count-1.before-1")
    with locked(folder / ".lock", what="run count-1", deadline_s=0.0):
        (said,) = take(folder, "new")
        assert f"the files of an earlier run count-1: they are in {aside} now" in said
        with pytest.raises(LockHeld), locked(folder / ".lock", what="run count-1", deadline_s=0.0):
            pass
    assert names(folder) == [".lock", IDENTITY_FILE]
    assert names(aside) == [name for name in before if name != ".lock"]
    assert (aside / "trackers" / "wandb.json").read_text() == '{"step": 19}'
    take(folder, "another")
    assert names(folder.with_name("count-1.before-2")) == [IDENTITY_FILE]
    assert (folder / IDENTITY_FILE).read_text() == "another\n"


def test_a_run_that_goes_on_keeps_its_files(folder: Path) -> None:
    """Also one of an older release, whose folder names no run."""
    before = names(folder)
    assert take(folder, "", new=False) == take(folder, "") == []
    assert names(folder) == before
    assert take(folder, "mine", new=False) == take(folder, "mine", new=False) == take(folder, "mine") == []
    assert names(folder) == sorted([*before, IDENTITY_FILE])


def test_a_move_that_was_cut_off_is_taken_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / IDENTITY_FILE).write_text("old")
    moved: list[Path] = []

    def full(entry: Path, target: Path) -> None:
        if moved:
            raise OSError("No space left on device")
        moved.append(entry.rename(target))

    with monkeypatch.context() as patch:
        patch.setattr("flows.run.folder_owner.shutil.move", full)
        with pytest.raises(RunFailed, match=r"run count-1 can't have .*count-1 for itself: No space left"):
            take(folder, "new")
    take(folder, "new", new=False)
    assert names(folder) == [".lock", IDENTITY_FILE]


def test_a_new_run_has_its_folder_for_itself(tmp_path: Path) -> None:
    (tmp_path / "count-1").mkdir()
    assert take(tmp_path / "count-1", "new") == []
    assert names(tmp_path) == ["count-1"] and names(tmp_path / "count-1") == [IDENTITY_FILE]


@pytest.mark.parametrize("later", [False, True])
def test_a_fork_has_its_folder_for_itself_though_its_first_start_is_a_resume(
    folder: Path, later: bool
) -> None:
    """A file that came after the fork was made is the fork's own, from an older release."""
    origin, made = ForkOrigin(run="count-0", step=1, iteration=1), time.time() + 3600
    if later:
        os.utime(folder / "metrics.jsonl", (made + 60, made + 60))
    fork = record("fork").model_copy(update={"fork": origin, "created_at": made})
    take_report_folder(fork, folder, new=False, say=lambda text: None)
    assert (names(folder) == [".lock", IDENTITY_FILE]) is not later
    assert folder.with_name("count-1.before-1").exists() is not later
