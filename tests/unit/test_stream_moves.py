"""A whole async run in virtual time in which running samples move between generators all the time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.planning.stage_times import EngineTimes, LearnerTimes
from flows.planning.workload import DrawnLengths
from flows.simulation.simulated_run import SimulatedRun, SimulatedSite
from flows.simulation.simulation_result import Simulation
from flows.simulation.world import World
from producers.dispatch.board import Board
from producers.dispatch.policies.longest_first_policy import LongestFirst
from schemas.identity import SampleKey
from tests.factories import make_spec

GROUPS, SIZE, ITERATIONS, GENERATORS, SLOTS = 4, 2, 5, 3, 3
FEW = 2  # moves of one sample


class Restless(LongestFirst):
    """Longest first; at each turn a running sample may go on elsewhere, where a slot is free."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self._board: Board | None = None
        self.moves: dict[SampleKey, int] = {}

    def tick(self, board: Board, now: float) -> bool:
        self._board = board
        return False

    def take_moves(self) -> list[tuple[SampleKey, str]]:
        assert self._board is not None
        targets = [one.name for one in self._board.generators.values() if one.free > 0]
        keys = sorted(self._board.home)
        tokens = zip(keys, self._board.tokens(keys), strict=True)
        begun = [key for key, count in tokens if count > 0 and self.moves.get(key, 0) < FEW]
        if not targets or not begun or self._rng.random() < 0.3:
            return []
        key = begun[self._rng.integers(len(begun))]
        target = targets[self._rng.integers(len(targets))]
        if target == self._board.home[key]:
            return []
        self.moves[key] = self.moves.get(key, 0) + 1
        return [(key, target)]


def run(seed: int, order: str, on_update: str, *, moving: bool) -> tuple[Simulation, int]:
    """Return the result of a run, and the tokens of all of its samples."""
    rng = np.random.default_rng(seed)
    count = GROUPS * ITERATIONS
    lengths = DrawnLengths(
        rng.integers(5, 200, (count, SIZE)), np.zeros(count, np.int64), np.full(count, 100.0)
    )
    spec = make_spec(
        sampling={"max_tokens": 256}, trainer={"microbatch_tokens": 1024},
        algorithm={
            "mode": "async", "staleness": 1, "order": order, "iterations": ITERATIONS, "groups": GROUPS,
            "group_size": SIZE,
        },
        task={"shuffle": False}, generator={"slots": SLOTS, "on_update": on_update},
    )  # fmt: skip
    engines = tuple(
        EngineTimes(tuple(np.linspace(0.01, 0.02, SLOTS + 1) * (1 + number)), prefill_s=1 / 20_000)
        for number in range(GENERATORS)
    )
    simulated = SimulatedRun(spec, LearnerTimes(1e-5, step_s=0.1), (SimulatedSite("here", engines),), lengths)
    world = World(simulated, Restless(seed) if moving else LongestFirst())
    return world.go(), int(lengths.answers.sum())


@given(
    st.integers(0, 1 << 20), st.sampled_from(["window", "arrival"]),
    st.sampled_from(["continue", "recompute", "wait"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_each_sample_is_trained_once_however_samples_move(seed: int, order: str, on_update: str) -> None:
    result, tokens = run(seed, order, on_update, moving=True)
    assert result.moves > 0
    assert sorted(group for step in result.steps for group in step.groups) == list(range(GROUPS * ITERATIONS))
    assert sum(step.tokens for step in result.steps) == tokens
    assert result.steps[-1].made == (GROUPS * SIZE * ITERATIONS, tokens)
    assert min(age for step in result.steps for age in step.staleness) >= 0
    if order == "window":
        assert max(age for step in result.steps for age in step.staleness) <= 1
    assert result.moved_tokens <= FEW * tokens


def test_nothing_moves_unless_the_policy_says_so() -> None:
    result, _ = run(3, "arrival", "continue", moving=False)
    assert (result.moves, result.moved_tokens) == (0, 0)


def test_tokens_that_are_computed_anew_take_time() -> None:
    continued, _ = run(5, "window", "continue", moving=False)
    recomputed, _ = run(5, "window", "recompute", moving=False)
    assert recomputed.ended_at > continued.ended_at
