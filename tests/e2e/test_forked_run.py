"""A fork of a real run, with all real parts: it draws the same samples, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.ranks.choose_learner import learner_of
from consumers.replay import Again
from flows.run.forking import ForkRequest, make_fork
from infra.kafka_bus import KafkaBus
from infra.ownership import claim
from infra.run_handle import opened_run
from infra.runs import find
from infra.supervise.children import kill
from schemas.topics import Topics
from tests.factories import make_spec
from tests.harness import Run, running

SYNC = make_spec(
    algorithm={"iterations": 4, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
    trainer={"bundle_tokens": 64, "checkpoint_every": 1},
)


class RunOfRecord(Run):
    """A run whose record is there already."""

    def __init__(self, parent: Run, run_id: str, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.store, self.record = folder, parent.store, find(parent.store, run_id)
        self.bus = KafkaBus(self.record.bootstrap_servers)
        self.topics = Topics(run_id, self.record.spec.lengths.classes)
        self.bus.create_topics(self.topics.all())
        claim(self.bus, self.record, self.topics)
        self.processes, self.modules = {}, dict(parent.modules)


@pytest.mark.timeout(400)
def test_a_fork_draws_what_its_run_drew_and_ends_with_its_bits(
    tmp_path: Path, kafka: str, tiny_model: Path
) -> None:
    with running(tmp_path / "parent", kafka, SYNC, tiny_model) as parent:
        parent.wait_for_end()
        steps = parent.steps()
    with opened_run(parent.store, parent.record, "test-fork") as handle:
        again = Again(
            handle, lambda: learner_of(str(tiny_model), handle.spec, run=handle.run, log=handle.log),
            lambda done, total: None,
        )  # fmt: skip
        said: list[str] = []
        made = make_fork(again, handle, ForkRequest(2), topics=handle.bus.topic_names(), say=said.append)
        again.close()
    assert not said, "its ranker and its bits are there"
    fork = RunOfRecord(parent, made.id, tmp_path / "fork")
    try:
        for role in ("feeder", "trainer", "generator"):
            fork.start(role)
        fork.wait_for_end()
        own = fork.steps()
    finally:
        for process in fork.processes.values():
            kill(process)
    assert [step.step for step in own] == [2, 3]
    for ours, theirs in zip(own, steps[2:], strict=True):
        assert sorted(ours.seeds.tolist()) == sorted(theirs.seeds.tolist())
        assert sorted(ours.problem_ids) == sorted(theirs.problem_ids)  # bundles come in any order
        assert ours.root_out == theirs.root_out
    assert not fork.dead_letters()
