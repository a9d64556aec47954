"""How long a model's steps take on a kind of hardware, by what they compute, read and send.

A step of decoding reads all weights once and every sample's keys and values, and computes one token a sample:

    step = max(weights / memory, products / compute) + keys and values / memory + all-reduces + launches

Training and prefill are bound by compute. The factors between a vendor's figures and what kernels reach are
`Efficiency`'s, each with its name. `streamrl profile` measures; this serves where nothing can be measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flows.planning.hardware import Hardware
from flows.planning.model_shape import ModelShape, weight_bytes
from flows.planning.stage_times import EngineTimes, LearnerTimes
from infra.errors import Explained

SPREAD = 0.25  # of seconds that nobody has measured
_MOST_SLOTS = 1024


class BudgetError(Explained):
    """These devices cannot hold the model, or there are none."""

    lasting = True


@dataclass(frozen=True)
class Efficiency:
    """Shares of a vendor's figures that are reached, and overheads that no figure has."""

    memory: float = 0.85  # of the bandwidth, by products that stream weights
    kv: float = 0.7  # of the bandwidth, by attention that reads keys and values
    decode_compute: float = 0.6  # of the FLOPs, by the thin products of a decode step
    prefill_compute: float = 0.6  # of the FLOPs, by prefill
    training_compute: float = 0.4  # of the FLOPs, by forward and backward, with what links cost (MFU)
    scoring_compute: float = 0.4  # of the FLOPs, by the forward passes of other models
    link: float = 0.8  # of the bandwidth of links and networks
    layer_s: float = 30e-6  # of a step for each layer: launches and what they wait for; twice with experts
    step_s: float = 0.0  # further seconds of a step
    sample_s: float = 10e-6  # further seconds of a step for each of its samples
    hop_s: float = 12e-6  # of an all-reduce, before its bytes
    memory_share: float = 0.9  # of a device's memory that an engine or a learner may use


@dataclass(frozen=True)
class Precision:
    """Bytes of an element."""

    weights: float = 2.0
    experts: float | None = None  # None: as the weights
    kv: float = 2.0
    fp8: bool = False  # products in FP8, where the hardware has it

    def peak(self, hardware: Hardware) -> float:
        """Return the FLOPs a second that products may reach."""
        return hardware.fp8_flops if self.fp8 and hardware.fp8_flops else hardware.bf16_flops


BF16 = Precision()


