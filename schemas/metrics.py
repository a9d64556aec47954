"""The metrics of an optimizer step, as metrics.jsonl, trackers and `streamrl.open_run` have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric: its unit, its meaning, the values of a run that is well, and the cause if it is off."""

    unit: str
    meaning: str
    healthy: str = ""
    otherwise: str = ""


REWARD_PART = "reward_part_"  # before the name of a part of the reward
_TRAINED = "trained tokens"
METRICS: dict[str, Metric] = {
    "step": Metric("number", "The optimizer step, from 0 on."),
    "iteration": Metric("number", "The iteration that the step belongs to, from 0 on."),
    "version": Metric("number", "The version of the weights after the step."),
    "trainer_epoch": Metric("number", "The start of the trainer that took the step: 0 is the first one.", "0",
                            "The trainer was started again; its log says why."),
    "samples": Metric("samples", "Samples of the step."),
    "tokens": Metric("tokens", "Tokens of all answers of the step."),
    "reward": Metric("reward", "Mean reward of the samples that have one.", "grows",
                     "Read samples; look at `informative_groups`, `clip_fraction` and `logprob_gap`."),
    "reward_part_NAME": Metric("reward", "Mean of the part NAME of the rewards that have it. At most 32 "
                                         "parts of a step are kept.", "grows",
                               "This part of the reward is not earned: look at samples."),
    "reward_deviation": Metric("reward", "Standard deviation of the rewards.", "above 0",
                               "0: all answers earn the same, and nothing can be learned."),
    "rewards_failed": Metric("samples", "Samples whose reward raised an error or took too long.", "0",
                             "The generators' logs and `reward_error` of the samples say why."),
    "failed_rewards": Metric("samples", "The same, as the trainer counted it.", "0"),
    "length": Metric("tokens", "Mean length of an answer."),
    "length_p50": Metric("tokens", "Median length of an answer."),
    "length_max": Metric("tokens", "Length of the longest answer.", "below sampling.max_tokens",
                         "Raise sampling.max_tokens if `cut_off` is high, too."),
    "longest": Metric("tokens", "The same, as the trainer counted it."),
    "cut_off": Metric("share of samples", "Answers that ended at sampling.max_tokens.", "below .1",
                      "Raise sampling.max_tokens, or let overlong answers lose reward (dapo)."),
    "staleness": Metric("iterations", "How much older the oldest weights of a sample are, in the mean.",
                        "at most algorithm.staleness"),
    "staleness_max": Metric("iterations", "The same, of the stalest sample.",
                            "at most algorithm.staleness, rounded up; in order arrival staleness_cap"),
    "length_balance": Metric("ratio", "order arrival: mean length of what was trained in the newest "
                                      "staleness + staleness_cap iterations that can be judged, over that "
                                      "of what was admitted for them.", ".9 to 1.1",
                             "Some lengths are trained later than others: lower algorithm.staleness_cap."),
    "finished_at": Metric("seconds since 1970", "The moment at which the step was done."),
    "ranker_recall": Metric("share", "How many of the longest fifth of the groups were predicted to be so.",
                            "above .5 after some iterations",
                            "Answers can't be told apart by their prompts; lengths.backbone may help."),
    "ranker_error": Metric("natural logarithm",
                           "Error of the predicted lengths of groups (root mean square).", "below 1"),
    "length_error": Metric("natural logarithm",
                           "Median error of the predicted length of a sample.", "below 1"),
    "trained_tokens": Metric("tokens", "Tokens of samples that have a gradient.",
                             "near `tokens`", "Many groups have rewards that are all alike."),
    "informative_groups": Metric("groups", "Groups whose rewards differ, so that they have a gradient.",
                                 "most groups", "The task is too easy or too hard for the model."),
    "resampled_groups": Metric("groups", "Groups that were drawn in the place of others (loss.resample)."),
    "microbatches": Metric("micro-batches", "Micro-batches that were computed."),
    "skipped": Metric("0 or 1", "1: no group had a gradient, and the weights were left as they are.", "0",
                      "Rewards do not differ within any group."),
    "padding_waste": Metric("share", "Empty share of attention's grids.", "below .05"),
    "row_filling": Metric("share", "Padding of the rows of linear layers.", "below .1",
                          "Larger micro-batches (trainer.bundle_tokens) have less."),
    "loss": Metric("loss", "The loss that is minimised, by the divisor of the gradient (loss.average).",
                   "", "Its size tells little in policy gradients: look at `reward` and `grad_norm`."),
    "learning_rate": Metric("factor", "The learning rate of the update; 0 if none was made (`skipped`).",
                            "algorithm.learning_rate after algorithm.warmup_steps"),
    "grad_norm": Metric("norm", "Norm of the gradient before it is clipped.", "steady",
                        "A growing one: lower the learning rate, or algorithm.max_grad_norm."),
    "clip_fraction": Metric(f"share of {_TRAINED}", "Tokens that the loss's clip holds back.", "below .2",
                            "The policy moves too far in an iteration: lower the learning rate."),
    "entropy": Metric("nats a token",
                      "Entropy of the policy where tokens were drawn; unknown if no group has a gradient.",
                      "falls slowly", "Near 0: the policy has collapsed to few answers."),
    "negative_logprob": Metric("nats a token", "Mean of -log π of the drawn tokens.", "falls slowly"),
    "capped_fraction": Metric(f"share of {_TRAINED}", "Corrections for old weights that met their cap.",
                              "below .05", "Samples are too stale: lower algorithm.staleness."),
    "divergence": Metric("nats a token", "Divergence from the reference policy, if there is one.",
                         "grows slowly", "Raise loss.kl, or lower the learning rate."),
    "logprob_gap": Metric("nats", "Largest difference between generator and trainer in a token's logprob.",
                          "below .001 in float32, .15 in bfloat16; more with generator.quantization",
                          "Engine and trainer compute different things: stop, and find out."),
    "gap_tokens": Metric("tokens", "Tokens that `logprob_gap` was looked for in."),
    "logprob_drift": Metric("nats a token", "Mean difference to the logprobs of the weights that drew them.",
                            "small where staleness is"),
    "value_explained": Metric("share", "Share of the returns that the critic explains (ppo).", "grows to 1",
                              "Below 0: the critic is worse than none; change loss.value_learning_rate."),
    "tokens_class_N": Metric("tokens", "Tokens of the predicted length class N."),
    "compute_s": Metric("seconds", "Time that the trainer computed for the step."),
    "waited_s": Metric("seconds", "Time that the trainer waited for samples.", "short beside `compute_s`",
                       "Generation is the bottleneck: add generators, or allow more staleness."),
    "peak_memory_gib": Metric("GiB", "Most memory that the trainer's first rank took so far: of its GPU, or "
                              "of the machine.", "below what there is",
                              "Set trainer.gradient_checkpointing, a smaller trainer.microbatch_tokens or "
                              "logits_chunk, or zero_stage 3."),
    "latency_s": Metric("seconds", "Mean time from a sample's first token to its last."),
    "samples_per_s": Metric("samples a second", "Samples of the step by the time since the step before."),
    "tokens_per_s": Metric("tokens a second", "Tokens of the step by the time since the step before."),
    "idle": Metric("share", "Share of that time in which the trainer waited for samples.", "below .2",
                   "See `waited_s`."),
    "ledger": Metric("offset", "The ledger's offset behind the step's record. Only metrics.jsonl has it."),
}  # fmt: skip
