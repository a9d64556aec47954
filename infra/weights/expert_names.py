"""Names of experts' weights: each expert's own, as in a model's folder, or all of a layer in one tensor.

….mlp.experts.7.gate_proj.weight  [inner, width] ─┐
….mlp.experts.7.up_proj.weight    [inner, width] ─┴► ….mlp.experts.gate_up_proj  [experts, 2 inner, width]
….mlp.experts.7.down_proj.weight  [width, inner] ──► ….mlp.experts.down_proj     [experts, width, inner]

Mixtral's folders say w1, w3 and w2 for gate_proj, up_proj and down_proj. The trainer's models have, and so
versions of a run have, all experts of a layer in one tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_ONE = re.compile(
    r"(?P<layer>.+\.experts)\.(?P<expert>\d{1,6})\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.weight"
)
_ALL = re.compile(rf"(?P<layer>.+\.experts)\.(?P<part>{GATE_UP}|{DOWN})")
_PARTS = {
    "gate_proj": (GATE_UP, 0), "w1": (GATE_UP, 0), "up_proj": (GATE_UP, 1), "w3": (GATE_UP, 1),
    "down_proj": (DOWN, None), "w2": (DOWN, None),
}  # fmt: skip


# Parts of names: the trainer's, and those of Mixtral's folders and of vLLM.
_BLOCKS = {".mlp.": ".block_sparse_moe."}


@dataclass(frozen=True)
class ExpertTensor:
    """The place of a tensor among the weights of a layer's experts."""

    layer: str  # such as model.layers.0.mlp.experts
    whole: str  # GATE_UP or DOWN: the tensor of all experts that it is, or is a part of
    expert: int | None = None  # None: it is of all experts
    half: int | None = None  # of GATE_UP: 0 is the gate, 1 is up; None: it is both, or of DOWN


def names_in_folders(name: str) -> list[str]:
    """Return the names under which a folder may have the trainer's tensor of this name."""
    others = (name.replace(ours, its) for ours, its in _BLOCKS.items())
    return list(dict.fromkeys([name, *others]))


def expert_tensor(name: str) -> ExpertTensor | None:
    """Return what a tensor of experts is, by its name; None if it is none."""
    if one := _ONE.fullmatch(name):
        whole, half = _PARTS[one["part"]]
        return ExpertTensor(one["layer"], whole, int(one["expert"]), half)
    if every := _ALL.fullmatch(name):
        return ExpertTensor(every["layer"], every["part"])
    return None
