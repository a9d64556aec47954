"""Profiles of a machine whose times are known, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from schemas.profile import DecodePoint, Profile, TrainPoint

BATCH_S = (0.004, 0.0001)  # of a step, and of each sample in it
CONTEXT_S, PROMPT_S, BEGUN_S, ENDED_S, FILLED_S = 2e-7, 3e-5, 1e-4, 5e-5, 1e-3
MICRO_BATCH_S, SAMPLE_S, TOKEN_S, ATTENDED_S = 0.02, 2e-4, 1e-4, 1e-8


def step_s(
    samples: float, context: float, prompt: float = 0.0, begun: float = 0.0, ended: float = 0.0,
    filled: float = 0.0,
) -> float:  # fmt: skip
    """How long a step takes on that machine."""
    return (
        BATCH_S[0] + BATCH_S[1] * samples + CONTEXT_S * context + PROMPT_S * prompt + BEGUN_S * begun
        + ENDED_S * ended + FILLED_S * filled
    )  # fmt: skip


def call_s(samples: float, tokens: float, context: float, micro_batches: float) -> float:
    """How long a call of the learner takes on that machine."""
    return MICRO_BATCH_S * micro_batches + SAMPLE_S * samples + TOKEN_S * tokens + ATTENDED_S * context


def decode_point(samples: float, context: float, **more: Any) -> DecodePoint:
    """A measured step."""
    parts = {name: more.get(name, 0.0) for name in ("prompt", "begun", "ended", "filled")}
    values = {"steps": 12, "seconds": step_s(samples, context, **parts), **more}
    return DecodePoint(samples=samples, context=context, **values)


def train_point(samples: int, tokens: int, context: float, micro_batches: int = 1, **more: Any) -> TrainPoint:
    """A measured call."""
    values = {"calls": 3, "seconds": call_s(samples, tokens, context, micro_batches), **more}
    return TrainPoint(samples=samples, tokens=tokens, context=context, micro_batches=micro_batches, **values)


def decode_points(noise: float = 0.0, seed: int = 0) -> list[DecodePoint]:
    """A grid like the one that is measured, with relative noise."""
    draw = np.random.default_rng(seed)
    found = [decode_point(size, size * each) for size in (1, 4, 16, 64) for each in (8, 200)]
    found += [decode_point(size, size * 20, begun=size, filled=1, prompt=size * 20.0) for size in (1, 16, 64)]
    found += [
        decode_point(size, size * 200, begun=size, filled=1, prompt=size * 200.0) for size in (1, 4, 16)
    ]
    found += [decode_point(size, size * 60, ended=size / 8) for size in (8, 32, 60)]
    found += [decode_point(size, size * 100, held_out=True) for size in (2, 30)]
    return [
        one.model_copy(update={"seconds": one.seconds * (1 + noise * draw.standard_normal())})
        for one in found
    ]


def train_points(noise: float = 0.0, seed: int = 0) -> list[TrainPoint]:
    """Calls like those that are measured, with relative noise."""
    draw = np.random.default_rng(seed)
    found = []
    for length in (20, 80, 240):
        for samples in (8, 24, 64):
            tokens = samples * length
            found.append(train_point(samples, tokens, samples * length**2 / 2, 1 + tokens // 8192))
    found.append(train_point(40, 1000, 20_000, held_out=True))
    return [
        one.model_copy(update={"seconds": one.seconds * (1 + noise * draw.standard_normal())})
        for one in found
    ]


def profile_data(**parts: Any) -> dict[str, Any]:
    """The profile of that machine as data; `parts` replaces keys of its parts."""
    found: dict[str, Any] = {
        "format": 2, "made_at": 1e9, "took_s": 60.0,
        "identity": {
            "model": "a" * 32, "root": "b" * 64, "parameters": 1000, "machine": "torch 1; a CPU", "cores": 2,
            "libraries": {"vllm": "1"}, "settings": {"model.dtype": '"float32"'},
            "sizes": {
                "generator.slots": 64, "generator.threads": 1, "trainer.ranks": 1, "trainer.threads": 1,
                "trainer.microbatch_tokens": 8192, "sampling": 248,
            },
        },
        "generation": {
            "points": [one.model_dump() for one in decode_points()], "start_s": 9.0, "memory_tokens": 100_000,
            "busy_cores": 1.0,
        },
        "training": {
            "points": [one.model_dump() for one in train_points()], "start_s": 7.0, "read_s": 1e-5,
            "step_s": 0.02, "hash_s": 0.005, "record_s": 0.002, "record_samples": 64, "busy_cores": 1.0,
        },
        "weights": {
            "publish_s": 0.05, "fetch_s": 0.02, "patch_s": 0.01, "prepare_s": 0.01, "install_s": 4e-4,
            "delta_bytes": 1_000_000, "whole_bytes": 4_000_000, "latency_s": 1e-4,
        },
        "rewards": {"seconds": 1e-4, "cpu_s": 1e-4, "scored": 100},
        "lengths": {"prompts": [7, 7], "answers": [10, 20, 30, 40], "group": 2, "informative": 0.5},
        "together": {"step": 1.5, "samples": 1.1, "training": 1.2},
    }  # fmt: skip
    for name, keys in parts.items():
        found[name] = {**found[name], **keys} if isinstance(found.get(name), dict) else keys
    return found


def known_profile(**parts: Any) -> Profile:
    """The profile of that machine."""
    return Profile.model_validate(profile_data(**parts))
