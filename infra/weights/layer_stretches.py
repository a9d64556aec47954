"""The stretches of layers that the ranks of one engine hold, as vLLM's pipeline parallelism divides them.

first   embedding, layers 0 …          last   layers …, norm and head (the embedding, where it is the head)

Where layers can't be divided evenly, those that are left over go to stretches before the last, which has the
head; vLLM is told so, and can't divide them otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.weights.weights_error import WeightsError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_FIRST, _LAST = {"embed_tokens"}, {"lm_head", "norm"}


@dataclass(frozen=True)
class LayerStretches:
    """The layers of a model, in stretches."""

    layers: int
    stretches: int
    tied: bool  # whether the embedding is the output head, too

    @property
    def sizes(self) -> list[int]:
        """Return how many layers each stretch has."""
        each, left = divmod(self.layers, self.stretches)
        last = self.stretches - 1
        return [each + (last - left <= number < last) for number in range(self.stretches)]

    def holds(self, name: str, stretch: int) -> bool:
        """Whether a tensor is in a stretch. Raises WeightsError if nobody knows where it is."""
        if found := _LAYER.search(name):
            return self._stretch_of(name, int(found[1])) == stretch
        module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        first, last = stretch == 0, stretch == self.stretches - 1
        if module in _FIRST:
            return first or (last and self.tied)
        if module in _LAST:
            return last
        raise WeightsError(
            f"tensor {name} is in no layer, and nobody knows which of {self.stretches} stretches of layers "
            "has it. Set generator.pipeline_parallel: 1"
        )

    def _stretch_of(self, name: str, layer: int) -> int:
        before = 0
        for number, size in enumerate(self.sizes):
            before += size
            if layer < before:
                return number
        raise WeightsError(f"tensor {name} is of layer {layer}, and the model has {self.layers}")
