"""The engine's logprobs are the trainer's, for each kind of model that is listed as tried."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner, unscored
from consumers.losses.loss import Needs
from flows.run.inspection.engine_differences import BFLOAT16_ALONE
from flows.run.inspection.supported_models import MIXTURES, TRIED
from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from tests.factories import make_patch, make_sample, make_spec, make_tiny_kind, make_tiny_mixture
from tests.waiting import wait_until

COUNT, FIRST_TRAINED_ON = 6, 24  # samples; tokens up to which longrope has other frequencies
LONG_ROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
    "original_max_position_embeddings": FIRST_TRAINED_ON, "rope_theta": 10000.0,
}  # fmt: skip


def requests() -> Iterable[SampleRequest]:
    """Prompts of 4 to 29 tokens; answers that are short and long."""
    for number in range(COUNT):
        prompt = [4 + (number + place) % 9 for place in range(4 + 5 * number)]
        yield SampleRequest(f"{number:07d}-00", prompt, 12 + 9 * number, 1000 + number, 1.0)


def gaps(folder: Path, dtype: str) -> list[float]:
    """Return for each sample how far its logprobs are apart: the engine drew it, the trainer scores it."""
    spec = make_spec(
        model={"dtype": dtype, "follow_routes": False}, generator={"slots": 8, "kv_cache_mib": 4},
        sampling={"max_tokens": 100, "max_prompt_tokens": 56}, trainer={"microbatch_tokens": 512},
    )  # fmt: skip
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    options = EngineOptions(model=str(folder), spec=spec.model_dump_json())
    engine = RemoteEngine(options, threading.Event(), deadline_s=600).open()
    try:
        engine.wait_until_ready()
        engine.prepare(make_patch({name: one.detach() for name, one in net.named_parameters()}))
        wait_until(engine.is_ready, what="the weights to be prepared")
        engine.install(recompute=False)
        drawn = answers(engine)
    finally:
        engine.close()
    rows = [
        TrainingRow(
            replace(
                make_sample(spec, 0, number), prompt_tokens=np.array(one.prompt, np.int32),
                tokens=drawn[one.id].tokens, logprobs=drawn[one.id].logprobs,
            ),
            0, number,
        )
        for number, one in enumerate(requests())
    ]  # fmt: skip
    learner = TorchLearner(str(folder), spec)
    scored = learner.ask(unscored(rows, learner.loss), Needs(before="step")).before
    assert scored is not None
    ends = np.cumsum([row.sample.tokens.size for row in rows])
    parts = np.split(scored, ends[:-1])
    return [float(np.abs(part - row.sample.logprobs).max()) for part, row in zip(parts, rows, strict=True)]


def answers(engine: RemoteEngine) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}
    for one in requests():
        engine.submit(one)

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == COUNT

    wait_until(all_there, what=f"{COUNT} samples")
    return found


def made(folder: Path, kind: str, **config: Any) -> Path:
    if kind in MIXTURES:
        return make_tiny_mixture(folder, kind)
    return make_tiny_kind(folder, kind, head_dim=32, intermediate_size=64, **config)


@pytest.mark.thorough
def test_a_model_with_long_and_short_frequencies(tmp_path: Path) -> None:
    """A short sample's are not those that transformers would take, if it were alone."""
    folder = made(tmp_path / "phi3", "phi3", rope_parameters=LONG_ROPE)
    assert max(gaps(folder, "float32")) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TRIED)
def test_the_engine_draws_with_the_trainers_logprobs(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path / kind, kind)
    half = kind in BFLOAT16_ALONE
    assert max(gaps(folder, "bfloat16" if half else "float32")) < (0.1 if half else 1e-4)
