"""Times of a run file's parts by the hardware table and the model's config: for all that nobody measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from consumers.losses.loss import loss_of
from flows.planning.hardware import HARDWARE, Hardware, hardware_of
from flows.planning.learner_memory import LearnerMemory, counts_for_memory, learner_memory
from flows.planning.main_memory import (
    beside_gpus_bytes,
    generator_bytes,
    in_gib,
    kv_cache_bytes,
    trainer_bytes,
)
from flows.planning.model_shape import ModelShape, weight_bytes
from flows.planning.roofline import (
    BF16,
    BudgetError,
    Efficiency,
    Precision,
    Recipe,
    RooflineEngine,
    engine_times,
    learner_times,
)
from flows.planning.stage_times import DeviceRoom, EngineTimes, LearnerTimes
from flows.planning.step_estimate import IterationDemand
from producers.engines.vllm_engine import SHARE_IN_TURNS
from schemas.runspec import RunSpec

_ENDLESS = 1e18  # bytes
_CPU_CORES = 16  # that the table's CPU has
SLOT_ROOM = 1.2  # times the tokens that a running sample has on average: memory that a slot is given
FROM_TABLE = "from the hardware table, not measured"
_SENT_SHARE = 0.05  # of the weights' bytes, as a delta: tests.bench delta prints it for real steps

_DOUBLINGS = 6  # of an engine's ranks: a run file may say 64 of them


@dataclass(frozen=True)
class TableTimes:
    """A source of times that are computed from a table of hardware and a model's shape."""

    spec: RunSpec
    shape: ModelShape
    demand: IterationDemand
    four_bits: bool = False  # `streamrl quantize` has rounded the model
    more: Mapping[str, Hardware] | None = None  # kinds of hardware of the user's own
    endless: bool = False  # memory is no matter: for times of what was measured, which did fit

    @property
    def known(self) -> Sequence[str]:
        """All kinds of hardware that it has figures of."""
        return list(dict(HARDWARE) | dict(self.more or {}))

    def tensor_parallel(self, hardware: str, devices: int) -> Sequence[int]:
        """Return numbers of devices that fit into a machine: powers of two that can divide heads and experts.

        Each is times the run file's stretches of layers.
        """
        if self._kind(hardware).name == "CPU":
            return [self.spec.generator.threads * self.spec.generator.devices]
        degrees = [1 << power for power in range(_DOUBLINGS + 1)]
        layout, shape = self.spec.generator.layout, self.shape
        able = [one for one in degrees if shape.heads % one == 0]
        if layout.whole_experts:
            able = [one for one in able if one > 1 and shape.experts % one == 0]
        return [one * layout.stretches for one in able if one * layout.stretches <= devices]

    def most_slots(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples have room at once; 0: the model does not fit."""
        kind, devices = self._for_engine(hardware, tensor_parallel)
        found = self._slots(kind, devices, self._share)
        cache_bytes = kv_cache_bytes(self.spec, on_gpu=False) if kind.name == "CPU" else None
        if found and cache_bytes is not None:  # the engine takes no more of the main memory
            found = max(1, min(found, int(cache_bytes / self._slot_bytes)))
        return found

    @property
    def _slot_tokens(self) -> float:
        return max(1.0, self.demand.prompt_tokens / 2 + self.demand.context * SLOT_ROOM)

    @property
    def _slot_bytes(self) -> float:
        return self.shape.kv_bytes(self._precision.kv) * self._slot_tokens

    @property
    def _engine_weights(self) -> float:
        return weight_bytes(self.shape, self._of_engine.weights, self._of_engine.experts)

    def _slots(self, kind: Hardware, devices: int, share: float) -> int:
        bound = None if kind.name == "CPU" else kv_cache_bytes(self.spec, on_gpu=True)
        if bound is not None:
            fits = self._engine_weights + bound <= devices * kind.memory_bytes
            return max(1, int(bound / self._slot_bytes)) if fits else 0
        efficiency = Efficiency(memory_share=share)
        try:
            return RooflineEngine(self.shape, kind, devices, self._of_engine, efficiency).slots(
                self._slot_tokens
            )
        except BudgetError:
            return 0

    def slots_in_turns(self, hardware: str, tensor_parallel: int) -> int:
        """Return how many samples fit into the share of a GPU that an engine takes in turns."""
        kind, devices = self._for_engine(hardware, tensor_parallel)
        if kind.name == "CPU":
            return self.most_slots(hardware, tensor_parallel)
        return self._slots(kind, devices, self._share_in_turns)

    def turn_problem(self, hardware: str, devices: int) -> str:
        """Return why the trainer's state does not fit beside the share of engines; empty: it does.

        While an engine draws, the learner keeps its weights, gradients and moments on the GPU. While the
        learner computes, the engine has given its share back, so activations have room then.
        """
        kind, _ = self._devices(hardware, devices)
        if kind.name == "CPU":
            return ""
        kept = self._memory(devices, on_gpu=True).kept
        taken = self._engine_takes(kind, self.spec.generator.devices, self._share_in_turns)
        left = kind.memory_bytes - taken
        if kept <= left:
            return ""
        return (
            f"in turns (placement.kind: colocated) the learner keeps {in_gib(kept)} on each of "
            f"{devices} x {kind.name}, and beside {self._said_of_engines} there are {in_gib(left)}: take a "
            f"smaller one, or {self._less(kept)}"
        )

    def trainer_problem(self, hardware: str, devices: int) -> str:
        """Return why a trainer with so many devices has no room; empty: it has."""
        kind, _ = self._devices(hardware, devices)
        if kind.name == "CPU":
            return ""
        memory, usable = self._memory(devices, on_gpu=True), kind.memory_bytes * Efficiency().memory_share
        if memory.most <= usable:
            return ""
        return (
            f"the trainer keeps {in_gib(memory.kept)} on each of {devices} x {kind.name} and takes "
            f"{in_gib(memory.at_work)} more while it computes, and {in_gib(usable)} may be used: take "
            f"{self._less(memory.kept)}"
        )

    def _less(self, kept: float) -> str:
        """Return in words what makes the memory of a trainer smaller, as far as the run file lacks it."""
        trainer, words = self.spec.trainer, []
        if self._memory(2, on_gpu=True).kept < self._memory(1, on_gpu=True).kept:
            words.append("more trainer.ranks")
        else:
            words.append("trainer.learner: fsdp with several ranks, which divide the model")
        if not trainer.offload_optimizer and kept:
            words.append("trainer.offload_optimizer")
        if trainer.sums_exactly and kept:
            words.append("trainer.exact_sums: false")
        if not trainer.gradient_checkpointing:
            words.append("trainer.gradient_checkpointing")
        return ", ".join([*words, "a smaller trainer.microbatch_tokens"]) + ", or an adapter (model.lora)" * (
            self.spec.model.lora is None
        )

    @property
    def _share_in_turns(self) -> float:
        return float(getattr(self.spec.generator, "gpu_memory", None) or SHARE_IN_TURNS)

    @property
    def _share(self) -> float:
        return float(getattr(self.spec.generator, "gpu_memory", None) or Efficiency().memory_share)

    def _memory(self, ranks: int, *, on_gpu: bool) -> LearnerMemory:
        tokens = min(float(self.spec.trainer.microbatch_tokens), self.demand.tokens)
        counts = counts_for_memory(self.shape)
        return learner_memory(
            self.spec, counts, ranks, tokens=tokens, on_gpu=on_gpu, four_bits=self.four_bits
        )

    def engine(self, hardware: str, tensor_parallel: int, slots: int) -> EngineTimes:
        """Return the times of one generator that fits."""
        kind, devices = self._for_engine(hardware, tensor_parallel)
        found = engine_times(
            self.shape, kind, devices=devices, slots=slots,
            longest=max(1.0, self.demand.context * SLOT_ROOM), prompt=max(1.0, self.demand.prompt_tokens),
            precision=self._of_engine, efficiency=Efficiency(memory_share=self._share),
        )  # fmt: skip
        if kind.name != "CPU":
            return replace(found, room=self.engine_room(hardware, tensor_parallel))
        memory = generator_bytes(self.spec, self._engine_weights)
        return replace(found, cores=float(tensor_parallel), memory_bytes=memory)

    def engine_room(self, hardware: str, tensor_parallel: int) -> DeviceRoom:
        """Return the memory of each GPU of a generator: vLLM fills its share with keys and values."""
        return self._room(hardware, tensor_parallel, self._share)

    def room_in_turns(self, hardware: str, tensor_parallel: int) -> DeviceRoom | None:
        """Return the memory of each GPU of a generator that takes turns with the trainer; None on CPUs."""
        if self._kind(hardware).name == "CPU":
            return None
        return self._room(hardware, tensor_parallel, self._share_in_turns)

    def _room(self, hardware: str, tensor_parallel: int, share: float) -> DeviceRoom:
        kind = self._kind(hardware)
        taken = self._engine_takes(kind, tensor_parallel, share)
        return DeviceRoom(taken, kind.memory_bytes, self._engine_weights / tensor_parallel)

    def _engine_takes(self, kind: Hardware, devices: int, share: float) -> float:
        """Return the bytes of each GPU that an engine takes on so many of them."""
        bound = kv_cache_bytes(self.spec, on_gpu=True)
        return kind.memory_bytes * share if bound is None else (self._engine_weights + bound) / devices

    @property
    def _said_of_engines(self) -> str:
        if kv_cache_bytes(self.spec, on_gpu=True) is None:
            return f"the engines' share of {self._share_in_turns:g} (generator.gpu_memory)"
        return "the engines' weights and KV cache (generator.gpu_kv_cache_mib)"

    def learner_room(self, hardware: str, devices: int) -> DeviceRoom:
        """Return the memory of each GPU of a trainer."""
        return DeviceRoom(self._memory(devices, on_gpu=True).most, self._kind(hardware).memory_bytes)

    def learner(self, hardware: str, devices: int) -> LearnerTimes | None:
        """Return the times of a trainer; None if the model does not fit."""
        if self.trainer_problem(hardware, devices):
            return None
        kind, many = self._devices(hardware, devices)
        length = self.demand.tokens / self.demand.samples
        found = learner_times(
            self.shape, kind, devices=many, length=length, recipe=self._recipe, sent_share=_SENT_SHARE,
            has_room=True, precision=self._precision,
        )  # fmt: skip
        if kind.name == "CPU":
            ranks = max(1, devices // self.spec.trainer.threads)
            taken = trainer_bytes(self.shape.parameters, ranks, self._memory(ranks, on_gpu=False))
            return replace(found, cores=float(devices), memory_bytes=taken)
        memory = self._memory(devices, on_gpu=True)
        published = found.version_bytes / (1 if self._recipe.share < 1 else _SENT_SHARE)
        return replace(
            found, memory_bytes=beside_gpus_bytes(published, devices, memory),
            room=self.learner_room(hardware, devices),
        )  # fmt: skip

    @property
    def _recipe(self) -> Recipe:
        """The models that the run's algorithm trains and asks."""
        loss = loss_of(self.spec)
        adapter = counts_for_memory(self.shape).adapter(self.spec)
        return Recipe(
            trained=2.0 if loss.critic else 1.0,
            scored=float(loss.needs.reference) + float(loss.needs.before != "no"),
            passes=4.0 if self.spec.trainer.gradient_checkpointing else 3.0,
            share=adapter / self.shape.parameters if adapter else 1.0,
        )

    def engine_source(self, hardware: str, tensor_parallel: int, slots: int) -> str:
        """Say where the times of a generator come from."""
        return FROM_TABLE

    def learner_source(self, hardware: str, devices: int) -> str:
        """Say where the times of a trainer come from."""
        return FROM_TABLE

    @property
    def _precision(self) -> Precision:
        return BF16 if self.spec.model.dtype == "bfloat16" else Precision(weights=4.0)

    @property
    def _of_engine(self) -> Precision:
        """The precision of engines: with weights in eight bits, embedding and head stay as they are."""
        plain, shape = self._precision, self.shape
        if not self.spec.generator.eight_bits:
            return plain
        rest = shape.parameters - shape.layer_elements
        mean = (shape.layer_elements + rest * plain.weights) / shape.parameters
        return replace(plain, weights=mean, fp8=True)

    def _kind(self, name: str) -> Hardware:
        by_upper = {one.upper(): one for one in self.known}
        return hardware_of(by_upper.get(name.upper(), name), self.more)

    def _for_engine(self, name: str, devices: int) -> tuple[Hardware, int]:
        """Like `_devices`: of stretches of layers one computes at a time, and all have memory."""
        stretches = self.spec.generator.layout.stretches
        kind, many = self._devices(name, max(1, devices // stretches))
        return (
            kind if kind.name == "CPU" else replace(kind, memory_bytes=kind.memory_bytes * stretches)
        ), many

    def _devices(self, name: str, devices: int) -> tuple[Hardware, int]:
        """Return the hardware and how many of it; cores of a CPU are a part of one."""
        kind = self._kind(name)
        if self.endless:
            kind = replace(kind, memory_bytes=_ENDLESS)
        return (_cores_of(kind, devices), 1) if kind.name == "CPU" else (kind, devices)


@cache
def _cores_of(cpu: Hardware, cores: int) -> Hardware:
    share = min(1.0, cores / _CPU_CORES)
    return replace(
        cpu, bf16_flops=cpu.bf16_flops * cores / _CPU_CORES,
        memory_bytes_per_s=cpu.memory_bytes_per_s * min(1.0, 4 * share),  # a few cores fill all channels
    )  # fmt: skip
