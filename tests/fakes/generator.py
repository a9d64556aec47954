"""A generator for tests of supervision: answers every prompt at once, and has a child of its own."""

import subprocess
import sys
import time

import numpy as np

from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from schemas.messages import Prompt, Sample
from schemas.wire import decode, encode
from tests.fakes.fill import fill


def body(context: RoleContext) -> None:
    # A grandchild of the guard, in a session of its own: the hardest to end.
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    topics = context.topics
    done = {int(record.key) for record in _all(context, topics.samples)}
    prompts = context.bus.reader(topics.prompts)
    while True:
        context.check_stop()
        for record in prompts.poll(0.1):
            prompt = decode(record.value, Prompt)
            if prompt.group in done:
                continue
            for index in range(prompt.size):
                sample = make_sample(prompt, index, context.name)
                context.writer.send(
                    topics.samples, encode(sample), key=str(prompt.group), partition=prompt.length_class
                )
            context.heart.working("generating")
        context.heart.waiting("prompts", unblocked_by="the feeder")


def _all(context, topic):
    from infra.bus import read_all

    return read_all(context.bus, topic, deadline_s=30)


def make_sample(prompt: Prompt, index: int, name: str) -> Sample:
    now = time.time()
    return fill(
        Sample,
        run=prompt.run,
        purpose=prompt.purpose,
        group=prompt.group,
        index=index,
        attempt=0,
        size=prompt.size,
        problem_id=prompt.problem_id,
        epoch=0,
        iteration=prompt.iteration,
        bundle=0,
        bundle_groups=prompt.bundle_groups,
        prompt_tokens=prompt.tokens,
        tokens=np.arange(5),
        logprobs=np.zeros(5),
        version_starts=np.zeros(1),
        versions=np.array([prompt.iteration]),
        roots=["r"],
        seed=1,
        finish="stop",
        reward=0.5 + 0.01 * index,
        reward_parts={},
        reward_error="",
        predicted=5.0,
        length_class=prompt.length_class,
        min_version=prompt.min_version,
        generator=name,
        admitted_at=prompt.admitted_at,
        started_at=now,
        finished_at=now,
        scored_at=now,
    )


if __name__ == "__main__":
    sys.exit(run_role("generator", body))
