"""kill -9 at any process: the same samples, none twice, none lost, and in sync mode the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.run.replaying import replaying
from infra.bus import begins_of, ends_of
from infra.stack import local
from infra.stack.paths import StackPaths
from tests.factories import make_spec
from tests.fakes.spoiling import EVERY
from tests.harness import ROOT, Run, running, trained_ids
from tests.retention import remove_before

SPEC = make_spec(
    algorithm={"iterations": 6, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
    trainer={"checkpoint_every": 4, "bundle_tokens": 64},
    placement={"generators": 1},
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, kafka: str, tiny_model: Path) -> list[str]:
    """Root hash after each step of a run that nobody disturbs."""
    with running(tmp_path_factory.mktemp("calm"), kafka, SPEC, tiny_model) as run:
        run.wait_for_end()
        return [step.root_out for step in run.steps()]


def check(run: Run, undisturbed: list[str]) -> None:
    steps = run.steps()
    assert trained_ids(steps) and sorted(trained_ids(steps)) == [(g, i) for g in range(48) for i in range(4)]
    assert [step.step for step in steps] == list(range(6))
    assert [step.root_out for step in steps] == undisturbed
    assert not run.dead_letters()


@pytest.mark.parametrize("victim", ["trainer", "generator", "feeder"])
@pytest.mark.thorough(but=["trainer"])
def test_a_killed_process_changes_nothing(
    tmp_path: Path, kafka: str, tiny_model: Path, undisturbed: list[str], victim: str
) -> None:
    with running(tmp_path, kafka, SPEC, tiny_model) as run:
        for step in (2, 5):
            run.wait_for_steps(step)
            run.kill(f"{victim}-0")
            run.start(victim)
        run.wait_for_end()
        check(run, undisturbed)
        for step in (2, None):  # another process, long after: the same bits
            with replaying(run.record.id, run.store.url, lambda done, total: None) as opened:
                assert opened.again.step(step).equal


@pytest.mark.thorough
def test_a_run_goes_on_from_its_archive_when_the_log_has_lost_its_beginning(
    tmp_path: Path, kafka: str, tiny_model: Path, undisturbed: list[str], prefect_stack: local.Stack
) -> None:
    """Feeder and trainer start again, and read there what retention has removed; so do replays."""
    with running(tmp_path, kafka, SPEC, tiny_model) as run:
        run.wait_for_steps(3)
        for name in ("trainer-0", "feeder-0"):
            run.kill(name)
        topics = (run.topics.prompts, run.topics.samples)
        ends = {topic: ends_of(run.bus, topic) for topic in topics}
        rows = _archived_by_the_flow(run, prefect_stack)
        assert rows[0]["records"] >= sum(sum(one.values()) for one in ends.values()) > 100
        for topic, of in ends.items():
            remove_before(kafka, topic, of)
            assert begins_of(run.bus, topic) == of
        for role in ("trainer", "feeder"):
            run.start(role)
        run.wait_for_end()
        check(run, undisturbed)
        with replaying(run.record.id, run.store.url, lambda done, total: None) as opened:
            assert all(found.equal for found in opened.again.each(0, 5))


def _archived_by_the_flow(run: Run, prefect_stack: local.Stack) -> list[dict[str, Any]]:
    """Run the flow archive-run; return its rows."""
    flow = (
        "import json, sys; from flows.archive_run import archive_run; "
        "print(json.dumps(archive_run([sys.argv[1]], store=sys.argv[2])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", flow, run.record.id, run.store.url], cwd=ROOT, text=True, check=False,
        env={**os.environ, **prefect_stack.env()}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


@pytest.mark.thorough
def test_unfit_samples_are_made_again(
    tmp_path: Path, kafka: str, tiny_model: Path, undisturbed: list[str]
) -> None:
    """Else what they belong to would be waited for in vain."""
    spoiling = {"generator": "tests.fakes.spoiling"}
    with running(tmp_path, kafka, SPEC, tiny_model, modules=spoiling) as run:
        run.wait_for_steps(2)
        for victim in ("feeder", "trainer"):
            run.kill(f"{victim}-0")
            run.start(victim)
        run.wait_for_end()
        letters = run.dead_letters()
        assert {letter.reason for letter in letters} == {"one of its logprobs is above 0 or not finite"}
        places = [(letter.partition, letter.offset) for letter in letters]
        assert len(places) == len(set(places)) == 48 * 4 // EVERY
        assert sorted(trained_ids(run.steps())) == [(g, i) for g in range(48) for i in range(4)]
        assert [step.root_out for step in run.steps()] == undisturbed


@pytest.mark.thorough
def test_an_async_trainer_takes_its_steps_again_to_the_same_bits(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    """What it trained together was decided by timing: the ledger says how it was."""
    algorithm = {**SPEC.algorithm.model_dump(), "mode": "async", "staleness": 1.5, "iterations": 40}
    spec = make_spec(algorithm=algorithm, trainer={"checkpoint_every": 100, "exact_sums": False})
    with running(tmp_path, kafka, spec, tiny_model) as run:
        for step in (3, 8):
            run.wait_for_steps(step)
            run.kill("trainer-0")
            run.start("trainer")
        run.wait_for_end()
        steps = run.steps()
        assert sorted(trained_ids(steps)) == [(g, i) for g in range(320) for i in range(4)]
        log = run.log("trainer-0").read_text()
        assert log.count("taken again from the ledger") >= 8  # each once: the first start kept them
        assert "has other bits" not in log
        assert not run.dead_letters()


@pytest.mark.thorough
def test_in_order_of_arrival_each_group_is_trained_once_and_in_time(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    """Whoever is killed, twice each. Which groups a step took only the ledger says, and that is enough."""
    algorithm = {
        **SPEC.algorithm.model_dump(), "mode": "async", "staleness": 1.5, "iterations": 40,
        "order": "arrival", "staleness_cap": 3,
    }  # fmt: skip
    spec = make_spec(
        algorithm=algorithm, trainer={"checkpoint_every": 7, "exact_sums": False, "keep_weights": 8}
    )
    with running(tmp_path, kafka, spec, tiny_model) as run:
        for step in (3, 10):
            for victim in ("trainer", "feeder", "generator"):
                run.wait_for_steps(step)
                run.kill(f"{victim}-0")
                run.start(victim)
                step += 2
        run.wait_for_end()
        steps = run.steps()
        assert [step.step for step in steps] == list(range(40))
        assert sorted(trained_ids(steps)) == [(g, i) for g in range(320) for i in range(4)]
        assert [set(step.groups.tolist()) for step in steps] != [
            set(range(8 * n, 8 * n + 8)) for n in range(40)
        ]
        assert max(step.iteration - int(step.versions.min()) for step in steps) <= 3
        for name in ("trainer-0", "feeder-0"):
            assert "has other bits" not in run.log(name).read_text()
        assert not run.dead_letters()
        for step in (2, 25, None):
            with replaying(run.record.id, run.store.url, lambda done, total: None) as opened:
                assert opened.again.step(step).equal


@pytest.mark.thorough
def test_a_killed_broker_loses_nothing(
    tmp_path: Path, new_home: Callable[[str], StackPaths], tiny_model: Path, undisturbed: list[str]
) -> None:
    paths = new_home("killed-broker")
    try:
        address = local.start_stack(kafka=True, prefect=False, paths=paths).bootstrap_servers
        assert address is not None
        with running(tmp_path, address, SPEC, tiny_model) as run:
            run.wait_for_steps(2)
            (broker,) = (state for state in local.stack_state(paths=paths) if state.name == "kafka")
            assert broker.pid is not None
            os.kill(broker.pid, signal.SIGKILL)
            assert local.start_stack(kafka=True, prefect=False, paths=paths).bootstrap_servers == address
            run.wait_for_end()
            check(run, undisturbed)
    finally:
        local.stop_stack(paths=paths)
