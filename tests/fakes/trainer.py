"""A trainer for tests of supervision: a step for every iteration whose samples are there, slowly."""

import os
import sys
import time

import numpy as np
import torch

from infra.bus import read_all
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.weights.versions import WeightStore
from schemas.messages import Sample, StepRecord, WeightsAnnouncement
from schemas.wire import decode, encode
from tests.fakes.feeder import GROUPS
from tests.fakes.fill import fill


def body(context: RoleContext) -> None:
    spec, topics = context.spec, context.topics
    weights = WeightStore(context.store, context.run)
    announce(context, weights, 0)
    first = len(read_all(context.bus, topics.ledger, deadline_s=30))
    reader = context.bus.reader(topics.samples)
    waiting: dict[int, list] = {}
    for iteration in range(first, spec.algorithm.iterations):
        want = GROUPS * spec.algorithm.group_size
        while len(waiting.get(iteration, [])) < want:
            context.check_stop()
            context.heart.waiting(f"samples of iteration {iteration}", unblocked_by="the generators")
            for record in reader.poll(0.1):
                sample = decode(record.value, Sample)
                waiting.setdefault(sample.iteration, []).append((record, sample))
        context.heart.working("training")
        if context.stop.wait(float(os.environ.get("FAKE_STEP_S", "0.05"))):
            context.check_stop()
        if os.environ.get("FAKE_TRAINER_DIES") == str(iteration) and not seen(context):
            os.kill(os.getpid(), 9)
        announce(context, weights, iteration + 1)
        step = make_step(context.run, iteration, waiting[iteration])
        context.writer.send(topics.ledger, encode(step), key=str(iteration))
        context.writer.flush(30)
        context.heart.counters["samples"] = context.heart.counters.get("samples", 0) + want


def seen(context: RoleContext) -> bool:
    """Whether this was done once already."""
    there = context.store.exists("died")
    context.store.put("died", b"")
    return there


def announce(context: RoleContext, weights: WeightStore, version: int) -> None:
    manifest = weights.publish(version, {"w": torch.full((4,), float(version))}, trainer_epoch=1)
    message = fill(
        WeightsAnnouncement,
        run=context.run,
        version=version,
        root=manifest.root,
        manifest=weights.manifest_key(version),
        size=manifest.size,
        trainer_epoch=1,
        announced_at=time.time(),
    )
    context.writer.send(context.topics.weights, encode(message), key="weights")


def make_step(run: str, iteration: int, rows: list) -> StepRecord:
    records, samples = [r for r, _ in rows], [s for _, s in rows]
    rewards = np.array([s.reward for s in samples])
    if failing := os.environ.get("FAKE_REWARDS_FAIL", ""):
        rewards[0] = np.nan
    return fill(
        StepRecord,
        run=run,
        trainer_epoch=1,
        iteration=iteration,
        step=iteration,
        last_of_iteration=True,
        version_in=iteration,
        version_out=iteration + 1,
        root_out="r",
        recipe="x",
        partitions=np.array([r.partition for r in records]),
        offsets=np.array([r.offset for r in records]),
        groups=np.array([s.group for s in samples]),
        indexes=np.array([s.index for s in samples]),
        lengths=np.array([s.true_length for s in samples]),
        rewards=rewards,
        versions=np.array([int(s.versions[0]) for s in samples]),
        predicted=np.zeros(len(rows)),
        problem_ids=[s.problem_id for s in samples],
        microbatches=np.array([len(rows)]),
        losses=np.array([0.1]),
        metrics={"logprob_gap": 1e-6},
        finished_at=time.time(),
        failed_reason=failing,
        failed_sample=f"s-{iteration}" if failing else "",
    )


if __name__ == "__main__":
    sys.exit(run_role("trainer", body))
