"""The learner on DeepSpeed: ZeRO 0 to 3 over any number of ranks, weights in fp32 as in TorchLearner.

The divisor of a step's gradient is known only when all samples are there, so gradients are added up
undivided. ZeRO divides them by its loss scale right before it clips them and steps. So the loss scale is
set to the divisor during the step, and is 1 otherwise.

With stage 3 weights are read and divided one by one, each rank writes its part of a checkpoint, and FSDP2
shares out the models beside the policy (see `shared_models.py`): no rank loads a whole model.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from consumers.batches.micro_batches import MicroBatch, filler
from consumers.learners import collective
from consumers.learners.critic import Critic
from consumers.learners.forward import Forward
from consumers.learners.host_moments import MOMENTS
from consumers.learners.learner import LocalLearner
from consumers.learners.optimizing import NotFinite, Parts, Stepped, closest, rate_share
from consumers.learners.sharded_model import ShardedModel
from consumers.learners.shared_models import part_of_state, shared_critic, shared_out, with_returns
from consumers.learners.snapshot import PartPlace, StateSnapshot
from consumers.learners.state_pieces import StateShare, elements_of
from consumers.learners.zero_loading import divided_by_zero
from consumers.losses.objective import LossStats
from infra import choices
from infra.ranks.rank_addresses import RanksError
from schemas.runspec import RunSpec

_BUCKET = 1 << 26  # elements that are reduced or gathered together


class _Policy(torch.nn.Module):
    """Computes logprobs of a micro-batch: DeepSpeed has to see where a forward pass begins and ends."""

    def __init__(self, model: Any, run: Forward) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return self._run.logprobs(self.model, batch)


class DeepSpeedLearner(LocalLearner):
    """One rank's learner. bf16 runs compute forward in bf16 by autocast; gradients and weights are fp32."""

    def __init__(self, model: str, spec: RunSpec, stage: int) -> None:
        self._stage = stage  # of ZeRO
        self._deepspeed = _import_deepspeed()
        self._linear = torch.nn.functional.linear
        self.lockstep = stage >= 2  # each backward pass sends gradients to the ranks that own them
        self.shares_state = self.scores_in_lockstep = stage == 3
        if stage == 3:
            _count_anew(self._deepspeed)
        super().__init__(model, spec)
        self._adam = torch.optim.AdamW(
            self._named.values(), lr=spec.algorithm.learning_rate, betas=spec.algorithm.betas,
            weight_decay=spec.algorithm.weight_decay, fused=True,
        )  # fmt: skip
        self._engine, self._optimizer, _, _ = self._deepspeed.initialize(
            model=_Policy(self._model, self._forward), model_parameters=list(self._named.values()),
            optimizer=self._adam, dist_init_required=False, config=self._config(self._elements()),
        )  # fmt: skip
        if not self._stage:
            self._adam.register_step_pre_hook(self._before_plain_step)
        self._total, self._norm = 1.0, 0.0
        self._steps = 0
        self._computed = False  # whether this rank has a gradient for the next step

    def _loaded(self, folder: str, *, trained: bool) -> Any:
        if self._stage < 3:
            return super()._loaded(folder, trained=trained)
        if not trained:
            return shared_out(folder, self._spec, self._device, self._forward, trained=False)
        return divided_by_zero(folder, self._spec, self._device, self._deepspeed, self._config(_BUCKET))

    def _frozen(self, folder: str) -> Any:
        return super()._frozen(folder) if self._stage < 3 else self._loaded(folder, trained=False)

    def _made_critic(self, folder: str) -> Critic:
        if self._stage < 3:
            return super()._made_critic(folder)
        return shared_critic(folder, self._spec, self._device, self._forward)

    def _logprobs_by(self, model: Any, batch: MicroBatch) -> torch.Tensor:
        return model.compute(batch) if isinstance(model, ShardedModel) else super()._logprobs_by(model, batch)

    def _elements(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes().values())

    def _config(self, elements: int) -> dict[str, Any]:
        bucket = min(_BUCKET, elements)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # `step` decides when a step is taken
            # Else DeepSpeed would compile an AdamW of its own for moments in main memory.
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": self._spec.algorithm.max_grad_norm if self._stage else 0.0,
            "zero_optimization": {
                "stage": self._stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
            }
            | (
                {"offload_optimizer": {"device": "cpu", "pin_memory": choices.cuda()}}
                if self._spec.trainer.offload_optimizer
                else {}
            ),
        }

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        found: torch.Tensor = self._engine(batch)
        return found

    def _backward(self, loss: torch.Tensor) -> float:
        self._engine.backward(loss)
        self._computed = True
        return 0.0

    def _check(self, most: torch.Tensor | float) -> None:
        """See LocalLearner; here `step` looks at the norm."""

    def _here(self) -> bool:
        return super()._here() and self._stage < 3

    def _shapes(self) -> dict[str, Sequence[int]]:
        return {
            name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in self._named.items()
        }

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        if self._critic is not None and self._stage == 3:  # all ranks compute it, those with a filler too
            batches = [with_returns(batch) for batch in batches]
        return super().accumulate(batches)

    def step(self, total: float) -> Stepped:
        self._lent.settle()
        if not self._computed:  # DeepSpeed wants a gradient from each rank
            self.accumulate([filler()])
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._spec.algorithm.learning_rate * rate_share(self._steps, self._spec)
        self._total = total / collective.ranks()  # DeepSpeed averages gradients over ranks
        if self._stage:
            self._optimizer.loss_scale = self._total
        self._engine.step()
        if self._stage:
            self._optimizer.loss_scale = 1.0
            self._norm = float(self._engine.get_global_grad_norm())
        self._computed = False
        if not math.isfinite(self._norm) or self._norm < 0:
            raise NotFinite(f"the gradient's norm is {self._norm}")
        self._copies.stepped()
        if self._critic is not None:
            self._critic.trained.step(total)
        return Stepped(self._norm)

    def close(self) -> None:
        super().close()
        # ZeRO-3 puts a function of its own here, for all models of this process, and leaves it.
        torch.nn.functional.linear = self._linear
        if collective.joined():
            self._engine.destroy()
            self._deepspeed.comm.destroy_process_group()  # DeepSpeed has groups of its own

    def _before_plain_step(self, *_: object) -> None:
        """Divide and clip the gradient before AdamW steps: without ZeRO there is no loss scale."""
        for parameter in self._named.values():
            assert parameter.grad is not None
            parameter.grad.div_(self._total)
        most = self._spec.algorithm.max_grad_norm
        self._norm = float(torch.nn.utils.clip_grad_norm_(self._named.values(), most))
        if not math.isfinite(self._norm):
            raise NotFinite(f"the gradient's norm is {self._norm}")

    def _whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[object]:
        if self._stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[object] = self._deepspeed.zero.GatheredParameters([parameter])
        return gathered

    @torch.no_grad()
    def begin_iteration(self) -> None:
        if not isinstance(self._first, ShardedModel):
            super().begin_iteration()
            return
        for name, shard in self._first.shards.items():
            with self._whole(self._named[name]):
                rows = shard.rows_in(self._named, name)
                assert rows is not None
                shard.local.copy_(rows)

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._lent.settle()
        self._set_weights(weights, "")

    @torch.no_grad()
    def _set_weights(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Replace the weights by tensors before whose names `prefix` stands."""
        for name, parameter in self._named.items():
            if self._stage < 3:
                parameter.copy_(closest(parameter, tensors[prefix + name]))
                continue
            part = ZeroPart(parameter)
            value = elements_of(tensors, prefix + name, part.first, part.count)
            assert value is not None
            mine = parameter.ds_tensor.narrow(0, 0, part.count)
            mine.copy_(closest(mine, value))
            parameter.partition([parameter])  # a small one is whole on all ranks: it is brought together anew
        if self._stage:
            self._optimizer.refresh_fp32_params()

    def snapshot(self, place: PartPlace | None = None) -> StateSnapshot:
        if self._stage < 3:
            return super().snapshot(place)
        taken = part_of_state(self._share(), self._critic, self._spec.deadlines.progress_s)
        self._lent.add(taken)
        return taken

    def _share(self) -> StateShare:
        """Return this rank's part of weights and optimizer state."""
        found = StateShare("", self._steps)
        for name, parameter in self._named.items():
            part = ZeroPart(parameter)

            def held(key: str | None, parameter: Any = parameter, count: int = part.count) -> torch.Tensor:
                # DeepSpeed's public calls would copy what lies in main memory to the GPU
                flat, _ = self._optimizer._get_fp32_opt_state_partition(parameter, False, key)
                some: torch.Tensor = flat.detach()[:count]
                return some

            moments = {key: held(key) for key in MOMENTS} if self._steps else {}
            found.add(name, part.shape, part.first, held(None), moments)
        return found

    def _policy_parts(self) -> Parts:
        """Return whole tensors on rank 0. Tensors that are whole on each rank are lent, others gathered."""
        first = collective.rank_number() == 0
        live: dict[str, torch.Tensor] = {}
        state = {"steps": torch.tensor(self._steps)}

        def put(name: str, value: torch.Tensor, *, is_whole: bool) -> None:
            if first and is_whole:
                live[name] = value.detach()
            elif first:
                state[name] = value.detach().to("cpu", copy=True)

        for name, parameter in self._named.items():
            with self._whole(parameter):
                put(f"weights.{name}", parameter, is_whole=self._stage < 3)
            if not self._steps:
                continue
            put(f"optimizer.step.{name}", torch.tensor(float(self._steps)), is_whole=False)
            for key in MOMENTS:
                put(f"optimizer.{key}.{name}", self._moment(parameter, key), is_whole=not self._stage)
        return live, state

    def _moment(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
        if not self._stage:
            plain: torch.Tensor = self._adam.state[parameter][key]
            return plain
        found: torch.Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        return found

    def _restore_policy(self, state: Mapping[str, torch.Tensor]) -> None:
        self._steps = int(state["steps"])
        self._set_weights(state, "weights.")
        self._clear_moments()
        for name, parameter in self._named.items():
            for key in MOMENTS:
                self._set_moment(parameter, key, state, f"optimizer.{key}.{name}")

    def _clear_moments(self) -> None:
        """Create moments of zeros to be filled in: before its first step DeepSpeed has none."""
        for flat in self._flat():
            self._adam.state[flat] = {
                "step": torch.tensor(float(self._steps), device=flat.device),
                **{key: torch.zeros_like(flat) for key in MOMENTS},
            }
        if 1 <= self._stage <= 2:  # link each parameter to its part of the moments anew
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> Sequence[torch.Tensor]:
        """Return the tensors that AdamW updates: with ZeRO this rank's part of all parameters, end to end."""
        if not self._stage:
            return list(self._named.values())
        of_stage = "single_partition_of_fp32_groups" if self._stage < 3 else "fp32_partitioned_groups_flat"
        flat: Sequence[torch.Tensor] = getattr(self._optimizer, of_stage)
        return flat

    def _set_moment(
        self, parameter: torch.nn.Parameter, key: str, state: Mapping[str, torch.Tensor], name: str
    ) -> None:
        """Set a moment to the tensor of this name, if there is one."""
        utils = self._deepspeed.utils
        if self._stage == 3:
            part = ZeroPart(parameter)
            mine = elements_of(state, name, part.first, part.count)
            if mine is not None:
                padded = mine.new_zeros(part.size)
                padded[: part.count] = mine
                utils.safe_set_local_optimizer_state(parameter, padded.to(self._device), key)
        elif (value := state.get(name)) is not None and self._stage:
            utils.safe_set_full_optimizer_state(parameter, value.to(self._device), key)
        elif value is not None:
            self._adam.state[parameter][key].copy_(value)


class ZeroPart:
    """The elements of a parameter that this rank has with ZeRO-3, end to end."""

    def __init__(self, parameter: Any) -> None:
        self.shape = tuple(parameter.ds_shape)
        self.size = int(parameter.ds_tensor.numel())  # the last ranks' parts may be filled up
        self.first = min(self.size * collective.rank_number(), int(parameter.ds_numel))
        self.count = min(self.size, int(parameter.ds_numel) - self.first)


def _count_anew(deepspeed: ModuleType) -> None:
    """Reset ZeRO-3's counters of modules and parameters.

    ZeRO-3 compares these numbers among ranks. Rank 0 may have had a learner before; the other ranks are new
    processes.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    deepspeed.zero.Init.param_id = 0


@contextmanager
def _unseen(package: str) -> Iterator[None]:
    """Hide a package that is not imported yet."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # as the language has it: the import fails
    try:
        yield
    finally:
        del sys.modules[package]


def _import_deepspeed() -> ModuleType:
    if not choices.cuda():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with _unseen("mlflow"):  # DeepSpeed's tuner would import it, for longer than all of DeepSpeed takes
            import deepspeed
    except ImportError as error:
        raise RanksError(
            f"trainer.learner is deepspeed, and that can't be imported: {error}. Install it: "
            "DS_BUILD_OPS=0 pip install --no-build-isolation 'streamrl[deepspeed]'"
        ) from error
    # DeepSpeed's own kernels are not needed. It would test each with a compiler. On CPUs it would compile
    # one for two minutes, for sums in shared memory, which leaves buffers in /dev/shm.
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # by DeepSpeed
    return deepspeed
