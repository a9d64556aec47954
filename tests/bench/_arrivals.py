"""Iterations of the demo's samples that arrive when a bench wants them to, on a real broker."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from consumers.learners.learner import TorchLearner
from flows.run.start_model import prepare_model
from infra import runs
from infra.kafka_bus import KafkaBus
from infra.roles.context import RoleContext
from infra.roles.heart import Heart
from infra.stack import local
from infra.stores.opening import open_store
from infra.weights.digest import digests_of, root_digest
from producers.chat import load_tokenize_prompt
from producers.planner import Planner
from producers.ranker.ranker import Question
from producers.tasks import load_problems
from schemas.loading import load_run_file
from schemas.messages import Prompt, Sample
from schemas.runspec import RunSpec
from schemas.topics import Topics
from schemas.wire import encode
from tests.bench._runs import RUNFILE


def spec_of(iterations: int, *changes: str) -> RunSpec:
    """The demo, with room for samples that are all there from the start."""
    ahead = [
        "algorithm.mode=async",
        "algorithm.staleness=64",
        "trainer.keep_weights=65",
        "evaluation.problems=0",
    ]
    return load_run_file(RUNFILE, [*ahead, f"algorithm.iterations={iterations}", *changes])


def samples_of(spec: RunSpec, model: Path) -> list[list[Sample]]:
    """By iteration: right answers, of which some end too soon; rewards by chance."""
    tokenize = load_tokenize_prompt(str(model), spec.task, 0.0)
    problems = load_problems(spec, spec.task.train_split)
    by_id = {problem["id"]: problem for problem in problems}
    planner = Planner("bench", spec, problems, tokenize)
    lengths = {planner.question(name).key: len(tokenize(str(p["answer"]))) for name, p in by_id.items()}
    prompts = planner.admit(lambda _: _Knowing(lengths))
    draw = np.random.default_rng(spec.seed)
    found: list[list[Sample]] = [[] for _ in range(spec.algorithm.iterations)]
    for prompt in prompts:
        answer = np.array(tokenize(str(by_id[prompt.problem_id]["answer"])), dtype=np.int32)
        for index in range(prompt.size):
            found[prompt.iteration].append(_sample(prompt, index, answer, draw))
    return found


class _Knowing:
    """A ranker that knows how long the right answers are: the demo's learns it within some iterations."""

    name = "bench"

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self._lengths = lengths

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        return np.array([float(self._lengths[question.key]) for question in questions])


def _sample(prompt: Prompt, index: int, answer: np.ndarray, draw: np.random.Generator) -> Sample:
    length = max(1, round(len(answer) * min(1.0, draw.uniform(0.7, 1.3))))
    return Sample(
        run="", purpose=prompt.purpose, group=prompt.group, index=index, attempt=0, size=prompt.size,
        problem_id=prompt.problem_id, epoch=prompt.epoch, iteration=prompt.iteration, mini=prompt.mini,
        bundle=prompt.bundle, bundle_groups=prompt.bundle_groups, prompt_tokens=prompt.tokens,
        tokens=answer[:length], logprobs=np.full(length, -0.1, np.float32),
        version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), roots=[""],
        seed=prompt.group * 1000 + index, finish="stop", reward=float(draw.random()), reward_parts={},
        reward_error="", predicted=prompt.predicted, length_class=prompt.length_class, min_version=0,
        generator="bench", admitted_at=0.0, started_at=0.0, finished_at=0.0, scored_at=0.0,
    )  # fmt: skip


class Arrivals:
    """A run on a broker whose samples this process sends."""

    numbers = itertools.count(1)

    def __init__(self, spec: RunSpec, model: Path, stack: local.Stack) -> None:
        store = open_store(f"file://{stack.paths.home}/store")
        assert stack.bootstrap_servers is not None
        bus = KafkaBus(stack.bootstrap_servers)
        record = runs.create(
            store, spec, bootstrap_servers=stack.bootstrap_servers, model=str(model),
            run_id=f"bench-{next(self.numbers)}",
        )  # fmt: skip
        topics = Topics(record.id, spec.lengths.classes)
        bus.create_topics(topics.all())
        self._root = root_digest(digests_of(TorchLearner(str(model), spec).weights()))  # of version 0
        self.context = RoleContext(
            record, store, bus, topics, logging.getLogger("streamrl.bench"), "trainer", 0, bus.writer(),
            Heart(record.id, "trainer", 0), threading.Event(),
        )  # fmt: skip

    def send(self, samples: Sequence[Sample], after_s: Sequence[float]) -> float:
        """Each so many seconds from now; returns when the last one was sent."""
        from msgspec import structs

        run, topics = self.context.run, self.context.topics
        ready = [
            (delay, structs.replace(s, run=run, roots=[self._root]))
            for delay, s in zip(after_s, samples, strict=True)
        ]
        ready.sort(key=lambda pair: pair[0])
        encoded = [(delay, sample, encode(sample)) for delay, sample in ready]
        began = time.time()
        for delay, sample, raw in encoded:
            if (wait := began + delay - time.time()) > 0:
                time.sleep(wait)
            self.context.writer.send(topics.samples, raw, key=sample.id, partition=sample.length_class)
        sent = time.time()
        self.context.writer.flush(60.0)
        return sent


def model_of(spec: RunSpec) -> Path:
    """The demo's model, built once."""
    return prepare_model(spec, lambda fraction, text: None)
