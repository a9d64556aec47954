"""Memory of one rank of a trainer, by the run file: what it keeps, and what it needs while it computes.

kept      weights, gradients, their exact sum, moments, models beside the policy: divided as the learner does
at work   activations of a micro-batch, a chunk of logits, weights made whole or rounded for the while

The figures for learner torch are near what one H100 showed (docs/benchmarks.md, "Memory"; a test compares
them). Nobody has measured fsdp and deepspeed: their figures follow from how they divide the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from consumers.losses.loss import loss_of
from flows.planning.model_shape import ModelShape
from infra.weights.adapter_tensors import is_meant
from schemas.runspec import RunSpec

_FLOAT = 4.0  # bytes of an element in float32
_HALF = 2.0  # in bfloat16
_EXACT = 8.0  # of a sum in fixed point
_MOMENTS = 8.0  # both of AdamW's
_FOUR_BITS = 0.5 + 2 / 64  # and each block's largest magnitude
_WORKSPACE = 0.5 * (1 << 30)  # of kernels, and what torch's blocks do not fill
_LOGITS = 14.0  # of a logit where no kernel does it in one pass: in the run's type, and three in float32
_ZERO_LIVE = 1e9  # elements of which ZeRO-3 holds whole weights at once, by its default
_ZERO_BUCKET = 1 << 26  # as `consumers/learners/zero.py` says


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one rank."""

    kept: float  # also between steps, and while engines draw in turns
    at_work: float  # further ones, while it computes
    moments: float = 0.0  # of main memory, where moments lie there, and weights that DeepSpeed steps

    @property
    def most(self) -> float:
        """The bytes of its device."""
        return self.kept + self.at_work


@dataclass(frozen=True)
class ModelSizes:
    """The counts of a model that memory depends on."""

    elements: float
    layers: int = 1
    hidden: float = 0.0
    vocab: float = 0.0
    tied: bool = True
    experts: float = 0.0  # elements
    of_token: float = 0.0  # bytes that a layer keeps of a token for the backward pass
    of_adapters_token: float = 0.0  # likewise, if an adapter is trained
    adapted: tuple[tuple[str, float], ...] = ()  # kinds of linear layers, and their inputs and outputs

    @property
    def table(self) -> float:
        """Elements of the embedding."""
        return self.vocab * self.hidden

    @property
    def head(self) -> float:
        """Elements of a head of its own."""
        return 0.0 if self.tied else self.table

    @property
    def in_layers(self) -> float:
        """Elements of all layers."""
        return self.elements - self.table - self.head

    def adapter(self, spec: RunSpec) -> float:
        """Return the elements that `model.lora` trains."""
        lora = spec.model.lora
        if lora is None:
            return 0.0
        meant = [
            both for name, both in self.adapted
            if lora.targets == "all-linear" or is_meant(name, lora.targets)
        ]  # fmt: skip
        return lora.rank * sum(meant)


