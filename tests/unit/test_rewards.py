"""Rewards: one that hangs, throws or exits costs its sample and nothing else."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.credentials import unset_credentials, without_credentials
from producers.rewards import RewardOutcome, RewardPool
from producers.tasks import TaskError
from schemas.runspec import TaskSection
from tests.waiting import wait_until

REWARD = """
import os, time
def problems(split):
    return []
def reward(problem, completion):
    print("a task may print")
    if completion == "hang":
        time.sleep(600)
    if completion == "throw":
        raise KeyError("no such answer")
    if completion == "exit":
        os._exit(7)
    if completion == "nan":
        return float("nan")
    if completion.startswith("env "):
        return float(completion[4:] in os.environ)
    if completion == "fds":
        return float(len(os.listdir("/proc/self/fd")))
    if completion == "parts":
        return {"right": 0.5, "short": 0.25}
    return float(len(completion))
"""


@pytest.fixture
def many_files() -> Iterator[None]:
    """A thousand descriptors that are taken, as with hundreds of reward processes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for one in taken:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def scores(
    folder: Path, completions: list[str], workers: int = 1
) -> tuple[dict[str, RewardOutcome], RewardPool]:
    (folder / "task.py").write_text(REWARD)
    pool = RewardPool(
        TaskSection(python=str(folder / "task.py"), reward_deadline_s=1.0, reward_workers=workers)
    )
    found: dict[str, RewardOutcome] = {}
    try:
        for completion in completions:
            pool.score(completion, json.dumps({"id": "1", "prompt": "p"}), completion)

        def all_came() -> bool:
            found.update({score.key: score for score in pool.poll()})
            return len(found) == len(completions)

        wait_until(all_came, what="the scores")
        assert pool.pending() == 0
    finally:
        pool.close()
    return found, pool


def test_bad_rewards_cost_only_their_sample(tmp_path: Path) -> None:
    good = [f"good {'x' * number}" for number in range(40)]
    found, pool = scores(tmp_path, [*good[:20], "hang", "throw", "exit", "nan", "parts", *good[20:]])
    assert all(found[name].total == len(name) and not found[name].error for name in good)
    assert "within 1 s" in found["hang"].error
    assert found["throw"].error == "KeyError: 'no such answer'"
    assert "process ended" in found["exit"].error
    assert "not a finite number" in found["nan"].error
    assert found["parts"].parts == {"right": 0.5, "short": 0.25}
    assert found["parts"].total == 0.75
    assert math.isnan(found["hang"].total)
    assert pool.restarts == 2


def test_a_problem_of_two_lines_is_one_job(tmp_path: Path) -> None:
    """It may come from anybody: a second answer would be another sample's."""
    (tmp_path / "task.py").write_text(REWARD)
    pool = RewardPool(TaskSection(python=str(tmp_path / "task.py"), reward_deadline_s=5.0, reward_workers=1))
    try:
        pool.score("two", '1}\n{"problem":2', "good x")
        pool.score("lines", '{"id": "1",\n"prompt": "p"}', "good xx")
        pool.score("one", '{"id": "1", "prompt": "p"}', "good xxx")
        found: dict[str, RewardOutcome] = {}

        def all_came() -> bool:
            found.update({score.key: score for score in pool.poll()})
            return len(found) == 3

        wait_until(all_came, what="the scores")
    finally:
        pool.close()
    assert found["two"].error and found["lines"].total == 7 and found["one"].total == 8


def test_a_worker_that_hangs_with_a_full_pipe_holds_up_nobody(tmp_path: Path) -> None:
    long = [str(number) + "x" * 100_000 for number in range(8)]
    found, _ = scores(tmp_path, ["hang", *long])
    assert "within 1 s" in found["hang"].error
    assert all(found[name].total == len(name) for name in long)


def test_fast_rewards_come_within_few_looks(tmp_path: Path) -> None:
    """However rarely somebody looks, a worker is not out of work in between: sixteen a look would be 32."""
    told = tmp_path / "told"
    (tmp_path / "task.py").write_text(
        "def problems(split):\n    return []\n"
        "def reward(problem, completion):\n"
        f"    open({str(told)!r}, 'a').write('x')\n    return 1.0\n"
    )
    pool = RewardPool(TaskSection(python=str(tmp_path / "task.py"), reward_workers=1))
    try:
        wait_until(lambda: pool.poll() == [] and pool._workers[0].ready, what="the worker")
        for number in range(512):
            pool.score(str(number), json.dumps({"id": "1", "prompt": "p"}), "c")
        looks = came = 0
        while came < 512:
            looks += 1
            came += len(pool.poll())
            sent = came + len(pool._workers[0].jobs)
            wait_until(lambda sent=sent: told.exists() and told.stat().st_size >= sent, what="answers")
        assert looks <= 14
    finally:
        pool.close()


def test_several_workers_score_everything(tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(100)]
    found, _ = scores(tmp_path, names, workers=3)
    assert set(found) == set(names)


def test_a_task_that_does_not_load_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import nothing_like_this\n")
    pool = RewardPool(TaskSection(python=str(tmp_path / "task.py")))
    pool.score("a", "{}", "x")
    try:
        with pytest.raises(TaskError, match="nothing_like_this"):
            wait_until(pool.poll, what="the error")
    finally:
        pool.close()


def test_a_reward_gets_no_credentials_and_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [
        "STREAMRL_KAFKA_PASSWORD", "STREAMRL_S3_SECRET_KEY", "STREAMRL_SIGNING_KEY", "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY", "HF_TOKEN", "DB_PASSWORD", "JUDGE_TOKEN",
    ]  # fmt: skip
    for name in (*secrets, "JUDGE_SECRET", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("STREAMRL_TASK_ENV", "JUDGE_SECRET, OTHER")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        found, _ = scores(tmp_path, [f"env {name}" for name in secrets])
        assert {score.total for score in found.values()} == {0.0}
        kept = ["JUDGE_SECRET", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "PATH"]
        found, _ = scores(tmp_path, [*(f"env {name}" for name in kept), "fds"])
        assert {found[f"env {name}"].total for name in kept} == {1.0}
        assert found["fds"].total <= 5, "three, that for its answers, and that of the listing"


def test_a_command_line_drops_credentials() -> None:
    given = {"AWS_SECRET_ACCESS_KEY": "s", "HF_TOKEN": "t", "PATH": "/bin"}
    assert unset_credentials(given) == ["env", "-u", "AWS_SECRET_ACCESS_KEY", "-u", "HF_TOKEN"]
    assert unset_credentials({"PATH": "/bin"}) == []
    assert without_credentials(given) == {"PATH": "/bin"}


@pytest.mark.usefixtures("many_files")
def test_a_worker_may_have_descriptors_of_any_number(tmp_path: Path) -> None:
    found, _ = scores(tmp_path, ["four"])
    assert found["four"].total == 4.0
