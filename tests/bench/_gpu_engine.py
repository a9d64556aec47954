"""The engine on one GPU beside plain vLLM with the same arguments: tokens a second, bits, and pauses.

A process of its own for each: `python -m tests.bench._gpu_engine {ours,plain} FOLDER SLOTS TOKENS`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infra import choices
from infra.weights.bits import Bits
from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.engine import SampleRequest

_MEMORY = 0.6  # share of the GPU
_CPU_MIB = 256  # of KV cache, to try the bench on a CPU
_CHANGES = (0.02, 1.0)  # of the weights


def prompts(count: int) -> list[list[int]]:
    """Prompts of 8 to 64 tokens."""
    return [np.random.default_rng(n).integers(2, 500, 8 + n % 57).tolist() for n in range(count)]


def requests(ids: list[int], tokens: int) -> list[SampleRequest]:
    """Samples by number: each has its prompt and its seed, whatever is drawn beside it."""
    texts = prompts(max(ids) + 1)
    return [SampleRequest(f"s{n}", texts[n], tokens, 1000 + n, 0.0, endless=True) for n in ids]


def ours(folder: str, slots: int, tokens: int) -> dict[str, Any]:
    """VllmEngine as a generator has it."""
    from producers.engines.vllm_in_process import GpuMemory, VllmEngine

    engine = VllmEngine(
        folder, dtype="bfloat16", slots=slots, max_model_len=tokens + 128, gpu=GpuMemory(_MEMORY),
        kv_cache_mib=None if choices.cuda() else _CPU_MIB,
    )  # fmt: skip

    def drawn(
        ids: list[int], made: dict[str, np.ndarray] | None = None
    ) -> tuple[dict[str, np.ndarray], float]:
        for one in requests(ids, tokens):
            engine.submit(replace(one, made=made[one.id].tolist()) if made else one)
        found: dict[str, np.ndarray] = {}
        began = time.perf_counter()
        while len(found) < len(ids):
            found |= {one.id: one.tokens for one in engine.step()}
        return found, time.perf_counter() - began

    every = list(range(slots))
    first, _ = drawn(every)
    again, seconds = drawn(every)
    alone, _ = drawn(every[:: max(1, slots // 4)])
    halves = {name: one[: tokens // 2] for name, one in first.items()}
    rest = {name: one[tokens // 2 :] for name, one in first.items()}
    resumed, _ = drawn(every, halves)
    return {
        "tokens_per_s": sum(one.size for one in again.values()) / seconds,
        "same_again": _alike(first, again), "same_in_other_batch": _alike(alone, again),
        "same_after_a_prefill": _alike(resumed, rest),
        "pauses": _pauses(engine, folder, slots, tokens),
    }  # fmt: skip


def _alike(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> float:
    return float(np.mean([np.array_equal(one, others[name]) for name, one in some.items()]))


def _pauses(engine: Any, folder: str, slots: int, tokens: int) -> dict[str, dict[str, float]]:
    """Bring new weights into the engine while it decodes."""
    held = {name: Bits(one.dtype, one.shape, one.data.copy())
            for name, one in ModelFolder(Path(folder)).bits().items()}  # fmt: skip
    found, since = {}, None
    for number, share in enumerate(_CHANGES):
        draw = np.random.default_rng(number)
        new = {
            name: Bits(one.dtype, one.shape,
                       one.data ^ (draw.random(one.data.size, np.float32) < share).astype(one.data.dtype))
            for name, one in held.items()
        }  # fmt: skip
        if since is None:  # before the first delta the engine has to know what it holds
            engine.prepare(PatchFile({}, held, since=None, root="0").read())
            engine.install(recompute=False)
            since = "0"
        whole = share == 1.0
        patch = PatchFile({} if whole else held, new, since=None if whole else since, root=str(number + 1))
        for one in requests(list(range(slots)), tokens):
            engine.submit(one)
        alone = [_step_s(engine) for _ in range(5)]
        prepared_s, beside = _beside_steps(engine, partial(_prepare, engine, patch))
        began = time.perf_counter()
        engine.install(recompute=False)
        pause_s = time.perf_counter() - began
        hashed_s, beside_hashes = _beside_steps(engine, engine.digests)
        if engine.digests() != model_digests(new):
            raise AssertionError("the engine holds other weights")
        found[f"{share:.0%}"] = {
            "pause_ms": pause_s * 1e3, "prepare_ms": prepared_s * 1e3, "digests_ms": hashed_s * 1e3,
            "step_ms": float(np.median(alone)) * 1e3,
            "longest_step_beside_ms": max(beside, default=0.0) * 1e3,
            "longest_step_beside_digests_ms": max(beside_hashes, default=0.0) * 1e3,
        }  # fmt: skip
        engine.abort(list(engine.unfinished()))
        engine.step()  # answers that ended at the install
        held, since = new, str(number + 1)
    return found


def _prepare(engine: Any, patch: PatchFile) -> None:
    engine.prepare(patch.read())


def _beside_steps(engine: Any, work: Callable[[], object]) -> tuple[float, list[float]]:
    """Do something in a thread beside steps. Return how long it took, and how long each step."""
    thread, steps = threading.Thread(target=work), list[float]()
    began = time.perf_counter()
    thread.start()
    while thread.is_alive():
        steps.append(_step_s(engine))
    return time.perf_counter() - began, steps


def _step_s(engine: Any) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def plain(folder: str, slots: int, tokens: int) -> dict[str, Any]:
    """vLLM itself, in one process as ours, invariant as ours."""
    from producers.engines.vllm_in_process import prepare_environment

    prepare_environment(1, batch_invariant=True)
    memory = (
        {"gpu_memory_utilization": _MEMORY} if choices.cuda() else {"kv_cache_memory_bytes": _CPU_MIB << 20}
    )
    from vllm import LLM, SamplingParams

    model = LLM(
        folder, dtype="bfloat16", max_model_len=tokens + 128, max_num_seqs=slots, seed=0,
        enable_prefix_caching=False, disable_log_stats=True, enforce_eager=not choices.cuda(), **memory,
    )  # fmt: skip
    texts = [{"prompt_token_ids": one} for one in prompts(slots)]
    found = {}
    for name, logprobs in (("tokens_per_s", 0), ("tokens_per_s_without_logprobs", None)):
        params = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        model.generate(texts, params, use_tqdm=False)
        began = time.perf_counter()
        made = model.generate(texts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        found[name] = sum(len(one.outputs[0].token_ids) for one in made) / seconds
    return found


if __name__ == "__main__":
    way = {"ours": ours, "plain": plain}[sys.argv[1]]
    print("RESULT", json.dumps(way(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
    os._exit(0)  # vLLM's threads may hold the process up