@dataclass(frozen=True)
class RooflineEngine:
    """One engine: a model on devices that share its tensors."""

    shape: ModelShape
    hardware: Hardware
    devices: int = 1
    precision: Precision = BF16
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        """Raise BudgetError if the weights do not fit."""
        if self.devices < 1:
            raise BudgetError(f"{self.shape.name} needs at least one device, not {self.devices}")
        if self._room() <= 0:
            takes = fewest_devices(self.shape, self.hardware, self.precision, self.efficiency)
            raise BudgetError(
                f"{self.devices} x {self.hardware.name} cannot hold {self.shape.name}: its weights take"
                f" {self._weights() / 1e9:.1f} GB of each device, and {self._usable() / 1e9:.1f} GB may be"
                f" used. It takes {takes} devices"
            )

    def _usable(self) -> float:
        return self.hardware.memory_bytes * self.efficiency.memory_share

    def _weights(self) -> float:
        return weight_bytes(self.shape, self.precision.weights, self.precision.experts) / self.devices

    def _room(self) -> float:
        return self._usable() - self._weights()

    def kv_bytes(self) -> float:
        """Bytes that a token of a sample takes on each device. Heads are copied where they are too few."""
        return self.shape.kv_bytes(self.precision.kv) / min(self.devices, self.shape.kv_heads)

    def kv_tokens(self) -> int:
        """How many tokens of samples fit beside the weights."""
        return int(self._room() / self.kv_bytes())

    def slots(self, tokens: float) -> int:
        """How many samples fit if each takes as many tokens."""
        if not tokens > 0:
            raise BudgetError(f"samples of {tokens} tokens take no memory: give the longest, with its prompt")
        slots = int(self.kv_tokens() / tokens)
        if not slots:
            raise BudgetError(
                f"{self.devices} x {self.hardware.name} hold {self.shape.name}, but beside it no sample of"
                f" {tokens:.0f} tokens ({self.kv_tokens()} fit): take more devices, or shorter samples"
            )
        return min(slots, _MOST_SLOTS)

    def read_bytes(self, batch: float) -> float:
        """Bytes of weights that a step of this batch reads on each device."""
        shape, precision = self.shape, self.precision
        of_experts = precision.weights if precision.experts is None else precision.experts
        always = shape.active_parameters - shape.expert_layers * shape.experts_per_token * shape.expert
        touched = shape.expert_elements * shape.experts_touched(batch)
        return (always * precision.weights + touched * of_experts) / self.devices

    def read_s(self, batch: float) -> float:
        """Seconds in which a step reads the weights."""
        return self.read_bytes(batch) / (self.hardware.memory_bytes_per_s * self.efficiency.memory)

    def batch_s(self, batch: float) -> float:
        """Seconds of a step with this many samples, without context."""
        efficiency, hardware = self.efficiency, self.hardware
        reads = self.read_s(batch)
        peak = self.precision.peak(hardware) * efficiency.decode_compute * self.devices
        computes = batch * self.shape.flops() / peak
        layers = self.shape.layers + self.shape.expert_layers
        launches = efficiency.step_s + layers * efficiency.layer_s + batch * efficiency.sample_s
        return max(reads, computes) + self._reduce_s(batch) + launches

    def _reduce_s(self, tokens: float) -> float:
        """Seconds of all-reducing these tokens, twice a layer: rings within a machine, networks beyond."""
        if self.devices == 1:
            return 0.0
        inside = self.devices <= self.hardware.per_machine
        link = self.hardware.link_bytes_per_s if inside else self.hardware.network_bytes_per_s
        sent = 2 * (self.devices - 1) / self.devices * tokens * self.shape.hidden * 2
        return 2 * self.shape.layers * (self.efficiency.hop_s + sent / (link * self.efficiency.link))

    def context_s(self, context: float = 0.0) -> float:
        """Seconds of a step for each token that one of its samples attends to."""
        share = self.shape.attended(context) / context if context else 1.0
        reads = self.kv_bytes() / (self.hardware.memory_bytes_per_s * self.efficiency.kv)
        flops = 4 * self.shape.layers * self.shape.heads * self.shape.head_dim
        computes = flops / (self.hardware.bf16_flops * self.efficiency.decode_compute * self.devices)
        return share * max(reads, computes)

    def step_s(self, batch: float, context: float) -> float:
        """Seconds of a step with so many samples, each with so much context."""
        return self.batch_s(batch) + self.context_s(context) * batch * context

    def prefill_s(self, prompt: float) -> float:
        """Seconds for each token of prompts of this length, several of which are computed together."""
        peak = self.precision.peak(self.hardware) * self.efficiency.prefill_compute * self.devices
        sends = self._reduce_s(1) - self._reduce_s(0)
        return self.shape.flops(prompt / 2) / peak + sends


def fewest_devices(
    shape: ModelShape,
    hardware: Hardware,
    precision: Precision = BF16,
    efficiency: Efficiency = Efficiency(),
) -> int:
    """Return the smallest power of two of devices that hold the weights and some tokens besides."""
    needed = weight_bytes(shape, precision.weights, precision.experts)
    usable = hardware.memory_bytes * efficiency.memory_share
    return int(2 ** math.ceil(math.log2(max(1.0, needed / usable * 1.0001))))


