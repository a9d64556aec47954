"""The times that plans and simulations need, from a profile.

measured points ──► curves ──► EngineTimes, LearnerTimes, LinkTimes, for given slots, threads and ranks

Each `spread` has in it how wrong the curves are at points that they were not fitted to, the noise of single
figures, and how far what is asked for is from what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flows.planning.fitted_curves import DecodeCurve, TrainCurve
from flows.planning.stage_times import EngineTimes, LearnerTimes, LinkTimes, share_filled
from schemas.profile import Profile

# Where more threads or ranks are asked for than were measured: n times as many are n ** SCALING as fast. No
# profile can tell; the two outer cases, no gain and all of it, are about two of these deviations away.
SCALING, SCALING_SPREAD = 0.75, 0.2
_BEYOND_SPREAD = 0.05  # of each doubling beyond the largest batch or context that was measured
_MOST_SLOWED = 4.0  # times by which a run is slower than the profile's parts: more is a mistake in its notes
_LEAST_TRAINED = 0.25  # share of a run: with less training nobody can tell how engines fare beside it
_LEAST_SPREAD = 0.04  # of a curve: no machine is more regular
# A minute of profiling sees less of how unsteady a machine is than the hours after it: the same work took
# .0154 to .0229 s within three hours of a virtual machine.
_LEAST_UNSTEADY = 0.1


@dataclass(frozen=True)
class ProfileErrors:
    """How wrong fitted curves are at the points that they were not fitted to: relative errors."""

    decode: tuple[float, ...]
    train: tuple[float, ...]

    @property
    def decode_error(self) -> float:
        """The median of the absolute errors of decode steps; NaN if none was held out."""
        return _median(self.decode)

    @property
    def train_error(self) -> float:
        """The median of the absolute errors of training; NaN if none was held out."""
        return _median(self.train)


def held_out_errors(profile: Profile) -> ProfileErrors:
    """Return the relative errors of the curves at a profile's held-out points."""
    decode, train = DecodeCurve.fitted(profile.generation.points), TrainCurve.fitted(profile.training.points)
    return ProfileErrors(
        tuple(decode.seconds(one) / one.seconds - 1 for one in profile.generation.points if one.held_out),
        tuple(train.seconds(one) / one.seconds - 1 for one in profile.training.points if one.held_out),
    )


def measured_engine(profile: Profile, *, slots: int | None = None, threads: int | None = None) -> EngineTimes:
    """Return the times of an engine of the run, by default with the slots and threads that were measured."""
    points, curve = profile.generation.points, DecodeCurve.fitted(profile.generation.points)
    sizes = profile.identity.sizes
    slots = slots or sizes["generator.slots"]
    faster, unsure = _scaled(threads, sizes["generator.threads"])
    factor = 1.0 / faster / _pace(profile)
    prompt = _mean(profile.lengths.prompts, 1.0)
    largest = max(one.samples for one in points)
    errors = held_out_errors(profile).decode
    spread = math.hypot(
        _spread_of(curve.spread, errors), unsure, _BEYOND_SPREAD * max(0.0, math.log2(slots / largest))
    )
    table = [curve.batch_s(max(1, size)) * factor for size in range(slots + 1)]
    in_run = _drawing_in_run(profile, curve)
    full_rate = slots / (table[slots] * max(1.0, _mean(profile.lengths.answers, 1.0)))  # samples a second
    return EngineTimes(
        batch_s=tuple(table), context_s=curve.context_s * factor,
        prefill_s=(curve.prompt_s + (curve.begun_s + curve.ended_s) / max(1.0, prompt)) * factor,
        fill_s=curve.filled_s * factor, install_s=profile.weights.install_s, reward_s=profile.rewards.seconds,
        cores=profile.generation.busy_cores * (threads / sizes["generator.threads"] if threads else 1.0)
        + _beside_engine(profile, full_rate),
        beside_step=_beside_learner(profile, profile.together.step * in_run),
        beside_samples=_beside_learner(profile, profile.together.samples * in_run),
        spread=spread, unsteady=max(_LEAST_UNSTEADY, profile.together.unsteady),
    )  # fmt: skip


def measured_learner(
    profile: Profile, *, ranks: int | None = None, threads: int | None = None, trained: float | None = None,
    lengths: Sequence[tuple[int, int]] = (), checkpoint_steps: float = math.inf,
) -> LearnerTimes:  # fmt: skip
    """Return the times of the run's trainer, by default with the ranks and threads that were measured.

    `trained`: share of the samples that have a gradient; by default as with the first weights. `lengths`: of
    prompts and answers, where they are not those of the profile. `checkpoint_steps`: optimizer steps from one
    checkpoint to the next.
    """
    training, curve = profile.training, TrainCurve.fitted(profile.training.points)
    sizes = profile.identity.sizes
    faster, unsure = _scaled(ranks, sizes["trainer.ranks"])
    more, unsure_too = _scaled(threads, sizes["trainer.threads"])
    factor = 1.0 / faster / more / _pace(profile)
    if trained is None:
        trained = profile.lengths.informative
    pairs = np.array(lengths or _pairs(profile), dtype=float)
    tokens = pairs.sum(axis=1)
    mean, attended = float(tokens.mean()), float((tokens**2).mean()) / 2
    token_s = curve.token_s + (curve.sample_s + curve.context_s * attended) / mean
    errors = held_out_errors(profile).train
    beyond = max(0.0, math.log2(float(tokens.max()) / max(1, sizes["sampling"])))
    return LearnerTimes(
        token_s=token_s * factor * trained + handled_s(profile) / mean,
        microbatch_s=curve.micro_batch_s * factor,
        step_s=training.step_s + beside_step_s(profile, checkpoint_steps),
        publish_s=profile.weights.publish_s, version_bytes=profile.weights.delta_bytes,
        cores=profile.training.busy_cores * (ranks / sizes["trainer.ranks"] if ranks else 1.0),
        beside=profile.together.training * _training_in_run(profile, curve),
        spread=math.hypot(
            _spread_of(curve.spread, errors), unsure, unsure_too, _BEYOND_SPREAD * beyond,
        ),
    )  # fmt: skip


