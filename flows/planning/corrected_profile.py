"""Times by the hardware table, corrected by a profile of the same hardware with other devices or slots.

table for what was measured ──┐
profile's points ─────────────┴──► ratio ──► table for what is asked for, corrected

The table does not know the rest of a run's work: rewards, installation, records and versions are those of
the profile.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from flows.planning.corrected_times import corrected_engine, corrected_learner, share_carried
from flows.planning.profile_times import beside_step_s, handled_s
from flows.planning.stage_times import EngineTimes, LearnerTimes
from schemas.profile import Profile


def corrected_by_engine(
    profile: Profile, asked: EngineTimes, there: EngineTimes, *, context: float, doublings: float
) -> EngineTimes:
    """Return an engine's times, as the engine of a profile corrects them.

    `asked` and `there`: by the table, of the engine that is asked for and of the one that was measured.
    `context`: tokens that a sample attends to, on average. `doublings`: of devices, from one to the other.
    """
    found = corrected_engine(
        asked, profile.generation.points, context=context, measured=there, doublings=doublings
    )
    return replace(found, install_s=profile.weights.install_s, reward_s=profile.rewards.seconds)


def corrected_by_learner(
    profile: Profile, asked: LearnerTimes, there: LearnerTimes, *, tokens: float, length: float,
    doublings: float, checkpoint_steps: float,
) -> LearnerTimes:  # fmt: skip
    """Return a trainer's times, as the trainer of a profile corrects them.

    `tokens`: of a micro-batch. `length`: tokens of a sample with its prompt, on average. `doublings`: of
    devices. `checkpoint_steps`: optimizer steps from one checkpoint to the next.
    """
    training, weights = profile.training, profile.weights
    found = corrected_learner(asked, training.points, tokens=tokens, measured=there, doublings=doublings)
    factor = (training.step_s / there.step_s) ** share_carried(doublings)
    return replace(
        found, token_s=found.token_s * profile.lengths.informative + handled_s(profile) / length,
        step_s=asked.step_s * factor + beside_step_s(profile, checkpoint_steps),
        publish_s=weights.publish_s, version_bytes=weights.delta_bytes,
    )  # fmt: skip


def doublings_between(measured: int, asked: int) -> float:
    """Return how many doublings lie between two numbers of devices."""
    return abs(math.log2(asked / measured))


def largest_batch(profile: Profile) -> int:
    """Return the samples of the largest step that was measured."""
    return int(np.ceil(max(one.samples for one in profile.generation.points)))
