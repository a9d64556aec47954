"""The wheel in an environment of its own, beside files of the user's that are called as our rooms are."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import yaml

from streamrl import __version__
from tests.factories import TASK, make_model_files, make_spec
from tests.wheels import env, run

ROOT = Path(__file__).parents[2]
ROOMS = ("flows", "consumers", "producers", "schemas", "infra")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with packages of the user's own."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f"raise RuntimeError('the user\\'s own {room}')\n")
    return tmp_path


def test_one_package_and_nothing_else_stands_at_the_top(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"streamrl", f"streamrl-{__version__}.dist-info"}
    assert {f"streamrl/{room}/__init__.py" for room in ROOMS} < set(names)
    assert "streamrl/py.typed" in names and "streamrl/infra/stack/kafka_jars/pom.xml" in names
    assert not [name for name in names if "tests" in name or "__pycache__" in name]


def test_commands_work_beside_a_users_own_packages(bin_folder: Path, elsewhere: Path) -> None:
    here = env(elsewhere)
    assert f"streamrl {__version__}" in run(bin_folder / "streamrl", "--version", cwd=elsewhere, **here)
    assert "python" in run(bin_folder / "streamrl", "doctor", cwd=elsewhere, **here).lower()
    said = run(bin_folder / "python", "-m", "streamrl.producers.feeder", "--help", cwd=elsewhere, **here)
    assert "--store" in said


def test_a_run_file_is_checked_and_its_task_imported_by_a_process_of_ours(
    bin_folder: Path, elsewhere: Path
) -> None:
    (elsewhere / "task.py").write_text(TASK)
    make_model_files(elsewhere / "model")
    spec = make_spec(placement={"store": f"file://{elsewhere}/store"})
    (elsewhere / "run.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    said = run(bin_folder / "streamrl", "run", "run.yaml", "--check", cwd=elsewhere, **env(elsewhere))
    assert "can be used" in said
