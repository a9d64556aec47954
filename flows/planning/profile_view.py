"""A profile as rows of a table for people."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flows.planning.fitted_curves import DecodeCurve, TrainCurve
from flows.planning.profile_times import held_out_errors
from schemas.profile import Profile


def profile_rows(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Yield part, figure and remark of each row."""
    generation, training, weights = profile.generation, profile.training, profile.weights
    decode, train = DecodeCurve.fitted(generation.points), TrainCurve.fitted(training.points)
    errors = held_out_errors(profile)
    slots = profile.identity.sizes["generator.slots"]
    sizes = sorted({1, *(size for size in (8, 64, 512) if size < slots), slots})
    steps = ", ".join(f"{decode.batch_s(size) * 1e3:.2f}" for size in sizes)
    yield "decode step", f"{steps} ms", f"of {', '.join(map(str, sizes))} samples, without context"
    yield "context", f"{decode.context_s * 1e6:.3f} ms", "for each 1,000 tokens that a step attends to"
    yield "prefill", f"{decode.prompt_s * 1e3:.3f} ms", "for each token of a prompt"
    yield "sample", f"{(decode.begun_s + decode.ended_s) * 1e3:.3f} ms", "to begin and end it"
    yield "filled step", f"{decode.filled_s * 1e3:.3f} ms", "once, if any sample begins in it"
    yield from _error("decode error", errors.decode, decode.spread)
    if generation.memory_tokens:
        holds = generation.memory_tokens // max(1, profile.identity.sizes["sampling"])
        yield "KV cache", f"{generation.memory_tokens:,} tokens", f"at least {holds} samples at once"
    yield "training", f"{train.token_s * 1e6:.1f} µs", "for each token of prompt and answer"
    yield "micro-batch", f"{train.micro_batch_s * 1e3:.1f} ms", "for each one"
    yield from _error("training error", errors.train, train.spread)
    step = training.step_s + training.hash_s + training.record_s
    yield "optimizer step", f"{step * 1e3:.1f} ms", "with the hash of the weights, and the record"
    yield (
        "publish",
        f"{weights.publish_s * 1e3:.1f} ms",
        f"{weights.delta_bytes:,} bytes of {weights.whole_bytes:,}",
    )
    way = weights.fetch_s + weights.patch_s + weights.prepare_s
    speed = f"; the store gives {weights.bytes_per_s / 1e6:,.0f} MB/s" if weights.bytes_per_s else ""
    yield "fetch", f"{way * 1e3:.1f} ms", f"until an engine can take the weights{speed}"
    yield "install", f"{weights.install_s * 1e3:.2f} ms", "without a decode step"
    yield (
        "reward",
        f"{profile.rewards.seconds * 1e3:.2f} ms",
        f"{profile.rewards.failed} of {profile.rewards.scored} failed",
    )
    if profile.lengths.answers:
        low, middle, high = np.quantile(profile.lengths.answers, (0.1, 0.5, 0.99))
        yield "answers", f"{middle:.0f} tokens", f"10 % have at most {low:.0f}, 1 % more than {high:.0f}"
    both = profile.together
    yield (
        "both at once", f"× {both.step:.2f}, × {both.samples:.2f}, × {both.training:.2f}",
        "seconds of a decode step, of its samples, and of training",
    )  # fmt: skip
    yield "steadiness", f"± {both.unsteady:.1%}", "of the seconds of the same work, at different times"
    if profile.overheads:
        others = profile.overheads
        yield (
            "other processes", f"{others.steady_cores:.2f}, {others.generator_cores:.2f} cores",
            "of all, and of each generator",
        )  # fmt: skip
        yield (
            "pace",
            f"× {others.pace:.2f}",
            "of a run, as these parts predict it; predictions follow the run",
        )
        yield "recording", f"{others.iteration_s * 1e3:.1f} ms", "of the trainer in each iteration"
    yield "checkpoint", f"{training.snapshot_s * 1e3:.1f} ms", "in which it holds training up"
    yield "starts", f"{generation.start_s:.1f} s, {training.start_s:.1f} s", "of engine and learner"
    yield "measured in", f"{profile.took_s:.0f} s", ""


def _error(name: str, errors: tuple[float, ...], spread: float) -> Iterator[tuple[str, str, str]]:
    if errors:
        yield (
            name,
            f"{np.median(np.abs(errors)):.1%}",
            f"median of {len(errors)} held-out points; spread {spread:.1%}",
        )
