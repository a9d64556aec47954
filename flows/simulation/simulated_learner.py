"""The learner in virtual time: which bundles it trains together and when are decided by the trainer's code.

whole groups ──► bundles ──► trained_next, cut ──► seconds of work ──► … ──► optimizer step
"""

from __future__ import annotations

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
class _Held:
    """Groups that are trained together, as composed at admission."""

    wanted: int
    groups: list[int] = field(default_factory=list)


class SimulatedLearner:
    """Trains the steps of a run in order."""

    def __init__(self, spec: RunSpec, times: LearnerTimes, taken: TakenGroups, clock: VirtualClock) -> None:
        """`taken` is shared: the run's steps are noted there."""
        self._spec, self._times, self._taken, self._clock = spec, times, taken, clock
        self._algorithm = spec.algorithm
        self._places = self._algorithm.groups // self._algorithm.optimizer_steps
        self._groups: dict[int, WholeGroup] = {}
        self._bundles: dict[tuple[int, int], dict[int, _Held]] = {}  # order window: by step
        self._whole: dict[int, None] = {}  # order arrival: in the order in which they became whole
        self.iteration, self.mini = 0, 0
        self.step: list[int] = []  # groups of the step in work that are trained, or in training
        self._chosen: dict[int, None] = {}  # order arrival: for the step in work
        self._order: ArrivalOrder | None = None
        self._work_s, self._at = 0.0, 0.0  # what is left of the work begun, at that moment
        self.doing = ""  # "training", "stepping", or nothing
        self.began_at = 0.0  # with it
        self.waits_for_weights = self.waits_for_turn = False
        self.speed, self.cores = 1.0, times.cores
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
        bundles = self._bundles.setdefault((prompt.iteration, prompt.mini), {})
        bundles.setdefault(prompt.bundle, _Held(prompt.bundle_groups)).groups.append(prompt.group)

    @property
    def has_whole_step(self) -> bool:
        """Whether all groups of the step in work are here."""
        self._choose()
        if self._order is not None:
            return self._order.left == 0
        bundles = self._bundles.get((self.iteration, self.mini), {})
        return len(self.step) + sum(len(one.groups) for one in bundles.values()) == self._places

    def go_on(self) -> None:
        """Begin what is to be done next, if nothing is in hand."""
        self.spend()
        if self.doing or self.waits_for_weights or self.waits_for_turn:
            return
        if len(self.step) == self._places:
            self._begin("stepping", self._times.step_s)
            return
        ready = self._ready()
        count = trained_next(
            self._spec, len(ready), lambda: sum(sum(self._groups[g].answers) for b in ready for g in b),
            missing=not self.has_whole_step, whole_step=False,
        )  # fmt: skip
        if not count:
            return
        groups = [group for bundle in ready[:count] for group in bundle]
        self._let_go(groups)
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

    def _ready(self) -> Sequence[Sequence[int]]:
        """Return the complete bundles of the step that are here, in order."""
        if self._order is not None:
            self._choose()
            return [[group] for group in sorted(self._chosen)]
        bundles = self._bundles.get((self.iteration, self.mini), {})
        return [sorted(one.groups) for _, one in sorted(bundles.items()) if len(one.groups) == one.wanted]

    def _let_go(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._chosen.pop(group, None)
        key = self.iteration, self.mini
        if key in self._bundles:
            gone = set(groups)
            left = {n: one for n, one in self._bundles[key].items() if one.groups[0] not in gone}
            self._bundles[key] = left
            if not left:
                del self._bundles[key]

    def _seconds_of(self, groups: Sequence[int]) -> float:
        sizes = sorted(
            len(self._groups[group].prompt.tokens) + answer
            for group in groups for answer in self._groups[group].answers
        )  # fmt: skip
        trainer = self._spec.trainer
        count = len(cut(sizes, max(trainer.microbatch_tokens, sizes[-1]), trainer.parts))
        return sum(sizes) * self._times.token_s + count * self._times.microbatch_s
