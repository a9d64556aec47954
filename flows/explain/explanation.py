"""Runs all detectors over a run, and puts their findings in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flows.explain.detector import Detector, FaultFound
from flows.explain.generation_faults import DifferentLogprobs
from flows.explain.prompt_faults import LostPrompts, OtherTokens, RepeatedPrompts
from flows.explain.reward_faults import HeldOut, LengthHacking, MissingRewards, RewardOfParts, RewardOutlier
from flows.explain.run_evidence import RunEvidence
from flows.explain.step_faults import FailedStep, OtherBits, SplitGroups, WrongAdvantages, WrongClip
from flows.explain.training_faults import Collapse, LargeUpdates
from infra.bus import NoBroker
from infra.errors import Explained

DETECTORS: tuple[type[Detector], ...] = (
    FailedStep, SplitGroups, DifferentLogprobs, OtherTokens, RepeatedPrompts, LostPrompts, MissingRewards,
    RewardOutlier, RewardOfParts, LengthHacking, HeldOut, WrongAdvantages, WrongClip, LargeUpdates, Collapse,
    OtherBits,
)  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """All that was found in a run, the likeliest cause first; and what could not be looked at, and why."""

    findings: list[tuple[str, FaultFound]]  # with the name of the detector
    unseen: list[tuple[str, str]]
    steps: int


def explain_run(
    run: RunEvidence, progress: Callable[[int, int], None] = lambda done, total: None
) -> Explanation:
    """Look at a run with all detectors.

    A cause that is proven stands before a trend; of two that are as certain, the earlier one stands first, as
    one fault brings others after it.
    """
    findings: list[tuple[str, FaultFound]] = []
    unseen: list[tuple[str, str]] = []
    for number, detector in enumerate(DETECTORS if run.steps else ()):
        progress(number, len(DETECTORS))
        try:
            findings += [(detector.name, one) for one in detector().look(run)]
        except NoBroker:
            raise  # the others would only try in vain, too
        except Explained as error:
            unseen.append((detector.name, str(error)))
    findings.sort(key=lambda one: (-one[1].certainty, one[1].step))
    return Explanation(findings, unseen, len(run.steps))
