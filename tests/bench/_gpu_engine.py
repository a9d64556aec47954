"""The engine on one GPU beside plain vLLM with the same arguments: tokens a second, bits, and pauses.

A process of its own for each: `python -m tests.bench._gpu_engine {ours,plain} FOLDER SLOTS TOKENS`. Ours
leaves vLLM's arguments and some samples beside the model, and plain vLLM takes these arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
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
import torch

from infra import choices
from infra.weights.bits import Bits
from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.engine import SampleRequest

_MEMORY = 0.6  # share of the GPU
_CPU_MIB = 256  # of KV cache, to try the bench on a CPU
_CHANGES = (0.015, 0.02, 0.028, 0.069, 1.0)  # of the weights
_GAPS = 80  # samples whose logprobs are compared with the learner's
_WARM = 16  # tokens of each sample that are drawn before times are taken
_ARGUMENTS, DRAWN = "vllm_arguments.json", "drawn.npz"
_SECTIONS = ("model_config", "cache_config", "scheduler_config", "parallel_config", "compilation_config")
_PLAIN = bool | int | float | str | None
DIFFERS = {
    "draws": "each sample has a seed in both; ours draws by kernels of its own, vLLM by its sampler, which "
    "draws row by row where samples have seeds. So vLLM is timed without seeds as well",
    "logprobs": "ours always keeps the drawn token's logprob; vLLM is timed with logprobs=0, and without",
    "attention": "ours computes prefills and decode steps by one kernel, for equal bits after a prefill; "
    "vLLM chooses by step",
    "weights": "ours holds them so that new ones can be written in place and hashed",
}


def settings_of(config: Any) -> dict[str, _PLAIN]:
    """Return the plain values of vLLM's configuration, by section and name."""
    return {
        f"{section}.{field.name}": value
        for section in _SECTIONS
        for field in dataclasses.fields(getattr(config, section))
        if isinstance(value := getattr(getattr(config, section), field.name, None), _PLAIN)
    }


def prompts(count: int) -> list[list[int]]:
    """Prompts of 8 to 64 tokens."""
    return [np.random.default_rng(n).integers(2, 500, 8 + n % 57).tolist() for n in range(count)]


def requests(ids: list[int], tokens: int) -> list[SampleRequest]:
    """Samples by number: each has its prompt and its seed, whatever is drawn beside it."""
    texts = prompts(max(ids) + 1)
    return [SampleRequest(f"s{n}", texts[n], tokens, 1000 + n, 0.0, endless=True) for n in ids]


def _note_arguments(file: Path) -> None:
    """Have the next engine of this process write the arguments that it gives vLLM to a file."""
    module: Any = importlib.import_module("producers.engines.vllm_in_process")
    merged = module.merged_arguments

    def noted(own: dict[str, Any], *rest: Any) -> dict[str, Any]:
        found: dict[str, Any] = merged(own, *rest)
        file.write_text(json.dumps(found))
        return found

    module.merged_arguments = noted


def ours(folder: str, slots: int, tokens: int) -> dict[str, Any]:
    """VllmEngine as a generator has it."""
    from producers.engines.vllm_in_process import GpuMemory, VllmEngine

    _note_arguments(Path(folder).with_name(_ARGUMENTS))
    engine = VllmEngine(
        folder, dtype="bfloat16", slots=slots, max_model_len=tokens + 128, gpu=GpuMemory(_MEMORY),
        kv_cache_mib=None if choices.cuda() else _CPU_MIB,
    )  # fmt: skip

    def drawn(
        ids: list[int],
        made: dict[str, np.ndarray] | None = None,
        logprobs: dict[str, np.ndarray] = {},  # noqa: B006
    ) -> tuple[dict[str, np.ndarray], float]:
        found: dict[str, np.ndarray] = {}
        began = time.perf_counter()  # plain vLLM's time counts from here, too
        for one in requests(ids, tokens):
            engine.submit(replace(one, made=made[one.id].tolist()) if made else one)
        while len(found) < len(ids):
            ended = engine.step()
            found |= {one.id: one.tokens for one in ended}
            logprobs |= {one.id: one.logprobs for one in ended}
        return found, time.perf_counter() - began

    every = list(range(slots))
    logprobs: dict[str, np.ndarray] = {}
    first, _ = drawn(every, logprobs=logprobs)
    _keep(Path(folder).with_name(DRAWN), [(first[f"s{n}"], logprobs[f"s{n}"]) for n in every[:_GAPS]])
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
        "recompute": _recomputed(engine, slots, tokens),
        "settings": settings_of(engine._engine.vllm_config),
    }  # fmt: skip


