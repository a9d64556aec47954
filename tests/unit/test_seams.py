"""Seams: a run file chooses code by name or by file, and records can be read without that code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from consumers.losses.grpo_loss import Grpo, GrpoSettings
from consumers.losses.loss import loss_of
from consumers.steps.step_record import recipe_of
from infra.contents import contents_of
from infra.resuming import other_bits, refused
from infra.runs import RunError, RunRecord
from schemas.importing import BadImport
from schemas.loading import RunFileError, load_run_file
from schemas.losses import LOSSES
from schemas.runspec import SEAMS, RunSpec
from schemas.seams import LOAD
from schemas.stores import STORES
from tests.factories import make_spec

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "specs.json").read_text())
MINE = '''
from pathlib import Path

from pydantic import Field

from consumers.losses.loss import GroupLoss, LossSettings

Path("imported").touch()


class Mine(LossSettings):
    """A loss of a user's own."""

    strength: float = Field(2.0, gt=0)

    def make(self, spec):
        return MyLoss(self, spec)


class MyLoss(GroupLoss):
    def of_tokens(self, tokens):
        return -self.settings.strength * tokens.advantage * tokens.logprobs


class NoLoss:
    pass


class Half(LossSettings):
    pass


class Fails(Mine):
    @property
    def always_needs_reference(self):
        return 1 / 0
