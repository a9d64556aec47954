"""A model's shape, from its Hugging Face config: parameters, FLOPs of a token, bytes of keys and values.

Counted are decoder-only models with attention, dense or with experts, with grouped heads and tied or own
head. Refused by name are those that keep other things than keys and values of each head (MLA, linear
attention, state spaces).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.errors import Explained

_LARGEST = 1 << 24  # of any count in a config: nothing real is near
_LONGEST_CONFIG = 1 << 22  # bytes


class ShapeError(Explained):
    """A config does not say what planning needs, or describes a model that planning cannot count."""

    lasting = True


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` differ from Llama's."""

    qkv_bias: bool | None = False  # None: as `attention_bias` says
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    head_norms: int = 0  # 1: norms of a head's size for queries and keys; 2: of all their heads' size
    gated: bool = True  # three matrices in an MLP, not two
    norms: int = 2  # of a layer
    router_bias: bool = False
    shared_gate: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias=None, out_bias=None, mlp_bias=None),
    "mistral": Family(),
    "ministral3": Family(),
    "smollm3": Family(qkv_bias=None, out_bias=None, mlp_bias=None),
    "phi3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias=None, out_bias=None, head_norms=1),
    "gemma": Family(qkv_bias=None, out_bias=None),
    "gemma3_text": Family(qkv_bias=None, out_bias=None, head_norms=1, norms=4),
    "olmo2": Family(qkv_bias=None, out_bias=None, head_norms=2),
    "olmo3": Family(qkv_bias=None, out_bias=None, head_norms=2),
    "arcee": Family(qkv_bias=None, out_bias=None, mlp_bias=None, gated=False),
    "mixtral": Family(),
    "qwen2_moe": Family(qkv_bias=True, shared_gate=True),
    "qwen3_moe": Family(qkv_bias=None, out_bias=None, head_norms=1),
    "olmoe": Family(qkv_bias=None, out_bias=None, head_norms=2),
    "minimax_m2": Family(head_norms=2),
    "gpt_oss": Family(qkv_bias=True, out_bias=True, mlp_bias=True, router_bias=True),
}


@dataclass(frozen=True)
class ModelShape:
    """The counts of a model. Matrices are of `elements`; a FLOP is a multiplication or an addition."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    mlp: int  # elements of a dense layer's MLP, with biases
    expert: int = 0  # elements of one expert, with biases
    experts: int = 0  # of a layer with experts
    experts_per_token: int = 0
    expert_layers: int = 0
    shared: int = 0  # elements of a layer with experts that every token passes, besides attention
    attention: int = 0  # elements of a layer's projections, with biases
    norms: int = 0  # elements of all norms
    window: int = 0  # of tokens that the layers with a window look back; 0: no layer has one
    windowed_layers: int = 0

    @property
    def embedding(self) -> int:
        """Elements of one of the two matrices that are as large as the vocabulary."""
        return self.vocab * self.hidden

    @property
    def expert_elements(self) -> int:
        """Elements of all experts."""
        return self.expert_layers * self.experts * self.expert

    @property
    def parameters(self) -> int:
        """All elements."""
        of_vocabulary = self.embedding * (1 if self.tied else 2)
        return self.layer_elements + self.norms + self.expert_elements + of_vocabulary

    @property
    def active_parameters(self) -> int:
        """Elements that one token passes in matrix products: experts that it takes, and no embedding."""
        chosen = self.expert_layers * self.experts_per_token * self.expert
        return self.layer_elements + chosen + self.embedding

    @property
    def layer_elements(self) -> int:
        """Elements of all layers but experts and norms: attention and MLPs."""
        dense = self.layers - self.expert_layers
        return self.layers * self.attention + dense * self.mlp + self.expert_layers * self.shared

    def kv_bytes(self, dtype_bytes: float = 2.0) -> float:
        """Bytes of keys and values that each token of a sample keeps."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes

    def attended(self, context: float) -> float:
        """How many tokens a layer looks back to, in the mean of layers, at this context."""
        wide = self.layers - self.windowed_layers
        return (wide * context + self.windowed_layers * min(context, self.window)) / self.layers

    def flops(self, context: float = 0.0) -> float:
        """FLOPs of one token forward that attends to `context` tokens."""
        attention = 4 * self.layers * self.heads * self.head_dim * self.attended(context)
        return 2 * self.active_parameters + attention

    def experts_touched(self, tokens: float) -> float:
        """The share of a layer's experts that some of these tokens take, if each takes any as likely."""
        if not self.experts:
            return 0.0
        return 1 - (1 - self.experts_per_token / self.experts) ** tokens