def _keep(file: Path, samples: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write tokens and logprobs of samples to a file."""
    arrays: dict[str, Any] = {}
    for number, (tokens, logprobs) in enumerate(samples):
        arrays |= {f"tokens{number}": tokens, f"logprobs{number}": logprobs}
    np.savez(file, **arrays)


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
        began = time.perf_counter()
        patch = PatchFile({} if whole else held, new, since=None if whole else since, root=str(number + 1))
        patch_s = time.perf_counter() - began
        for one in requests(list(range(slots)), tokens):
            engine.submit(one)
        alone = [_step_s(engine) for _ in range(5)]
        prepared_s, beside = _beside_steps(engine, partial(_prepare, engine, patch))
        pause_s, still_s = _install(engine, recompute=False)
        hashed_s, beside_hashes = _beside_steps(engine, engine.digests)
        if engine.digests() != model_digests(new):
            raise AssertionError("the engine holds other weights")
        found[f"{100 * share:g}%"] = {
            "patch_s": patch_s, "prepare_ms": prepared_s * 1e3,
            "pause_ms": pause_s * 1e3, "still_ms": still_s * 1e3, "digests_ms": hashed_s * 1e3,
            "step_ms": float(np.median(alone)) * 1e3,
            "longest_step_beside_ms": max(beside, default=0.0) * 1e3,
            "longest_step_beside_digests_ms": max(beside_hashes, default=0.0) * 1e3,
        }  # fmt: skip
        _drop_all(engine)
        held, since = new, str(number + 1)
    return found


def _drop_all(engine: Any) -> None:
    engine.abort(list(engine.unfinished()))
    engine.step()  # answers that ended at the install


def _recomputed(engine: Any, slots: int, tokens: int) -> dict[str, float]:
    """Have running samples computed anew, half done, by a version in which no tensor changed."""
    for one in requests(list(range(slots)), tokens):
        engine.submit(one)
    alone = [_step_s(engine) for _ in range(tokens // 2)]
    engine.prepare(PatchFile({}, {}, since=None, root="again").read())
    pause_s, _ = _install(engine, recompute=True)
    # With asynchronous scheduling the first one only begins a batch, and the next one waits for it.
    first_s = sum(_step_s(engine) for _ in range(1 + engine._in_flight.fills))
    _drop_all(engine)
    return {
        "pause_ms": pause_s * 1e3, "first_step_ms": first_s * 1e3, "step_ms": float(np.median(alone)) * 1e3
    }  # fmt: skip


def _install(engine: Any, *, recompute: bool) -> tuple[float, float]:
    """Install weights. Return how long it took, and how long since the step under way had ended."""
    began = time.perf_counter()
    if choices.cuda():
        torch.cuda.synchronize()  # as the engine does first
    ended = time.perf_counter()
    engine.install(recompute=recompute)
    now = time.perf_counter()
    return now - began, now - ended


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
    """vLLM itself, in one process as ours, invariant as ours, with the very arguments that ours gave it."""
    from producers.engines.vllm_in_process import prepare_environment

    prepare_environment(1, batch_invariant=True)
    from vllm import LLM, SamplingParams

    model = LLM(**json.loads(Path(folder).with_name(_ARGUMENTS).read_text()))
    texts = [{"prompt_token_ids": one} for one in prompts(slots)]

    def params(count: int, logprobs: int | None, *, seeds: bool) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=logprobs,
                seed=1000 + number if seeds else None,
            )
            for number in range(slots)
        ]  # fmt: skip

    found: dict[str, Any] = {"settings": settings_of(model.llm_engine.vllm_config)}
    for name, logprobs, seeds in (
        ("tokens_per_s", 0, True),
        ("tokens_per_s_without_seeds", 0, False),
        ("tokens_per_s_without_logprobs", None, False),
    ):
        model.generate(texts, params(min(_WARM, tokens), logprobs, seeds=seeds), use_tqdm=False)
        began = time.perf_counter()
        made = model.generate(texts, params(tokens, logprobs, seeds=seeds), use_tqdm=False)
        seconds = time.perf_counter() - began
        found[name] = sum(len(one.outputs[0].token_ids) for one in made) / seconds
    return found


if __name__ == "__main__":
    way = {"ours": ours, "plain": plain}[sys.argv[1]]
    print("RESULT", json.dumps(way(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
    os._exit(0)  # vLLM's threads may hold the process up
