"""AdamW over rows of parameters of which each rank has some; the bits do not depend on how many ranks.

The kernels of a CPU take several elements at a time, and compute the last few of a tensor otherwise. So rows
lie in memory as they would in the whole: as far from a place that such a group begins at, with zeros before
them, and with zeros behind them unless they are the last ones. Then each element has the bits that it would
have in the whole tensor.

    whole    |········|········|········|···
    rank 0   |········|····0000|
    rank 1            |0000····|········|···
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from consumers.learners import collective
from consumers.learners.host_moments import MOMENTS, adamw_step, host_blanks
from consumers.learners.optimizing import NotFinite, Parts, Stepped, closest, rate_share
from consumers.learners.sharded_fingerprint import ShardedFingerprint
from consumers.learners.sharded_model import Shard, ShardedModel
from consumers.learners.sharded_norm import norm_of_pieces
from consumers.learners.state_pieces import StateShare
from schemas.runspec import RunSpec

_GROUP = 64  # elements, a multiple of what any CPU takes at a time
_LARGEST = "a gradient is NaN, infinite or too large for exact sums (trainer.exact_sums)"


class _Row:
    """One parameter's rows on this rank, with their moments."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.moments: dict[str, torch.Tensor] = {}  # laid out by `room`; none before the first step
        self.offloaded: dict[str, torch.Tensor] = {}  # room for them in main memory, if they lie there
        size, width = shard.local.numel(), math.prod(shard.shape[1:])
        self._begin = shard.first * width % _GROUP
        self._end = self._begin + size
        self._is_last = shard.first + shard.local.shape[0] == shard.shape[0]

    @property
    def size(self) -> int:
        """Elements of a room."""
        return self._end if self._is_last else -(-self._end // _GROUP) * _GROUP

    def room(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return flat memory for rows, with zeros or some rows in it."""
        found = torch.zeros(self.size, device=self.shard.local.device)
        if rows is not None:
            self.flat(found).copy_(rows.reshape(-1))
        return found

    def flat(self, room: torch.Tensor) -> torch.Tensor:
        """Return the rows that lie in a room, end to end."""
        return room[self._begin : self._end]

    def moment(self, key: str) -> torch.Tensor:
        """Return the rows of a moment, on this rank's device."""
        there = self.moments[key].to(self.shard.local.device, non_blocking=True)
        return self.flat(there).view(self.shard.local.shape)

    def kept(self, key: str) -> torch.Tensor:
        """Return the rows of a moment, end to end, where they lie."""
        return self.flat(self.moments[key])

    def keep(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Keep moments where they are to lie."""
        self.moments = {**moments}
        for key, room in self.offloaded.items():
            if key in moments:
                room.copy_(moments[key], non_blocking=True)
                self.moments[key] = room


class ShardedOptimized:
    """The parameters of a shared-out model and their AdamW: the same interface as `Optimized`."""

    def __init__(self, model: ShardedModel, spec: RunSpec, learning_rate: float) -> None:
        self._model, self._spec, self._learning_rate = model, spec, learning_rate
        self._rows = {name: _Row(shard) for name, shard in model.shards.items()}
        if spec.trainer.offload_optimizer:
            rows = self._rows.values()
            rooms = host_blanks([[row.size] for row in rows], model.largest.device)
            for row, room in zip(rows, rooms, strict=True):
                row.offloaded = room
        self._exact = spec.trainer.sums_exactly
        self._steps = 0

    def accumulate(self) -> torch.Tensor | float:
        """Take in a micro-batch's gradient, which the backward pass has sent. See `Optimized`."""
        if not self._exact:
            return 0.0  # FSDP adds floats itself
        if collective.ranks() == 1:
            self._add_own()
        for row in self._rows.values():
            row.shard.parameter.grad = None
        most = self._model.largest.clone()
        self._model.largest.zero_()
        return most

    def _add_own(self) -> None:
        """Add gradients that FSDP did not send anywhere."""
        for total in dict.fromkeys(self._model.sums.values()):
            mine = [row.shard for name, row in self._rows.items() if self._model.sums[name] is total]
            mine.sort(key=lambda shard: shard.begin)
            total.add(torch.cat([shard.parameter.grad._local_tensor.reshape(-1) for shard in mine]))

    def check(self, most: torch.Tensor | float) -> None:
        """Raise NotFinite if the sum can't hold a gradient that was added to it."""
        if not self._exact:
            return
        one = next(iter(self._model.sums.values()))  # all units have the same bound
        if not one.sum.fits(float(most)):
            raise NotFinite(_LARGEST)

    def _gradients(self, total: float) -> Iterator[tuple[_Row, torch.Tensor]]:
        """Yield rows with the mean of their gradient, in a room."""
        for name, row in self._rows.items():
            gradient = row.room()
            if self._exact:
                self._model.sums[name].sum.part_into(row.flat(gradient), row.shard.begin, total)
            elif row.shard.parameter.grad is not None:
                row.flat(gradient).copy_(row.shard.parameter.grad._local_tensor.reshape(-1)).div_(total)
            yield row, gradient

    @torch.no_grad()
    def step(self, total: float) -> Stepped:
        """Divide the sum by `total`, clip it and step."""
        count = sum(math.prod(row.shard.shape) for row in self._rows.values())
        norm = norm_of_pieces(
            lambda: (gradient for _, gradient in self._gradients(total)), count, self._model.largest.device
        )
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient's norm is {norm}")
        most = self._spec.algorithm.max_grad_norm
        scale = most / (norm + 1e-6) if norm > most else 1.0
        self._steps += 1
        found = [ShardedFingerprint(self._model.largest.device) for _ in range(3)]
        for row, gradient in self._gradients(total):
            found[0].add(row.flat(gradient), row.shard)
            moments = self._update(row, gradient.mul_(scale))
            for key in MOMENTS:
                found[1].add(row.flat(moments[key]), row.shard)
            row.keep(moments)
            found[2].add(row.shard.local, row.shard)
        for unit in dict.fromkeys(self._model.sums.values()):
            unit.sum.clear()
        for row in self._rows.values():
            row.shard.parameter.grad = None
        return Stepped(norm, *(one.found() for one in found))

    def _update(self, row: _Row, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Step these rows, and return their moments."""
        device, kept = row.shard.local.device, row.moments
        moments = {
            key: kept[key].to(device, non_blocking=True) if key in kept else row.room() for key in MOMENTS
        }
        if row.shard.local.numel():
            weights = row.room(row.shard.local)
            rate = self._learning_rate * rate_share(self._steps, self._spec)
            adamw_step(weights, gradient, moments, self._spec.algorithm, self._steps - 1, rate)
            row.shard.local.copy_(row.flat(weights).view(row.shard.local.shape))
        return moments

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Replace the weights. `prefix` stands before their names in `weights`."""
        for name, row in self._rows.items():
            if (mine := row.shard.rows_in(weights, prefix + name)) is None:
                raise KeyError(prefix + name)
            row.shard.local.copy_(closest(row.shard.local, mine))

    def parts(self) -> Parts:
        """Return weights and optimizer state in whole tensors on rank 0. All ranks take part."""
        first = collective.rank_number() == 0
        own = {"steps": torch.tensor(self._steps)}

        def put(name: str, shard: Shard, rows: torch.Tensor) -> None:
            whole = shard.brought(rows)
            if whole is not None:
                own[name] = whole.to("cpu", copy=True)

        for name, row in self._rows.items():
            put(f"weights.{name}", row.shard, row.shard.local)
            if not row.moments:
                continue
            if first:
                own[f"optimizer.step.{name}"] = torch.tensor(float(self._steps))
            for key in MOMENTS:
                put(f"optimizer.{key}.{name}", row.shard, row.moment(key))
        return {}, own

    def share(self, prefix: str = "") -> StateShare:
        """Return this rank's part of weights and optimizer state. `prefix` stands before all names."""
        found = StateShare(prefix, self._steps)
        for name, row in self._rows.items():
            first = row.shard.first * math.prod(row.shard.shape[1:])
            moments = {key: row.kept(key) for key in MOMENTS} if row.moments else {}
            found.add(name, row.shard.shape, first, row.shard.local.reshape(-1), moments)
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Restore a state, tensor by tensor. `prefix` stands before all names in `state`."""
        self._steps = int(state[f"{prefix}steps"])
        self.adopt(state, f"{prefix}weights.")
        for name, row in self._rows.items():
            row.keep({
                key: row.room(rows)
                for key in MOMENTS
                if (rows := row.shard.rows_in(state, f"{prefix}optimizer.{key}.{name}")) is not None
            })  # fmt: skip
