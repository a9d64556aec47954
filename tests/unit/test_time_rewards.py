"""Rewards are timed one after the other, by the pool that generators have."""

from __future__ import annotations

from pathlib import Path

from flows.planning.measuring import time_rewards
from producers.rewards import RewardPool
from schemas.runspec import TaskSection

TASK = """
def problems(split):
    return []

def reward(problem, completion):
    if completion == "bad":
        raise ValueError("bad")
    for _ in range(200_000):
        pass
    return float(len(completion))
"""


def test_rewards_are_timed_and_failures_counted(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    pool = RewardPool(TaskSection(python=str(tmp_path / "task.py")))
    texts = [(number // 2, "{}", "bad" if number == 5 else "x" * (number + 1)) for number in range(40)]
    try:
        found, totals = time_rewards(pool, texts, 60.0)
    finally:
        pool.close()
    assert (found.scored, found.failed) == (39, 1)
    assert found.seconds > 0
    assert found.cpu_s > 0  # 200,000 turns of a loop take longer than a tick, 39 times
    assert totals[0] == [1.0, 2.0]
    assert len(totals) == 20


def test_timing_ends_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    pool = RewardPool(TaskSection(python=str(tmp_path / "task.py")))
    try:
        found, totals = time_rewards(pool, [(0, "{}", "a")] * 100_000, 0.0)
    finally:
        pool.close()
    assert found.scored <= 2
    assert len(totals[0]) <= 3
