"""Prompts that vLLM's attention on CPUs goes through in several stretches: a sample's bits stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

from producers.engines.engine import SampleRequest
from producers.engines.vllm_in_process import VllmEngine
from tests.engine_draws import check_begins, run
from tests.factories import make_tiny_model

PROMPT, ANSWER = 2600, 12  # a stretch has up to 1,000 keys of this model where caches are large


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    model = flat_model(tmp_path_factory.mktemp("model"))
    yield VllmEngine(str(model), slots=8, max_model_len=PROMPT + ANSWER, kv_cache_mib=64)
    cleanup_dist_env_and_memory()


def flat_model(folder: Path) -> Path:
    """A model that attends to all tokens about alike, so that each way to add them has other bits."""
    make_tiny_model(folder)  # for its tokenizer
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=PROMPT + ANSWER, tie_word_embeddings=True,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def group(number: int) -> list[SampleRequest]:
    prompt = np.random.default_rng(number).integers(2, 500, PROMPT).tolist()
    return [
        SampleRequest(f"{number:07d}-{index:02d}", prompt, ANSWER, 10 * number + index, 1.0)
        for index in range(3)
    ]


@pytest.mark.parametrize("budget", [700, 4096])
@pytest.mark.parametrize("endless", [False, True])
def test_a_sample_has_the_same_bits_however_its_prompt_is_cut(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, budget: int, endless: bool
) -> None:
    """Alone and computed whole, or among others in pieces; found in the cache, or not (`endless`)."""
    requests = [replace(one, endless=endless) for number in range(3) for one in group(number)]
    alone = [run(engine, [replace(one, endless=True)])[one.id] for one in requests]
    monkeypatch.setattr(engine._scheduler, "max_num_scheduled_tokens", budget)
    before = engine.pace().shared
    together = run(engine, requests)
    assert (engine.pace().shared > before) is not endless
    check_begins(together, alone)