def _pace(profile: Profile) -> float:
    return profile.overheads.pace if profile.overheads else 1.0


def _drawing_in_run(profile: Profile, curve: DecodeCurve) -> float:
    """Return how many times as many processor seconds engines took in a run as beside a learner alone."""
    drawn = profile.overheads.drawn if profile.overheads else None
    if drawn is None:
        return 1.0
    lengths, together = profile.lengths, profile.together
    prompt, answer = _mean(lengths.prompts, 16.0), drawn.tokens / drawn.samples
    fixed_s, whole_s = curve.batch_s(1), curve.batch_s(drawn.at_once)
    step_s = fixed_s * together.step + together.samples * (
        max(0.0, whole_s - fixed_s) + curve.context_s * drawn.at_once * (prompt + answer / 2)
    )
    begun_s = together.samples * (prompt * curve.prompt_s + curve.begun_s + curve.ended_s)
    steps = drawn.tokens / drawn.at_once
    filled_s = together.samples * curve.filled_s * share_filled(drawn.samples / steps)
    expected_s = steps * (step_s + filled_s) + drawn.samples * begun_s
    return _factor(drawn.cpu_s / max(0.1, profile.generation.busy_cores) / expected_s)


def handled_s(profile: Profile) -> float:
    """Return the seconds in which the trainer reads a sample, and records it."""
    training = profile.training
    return training.read_s + training.record_s / max(1, training.record_samples)


def beside_step_s(profile: Profile, checkpoint_steps: float) -> float:
    """Return the seconds that the trainer takes with each optimizer step, besides the step itself."""
    training, overheads = profile.training, profile.overheads
    own_s = overheads.iteration_s if overheads else 0.0
    return training.hash_s + own_s + training.snapshot_s / checkpoint_steps


def _beside_learner(profile: Profile, in_run: float) -> float:
    """Return how many times as long an engine takes while the learner computes. `in_run`: on average."""
    overheads = profile.overheads
    if overheads is None or overheads.trained is None:
        return in_run
    share = min(1.0, max(_LEAST_TRAINED, overheads.trained.seconds / overheads.seconds))
    return max(1.0, 1 + (in_run - 1) / share)


def _training_in_run(profile: Profile, curve: TrainCurve) -> float:
    """Return how many times as many processor seconds training took in a run as beside an engine alone."""
    trained = profile.overheads.trained if profile.overheads else None
    if trained is None:
        return 1.0
    samples = trained.groups * profile.lengths.group
    tokens = trained.answer_tokens + samples * _mean(profile.lengths.prompts, 16.0)
    expected_s = profile.together.training * (
        trained.micro_batches * curve.micro_batch_s + samples * curve.sample_s
        + tokens * (curve.token_s + curve.context_s * tokens / samples / 2)
    )  # fmt: skip
    return _factor(trained.cpu_s / max(0.1, profile.training.busy_cores) / expected_s)


def _factor(found: float) -> float:
    return min(_MOST_SLOWED, max(1 / _MOST_SLOWED, found))


def cores_for_work(profile: Profile) -> float:
    """Return the cores of the machine that engines and learner may keep busy, with all others at work."""
    taken = profile.overheads.steady_cores if profile.overheads else 0.0
    return max(0.1, profile.identity.cores - taken)


def _beside_engine(profile: Profile, full_rate: float) -> float:
    """Return the cores that the process of a generator keeps busy, and those of its rewards."""
    own = profile.overheads.generator_cores if profile.overheads else 0.0
    return own + (profile.rewards.cpu_s or profile.rewards.seconds) * full_rate


def measured_link(profile: Profile) -> LinkTimes:
    """Return how fast versions come from the run's store to a generator here, up to their installation."""
    weights = profile.weights
    trips = LinkTimes(1.0, weights.latency_s).fetch_s(0)
    seconds = weights.fetch_s + weights.patch_s + weights.prepare_s
    return LinkTimes(
        bytes_per_s=max(1, weights.delta_bytes) / max(1e-6, seconds - trips), latency_s=weights.latency_s,
        spread=0.2,
    )  # fmt: skip


def _pairs(profile: Profile) -> list[tuple[int, int]]:
    lengths = profile.lengths
    found = [
        (lengths.prompts[number // lengths.group], answer) for number, answer in enumerate(lengths.answers)
    ]
    return found or [(16, max(1, profile.identity.sizes["sampling"] // 4))]


def _spread_of(spread: float, errors: Sequence[float]) -> float:
    """Return the relative deviation: that of points around their curve, or at held-out ones if it is more."""
    unseen = math.sqrt(float(np.mean(np.square(errors)))) if len(errors) else spread
    return float(max(_LEAST_SPREAD, spread, unseen))


def _scaled(wanted: int | None, measured: int) -> tuple[float, float]:
    """Return how many times as fast other threads or ranks are, and the relative deviation of that."""
    if not wanted or wanted == measured:
        return 1.0, 0.0
    ratio = wanted / measured
    return ratio**SCALING, SCALING_SPREAD * abs(math.log(ratio))


def _mean(values: Sequence[int], without: float) -> float:
    return float(np.mean(values)) if len(values) else without


def _median(errors: Sequence[float]) -> float:
    return float(np.median(np.abs(errors))) if len(errors) else math.nan