def engine_times(
    shape: ModelShape,
    hardware: Hardware,
    *,
    devices: int = 1,
    slots: int | None = None,
    longest: float = 4096,
    prompt: float = 512,
    install_s: float = 0.0,
    precision: Precision = BF16,
    efficiency: Efficiency = Efficiency(),
) -> EngineTimes:
    """Return how fast one engine would be.

    `devices` share its tensors. `longest`: tokens of the longest sample with its prompt, for which each slot
    has memory. `slots`: at most so many; None: as many as memory allows.
    """
    engine = RooflineEngine(shape, hardware, devices, precision, efficiency)
    fits = engine.slots(longest)
    if slots is not None and slots < 1:
        raise BudgetError(f"an engine of {slots} slots makes nothing: give it at least one")
    taken = fits if slots is None else min(slots, fits)
    seconds = [engine.batch_s(max(1, batch)) for batch in range(taken + 1)]
    return EngineTimes(
        batch_s=tuple(float(second) for second in np.maximum.accumulate(seconds)),
        context_s=engine.context_s(longest / 2), prefill_s=engine.prefill_s(prompt), install_s=install_s,
        spread=SPREAD,
    )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The models that an algorithm trains and asks, as multiples of the policy, and how they are kept."""

    trained: float = 1.0  # models with gradients: with a critic of the same size 2
    scored: float = 0.0  # forward passes besides, such as a reference's
    state_bytes: float = 18.0  # of a trained element: weights and gradients, main weights, two moments
    offloaded: bool = False  # a model that is not at work waits in the machine's memory
    passes: float = 3.0  # forward passes' worth of work that a trained token is
    share: float = 1.0  # of the elements that are trained: an adapter's are few

    def resident(self, shape: ModelShape, dtype_bytes: float = 2.0) -> float:
        """Bytes that all devices together hold at once."""
        trained = 1.0 if self.offloaded else self.trained
        frozen = 0.0 if self.offloaded else self.scored
        return shape.parameters * (trained * self.state_bytes + frozen * dtype_bytes)


def training_flops(shape: ModelShape, context: float, recipe: Recipe) -> tuple[float, float]:
    """FLOPs of a token with gradients, and of its scores."""
    forward = shape.flops(context)
    return recipe.passes * recipe.trained * forward, recipe.scored * forward


def learner_times(
    shape: ModelShape,
    hardware: Hardware,
    *,
    devices: int = 1,
    length: float = 4096,
    recipe: Recipe = Recipe(),
    sent_share: float = 1.0,
    has_room: bool = False,
    precision: Precision = BF16,
    efficiency: Efficiency = Efficiency(),
) -> LearnerTimes:
    """Return how fast a trainer would be, all its devices together.

    `length`: tokens of a typical sample with its prompt; a token attends to half of them. `sent_share`: of
    the weights' bytes that a new version sends, which a delta makes small. `has_room`: somebody has seen that
    its memory suffices, who knows more than the recipe.
    """
    if devices < 1:
        raise BudgetError(f"training {shape.name} needs at least one device, not {devices}")
    usable = hardware.memory_bytes * efficiency.memory_share * devices
    needed = recipe.resident(shape, precision.weights)
    if needed > usable and not has_room:
        one = hardware.memory_bytes * efficiency.memory_share
        raise BudgetError(
            f"{devices} x {hardware.name} cannot train {shape.name}: weights, gradients and the optimizer's"
            f" state take {needed / 1e9:.0f} GB, and {usable / 1e9:.0f} GB may be used: take"
            f" {math.ceil(needed / one)} devices"
        )
    trained, scored = training_flops(shape, length / 2, recipe)
    peak = hardware.bf16_flops * devices
    sent = weight_bytes(shape, precision.weights, precision.experts) * sent_share
    if recipe.share < 1:  # an adapter is sent in float32, and nearly all of it changes
        sent = shape.parameters * recipe.share * 4
    network = hardware.network_bytes_per_s * efficiency.link * min(devices, hardware.per_machine)
    return LearnerTimes(
        token_s=trained / (peak * efficiency.training_compute) + scored / (peak * efficiency.scoring_compute),
        step_s=_optimizer_s(shape, hardware, devices, recipe, efficiency),
        publish_s=sent / network, version_bytes=int(sent), spread=SPREAD,
    )  # fmt: skip


def _optimizer_s(
    shape: ModelShape, hardware: Hardware, devices: int, recipe: Recipe, efficiency: Efficiency
) -> float:
    """Seconds of an optimizer step: state read and written once, gradients and weights sent round once.

    A machine's devices hold one copy of a model between them, so each sends its part to the other machines.
    """
    trained = shape.parameters * recipe.share * recipe.trained
    state = trained * recipe.state_bytes / devices
    touched = 2 * state / (hardware.memory_bytes_per_s * efficiency.memory)
    inside = min(devices, hardware.per_machine)
    copies = devices / inside
    if copies <= 1:
        return touched
    part = trained * 2 / inside  # of BF16, gradients there and weights back
    sent = 2 * part * (copies - 1) / copies
    return touched + sent / (hardware.network_bytes_per_s * efficiency.link)
