"""The slices of tensors that the ranks of one engine hold, as vLLM divides them.

rows      q, k and v by heads; gate and up; embedding and head by the vocabulary, padded
columns   o and down: each rank computes a part of a sum, and the ranks add up
whole     all else, such as norms, routers and the biases of o and down
experts   gate, up and down of each one like those of a layer without experts; or each rank has whole experts
nothing   of the layers that other ranks hold (`layer_stretches.py`), and of their experts

A rank of a model that has fewer heads of k and v than ranks holds the same heads as its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.model_config import count_in, read_config
from infra.route_shapes import EXPERTS
from infra.weights.bits import Bits, Model
from infra.weights.digest import digest_of
from infra.weights.eight_bits import SCALE
from infra.weights.expert_names import DOWN, ExpertTensor, expert_tensor
from infra.weights.folder import ModelFolder
from infra.weights.layer_stretches import LayerStretches
from infra.weights.patch import Patch
from infra.weights.tensor_slice import Slice
from infra.weights.weights_error import WeightsError
from schemas.rank_layout import RankLayout

VOCABULARY_PADDING = 64  # vLLM pads the rows of embedding and head to a multiple of it

_QUERIES, _KEYS = {"q_proj"}, {"k_proj", "v_proj"}
_ROWS, _COLUMNS = {"gate_proj", "up_proj"}, {"o_proj", "down_proj"}
_VOCABULARY = {"embed_tokens", "lm_head"}
_WHOLE = {"gate", "shared_expert_gate"}  # routers of experts


@dataclass(frozen=True)
class Slicing:
    """How a model is divided among the ranks of an engine."""

    layout: RankLayout
    heads: int
    kv_heads: int
    layers: int = 0  # needed for several stretches
    experts: int = 0  # of a layer; 0: it is no mixture
    tied: bool = False  # whether the embedding is the output head, too

    @classmethod
    def of(cls, folder: Path, layout: RankLayout) -> Slicing:
        """Return the slicing of the model in a folder. Raises WeightsError if its config does not say it."""
        try:
            config = read_config(folder)
            heads = _heads(config["num_attention_heads"])
            given = config.get("num_key_value_heads")
            kv_heads = heads if given is None else _heads(given)
        except (OSError, ValueError, KeyError) as error:
            raise WeightsError(
                f"{folder / 'config.json'} does not say how many attention heads the model has ({error!r}), "
                "so its tensors can't be divided among ranks"[:1000]
            ) from None
        # files may have a copy of a tied head, such as Qwen3-0.6B's
        tied = layout.stretches > 1 and (
            config.get("tie_word_embeddings") is True or "lm_head.weight" not in ModelFolder(folder).shapes
        )
        layers = count_in(config, "num_hidden_layers")
        return cls(layout, heads, kv_heads, layers, count_in(config, *EXPERTS), tied)

    @classmethod
    def for_engine(cls, folder: Path, layout: RankLayout) -> Slicing | None:
        """Like `of`; None for an engine of one rank, which holds all tensors whole."""
        return cls.of(folder, layout) if layout.ranks > 1 else None

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.layout.ranks

    @property
    def stretches(self) -> LayerStretches:
        """The layers that ranks hold."""
        return LayerStretches(self.layers, self.layout.stretches, self.tied)

    def problems(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
        """Yield why a model with tensors of these shapes can't be divided so, with the setting's name."""
        yield from self._tensor_problems(shapes)
        yield from (counts := [*self._layer_problems(), *self._expert_problems()])
        if self.heads % self.layout.tensor == 0 and not counts and (wrong := self._undivided(shapes)):
            yield wrong

    def holds(self, name: str, rank: int) -> bool:
        """Whether a rank holds some of a tensor. Raises WeightsError if nobody knows."""
        if self.layout.stretches > 1 and not self.stretches.holds(name, self.layout.stretch(rank)):
            return False
        found = expert_tensor(name) if self.layout.whole_experts else None
        return found is None or found.expert is None or found.expert in self.experts_of(rank)

    def experts_of(self, rank: int) -> range:
        """Return the experts that a rank holds, whole or slices of them."""
        if not self.layout.whole_experts:
            return range(self.experts)
        each = self.experts // self.layout.tensor
        first = self.layout.column(rank) * each
        return range(first, first + each)

    def slice(self, name: str, shape: Sequence[int], rank: int) -> Slice | None:
        """Return the slice of a tensor that a rank has, if it holds any of it; None if it has all.

        Raises WeightsError if nobody knows how ranks divide such a tensor.
        """
        if self.layout.tensor == 1:
            return None
        if found := expert_tensor(name):
            return self._of_experts(found, name, shape, rank)
        module, _, leaf = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if len(shape) > 1 and (".experts." in name or len(shape) > 2 or leaf != "weight"):
            raise self._unknown(name)
        if leaf not in ("weight", "bias", SCALE) or layer in _WHOLE:  # scales of rows are divided as rows are
            return None  # such as scales of channels; ranks look what vLLM holds of them
        if layer in _QUERIES:
            return self._even(name, shape, 0, self.heads, rank)
        if layer in _KEYS:
            return self._even(name, shape, 0, self.kv_heads, rank)
        if layer in _ROWS:
            return self._even(name, shape, 0, self.layout.tensor, rank)
        if layer in _COLUMNS:
            return self._even(name, shape, 1, self.layout.tensor, rank) if len(shape) == 2 else None
        if layer in _VOCABULARY:
            each = -(-shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING // self.layout.tensor
            first = self.layout.column(rank) * each
            return Slice(0, ((min(first, shape[0]), min(first + each, shape[0])),))
        if len(shape) == 1:
            return None
        raise self._unknown(name)

    def shapes(self, shapes: Mapping[str, Sequence[int]], rank: int) -> dict[str, Sequence[int]]:
        """Return the shapes of what a rank holds of some tensors."""
        return {
            name: shape if (mine := self.slice(name, shape, rank)) is None else mine.shape(shape)
            for name, shape in shapes.items()
            if self.holds(name, rank)
        }

    def patch(self, patch: Patch, rank: int) -> Patch:
        """Return what a patch means for a rank."""
        parts = {}
        for name, part in patch.parts.items():
            if self.holds(name, rank):
                mine = self.slice(name, part.shape, rank)
                parts[name] = part if mine is None else mine.patch(part)
        return Patch(patch.since, patch.root, parts)

    def _of_experts(self, found: ExpertTensor, name: str, shape: Sequence[int], rank: int) -> Slice | None:
        """Return the slice of a tensor of one expert, or of all experts of a layer."""
        if len(shape) != (3 if found.expert is None else 2):
            raise self._unknown(name)
        if self.layout.whole_experts:
            return self._even(name, shape, 0, self.layout.tensor, rank) if found.expert is None else None
        axis = len(shape) - (1 if found.whole == DOWN else 2)
        halves = 2 if found.whole != DOWN and found.half is None else 1  # gate above up
        inner = (shape[axis] // halves,)
        if shape[axis] % halves:
            raise self._uneven(name, shape)
        ((begin, end),) = self._even(name, inner, 0, self.layout.tensor, rank, of=shape).spans
        return Slice(axis, tuple((half * inner[0] + begin, half * inner[0] + end) for half in range(halves)))

    def _even(
        self, name: str, shape: Sequence[int], axis: int, parts: int, rank: int,
        of: Sequence[int] | None = None,
    ) -> Slice:  # fmt: skip
        """Return a rank's slice of `parts` equal parts. If there are fewer, several ranks have the same."""
        ranks, column = self.layout.tensor, self.layout.column(rank)
        if shape[axis] % parts or (parts % ranks and ranks % parts):
            raise self._uneven(name, of or shape)
        size, each = shape[axis] // parts, max(1, parts // ranks)
        first = column * each if parts >= ranks else column // (ranks // parts)
        return Slice(axis, ((first * size, (first + each) * size),))

    def _tensor_problems(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
        ranks, of = self.layout.tensor, "generator.tensor_parallel: "
        if self.heads % ranks:
            yield f"{of}its {self.heads} attention heads can't be divided among {ranks} ranks"
        if self.kv_heads % ranks and ranks % self.kv_heads:
            yield (
                f"{of}its {self.kv_heads} heads of keys and values can neither be divided among {ranks} "
                "ranks nor be given to equally many ranks each"
            )
        if self.kv_heads % ranks and any(_norms_all_heads(name, shapes) for name in shapes):
            yield (
                f"{of}it norms keys over all heads, which vLLM can't compute where {self.kv_heads} heads are "
                f"fewer than {ranks} ranks"
            )
        if VOCABULARY_PADDING % ranks:
            yield (
                f"{of}vocabularies are padded to a multiple of {VOCABULARY_PADDING} rows, which can't be "
                f"divided among {ranks} ranks"
            )

    def _layer_problems(self) -> Iterator[str]:
        if self.layout.stretches > max(1, self.layers):
            yield (
                f"generator.pipeline_parallel: its {self.layers} layers can't be divided into "
                f"{self.layout.stretches} stretches"
            )

    def _expert_problems(self) -> Iterator[str]:
        if self.layout.whole_experts and self.experts % self.layout.tensor:
            yield (
                f"generator.expert_parallel: its {self.experts} experts of a layer can't be divided among "
                f"{self.layout.tensor} ranks (generator.tensor_parallel)"
            )
        if self.layout.whole_experts and not self.experts:
            yield "generator.expert_parallel: it is no mixture of experts: leave the setting out"

    def _undivided(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return the first tensor that can't be divided, in words; empty if there is none."""
        try:
            for name, shape in shapes.items():
                for rank in range(0, self.ranks, self.layout.tensor):  # one of each stretch
                    if self.holds(name, rank):
                        self.slice(name, shape, rank)
        except WeightsError as error:
            setting = "tensor" if self.layout.tensor > 1 else "pipeline"
            return f"generator.{setting}_parallel: {error}"
        return ""

    def _uneven(self, name: str, shape: Sequence[int]) -> WeightsError:
        return WeightsError(
            f"tensor {name} {list(shape)} can't be divided among {self.layout.tensor} ranks of an engine"
        )

    def _unknown(self, name: str) -> WeightsError:
        return WeightsError(
            f"tensor {name} can't be divided among {self.layout.tensor} ranks of an engine: it is no layer "
            "known here. Set generator.tensor_parallel: 1"
        )


class SliceDigests:
    """Hashes the slices that the ranks of an engine must hold, from whole tensors.

    Slices of a tensor that has not changed since the last call are not hashed again.
    """

    def __init__(self, slicing: Slicing | None) -> None:
        """`slicing`: None for an engine that holds whole tensors."""
        self._slicing = slicing
        # by tensor: its own digest, and those by rank; None: the rank holds nothing of it
        self._known: dict[str, tuple[str, list[str | None]]] = {}

    def of(self, model: Model, digests: Mapping[str, str]) -> dict[str, str]:
        """Return the digests of all slices of a model with verified `digests`, by `slice_name`."""
        if self._slicing is None:
            return dict(digests)
        found: dict[str, str] = {}
        for name, bits in model.items():
            if name not in self._known or self._known[name][0] != digests[name]:
                by_rank = _by_rank(self._slicing, name, bits, digests[name])
                self._known[name] = digests[name], list(by_rank)
            for rank, digest in enumerate(self._known[name][1]):
                if digest is not None:
                    found[slice_name(name, rank)] = digest
        return found


def _by_rank(slicing: Slicing, name: str, bits: Bits, whole: str) -> Iterator[str | None]:
    hashed: dict[Slice | None, str] = {None: whole}
    for rank in range(slicing.ranks):
        if not slicing.holds(name, rank):
            yield None
            continue
        mine = slicing.slice(name, bits.shape, rank)
        if mine is not None and mine not in hashed:
            values = mine.values(bits.data, bits.shape)
            hashed[mine] = digest_of(Bits(bits.dtype, mine.shape(bits.shape), values))
        yield hashed[mine]


def slice_name(tensor: str, rank: int) -> str:
    """Return the name of a rank's slice of a tensor in digests and errors."""
    return f"{tensor} on rank {rank}"


def _norms_all_heads(name: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a tensor is a norm of all heads of a layer together; norms of each head are more common."""
    queries = shapes.get(name.replace("k_norm", "q_norm"))
    return "k_norm" in name and queries is not None and tuple(queries) != tuple(shapes[name])


def _heads(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no number of heads")
    return value
