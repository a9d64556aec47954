"""A trainer of a large model with a watch, in a world in memory that answers weights with samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from consumers.learners.learner import TorchLearner
from consumers.learners.optimizing import Stepped
from consumers.steps.step_record import StepParts
from consumers.stream.sample_stream import Stream
from consumers.trainer import Trainer
from infra.memory_bus import MemoryBus, MemorySent, MemoryWriter
from infra.roles.context import RoleContext
from schemas.messages import WeightsAnnouncement
from schemas.runspec import RunSpec
from schemas.topics import Topic
from schemas.wire import decode
from tests.factories import make_context
from tests.fakes.crashing import World

_HIDDEN, _WIDE = 2048, 5632
_OF_A_LAYER = 2 * _HIDDEN * _HIDDEN + 2 * _HIDDEN * 256 + 3 * _HIDDEN * _WIDE  # elements


def make_model(folder: Path, gigabytes: float) -> int:
    """A Qwen2 with random weights, few words and few large layers; its bytes in fp32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    layers = max(1, round(gigabytes * 1e9 / 4 / _OF_A_LAYER))
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=_HIDDEN, intermediate_size=_WIDE, num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


@dataclass
class Watch:
    """Seconds on the training thread, by step."""

    beside: list[float] = field(default_factory=list)  # forward, backward and optimizer
    settled: list[float] = field(default_factory=list)  # of these: until others had read what a step changes
    checkpoints: dict[int, float] = field(default_factory=dict)  # by the number of the step behind it
    optimizer_s: float = 0.0
    settle_s: float = 0.0
    collected: float = 0.0


class WatchedLearner(TorchLearner):
    """Notes what a step's optimizer takes, and how long it waits for readers before."""

    def __init__(self, model: str, spec: RunSpec, watch: Watch) -> None:
        super().__init__(model, spec)
        self._watch = watch

    def step(self, total: float) -> Stepped:
        began = time.perf_counter()
        self._lent.settle()
        settled = time.perf_counter()
        taken = super().step(total)
        self._watch.settle_s += settled - began
        self._watch.optimizer_s += time.perf_counter() - settled
        return taken


class WatchedTrainer(Trainer):
    """Notes what a step takes on its thread when all micro-batches are done."""

    def __init__(self, context: RoleContext, learner: WatchedLearner, watch: Watch) -> None:
        super().__init__(context, learner)
        self._watch = watch

    def _collect(self, stream: Stream, *given: Any) -> StepParts:
        step = super()._collect(stream, *given)
        self._watch.collected = time.perf_counter()
        return step

    def _train_step(self, stream: Stream) -> None:
        watch = self._watch
        optimizer, settle, checkpoint = watch.optimizer_s, watch.settle_s, sum(watch.checkpoints.values())
        super()._train_step(stream)
        whole = time.perf_counter() - watch.collected
        stood = sum(watch.checkpoints.values()) - checkpoint
        watch.beside.append(whole - (watch.optimizer_s - optimizer) - stood)
        watch.settled.append(watch.settle_s - settle)

    def _checkpoint(self, *given: Any) -> None:
        began = time.perf_counter()
        super()._checkpoint(*given)
        self._watch.checkpoints[len(self._watch.beside) + 1] = time.perf_counter() - began


class _Answering(MemoryWriter):
    """The log; announced weights are answered with samples."""

    world: World

    def __init__(self, bus: MemoryBus, weights: Topic) -> None:
        super().__init__(bus)
        self._weights = weights

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> MemorySent:
        sent = super().send(topic, value, key=key, partition=partition)
        if topic.name == self._weights.name:
            self.world.answer(decode(value, WeightsAnnouncement))
        return sent


def train(spec: RunSpec, folder: Path) -> tuple[RoleContext, Watch]:
    """A run to its end, of the model in the folder's `model`."""
    plain, watch = make_context(spec, folder), Watch()
    assert isinstance(plain.bus, MemoryBus)
    writer = _Answering(plain.bus, plain.topics.weights)
    context = replace(plain, writer=writer)
    writer.world = World(context, str(folder / "model"))
    learner = WatchedLearner(str(folder / "model"), spec, watch)
    try:
        WatchedTrainer(context, learner, watch).run()
    finally:
        learner.close()
    return context, watch
