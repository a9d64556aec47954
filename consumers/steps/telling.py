"""Report a finished step: counters for people who watch, and the trainer's log."""

from __future__ import annotations

from collections.abc import Mapping

from infra.roles.context import RoleContext
from schemas.messages import StepRecord
from schemas.runspec import RunSpec

# Larger differences between trainer and generator on the same weights mean that one of them computes wrongly.
_LARGEST_GAP = {"float32": 0.01, "bfloat16": 0.5}
_IN_EIGHT_BITS = 8.0  # of random models, whose logits are steep, a token in a thousand differed by 7


def largest_gap(spec: RunSpec) -> float:
    """Return the largest difference of a token's logprob that may come from rounding alone."""
    return _IN_EIGHT_BITS if spec.generator.eight_bits else _LARGEST_GAP[spec.model.dtype]


def gap_is_too_wide(metrics: Mapping[str, float], spec: RunSpec) -> bool:
    """Whether a step's log-probabilities differ by more than rounding from those of its generators."""
    return bool(metrics.get("gap_tokens", 0)) and metrics.get("logprob_gap", 0.0) > largest_gap(spec)


def tell(context: RoleContext, record: StepRecord, *, duplicates: int) -> None:
    """Update counters, warn if something is wrong, and log one line about the step."""
    metrics, counters = record.metrics, context.heart.counters
    counters.update(
        step=record.step, iteration=record.iteration, version=record.version_out,
        trained=counters.get("trained", 0) + len(record.rewards),
        trained_tokens=counters.get("trained_tokens", 0) + metrics["tokens"],
        duplicates=duplicates,
    )  # fmt: skip
    if gap_is_too_wide(metrics, context.spec):
        context.log.warning(
            "the generators' logprobs differ by %.3g from the trainer's on the same weights: one of them "
            "computes wrongly (stale weights, another temperature, another model?)",
            metrics["logprob_gap"],
        )  # fmt: skip
    if record.failed_reason:
        context.log.warning(
            "%d of %d samples have no reward, such as sample %s: %s",
            metrics["failed_rewards"], len(record.rewards), record.failed_sample, record.failed_reason,
        )  # fmt: skip
    if metrics["skipped"]:
        counters["skipped_steps"] = counters.get("skipped_steps", 0) + 1
        context.log.warning(
            "the rewards of no group differ: this step has no gradient, and leaves the weights as they are"
        )
    context.log.info(
        "iteration %d reward %.3f, length %.1f, staleness %.2f, waited %.2f s, computed %.2f s",
        record.iteration, metrics["reward"], metrics["length"], metrics["staleness"],
        metrics["waited_s"], metrics["compute_s"],
    )  # fmt: skip
