"""How long an iteration takes, by formulas: quick enough to compare thousands of splits.

                 (lookahead + 1) steps from the groups' admission until they have to be trained
    ├────────────────────────────────────────────────────────────────────────────────────────┤
    publish, transfer, install │ H: the samples are drawn, each within this time │ last training
                               └─ each engine has the length of one step for it, less the install

The step time is the least for which the engines can draw all samples (`flows.planning.decode_bound`), the
trainer can train all tokens, and cores that both share hold both. It leaves out waiting for gaps, the
dispatcher's errors and chance: the simulation has those, and has the last word on the best few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flows.planning.decode_bound import DecodeBound
from flows.planning.machine_pools import MachinePool
from flows.planning.main_memory import in_gib
from flows.planning.stage_times import EngineTimes, LearnerTimes, share_filled

_CLASSES = 40  # of lengths; the longest samples have classes of their own
_RATIO = 1.004  # from one moment that is looked up to the next
_HALVINGS = 12  # of the range of step times: to 1 in 4,000, and moments are told apart by 1 in 250
_MOST_AT_ONCE = 4096


@dataclass(frozen=True)
class IterationDemand:
    """The work of an iteration."""

    lengths: np.ndarray  # of all its answers, in tokens
    prompt_tokens: float  # in the mean
    lookahead: float = 0.0  # how many iterations generation may run ahead
    microbatch_tokens: int = 8192
    optimizer_steps: int = 1

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return len(self.lengths)

    @property
    def tokens(self) -> float:
        """How many tokens are trained, those of prompts included."""
        return float(self.lengths.sum()) + self.samples * self.prompt_tokens

    @property
    def context(self) -> float:
        """How many tokens a sample attends to in a step, in the mean over all steps."""
        lengths = self.lengths.astype(np.float64)
        return float((lengths * (self.prompt_tokens + lengths / 2)).sum() / lengths.sum())

    def training_s(self, learner: LearnerTimes) -> float:
        """Return how long the trainer computes beside engines, if it never waits."""
        batches = max(self.optimizer_steps, -(-self.tokens // self.microbatch_tokens))
        return learner.beside * (
            self.tokens * learner.token_s
            + batches * learner.microbatch_s
            + self.optimizer_steps * learner.step_s
        )

    def last_training_s(self, learner: LearnerTimes) -> float:
        """Return how long it computes after the last sample has come: a micro-batch and a step."""
        tokens = min(self.tokens, self.microbatch_tokens)
        return tokens * learner.token_s + learner.microbatch_s + learner.step_s


@dataclass(frozen=True)
class GeneratorKind:
    """One way to use devices of a pool for generators."""

    pool: MachinePool
    engine: EngineTimes
    tensor_parallel: int = 1  # devices of one generator

    @property
    def slots(self) -> int:
        """How many samples one generator draws at once."""
        return self.engine.slots


@dataclass(frozen=True)
class TrainerKind:
    """One way to use devices of a pool for the trainer."""

    pool: MachinePool
    learner: LearnerTimes
    devices: int = 1


@dataclass(frozen=True)
class MachineSplit:
    """Which machines generate and which train."""

    trainer: TrainerKind
    generators: tuple[tuple[GeneratorKind, int], ...]  # how many of each kind; one kind for each pool
    lookahead: float = 0.0
    takes_turns: bool = False  # engines and learner use the same devices, one after the other

    def machines(self) -> dict[MachinePool, int]:
        """Return how many machines of each pool have to be paid for."""
        trainer = self.trainer
        found = {trainer.pool: trainer.pool.machines_of(trainer.devices)}
        for kind, count in self.generators:
            pool, each = kind.pool, kind.tensor_parallel
            if pool.shares_cores:
                needed = pool.machines_of(min(pool.total, count * each))
            else:
                beside = trainer.devices if pool == trainer.pool and not self.takes_turns else 0
                needed = min(pool.machines, pool.machines_with(count, each, beside))
            found[pool] = max(found.get(pool, 0), needed)
        return found

    def memory_problem(self) -> str:
        """Return in words in which pool's main memory it has no room, and how much would; empty: it fits."""
        for kind, count in self.generators:
            pool, each = kind.pool, kind.engine.memory_bytes
            if not pool.shares_cores or pool.memory_bytes is None:
                continue
            beside = 0.0
            if pool.shares_cores_with(self.trainer.pool):
                beside = self.trainer.learner.memory_bytes / pool.machines_of(self.trainer.devices)
            on_one = -(-count // pool.machines)
            if on_one * each + beside > pool.memory_bytes:
                fit = max(0, int((pool.memory_bytes - beside) / max(1.0, each)))
                there = f" beside {in_gib(beside)} of the trainer" if beside else ""
                return (
                    f"placement.machines.{pool.name}: a machine has {in_gib(pool.memory_bytes)} of "
                    f"main memory, and {on_one} generators of {in_gib(each)} each{there} take "
                    f"{in_gib(on_one * each + beside)}: {fit} of them would fit. Take fewer generators, "
                    "or less generator.kv_cache_mib, or say more memory_gib"
                )
        pool, needed = self.trainer.pool, self.trainer.learner.memory_bytes
        needed /= pool.machines_of(self.trainer.devices)
        if pool.memory_bytes is not None and needed > pool.memory_bytes:
            return (
                f"placement.machines.{pool.name}: a machine has {in_gib(pool.memory_bytes)} of main "
                f"memory, and the trainer takes {in_gib(needed)} of it. Say more memory_gib, or "
                "take more machines"
                + ("" if pool.shares_cores else ", or leave out trainer.offload_optimizer")
            )
        return ""

    @property
    def price(self) -> float:
        """The price of all its machines for an hour."""
        return sum(pool.price * many for pool, many in self.machines().items())


def length_classes(lengths: np.ndarray, most: int = _CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean length of each class and how many samples it has, the longest first."""
    ordered = np.sort(lengths.astype(np.float64))[::-1]
    edges = {0, 1, 2, 3, 4, 6, 8} | {round(one) for one in np.linspace(0, len(ordered), most)}
    cuts = sorted(edge for edge in edges if edge < len(ordered))
    parts = np.split(ordered, cuts[1:])
    return np.array([part.mean() for part in parts]), np.array([len(part) for part in parts], np.float64)


def _fill_s(engine: EngineTimes, length: float) -> float:
    """Return a sample's share of the steps in which any sample begins, with all slots taken."""
    begun = engine.slots / max(1.0, length)
    return engine.fill_s * share_filled(begun) / begun


class StepEstimator:
    """Estimates the steps of splits that are made of the same kinds of generators."""

    def __init__(self, demand: IterationDemand, kinds: Sequence[GeneratorKind]) -> None:
        self.demand, self._kinds = demand, {id(kind): number for number, kind in enumerate(kinds)}
        self._held = list(kinds)  # an id stays that of its kind
        self._lengths, self._many = length_classes(demand.lengths)
        context = demand.context
        bounds = [DecodeBound(kind.engine, context) for kind in kinds]
        self._quickest = np.array([bound.quickest_s for bound in bounds])
        low = self._lengths.min() * min(bound.quickest_s for bound in bounds) * 0.99
        high = self._lengths.max() * max(float(bound.token_s[-1]) for bound in bounds) * 1.01
        points = int(np.log(high / low) / np.log(_RATIO)) + 2
        self._low, moments = low, low * _RATIO ** np.arange(points)
        prompt = demand.prompt_tokens  # of each sample, though samples of a group may share it
        self._work = np.stack([
            self._many * (
                self._lengths * bound.occupied(moments[:, None] / self._lengths)
                + prompt * kind.engine.prefill_s + _fill_s(kind.engine, float(demand.lengths.mean()))
            )
            for kind, bound in zip(kinds, bounds, strict=True)
        ]).astype(np.float32)  # by kind, moment and class  # fmt: skip
        self._last = points - 1

    def step_s(self, splits: Sequence[MachineSplit]) -> np.ndarray:
        """Return the least time of an iteration with each split; infinity if it can't work at all."""
        parts = [
            self._step_s(splits[first : first + _MOST_AT_ONCE])
            for first in range(0, len(splits), _MOST_AT_ONCE)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _step_s(self, splits: Sequence[MachineSplit]) -> np.ndarray:
        table = _SplitTable(self.demand, splits, self._kinds, self._quickest * self._lengths.min())
        low = table.least_s()
        high = np.maximum(low, 1e-9)
        fits = self._fits(table, high)
        for _ in range(60):
            if fits.all():
                break
            low = np.where(fits, low, high)
            high = np.where(fits, high, high * 2)
            fits = self._fits(table, high)
        impossible = ~fits
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = self._fits(table, middle)
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        return np.where(impossible, np.inf, high)

    def _fits(self, table: _SplitTable, step_s: np.ndarray) -> np.ndarray:
        """Whether each split can do an iteration in the given time."""
        limit, each = table.room(step_s)
        room = each * table.counts
        moment = np.floor(np.log(np.maximum(limit, 1e-30) / self._low) / np.log(_RATIO)).astype(int)
        late = (moment < 0) | (table.kinds < 0)
        work = self._work[np.maximum(table.kinds, 0), np.clip(moment, 0, self._last)]
        work = np.where(late[:, :, None], np.inf, work)
        left, fits = room.copy(), np.ones(len(step_s), bool)
        for number in range(len(self._lengths)):  # the longest first: only quick engines can take them
            share = left / work[:, :, number]
            whole = share.sum(axis=1)
            fits &= whole >= 1
            taken = 1 / np.maximum(whole, 1.0)
            left = np.where(share > 0, left * (1 - taken[:, None]), left)
        return fits & table.cores_hold(room - left, step_s)


class _SplitTable:
    """Many splits as columns: a row for each split, a column for each kind of generator that it may have."""

    def __init__(
        self, demand: IterationDemand, splits: Sequence[MachineSplit], numbers: dict[int, int],
        first_s: np.ndarray,
    ) -> None:  # fmt: skip
        """`first_s`: by kind, how soon its first sample may be done."""
        wide = max(len(split.generators) for split in splits)
        many = len(splits), wide
        self.kinds, self.counts = np.full(many, -1), np.zeros(many)
        self._gap, self._install, self._cores = np.full(many, np.inf), np.zeros(many), np.zeros(many)
        self._first = np.full(many, np.inf)
        self._lookahead = np.array([split.lookahead for split in splits])
        self._turns = np.array([split.takes_turns for split in splits])
        learners = [split.trainer.learner for split in splits]
        self._training = np.array([demand.training_s(one) for one in learners])
        self._tail = np.array([demand.last_training_s(one) for one in learners])
        self._publish = np.array([one.publish_s for one in learners])
        self._trainer_cores = np.array([one.cores for one in learners])
        self._all_cores = np.full(len(splits), np.inf)
        self._together = np.zeros(many, bool)  # whether the generators share the trainer's cores
        for row, split in enumerate(splits):
            if split.trainer.pool.shares_cores:
                self._all_cores[row] = split.trainer.pool.work_cores
            for column, (kind, count) in enumerate(split.generators):
                engine, link = kind.engine, kind.pool.link
                self.kinds[row, column], self.counts[row, column] = numbers[id(kind)], count
                transfer = 0.0
                if link is not None:
                    transfer = link.fetch_s(split.trainer.learner.version_bytes) + 2 * link.message_s
                self._gap[row, column] = transfer + engine.install_s + engine.reward_s
                self._install[row, column] = engine.install_s
                self._cores[row, column] = engine.cores
                self._first[row, column] = first_s[numbers[id(kind)]]
                self._together[row, column] = kind.pool.shares_cores_with(split.trainer.pool)
        self._apart = self._pools_apart(splits)

    def _pools_apart(self, splits: Sequence[MachineSplit]) -> np.ndarray:
        """Return the cores of each kind's pool, where the generators have it for themselves."""
        found = np.full(self.kinds.shape, np.inf)
        for row, split in enumerate(splits):
            for column, (kind, _) in enumerate(split.generators):
                if kind.pool.shares_cores:
                    found[row, column] = kind.pool.work_cores
        return found

    def least_s(self) -> np.ndarray:
        """Return a time that each split takes in any case."""
        steps = self._lookahead + 1
        start = self._publish + (self._gap + self._first).min(axis=1) + self._training
        return np.where(self._turns, self._training, np.maximum(self._training, start / steps))

    def room(self, step_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the time for a sample with each kind, and the time that each of its engines has."""
        steps = np.where(self._turns, 1.0, self._lookahead + 1)
        behind = np.where(self._turns, self._training, self._tail) + self._publish
        limit = np.maximum(0.0, (steps * step_s - behind)[:, None] - self._gap)
        return limit, np.minimum(np.maximum(0.0, step_s[:, None] - self._install), limit)

    def cores_hold(self, busy_s: np.ndarray, step_s: np.ndarray) -> np.ndarray:
        """Whether cores that processes share have time for all of them."""
        used = busy_s * self._cores
        shared = np.where(self._together, used, 0.0).sum(axis=1) + self._training * self._trainer_cores
        alone = np.where(self._together, 0.0, used) <= self._apart * step_s[:, None]
        return np.asarray((shared <= self._all_cores * step_s) & alone.all(axis=1))
