"""How the ranks of an engine divide a model among them.

 tensor_parallel: 2
rank 0      rank 1    layers 0 … 15  ┐
rank 2      rank 3    layers 16 … 31 ┘ pipeline_parallel: 2
"""

from __future__ import annotations

from typing import NamedTuple


class RankLayout(NamedTuple):
    """The number of ranks of an engine, and whether they divide tensors, layers or experts."""

    tensor: int = 1  # ranks that divide the tensors of a layer
    stretches: int = 1  # of layers, one after the other; each is held by `tensor` ranks
    whole_experts: bool = False  # whether these divide experts among them, and not each expert's tensors

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.tensor * self.stretches

    def column(self, rank: int) -> int:
        """Return which one a rank is of those that hold the same layers."""
        return rank % self.tensor

    def stretch(self, rank: int) -> int:
        """Return which stretch of layers a rank holds."""
        return rank // self.tensor