def counts_for_memory(shape: ModelShape) -> ModelSizes:
    """Return the counts of a model whose config is known."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, dense = shape.hidden, shape.layers - shape.expert_layers
    wide = shape.mlp / (3 * hidden) if dense else 0.0
    of_experts = (shape.shared + shape.experts_per_token * shape.expert) / (3 * hidden)
    passed = (dense * wide + shape.expert_layers * of_experts) / shape.layers  # width of a layer's MLP
    attention = _HALF * (2 * queries + 2 * keys)  # queries, keys, values and the result
    norms, gate = 2 * _FLOAT * hidden, 2 * _HALF * passed
    inputs = _HALF * (2 * hidden + passed)  # of the linear layers, as far as nothing else keeps them
    # each of an adapter's layers keeps an input of its own
    of_adapter = _HALF * (5 * hidden + queries + passed)
    pairs = {
        "q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys,
        "o_proj": hidden + queries,
    }  # fmt: skip
    all_pairs = {name: float(shape.layers * both) for name, both in pairs.items()}
    if dense:
        all_pairs |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), dense * (hidden + wide))
    return ModelSizes(
        elements=shape.parameters, layers=shape.layers, hidden=hidden, vocab=shape.vocab, tied=shape.tied,
        experts=shape.expert_elements, of_token=attention + norms + gate + inputs,
        of_adapters_token=attention + norms + gate + of_adapter, adapted=tuple(all_pairs.items()),
    )  # fmt: skip


def learner_memory(
    spec: RunSpec, sizes: ModelSizes, ranks: int, *, tokens: float, on_gpu: bool, four_bits: bool = False
) -> LearnerMemory:
    """Return the memory of each of some ranks.

    `tokens`: of the largest micro-batch. `four_bits`: `streamrl quantize` has rounded the model, so that the
    base of an adapter is held so.
    """
    return _Estimate(spec, sizes, ranks, tokens, on_gpu, four_bits).found()


@dataclass(frozen=True)
class _Estimate:
    spec: RunSpec
    sizes: ModelSizes
    ranks: int
    tokens: float
    on_gpu: bool
    four_bits: bool

    def found(self) -> LearnerMemory:
        adapter = self.sizes.adapter(self.spec)
        trained = self._optimized(adapter, whole=True) if adapter else self._trained()
        kept = trained + (self._frozen() if adapter else 0.0)
        loss = loss_of(self.spec)
        if loss.critic:
            kept *= 2
        kept += self._beside(adapter)
        moments = 0.0
        if self._offloads:
            each = _MOMENTS + (_FLOAT if self._stage else 0.0)  # DeepSpeed steps weights of its own there
            moments = each * (adapter or self.sizes.elements * self._share("moments"))
        return LearnerMemory(kept, self._at_work(adapter), moments * (2 if loss.critic else 1))

    @property
    def _learner(self) -> str:
        return self.spec.trainer.learner

    @property
    def _stage(self) -> int:
        return int(getattr(self.spec.trainer, "zero_stage", 0)) if self._learner == "deepspeed" else 0

    @property
    def _divides(self) -> bool:
        """Whether no rank ever holds the whole model."""
        return self._learner == "fsdp" or self._stage == 3

    @property
    def _offloads(self) -> bool:
        return self.on_gpu and self.spec.trainer.offload_optimizer

    @property
    def _rounds(self) -> bool:
        return self.spec.model.dtype == "bfloat16"

    def _share(self, what: str) -> float:
        """Return the share of a thing that a rank holds."""
        least_stage = {"moments": 1, "gradients": 2, "weights": 3}[what]
        divided = self._learner == "fsdp" or self._stage >= least_stage
        return 1 / self.ranks if divided else 1.0

    def _trained(self) -> float:
        return self._optimized(self.sizes.elements, whole=False)

    def _optimized(self, elements: float, *, whole: bool) -> float:
        """Return the bytes of elements with gradients and moments. `whole`: each rank has all of them."""
        shares = {what: 1.0 if whole else self._share(what) for what in ("weights", "gradients", "moments")}
        each = _FLOAT * (shares["weights"] + shares["gradients"])
        if self.spec.trainer.sums_exactly:
            each += _EXACT * shares["gradients"]
        if not self._offloads:
            each += _MOMENTS * shares["moments"]
        if self._stage and not self._offloads:
            each += _FLOAT * shares["moments"]  # ZeRO steps weights of its own
        return elements * each

    def _frozen(self) -> float:
        """Return the bytes of a whole model that is not trained, or of this rank's part of it."""
        sizes = self.sizes
        if self._divides:
            layer = _HALF if self._rounds else _FLOAT
            return (sizes.in_layers * layer + (sizes.table + sizes.head) * _FLOAT) / self.ranks
        if not self._rounds:
            return sizes.elements * _FLOAT
        linear = _FOUR_BITS if self.four_bits else _HALF
        others = sizes.experts + sizes.table  # which are no linear layers
        return (sizes.in_layers - sizes.experts) * linear + others * _FLOAT + sizes.head * _HALF

    def _beside(self, adapter: float) -> float:
        """Return the bytes of the reference, and of the weights that an iteration began with."""
        needs, found = loss_of(self.spec).needs, 0.0
        if needs.reference and (not adapter or self.spec.loss.reference not in (None, self.spec.model.path)):
            found += self._frozen()
        if needs.before == "iteration":
            whole = self.sizes.elements * _FLOAT / (self.ranks if self._divides else 1)
            found += adapter * _FLOAT if adapter else whole
        return found

    def _at_work(self, adapter: float) -> float:
        sizes, trainer = self.sizes, self.spec.trainer
        wide = 1.0 if self._rounds else _FLOAT / _HALF
        of_layer = self.tokens * wide * (sizes.of_adapters_token if adapter else sizes.of_token)
        forward, backward = self._logits(adapter)
        # Autocast makes weights in bf16, and keeps them until the forward or the backward pass is over.
        rounded = sizes.in_layers * _HALF if self._rounds and not adapter and not self._divides else 0.0
        if trainer.gradient_checkpointing:
            begins = sizes.layers * self.tokens * sizes.hidden * _FLOAT
            found = begins + max(rounded + forward, backward, of_layer)
        else:
            found = sizes.layers * of_layer + rounded + backward
        return found + self._made_whole(adapter) + (_WORKSPACE if self.on_gpu else 0.0)

    def _logits(self, adapter: float) -> tuple[float, float]:
        """Return the bytes of a chunk of logits and of the head, in the forward and the backward pass."""
        sizes, rows = self.sizes, min(self.tokens, self.spec.trainer.logits_chunk)
        fused = self.on_gpu and self._stage < 3
        each = (_HALF if self._rounds else _FLOAT) if fused else _LOGITS
        head = sizes.table * _HALF if self._rounds else 0.0
        forward = rows * sizes.vocab * each + head
        return forward, forward + (0.0 if adapter else sizes.table * _FLOAT)

    def _made_whole(self, adapter: float) -> float:
        """Return the bytes of what a rank holds whole for the while of what ranks share out."""
        sizes, layer = self.sizes, self.sizes.in_layers / self.sizes.layers
        ends = sizes.table + sizes.head
        if self._stage == 3:
            live = min(sizes.elements, _ZERO_LIVE) * _FLOAT
            return live + 2 * min(_ZERO_BUCKET, sizes.elements) * _FLOAT
        if self._stage:
            return 2 * min(_ZERO_BUCKET, sizes.elements) * _FLOAT
        if self._learner != "fsdp" or self.ranks == 1:
            return 0.0
        # this layer's and the next one's weights, embedding and head; a layer's gradient, sent and received
        weights = 2 * layer * (_HALF if self._rounds else _FLOAT) + ends * _FLOAT
        gradients = 0.0 if adapter else 2 * _FLOAT * max(layer, ends)
        return weights + gradients
