"""The learner in virtual time: which bundles it trains together and when are decided by the trainer's code.

whole groups ──► bundles ──► trained_next, cut ──► seconds of work ──► … ──► optimizer step
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from consumers.batches.cutting import cut, trained_next
from consumers.stream.arrival_order import ArrivalOrder
from flows.planning.stage_times import LearnerTimes
from flows.simulation.simulation_result import LEARNER_CAUSES
from producers.engines.without_model import VirtualClock
from schemas.messages import Prompt
from schemas.runspec import RunSpec
from schemas.taken import TakenGroups


@dataclass
class WholeGroup:
    """A group whose samples are all here."""

    prompt: Prompt
    answers: list[int]  # tokens of each sample
    versions: list[int]  # the oldest weights of each


@dataclass
class _StepGroups:
    """The groups of a step that are here and not trained, by the bundles that were composed at admission."""

    parts: dict[int, list[int]] = field(default_factory=dict)  # of bundles that lack groups
    whole: list[tuple[int, list[int]]] = field(default_factory=list)  # a heap
    count: int = 0  # of groups

    def add(self, prompt: Prompt) -> None:
        """Add a group."""
        self.count += 1
        groups = self.parts.setdefault(prompt.bundle, [])
        groups.append(prompt.group)
        if len(groups) == prompt.bundle_groups:
            heapq.heappush(self.whole, (prompt.bundle, sorted(self.parts.pop(prompt.bundle))))

    def take(self, bundles: int) -> list[int]:
        """Remove the first so many whole bundles, and return their groups."""
        groups = [group for _ in range(bundles) for group in heapq.heappop(self.whole)[1]]
        self.count -= len(groups)
        return groups


class SimulatedLearner:
    """Trains the steps of a run in order."""

    def __init__(self, spec: RunSpec, times: LearnerTimes, taken: TakenGroups, clock: VirtualClock) -> None:
        """`taken` is shared: the run's steps are noted there."""
        self._spec, self._times, self._taken, self._clock = spec, times, taken, clock
        self._algorithm = spec.algorithm
        self._places = self._algorithm.groups // self._algorithm.optimizer_steps
        self._groups: dict[int, WholeGroup] = {}
        self._by_step: dict[tuple[int, int], _StepGroups] = {}  # order window
        self._whole: dict[int, None] = {}  # order arrival: in the order in which they became whole
        self.iteration, self.mini = 0, 0
        self.step: list[int] = []  # groups of the step in work that are trained, or in training
        self._chosen: dict[int, None] = {}  # order arrival: for the step in work
        self._order: ArrivalOrder | None = None
        self._work_s, self._at = 0.0, 0.0  # what is left of the work begun, at that moment
        self.doing = ""  # "training", "stepping", or nothing
        self.began_at = 0.0  # with it
        self.waits_for_weights = self.waits_for_turn = False
        self.speed, self.cores, self.beside = 1.0, times.cores, times.beside
        self.seconds = dict.fromkeys(LEARNER_CAUSES, 0.0)
        self._begin_step()

    @property
    def is_busy(self) -> bool:
        """Whether it computes."""
        return bool(self.doing)

    @property
    def ends(self) -> float:
        """When the work in hand is done."""
        if not self.doing or not self.speed:
            return float("inf")
        return self._at + self._work_s / self.speed

    def spend(self) -> None:
        """Note where the time went since the last call."""
        now = self._clock.time
        passed, self._at = now - self._at, now
        if self.doing:
            self._work_s = max(0.0, self._work_s - passed * self.speed)
        cause = self.doing or "waiting for samples"
        if not self.doing and self.waits_for_weights:
            cause = "waiting for weights"
        elif not self.doing and self.waits_for_turn:
            cause = "waiting for its turn"
        self.seconds[cause] += passed

    def set_speed(self, speed: float) -> None:
        """Go on at so much of its full speed."""
        if speed != self.speed:
            self.spend()
            self.speed = speed

    def take(self, group: WholeGroup) -> None:
        """Take a whole group."""
        prompt = group.prompt
        self._groups[prompt.group] = group
        if self._algorithm.order == "arrival":
            self._whole[prompt.group] = None
            return
        self._by_step.setdefault((prompt.iteration, prompt.mini), _StepGroups()).add(prompt)

    @property
    def has_whole_step(self) -> bool:
        """Whether all groups of the step in work are here."""
        self._choose()
        if self._order is not None:
            return self._order.left == 0
        return len(self.step) + self._here.count == self._places

    def go_on(self) -> None:
        """Begin what is to be done next, if nothing is in hand."""
        self.spend()
        if self.doing or self.waits_for_weights or self.waits_for_turn:
            return
        if len(self.step) == self._places:
            self._begin("stepping", self._times.step_s)
            return
        is_whole = self.has_whole_step
        ready = len(self._here.whole) if self._order is None else len(self._chosen)
        count = trained_next(
            self._spec, ready, self._tokens_ready, missing=not is_whole, whole_step=False
        )  # fmt: skip
        if not count:
            return
        groups = self._take_ready(count)
        self.step += groups
        self._begin("training", self._seconds_of(groups))

    def done(self) -> bool:
        """End the work in hand. Return whether an optimizer step is done."""
        self.spend()
        doing, self.doing, self._work_s = self.doing, "", 0.0
        return doing == "stepping"

    def stepped(self) -> tuple[list[WholeGroup], bool]:
        """Return the groups of the step that is done, and whether it ends an iteration. Go on to the next."""
        groups = [self._groups.pop(group) for group in self.step]
        self.mini = (self.mini + 1) % self._algorithm.optimizer_steps
        self.iteration += self.mini == 0
        return groups, self.mini == 0

    def begin_step(self) -> None:
        """Begin the next step; the last one is noted among the taken groups."""
        self._begin_step()

    def _begin_step(self) -> None:
        self.step, self._chosen, self._order = [], {}, None
        key = self.iteration, self.mini
        self._here = self._by_step.setdefault(key, _StepGroups())
        self._by_step = {step: groups for step, groups in self._by_step.items() if step >= key}
        if self._algorithm.order == "arrival":
            self._order = ArrivalOrder(self._algorithm, self._taken, self.iteration, self.mini)

    def _begin(self, doing: str, work_s: float) -> None:
        self.doing, self._work_s, self.began_at = doing, work_s, self._clock.time

    def _choose(self) -> None:
        """With order arrival: choose the whole groups that the step takes, as `ArrivalStream` does."""
        if self._order is None:
            return
        for group in list(self._whole):
            if not self._order.left:
                return
            if self._order.takes(group):
                self._order.took(group)
                del self._whole[group]
                self._chosen[group] = None

    def _tokens_ready(self) -> int:
        """Return the tokens of the answers that may be trained now."""
        groups = (
            self._chosen if self._order is not None else [g for _, many in self._here.whole for g in many]
        )
        return sum(sum(self._groups[group].answers) for group in groups)

    def _take_ready(self, count: int) -> list[int]:
        """Take the first so many complete bundles. Return their groups."""
        if self._order is None:
            return self._here.take(count)
        groups = sorted(self._chosen)[:count]
        for group in groups:
            del self._chosen[group]
        return groups

    def _seconds_of(self, groups: Sequence[int]) -> float:
        sizes = sorted(
            len(self._groups[group].prompt.tokens) + answer
            for group in groups for answer in self._groups[group].answers
        )  # fmt: skip
        trainer = self._spec.trainer
        count = len(cut(sizes, max(trainer.microbatch_tokens, sizes[-1]), trainer.parts))
        return sum(sizes) * self._times.token_s + count * self._times.microbatch_s
