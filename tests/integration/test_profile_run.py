"""A run file is profiled with the real engine and learner, and nothing is left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from flows.planning.fitted_curves import DecodeCurve, TrainCurve
from flows.planning.measuring import measure, read_prompts
from flows.planning.profile_times import measured_engine, measured_learner
from flows.planning.profiled_learner import ProfilingFailed
from flows.run.locations import Places
from producers.engines.engine import EngineError
from schemas.profile import Profile
from schemas.runspec import RunSpec
from tests.factories import TASK, make_spec, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def spec_of(folder: Path, **sections: object) -> RunSpec:
    (folder / "task.py").write_text(TASK)
    return make_spec(
        task={"python": str(folder / "task.py")},
        sampling={"max_tokens": 60, "max_prompt_tokens": 8},
        trainer={"microbatch_tokens": 256, "bundle_tokens": 32},
        **{"generator": {"slots": 8, "kv_cache_mib": 4}, **sections},
    )  # fmt: skip


def places(folder: Path) -> Places:
    return Places("", f"file://{folder}/store")


def processes() -> set[int]:
    """The processes below this one: services of other tests are among them."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_run_file_is_profiled(model: Path, tmp_path: Path) -> None:
    spec, told = spec_of(tmp_path), list[tuple[float, str]]()
    before = processes()
    found = measure(spec, model, places(tmp_path), lambda *one: told.append(one), seconds=5)
    assert processes() <= before
    assert not list((tmp_path / "store").rglob("*.json"))
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert Profile.model_validate_json(found.model_dump_json()) == found
    assert found.generation.memory_tokens >= 8 * 68
    assert found.generation.start_s > 0.5
    assert max(one.samples for one in found.generation.points) == 8
    assert any(one.held_out for one in found.generation.points)
    assert 8 <= len(found.lengths.prompts) <= 64  # as many as there was time for
    assert all(1 <= one <= 60 for one in found.lengths.answers)
    assert (found.rewards.failed, found.weights.whole_bytes > 100_000) == (0, True)
    assert 0 < found.weights.install_s < 5
    decode, train = DecodeCurve.fitted(found.generation.points), TrainCurve.fitted(found.training.points)
    assert 0 < decode.batch_s(1) <= decode.batch_s(8) < 5
    assert train.token_s + train.micro_batch_s + train.sample_s > 0
    assert measured_engine(found).slots == 8
    assert measured_learner(found).token_s > 0


@pytest.mark.thorough
def test_an_engine_that_can_not_start_says_why_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, generator={"slots": 8, "kv_cache_mib": 1, "engine": "vllm"})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    before, children = set(threading.enumerate()), processes()
    with pytest.raises(EngineError):
        measure(spec, tmp_path / "broken", places(tmp_path), lambda share, text: None, seconds=5)
    assert set(threading.enumerate()) <= before
    assert processes() <= children


def test_a_task_without_problems_is_named(model: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (tmp_path / "task.py").write_text("def problems(split):\n    raise ValueError('no data')\n")
    with pytest.raises(ProfilingFailed, match="no data") as failed:
        read_prompts(spec, str(model))
    assert failed.value.lasting