'''
RUN_FILE = """
run: mine
task: {python: task.py}
model: {path: model}
loss: {import: "my_loss.py:Mine", strength: 3, kl: 0.1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's files. The code leaves a mark there when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loss.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    return tmp_path


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("streamrl_user_")]:
        del sys.modules[name]


@pytest.mark.parametrize("old", RECORDED, ids=lambda old: old["recipe"])
def test_what_was_recorded_before_there_were_seams_means_the_same(old: dict[str, Any]) -> None:
    spec = RunSpec.model_validate(old["spec"])
    assert recipe_of(spec) == old["recipe"]
    now = RunSpec.model_validate(spec.model_dump(mode="json"))
    assert recipe_of(now) == old["recipe"] and not refused(spec, now, {}, {}) and not other_bits(spec, now)


def test_every_built_in_thing_can_be_chosen_by_its_name() -> None:
    names = {section: seam.built_in() for section, seam in SEAMS.items()}
    assert names["loss"] == ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "cispo", "gspo", "tb"]
    assert names["trainer"] == ["torch", "deepspeed", "fsdp"] and names["generator"] == ["vllm", "served"]
    assert names["dispatch"] == ["deadline", "longest_first", "round_robin", "algorithm2", "random"]
    assert names["trackers"] == ["csv", "tensorboard", "wandb", "mlflow", "trackio"]
    assert STORES.built_in() == ["file", "s3"]
    for section, seam in SEAMS.items():
        for name in names[section]:
            given = {seam.key: name}
            chosen = getattr(make_spec(**{section: [given] if section == "trackers" else given}), section)
            chosen = chosen[0] if section == "trackers" else chosen
            assert type(chosen) is seam.class_of(name) and getattr(chosen, seam.key) == name
            assert chosen.__doc__ and all(field.description for field in type(chosen).model_fields.values())


def test_settings_are_read_without_torch() -> None:
    program = "import sys, schemas.reference as r; r.reference_page(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_a_run_file_brings_its_own_loss(folder: Path) -> None:
    loss = loss_of(load_run_file(folder / "run.yaml"))
    assert type(loss).__name__ == "MyLoss" and loss.settings.kl == 0.1
    assert loss.settings.kind == "Mine" and loss.settings.model_dump()["strength"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss.strength=-1", "loss.strength: input should be greater than 0"),
        ("loss.strenght=1", "loss.strenght: unknown key; did you mean 'strength'"),
        ("loss.clip_low=.1", "loss: Mine has no clip_low; it has strength"),
        ("loss.import=my_loss.py:NoLoss", "loss.import: .*NoLoss is no loss: a class is expected that"),
        ("loss.import=my_loss.py:Nobody", "loss.import: .*Nobody is no loss"),
        ("loss.import=my_loss.py:Half", "loss.import: .*Half has no make.*docs/extending/loss"),
        ("loss={import: 'my_loss.py:Fails', reference: x}", "loss: Fails can't be set up: ZeroDivisionError"),
        ("loss.import=your_loss.py:Mine", "loss.import: .*your_loss.py: no such file"),
        ("loss.import=my_loss.py", "loss.import: .*write it as FILE.py:CLASS or module:CLASS"),
        ("loss.kind=grpo", "loss.kind: import chooses the loss already: leave kind out"),
        ("loss={kind: grop}", "loss.kind: 'grop' is not one of 'grpo', .*did you mean 'grpo'"),
        ("loss={kind: 3}", "loss.kind: 3 is not one of 'grpo'"),
        ("dispatch={policy: sometimes}", "dispatch.policy: 'sometimes' is not one of 'deadline'"),
        ("generator={engine: vlm}", "generator.engine: 'vlm' is not one of 'vllm' or .*did you mean 'vllm'"),
        ("trainer={learner: torsh}", "trainer.learner: 'torsh' is not one of .*did you mean 'torch'"),
    ],
)  # fmt: skip
def test_errors_name_the_setting_and_what_is_allowed(folder: Path, change: str, message: str) -> None:
    with pytest.raises(RunFileError, match=message):
        load_run_file(folder / "run.yaml", [change])


def test_code_that_fails_says_so(folder: Path) -> None:
    (folder / "my_loss.py").write_text("1 / 0\n")
    with pytest.raises(RunFileError, match=r"run\.yaml:5: loss\.import: .*ZeroDivisionError"):
        load_run_file(folder / "run.yaml")


def test_reading_a_record_runs_no_code_but_ours(folder: Path) -> None:
    written = load_run_file(folder / "run.yaml")
    (folder / "imported").unlink()
    forget()
    said = written.model_dump(mode="json")
    read = RunSpec.model_validate(said)
    assert not (folder / "imported").exists()
    assert read.model_dump(mode="json") == said and read.loss.kl == 0.1 and not read.loss.is_read
    loss = loss_of(read)
    assert (folder / "imported").exists() and loss.settings.model_dump()["strength"] == 3


def test_a_record_that_lies_about_its_code_is_refused_by_name(folder: Path) -> None:
    said = load_run_file(folder / "run.yaml").model_dump(mode="json")
    said["loss"]["strength"] = -1
    with pytest.raises(ValueError, match="resample must be a number from 0 to 64, not '9'"):
        RunSpec.model_validate(said | {"loss": said["loss"] | {"resample": "9"}})
    record = RunRecord(
        id="mine-1", spec=RunSpec.model_validate(said), bootstrap_servers="", store="",
        model="", created_at=0.0,
    )  # fmt: skip
    with pytest.raises(RunError, match="run mine-1: loss Mine: strength: Input should be greater than 0"):
        record.with_code("loss")
    assert record.with_code("trainer", "generator", "dispatch") == record


def test_a_resumed_run_has_the_same_code(folder: Path) -> None:
    spec = load_run_file(folder / "run.yaml")
    before = contents_of(spec, "")
    assert "loss.import" in before
    (folder / "my_loss.py").write_text(MINE + "\n")
    assert "other content of loss.import" in refused(spec, spec, before, contents_of(spec, ""))
    other = load_run_file(folder / "run.yaml", ["loss.strength=4"])
    assert "loss.strength" in refused(spec, other, before, before)


def test_an_installed_package_brings_a_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real installed package: its metadata is what `importlib.metadata` finds on the path."""
    site = folder / "site"
    (site / "their_package-1.0.dist-info").mkdir(parents=True)
    (site / "their_package-1.0.dist-info" / "METADATA").write_text("Name: their-package\nVersion: 1.0\n")
    (site / "their_package-1.0.dist-info" / "entry_points.txt").write_text(
        "[streamrl.losses]\ntheirs = their_package:Mine\n"
    )
    (site / "their_package.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(site))
    spec = load_run_file(folder / "run.yaml", ["loss={kind: theirs, strength: 5}"])
    assert spec.loss.kind == "theirs" and type(loss_of(spec)).__name__ == "MyLoss"
    monkeypatch.undo()
    sys.modules.pop("their_package")
    read = RunSpec.model_validate(spec.model_dump(mode="json"))  # where the package is not installed
    assert read.loss.kind == "theirs"
    with pytest.raises(BadImport, match="'theirs' is not one of"):
        LOSSES.loaded(read.loss)


def test_settings_can_be_given_as_a_section_or_as_a_name() -> None:
    for given in ("grpo", {"kind": "grpo"}, {}, GrpoSettings()):
        assert type(loss_of(make_spec(loss=given))) is Grpo
    assert RunSpec.model_validate(make_spec(loss="rloo"), context=LOAD).loss.kind == "rloo"
