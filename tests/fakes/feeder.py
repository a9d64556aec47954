"""A feeder for tests of supervision: admits two groups an iteration, all at once, and evaluates twice."""

import sys
import time

import numpy as np

from infra.bus import read_all
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.waiting import wait_until
from schemas.messages import EVAL, TRAIN, Evaluation, Prompt
from schemas.wire import encode
from tests.fakes.fill import fill

GROUPS = 2


def body(context: RoleContext) -> None:
    spec, topics = context.spec, context.topics
    known = {record.key for record in read_all(context.bus, topics.prompts, deadline_s=30)}
    for iteration in range(spec.algorithm.iterations):
        for group in range(GROUPS * iteration, GROUPS * (iteration + 1)):
            if str(group).encode() not in known:
                place = group % spec.lengths.classes
                prompt = make_prompt(context.run, group, iteration, spec.algorithm.group_size, place)
                context.writer.send(topics.prompts, encode(prompt), key=str(group), partition=place)
    context.writer.flush(30)
    evaluate(context, 0, 0.2)
    context.heart.waiting("the last iteration", unblocked_by="the trainer")

    def trained() -> bool:
        context.check_stop()
        return len(read_all(context.bus, topics.ledger, deadline_s=30)) >= spec.algorithm.iterations

    wait_until(trained, "the ledger", unblocked_by="the trainer", deadline_s=120, every_s=0.2)
    evaluate(context, spec.algorithm.iterations, 0.7)


def make_prompt(run: str, group: int, iteration: int, size: int, place: int) -> Prompt:
    return fill(
        Prompt,
        run=run,
        purpose=TRAIN,
        group=group,
        size=size,
        problem_id=f"p{group}",
        problem="{}",
        epoch=0,
        tokens=np.arange(4),
        iteration=iteration,
        bundle=0,
        bundle_groups=GROUPS,
        min_version=iteration,
        predicted=5.0,
        predictor="fake",
        length_class=place,
        edges=[],
        admitted_at=time.time(),
    )


def evaluate(context: RoleContext, version: int, reward: float) -> None:
    names = [f"h{number}" for number in range(10)]
    found = fill(
        Evaluation,
        run=context.run,
        version=version,
        problem_ids=names,
        rewards=np.full(10, reward),
        lengths=np.arange(1, 11),
        predicted=np.full(10, 5.0),
        failed=0,
        finished_at=time.time(),
    )
    assert EVAL
    context.writer.send(context.topics.evals, encode(found), key=str(version))
    context.writer.flush(30)


if __name__ == "__main__":
    sys.exit(run_role("feeder", body))