def shape_of(model: str | Path | Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model: of a folder with `config.json`, of such a file, or of its content."""
    if isinstance(model, Mapping):
        return _shape(dict(model), str(model.get("_name_or_path") or model.get("model_type") or "the config"))
    file = Path(model)
    if file.is_dir():
        file = file / "config.json"
    try:
        if file.stat().st_size > _LONGEST_CONFIG:
            raise ShapeError(f"{file} is larger than {_LONGEST_CONFIG} bytes: it is no model's config")
        config = json.loads(file.read_text())
    except OSError as error:
        raise ShapeError(f"{file} can't be read ({error.strerror}): give a model's folder") from error
    except ValueError as error:
        raise ShapeError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ShapeError(f"{file} holds no JSON object: it is no model's config")
    return _shape(config, file.parent.name or str(file))


def _shape(config: dict[str, Any], name: str) -> ModelShape:
    config = config.get("text_config") or config
    kind = config.get("model_type")
    if config.get("kv_lora_rank"):
        raise ShapeError(
            f"{name}: its attention keeps compressed keys and values (MLA, kv_lora_rank), which planning"
            " cannot count: measure it with `streamrl profile`"
        )
    if "linear_attention" in (config.get("layer_types") or ()):
        raise ShapeError(
            f"{name}: it has layers of linear attention, which planning cannot count: measure it with"
            " `streamrl profile`"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ShapeError(
            f"{name}: planning cannot count models of type {kind!r}. It counts {', '.join(FAMILIES)}."
            " Measure it with `streamrl profile`"
        )
    return _counted(_Reader(config, name), FAMILIES[kind])


@dataclass(frozen=True)
class _Reader:
    """Reads counts of a config, each checked."""

    config: Mapping[str, Any]
    name: str

    def count(self, *fields: str, default: int | None = None) -> int:
        """Return the first of these fields that the config has."""
        for field in fields:
            value = self.config.get(field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
                raise ShapeError(f"{self.name}: {field} is {value!r}; it must be a whole number")
            return value
        if default is None:
            raise ShapeError(f"{self.name}: its config has no {fields[0]}")
        return default

    def positive(self, *fields: str, default: int | None = None) -> int:
        value = self.count(*fields, default=default)
        if value < 1:
            raise ShapeError(f"{self.name}: {fields[0]} is {value}; it must be 1 or more")
        return value

    def flag(self, known: bool | None, field: str) -> bool:
        return bool(self.config.get(field, False)) if known is None else known


def _counted(read: _Reader, family: Family) -> ModelShape:
    hidden, layers = read.positive("hidden_size"), read.positive("num_hidden_layers")
    heads = read.positive("num_attention_heads")
    kv_heads = read.positive("num_key_value_heads", default=heads)
    head_dim = read.positive("head_dim", default=max(1, hidden // heads))
    queries, keys = heads * head_dim, kv_heads * head_dim
    attention = hidden * (2 * queries + 2 * keys)
    if read.flag(family.qkv_bias, "attention_bias"):
        attention += queries + 2 * keys
    if read.flag(family.out_bias, "attention_bias"):
        attention += hidden
    if read.config.get("model_type") == "gpt_oss":
        attention += heads  # its sinks
    head_norms = (0, 2 * head_dim, queries + keys)[family.head_norms]
    mlp_bias = read.flag(family.mlp_bias, "mlp_bias")

    def mlp(width: int) -> int:
        matrices = 3 if family.gated else 2
        return matrices * hidden * width + (((matrices - 1) * width + hidden) if mlp_bias else 0)

    experts = read.count("num_experts", "num_local_experts", default=0)
    expert_layers = _expert_layers(read, layers) if experts else 0
    shared = 0
    if experts:
        shared = experts * hidden + (experts if family.router_bias else 0)
        shared_width = read.count("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
        shared += mlp(shared_width) if shared_width else 0
        shared += hidden if family.shared_gate else 0
    windowed = [kind for kind in (read.config.get("layer_types") or ()) if kind == "sliding_attention"]
    per_token = read.positive("num_experts_per_tok") if experts else 0
    if experts and per_token > experts:
        raise ShapeError(f"{read.name}: a token takes {per_token} experts, and there are {experts}")
    return ModelShape(
        name=read.name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=read.positive("vocab_size"), tied=bool(read.config.get("tie_word_embeddings", False)),
        mlp=mlp(read.positive("intermediate_size")) if expert_layers < layers else 0,
        expert=mlp(read.positive("moe_intermediate_size", "intermediate_size")) if experts else 0,
        experts=experts, experts_per_token=per_token, expert_layers=expert_layers, shared=shared,
        attention=attention, norms=layers * (family.norms * hidden + head_norms) + hidden,
        window=read.count("sliding_window", default=0) if windowed else 0,
        windowed_layers=min(len(windowed), layers),
    )  # fmt: skip


def _expert_layers(read: _Reader, layers: int) -> int:
    """Count the layers that have experts; Qwen's configs may name dense ones among them."""
    step = read.positive("decoder_sparse_step", default=1)
    dense = set(read.config.get("mlp_only_layers") or ())
    return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def weight_bytes(shape: ModelShape, dtype_bytes: float = 2.0, expert_bytes: float | None = None) -> float:
    """Bytes of all weights. `expert_bytes`: of an element of the experts, where it differs."""
    if not (math.isfinite(dtype_bytes) and dtype_bytes > 0):
        raise ShapeError(f"{shape.name}: an element of {dtype_bytes} bytes is none")
    of_experts = dtype_bytes if expert_bytes is None else expert_bytes
    return (shape.parameters - shape.expert_elements) * dtype_bytes + shape.expert_elements * of_experts
