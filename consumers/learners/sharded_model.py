"""A model that ranks share out, on torch's FSDP2: each holds some rows of each weight.

forward   layer 0 made whole ──► computed ──► divided again │ layer 1 … ─┐
backward  gradients of a layer ──► to the ranks that have its rows ──► added up there     ◄── … layer 1 ─┘

Each rank computes the gradients of its own micro-batch whole. With exact sums they are sent as they are, and
added in fixed point by the rank that has the rows. So the sum has the same bits on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from consumers.batches.micro_batches import MicroBatch
from consumers.learners import collective
from consumers.learners.expert_routing import routers
from consumers.learners.fixed_point import FixedPointSum
from consumers.learners.forward import UnsupportedModel
from consumers.learners.sharded_loading import fill, parameter_names
from consumers.learners.state_pieces import elements_of
from schemas.runspec import RunSpec

_UNDER_ADAPTER = ".base_layer."  # a layer with an adapter has its weights there
_KNOWS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13
_WHOLE = "model."  # stands before the names of the model's own parameters


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one parameter."""

    shape: tuple[int, ...]  # of the whole
    parameter: Any  # a DTensor
    begin: int  # place of its gradient in that of its unit

    @property
    def local(self) -> torch.Tensor:
        """The rows themselves."""
        rows: torch.Tensor = self.parameter._local_tensor.detach()
        return rows

    @property
    def most(self) -> int:
        """Rows of a rank that has most. The first ranks have as many, and the last ones what is left."""
        return -(-self.shape[0] // collective.ranks())

    @property
    def first(self) -> int:
        """The first row that is here."""
        return min(self.shape[0], self.most * collective.rank_number())

    def rows_in(self, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
        """Return this rank's rows of a tensor; None if it is not there."""
        width = math.prod(self.shape[1:])
        found = elements_of(tensors, name, self.first * width, self.local.numel())
        return None if found is None else found.view(self.local.shape)

    def brought(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the whole tensor of which each rank has such rows on rank 0, and None on the others."""
        return collective.brought(rows, self.most, self.shape[0])


class UnitSum:
    """The sum of the gradients of one unit: all rows that this rank has of its parameters, end to end.

    It stands in for FSDP's reduce-scatter. `largest`: shared by all units.
    """

    def __init__(self, size: int, largest: torch.Tensor) -> None:
        self.sum = FixedPointSum(size, largest.device)
        self._size, self._largest = size, largest

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return room for FSDP's own use."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """Send each rank its rows of this rank's gradient, and add those that come."""
        assert output_tensor.numel() == self._size, "each parameter of a layer has a gradient"
        self._look_at(input_tensor)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for gradient in received.split(self._size):
            self.sum.add(gradient)
        output_tensor.zero_()  # FSDP takes it for the gradient; it is dropped

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient of this rank, which is alone: then FSDP sends nothing."""
        self._look_at(gradient)
        self.sum.add(gradient)

    def _look_at(self, gradient: torch.Tensor) -> None:
        """Note the largest magnitude here, where it is known which micro-batch has it."""
        found = torch.linalg.vector_norm(gradient, float("inf"))
        torch.maximum(self._largest, found, out=self._largest)


class ShardedModel(torch.nn.Module):
    """A model, and what is computed with it: FSDP has to see where a forward pass begins and ends."""

    def __init__(
        self, model: Any, compute: Callable[[ShardedModel, MicroBatch], torch.Tensor],
        value_head: torch.nn.Linear | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.value_head, self._compute = model, value_head, compute
        self.config = model.config
        self.shards: dict[str, Shard] = {}  # by Hugging Face names; those of the head as `value_head.…`
        self.sums: dict[str, UnitSum] = {}  # of the unit of each parameter, with exact sums
        self.largest = torch.zeros(())

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return self._compute(self, batch)

    def compute(self, batch: MicroBatch) -> torch.Tensor:
        """Compute for a micro-batch; all ranks at once. Without gradients the rest is divided again."""
        found: torch.Tensor = self(batch)
        if not found.requires_grad:
            self._root.reshard()
        return found

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self, FSDPModule), "share_out was called"
        return self

    def share_out(
        self, folder: str, spec: RunSpec, device: torch.device,
        whole: Iterable[torch.nn.Parameter] = (),
    ) -> ShardedModel:  # fmt: skip
        """Divide the model, whose weights are not there yet, and read this rank's rows. Return itself.

        `whole`: parameters that have values, and that each rank keeps.
        """
        kept, parameters = set(whole), dict(self.named_parameters())
        trained = any(one.requires_grad for one in parameters.values() if one not in kept)
        if trained and routers(self.model) and not _KNOWS_UNUSED:
            raise UnsupportedModel(
                "trainer.learner: fsdp trains experts with torch 2.13 or newer; this is torch "
                f"{torch.__version__}"
            )
        all_names = {
            _short(name): [_short(one) for one in some]
            for name, some in parameter_names(self).items()
            if parameters[name] not in kept
        }
        mesh = init_device_mesh(device.type, (collective.ranks(),))
        # Autocast would keep all layers' weights in the run's dtype until the backward pass. So it is FSDP
        # that converts them; gradients come in that dtype then, as autocast's do, and are added up in fp32.
        layers = MixedPrecisionPolicy(
            param_dtype=getattr(torch, spec.model.dtype), reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )  # fmt: skip
        for layer in self.model.model.layers:
            if not any(one.requires_grad for one in layer.parameters() if one not in kept):
                _round(layer, layers.param_dtype, kept)
            fully_shard(layer, mesh=mesh, mp_policy=layers, ignored_params=kept)
        fully_shard(self, mesh=mesh, ignored_params=kept)
        self._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device))
        self._tie_again()
        self.largest = torch.zeros((), device=device)
        names = {id(parameter): _short(name) for name, parameter in self.named_parameters()}
        for unit in self._units():
            self._take_in(unit, names, exact=spec.trainer.sums_exactly)
        self.shards = {name: self.shards[name] for name in all_names}
        in_files = {name: shard for name, shard in self.shards.items() if name not in self._own}
        fill(self.model, in_files, all_names, folder)
        return self

    @property
    def _own(self) -> set[str]:
        """Names of parameters that no file has."""
        return {name for name in self.shards if name.startswith("value_head.")} if self.value_head else set()

    def _units(self) -> Iterator[FSDPModule]:
        return (module for module in self.modules() if isinstance(module, FSDPModule))

    def _tie_again(self) -> None:
        """Give tied modules one parameter: each got its own when they were taken off the meta device."""
        for one in (one for unit in self._units() for one in _divided(unit)):
            place = one._module_info
            for module, name in zip(place.shared_modules, place.shared_param_names, strict=True):
                module._parameters[name] = one.sharded_param

    def _take_in(self, unit: FSDPModule, names: Mapping[int, str], *, exact: bool) -> None:
        """Find the parameters of a unit, in the order in which FSDP lays their gradients end to end."""
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        begin, shards = 0, dict[str, Shard]()
        for one in _divided(unit):
            shard = Shard(tuple(one.sharded_param.shape), one.sharded_param, begin)
            shards[names[id(one.sharded_param)]] = shard
            begin += shard.most * math.prod(shard.shape[1:])
        self.shards |= shards
        if not any(shard.parameter.requires_grad for shard in shards.values()):
            return
        if _KNOWS_UNUSED:
            unit.set_reduce_scatter_unused_params(True, recurse=False)  # an expert that no token came to
        if exact:
            total = UnitSum(begin, self.largest)
            unit.set_custom_reduce_scatter(total)
            self.sums |= dict.fromkeys(shards, total)


def _short(name: str) -> str:
    return name.removeprefix(_WHOLE).replace(_UNDER_ADAPTER, ".")


def _round(layer: torch.nn.Module, dtype: torch.dtype | None, kept: set[torch.nn.Parameter]) -> None:
    """Hold a layer that is not trained in the type to which FSDP would convert it each time."""
    for module in layer.modules():
        for name, one in module._parameters.items():
            if one is not None and one not in kept:
                module._parameters[name] = torch.nn.Parameter(one.to(dtype), requires_grad=False)


def _divided(unit: FSDPModule) -> Iterator[Any]:
    """Return FSDP's own view of a unit's parameters, in its order: torch has no public way to learn that."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 there was one at most
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            yield from group.fsdp_params
