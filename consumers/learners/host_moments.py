"""AdamW whose moments lie in main memory. One parameter's at a time come to the GPU, and go back.

main memory   moments 1 │ moments 2 │ …
                 ▼ ▲        ▼ ▲
GPU            step 1     step 2    …          the same kernel, so the same bits as with moments on the GPU
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.optim.adamw import adamw

from consumers.learners.memory_rooms import Rooms, blanks, size_in
from schemas.algorithm import AlgorithmSection

MOMENTS = ("exp_avg", "exp_avg_sq")


def host_blanks(shapes: Sequence[Sequence[int]], device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return moments in main memory for parameters of these shapes, all 0. `device`: where they are sent."""
    named = {f"{number} {key}": shape for number, shape in enumerate(shapes) for key in MOMENTS}
    room = Rooms(0, locked=device.type == "cuda").take(size_in(named, torch.float32))  # fresh memory is 0
    found = blanks(room, named, torch.float32)
    return [{key: found[f"{number} {key}"] for key in MOMENTS} for number in range(len(shapes))]


def adamw_step(
    weights: torch.Tensor, gradient: torch.Tensor, moments: dict[str, torch.Tensor],
    algorithm: AlgorithmSection, steps: int, rate: float,
) -> None:  # fmt: skip
    """Step one parameter. `steps`: how many it took before."""
    adamw(
        [weights], [gradient], *([moments[key]] for key in MOMENTS), [],
        [torch.full((), float(steps), device=weights.device)], fused=True, amsgrad=False,
        beta1=algorithm.betas[0], beta2=algorithm.betas[1], lr=rate, weight_decay=algorithm.weight_decay,
        eps=1e-8, maximize=False,
    )  # fmt: skip


class HostMoments:
    """Stands in for torch's AdamW."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], algorithm: AlgorithmSection) -> None:
        self._parameters = [one for one in parameters if one.requires_grad]
        self._algorithm = algorithm
        # as torch's AdamW has it: a parameter that never had a gradient has none
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        self._blanks: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}  # all 0, of all others

    @property
    def size(self) -> int:
        """Bytes of all moments."""
        return sum(one.nbytes for one in self._parameters) * len(MOMENTS)

    @torch.no_grad()
    def step(self, rate: float) -> Iterator[torch.Tensor]:
        """Take a step, parameter by parameter; yield the moments while they are on the GPU."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue  # a learner of one's own leaves it as it is
            kept = self._moments(parameter)
            moments = {key: kept[key].to(parameter.device, non_blocking=True) for key in MOMENTS}
            adamw_step(parameter, parameter.grad, moments, self._algorithm, int(kept["step"]), rate)
            yield from moments.values()
            for key in MOMENTS:
                if moments[key] is not kept[key]:
                    kept[key].copy_(moments[key], non_blocking=True)
            kept["step"] += 1
        if self._parameters[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # others may read the moments now

    def restore(self, parameter: torch.nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Take over the moments of a parameter; none if it took no step."""
        if values:
            kept = self._moments(parameter)
            for key, value in values.items():
                kept[key].copy_(value)
        elif kept := self.state.pop(parameter, {}):
            self._blanks[parameter] = {key: value.zero_() for key, value in kept.items()}

    def _moments(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the moments of a parameter in main memory. The memory of all is taken at once."""
        if not self.state and not self._blanks:
            rooms = host_blanks([one.shape for one in self._parameters], self._parameters[0].device)
            for one, room in zip(self._parameters, rooms, strict=True):
                self._blanks[one] = room | {"step": torch.zeros(())}
        if parameter not in self.state:
            self.state[parameter] = self._blanks.pop(parameter)
        return self.state[parameter]
