"""A world in which a run is trained: all of it is as it should be, until a fault replaces a part.

announced weights ──► groups that may be admitted ──► prompts ──► answers ──► rewards ──► samples on the log
                                                  the trainer is the real one ◄──┘
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consumers.learners.learner import TorchLearner
from consumers.steps.failing import TrainingFailed
from consumers.trainer import Trainer
from infra import runs
from infra.memory_bus import MemoryWriter
from infra.roles.context import Stopped
from infra.roles.heart import Heart
from infra.weights.adapter_tensors import Merging
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from schemas.admission import admissible, latest_iteration, oldest_version
from schemas.identity import derive_seed, sampling_seed
from schemas.messages import EVAL, TRAIN, Evaluation, Prompt, Sample, WeightsAnnouncement
from schemas.runspec import RunSpec
from schemas.topics import Topic
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec
from tests.zoo.drawing import Drawing, Drawn

Problem = dict[str, Any]
Weights = Mapping[str, torch.Tensor]


def zoo_spec(**sections: Any) -> RunSpec:
    """Return the settings of a run of the zoo."""
    algorithm = {"iterations": 30, "groups": 4, "group_size": 4, "learning_rate": 5e-4}
    return make_spec(
        algorithm=algorithm | sections.pop("algorithm", {}),
        sampling={"max_tokens": 12, "max_prompt_tokens": 8} | sections.pop("sampling", {}),
        trainer={"checkpoint_every": 5, "keep_checkpoints": 10, "keep_weights": 64}
        | sections.pop("trainer", {}),
        evaluation={"every": 5, "problems": 16, "per_problem": 1} | sections.pop("evaluation", {}),
        **sections,
    )


def problem_of(number: int, split: str = "train") -> Problem:
    """Return a problem: its prompt begins with one or several letters, of which nothing depends."""
    letters = "abcdefg"
    text = "".join(letters[(number // 7**place + place) % 7] for place in range(1 + number % 3))
    return {"id": f"{split}-{number}", "prompt": f"{text}{number % 10}:"}


def digits(problem: Problem, text: str) -> dict[str, float]:
    """Return the reward: the share of digits."""
    return {"digits": sum(one.isdigit() for one in text) / max(1, len(text))}


class ZooWorld:
    """A run of the zoo. A fault replaces the attributes that are functions."""

    def __init__(self, folder: Path, model: str, spec: RunSpec | None = None) -> None:
        self.spec = spec or zoo_spec()
        self.model, self.folder = model, folder
        self.context = make_context(self.spec, folder)
        self.problems = [problem_of(number) for number in range(64)]
        self.held_out = [problem_of(number, "held_out") for number in range(1000, 1016)]
        self.generator = Drawing(
            model, temperature=self.spec.sampling.temperature, max_tokens=self.spec.sampling.max_tokens
        )
        # what a fault may replace
        self.problem_at: Callable[[int], Problem] = lambda group: self.problems[group % len(self.problems)]
        self.epoch_of: Callable[[int], int] = lambda group: group // len(self.problems)
        self.reward: Callable[[Problem, str], dict[str, float]] = digits
        self.served: Callable[[int], Weights] = self.published
        self.told: Callable[[list[int], int], list[int]] = lambda prompt, version: prompt
        self.tokenized: Callable[[Problem], list[int]] = self.tokens_of
        self.said: Callable[[Drawn, int, int], Drawn] = lambda drawn, group, index: drawn
        self.edit: Callable[[Sample], Sample] = lambda sample: sample
        self.tamper: Callable[[Any], None] = lambda learner: None
        self.of_trainer: Callable[[Trainer], None] = lambda trainer: None
        self._versions = WeightStore(self.context.store, self.context.run)
        self._admitted = 0

    def published(self, version: int) -> Weights:
        """Return the weights of a version."""
        found = self._versions.fetch(version)[1]
        if self.spec.model.lora is None:
            return found
        base = ModelFolder(self.model)
        merging = Merging(self.spec.model, base)
        return {name: merging.tensor(name, found) for name in base.names}

    def tokens_of(self, problem: Problem) -> list[int]:
        """Return the tokens of a problem's prompt."""
        return list(self.generator.tokenizer.encode(problem["prompt"], add_special_tokens=False))

    def live(self) -> str:
        """Train the run to its end; return why it ended before, if it did."""
        runs.create(
            self.context.store,
            self.spec,
            bootstrap_servers="none",
            model=self.model,
            topics=set(),
            run_id=self.context.run,
        )
        self.context = replace(
            self.context, record=runs.find(self.context.store, self.context.run).with_code("loss")
        )
        writer = _Answering(self)
        context = replace(
            self.context, writer=writer, stop=threading.Event(), heart=Heart(self.context.run, "trainer", 0)
        )
        learner = TorchLearner(self.model, self.context.spec)
        self.tamper(learner)
        try:
            trainer = Trainer(context, learner)
            self.of_trainer(trainer)
            with suppress(Stopped):
                trainer.run()
        except TrainingFailed as error:
            return str(error)
        finally:
            learner.close()
        return ""

    def answer(self, announced: WeightsAnnouncement) -> None:
        """Do what the feeder and the generators do when weights are announced."""
        algorithm, version = self.spec.algorithm, announced.version
        most = algorithm.iterations * algorithm.groups
        until = min(admissible(version, algorithm.groups, algorithm.lookahead), most)
        first, self._admitted = self._admitted, max(until, self._admitted)
        self.generator.load(self.served(version))
        jobs = [(group, index) for group in range(first, until) for index in range(algorithm.group_size)]
        problems = {group: self.problem_at(group) for group in range(first, until)}
        prompts = {group: self.tokenized(problem) for group, problem in problems.items()}
        for group in range(first, until):
            self._publish_prompt(group, problems[group], prompts[group])
        seeds = [
            sampling_seed(self.spec.seed, self.spec.run, problems[g]["id"], g, index, 0, version)
            for g, index in jobs
        ]
        answers = self.generator.draw([self.told(prompts[group], version) for group, _ in jobs], seeds)
        for (group, index), seed, drawn in zip(jobs, seeds, answers, strict=True):
            sample = self._sample(
                announced, group, index, problems[group], prompts[group], self.said(drawn, group, index), seed
            )
            self._send(self.context.topics.samples, encode(self.edit(sample)), sample.id, sample.length_class)
        if self.spec.evaluates(version):
            self._evaluate(version)

    def _publish_prompt(self, group: int, problem: Problem, tokens: list[int]) -> None:
        prompt = Prompt(
            **self._shared(group, problem, TRAIN),
            problem=json.dumps(problem),
            tokens=np.array(tokens, np.int32),
            predictor="none",
            edges=[],
        )
        self._send(self.context.topics.prompts, encode(prompt), str(group), prompt.length_class)

    def _shared(self, group: int, problem: Problem, purpose: str) -> dict[str, Any]:
        algorithm, iteration = self.spec.algorithm, latest_iteration(group, self.spec.algorithm)
        mini, bundle, bundle_groups = 0, group, 1
        if algorithm.order == "window":
            mini = group % algorithm.optimizer_steps
            bundle, bundle_groups = (
                iteration * algorithm.groups + mini,
                algorithm.groups // algorithm.optimizer_steps,
            )
        return {
            "run": self.context.run,
            "purpose": purpose,
            "group": group,
            "size": algorithm.group_size,
            "problem_id": problem["id"],
            "epoch": self.epoch_of(group),
            "iteration": iteration,
            "mini": mini,
            "bundle": bundle,
            "bundle_groups": bundle_groups,
            "predicted": 6.0,
            "admitted_at": 0.0,
            "min_version": oldest_version(group, algorithm.groups, algorithm.lookahead),
            "length_class": group % self.spec.lengths.classes,
        }

    def _sample(
        self,
        announced: WeightsAnnouncement,
        group: int,
        index: int,
        problem: Problem,
        prompt: list[int],
        drawn: Drawn,
        seed: int,
    ) -> Sample:
        parts, error = self._scored(problem, drawn)
        return Sample(
            **self._shared(group, problem, TRAIN),
            index=index,
            attempt=0,
            prompt_tokens=np.array(prompt, np.int32),
            tokens=drawn.tokens,
            logprobs=drawn.logprobs,
            version_starts=np.zeros(1, np.int32),
            versions=np.array([announced.version], np.int32),
            roots=[announced.root],
            seed=seed,
            finish=drawn.finish,
            reward=sum(parts.values()),
            reward_parts=parts,
            reward_error=error,
            generator="generator-0",
            started_at=0.0,
            finished_at=0.0,
            scored_at=0.0,
        )

    def _scored(self, problem: Problem, drawn: Drawn) -> tuple[dict[str, float], str]:
        """Return parts and error of the reward, as the generator's own code has them."""
        try:
            parts = self.reward(problem, self.text(drawn.tokens))
        except Exception as error:
            return {}, f"{type(error).__name__}: {error}"
        if not all(map(np.isfinite, parts.values())):
            return {}, f"the reward is {parts}, which is not finite"
        return parts, ""

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of some tokens."""
        return str(self.generator.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def _evaluate(self, version: int) -> None:
        self.generator.load(self.published(version))
        seeds = [derive_seed(EVAL, self.spec.seed, version, number) for number in range(len(self.held_out))]
        drawn = self.generator.draw([self.tokens_of(problem) for problem in self.held_out], seeds)
        scored = [
            sum(self._scored(problem, one)[0].values())
            for problem, one in zip(self.held_out, drawn, strict=True)
        ]
        evaluation = Evaluation(
            run=self.context.run,
            version=version,
            problem_ids=[problem["id"] for problem in self.held_out],
            rewards=np.array(scored),
            lengths=np.array([one.tokens.size for one in drawn]),
            predicted=np.ones(len(drawn)),
            failed=0,
            finished_at=0.0,
            newest=version,
        )
        self._send(self.context.topics.evals, encode(evaluation), str(version), 0)

    def _send(self, topic: Topic, value: bytes, key: str, partition: int) -> None:
        self.context.writer.send(topic, value, key=key, partition=partition)


class _Answering(MemoryWriter):
    """The log; announced weights are answered with samples."""

    def __init__(self, world: ZooWorld) -> None:
        super().__init__(world.context.bus)  # type: ignore[arg-type]
        self._world = world

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> Any:
        sent = super().send(topic, value, key=key, partition=partition)
        if topic.name == self._world.context.topics.weights.name:
            announced = decode(value, WeightsAnnouncement)
            self._world.answer(announced)
        return sent
