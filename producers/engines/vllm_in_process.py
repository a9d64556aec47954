"""Runs vLLM in this process: continuous batching, longest first, weights replaced between two steps.

vLLM's CPU build packs the weights of linear layers and drops the originals. After that `load_weights` raises,
and `reload_weights` silently leaves a tied `lm_head` stale. Here the originals are kept (`packed_linear.py`),
new weights are written into vLLM's parameters (`scatter.py`), and the weights that the engine then holds are
hashed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from infra import choices
from infra.gpu_builds import GET_VLLM, has_only_cpu_vllm
from infra.route_shapes import route_shape
from infra.weights.eight_bits import shapes_with_scales
from infra.weights.folder import ModelFolder
from infra.weights.patch import Patch
from producers.engines.cpu_activations import use_vectors, use_vectors_in
from producers.engines.cpu_attention import use_one_stretch
from producers.engines.draft_plan import DraftPlan
from producers.engines.drafter import Drafter
from producers.engines.eight_bit_linear import check_no_experts, check_rounded, use_eight_bits
from producers.engines.engine import DrawnAnswer, EngineError, Pace, SampleRequest, lasting_error
from producers.engines.in_flight import InFlight
from producers.engines.pace import StepTimes
from producers.engines.packed_linear import PackedLayer, PackedLinear
from producers.engines.plain_experts import check_experts, use_plain_experts
from producers.engines.prefill_bits import prefills_keep_bits, use_one_kernel
from producers.engines.quick_start import leave_compiler_unchanged
from producers.engines.rank_group import EngineRank, joined_ranks
from producers.engines.route_recorder import RouteRecorder, recording_from_the_start
from producers.engines.sampler import StreamSampler, own_id
from producers.engines.scatter import HeldWeights
from producers.engines.shared_prompts import SharedPrompts, sharing_asked
from producers.engines.speculation import Speculation
from producers.engines.vllm_options import VllmOption, merged_arguments
from producers.stopping import Stopping

_AHEAD = 1 << 30  # bytes of a whole version that go to a GPU before the pause: 20 ms less of it


def prepare_environment(threads: int, *, batch_invariant: bool) -> None:
    """Set the environment that vLLM reads at import: one process, few threads, no compiling on CPUs."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    if choices.cuda():
        os.environ["VLLM_BATCH_INVARIANT"] = str(int(batch_invariant))
        # Our sampler takes the place of vLLM's, so that FlashInfer need not be there, nor be compiled.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    leave_compiler_unchanged()
    if choices.DEVICE.forced():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM detects GPUs by itself


def check_build() -> None:
    """Raise EngineError if the engine would be on a GPU, and vLLM's build for CPUs is installed."""
    if choices.cuda() and has_only_cpu_vllm():
        raise lasting_error(f"vLLM's build for CPUs is installed, and torch sees a GPU: {GET_VLLM}")


def packed_linears(invariant: bool) -> list[PackedLinear]:
    """Make the next engine of this process use our linear layers.

    Return a list of them, which is filled while the engine is built.
    """
    import vllm.model_executor.layers.utils as utils

    layers: list[PackedLinear] = []
    known: dict[tuple[object, ...], bool] = {}

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layers.append(PackedLinear(layer, invariant=invariant, known=known))
        layer.cpu_linear = layers[-1]

    utils.dispatch_cpu_unquantized_gemm = dispatch
    return layers


@contextmanager
def _llvmlite_unseen() -> Iterator[None]:
    """Hide llvmlite from vLLM while vLLM starts.

    vLLM looks for kernels in the attributes of all modules, and llvmlite's library claims to have every
    attribute. So vLLM could not start in a process that has numba.
    """
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


@dataclass(frozen=True)
class GpuMemory:
    """How an engine uses a GPU's memory."""

    share: float | None = None  # that it takes; None: as vLLM has it
    sleeps: bool = False  # whether `VllmEngine.sleep` frees it
    shared: bool = False  # whether others may take what is free

    @property
    def ahead(self) -> int:
        """Bytes of a whole version that may come there before the pause."""
        return 0 if self.shared else _AHEAD

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments."""
        return {"enable_sleep_mode": self.sleeps} | (
            {} if self.share is None else {"gpu_memory_utilization": self.share}
        )


def _memory(gpu: GpuMemory, kv_cache_mib: int | None, ranks: int) -> dict[str, Any]:
    """Return vLLM's arguments that say how much memory each of an engine's ranks takes."""
    bound = {} if kv_cache_mib is None else {"kv_cache_memory_bytes": (kv_cache_mib << 20) // ranks}
    return bound | (gpu.arguments() if choices.cuda() else {})


def _by_experts(model: str, sharing: bool | None, *, routes: bool, invariant: bool) -> dict[str, Any]:
    """Return those of vLLM's arguments that depend on whether the model is a mixture of experts."""
    is_mixture = route_shape(model) is not None
    asked = sharing_asked(sharing, invariant=invariant, routed=routes and is_mixture)
    # other backends lay the weights of experts out anew
    plain = {"moe_backend": "triton"} if is_mixture and choices.cuda() else {}
    return {"enable_prefix_caching": asked, **plain}


def _look_at(model: torch.nn.Module, *, by_vectors: bool) -> None:
    """Refuse a loaded model with layers that samples can't be drawn by; `by_vectors`: activations are."""
    check_experts(model)
    if by_vectors:
        use_vectors_in(model)


def _keep_bits(*, on_cpu: bool) -> None:
    """Have the next engine compute a token alike in every batch; its linear layers do by themselves."""
    if on_cpu:
        use_one_stretch()
        use_vectors()
    else:
        use_one_kernel()


def _checked_weights(
    model: Any, folder: ModelFolder, rank: EngineRank | None, packed: Sequence[PackedLayer],
    eight_bits: bool, ahead: int,
) -> HeldWeights:  # fmt: skip
    """Return the weights of vLLM's model; raise EngineError if they can't be those of the folder's."""
    shapes = shapes_with_scales(folder.shapes) if eight_bits else folder.shapes
    shapes = rank.slicing.shapes(shapes, rank.number) if rank else shapes
    weights = HeldWeights(model, shapes, packed, rank.first_expert if rank else 0, ahead)
    if eight_bits:
        check_rounded(weights, shapes)
    if rank:
        rank.check(weights, folder)
    weights.check_filled()
    return weights


class VllmEngine:
    """The engine on vLLM's CPU and GPU builds."""

    _routes: RouteRecorder | None = None  # None: the model has no experts, or nobody wants to know

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        slots: int = 64,
        max_model_len: int = 512,
        temperature: float = 1.0,
        kv_cache_mib: int | None = 64,
        threads: int = 1,
        batch_invariant: bool = True,
        stopping: Stopping | None = None,
        drafter: Drafter | None = None,
        gpu: GpuMemory | None = None,
        options: Mapping[str, VllmOption] | None = None,
        rank: EngineRank | None = None,
        routes: bool = False,
        eight_bits: str = "",
        prefix_caching: bool | None = None,
    ) -> None:
        """`rank`: which one this engine is of several that compute together; None: it computes alone.

        `kv_cache_mib`: of all ranks; None: what the share of a GPU leaves.
        `routes`: whether to record which experts a mixture's layers take. `eight_bits`: the way to hold
        weights in eight bits; empty: they are as they come. `prefix_caching`: whether samples share what was
        computed of their prompt; None: if that changes no bits.
        """
        prepare_environment(threads, batch_invariant=batch_invariant)
        check_build()
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        torch.set_num_threads(threads)
        on_cpu = not choices.cuda()
        packed = packed_linears(batch_invariant) if on_cpu else []
        if on_cpu:
            use_plain_experts(invariant=batch_invariant)
        if batch_invariant:
            _keep_bits(on_cpu=on_cpu)
        arguments = {
            "model": model, "dtype": dtype, "seed": 0, "enforce_eager": on_cpu,
            "max_model_len": max_model_len, "max_num_seqs": slots,
            "max_num_batched_tokens": max(max_model_len, 64 * slots, 2048),
            "scheduling_policy": "priority", "disable_log_stats": True,
            # drafts are made from the last step's tokens; vLLM has none on CPUs, and for stretches of layers
            "async_scheduling": not on_cpu and drafter is None and not (rank and rank.stretched),
        }  # fmt: skip
        arguments |= _memory(gpu or GpuMemory(), kv_cache_mib, rank.slicing.ranks if rank else 1)
        arguments |= _by_experts(model, prefix_caching, routes=routes, invariant=batch_invariant)
        rounded: list[PackedLayer] = []
        if eight_bits:
            check_no_experts(model)
            arguments["quantization"], rounded = use_eight_bits(eight_bits, dtype, invariant=batch_invariant)
        arguments |= rank.arguments() if rank else {}
        gc.freeze()  # vLLM collects garbage seven times while it starts, and freezes what is there then
        with _llvmlite_unseen(), joined_ranks(rank), recording_from_the_start(wanted=routes) as recorders:
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(**merged_arguments(arguments, options or {}, EngineArgs))
            )
        self._params = lambda tokens: SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nobody else uses it; a deep copy of each took a tenth of a millisecond
        )
        renderer = self._engine.input_processor.renderer
        end = renderer.get_eos_token_id()
        renderer.get_eos_token_id = lambda: end  # vLLM would ask a pool of tokenizers at each request
        core = self._engine.engine_core.engine_core
        if rank and rank.stretched:
            # vLLM would hold back each step's answers for batches that nothing can fill
            core.batch_queue, core.step_fn = None, core.step
        runner = core.model_executor.driver_worker.worker.model_runner
        self._scheduler, self._runner = core.scheduler, runner
        self._in_flight = InFlight(self._engine)
        self._drained: list[DrawnAnswer] = []  # while batches were drained: the next step returns them
        self._stopping = stopping or Stopping(lambda tokens: "")
        self._made: dict[str, Sequence[int]] = {}  # tokens that other engines drew
        self._sampler = StreamSampler(self._stopping.min_tokens, self._stopping.end_tokens)
        if recorders:
            self._routes = recorders[0]
            self._sampler.watch = partial(self._routes.take, runner)
            self._routes.guesses = drafter is not None
        runner.sampler.topk_topp_sampler = self._sampler
        _look_at(runner.model, by_vectors=batch_invariant and on_cpu)
        self._rank, self._arrived = rank, 0.0
        self.weights = _checked_weights(
            runner.model, ModelFolder(model), rank, [*packed, *rounded], bool(eight_bits),
            (gpu or GpuMemory()).ahead,
        )  # fmt: skip
        self._slots, self._times = slots, StepTimes()
        self._sleeps = gpu is not None and gpu.sleeps and not on_cpu
        self._keeps_bits = batch_invariant and (on_cpu or prefills_keep_bits(runner))
        self._shared = SharedPrompts(self._engine, self._scheduler, prefix_caching, self._keeps_bits)
        self._speculation: Speculation | None = None
        if drafter:
            plan = rank.plan if rank else DraftPlan
            self._speculation = Speculation(runner, self._scheduler, self._sampler, drafter, plan)

    def submit(self, request: SampleRequest) -> None:
        params = self._params(request.max_tokens - len(request.made))
        if request.endless or not self._shared.on:
            params.skip_reading_prefix_cache = True
        if request.endless:
            params.ignore_eos = True
        else:
            self._made[request.id] = request.made  # only in these `_stopped` looks for stop strings
        if self._speculation:
            self._speculation.open(request.id, request.prompt)
        self._add(request, params)

    def _add(self, request: SampleRequest, params: object) -> None:
        self._sampler.open(request.id, request.seed, len(request.made))
        if self._routes:
            self._routes.open(request.id, len(request.prompt) + len(request.made))
        self._arrived += 1.0  # in the place of the clock, which is another one in each rank
        self._engine.add_request(
            request.id,
            {
                "type": "token",
                "prompt_token_ids": [*request.prompt, *request.made],
                "cache_salt": self._shared.salt,
            },
            params,
            arrival_time=self._arrived,
            priority=-round(request.priority),
        )

    @property
    def running(self) -> int:
        """The samples that have a place in the KV cache."""
        return len(self._scheduler.running)

    def expect(self, times: StepTimes) -> None:
        """Take measured times of steps."""
        self._times = times
        if self._speculation:
            self._speculation.learn(times.pace())

    def step(self, wait_s: float = 0.0) -> list[DrawnAnswer]:
        self._sampler.batch = self._runner.input_batch
        samples, began = min(len(self._scheduler.requests), self._slots), time.perf_counter()
        fills = self._in_flight.fills
        if self._speculation:
            self._speculation.begin_step()
        outputs = self._engine.step()
        if samples and not fills:
            seconds = time.perf_counter() - began
            each = self._speculation.end_step(samples, seconds) if self._speculation else 1.0
            self._times.add(samples, seconds / each)
        ended, self._drained = self._drained, []
        return [*ended, *self._finished(outputs)]

    def _finished(self, outputs: Sequence[Any]) -> list[DrawnAnswer]:
        """Return the answers that ended with a batch, from vLLM's outputs of it."""
        finished = [
            self._answer(one.request_id, one.outputs[0].token_ids, one.outputs[0].finish_reason)
            for one in outputs
            if one.finished
        ]
        return [*finished, *self._stopped()]

    def _drain(self) -> None:
        """Take in what is under way. So all tokens that the present weights drew are known."""
        for outputs in self._in_flight.drain():
            self._drained += self._finished(outputs)

    def _answer(self, name: str, drawn: Sequence[int], finish: str) -> DrawnAnswer:
        """Return a finished answer. A stop string may be complete before its last token, and with it."""
        made = self._made.pop(name, ())
        if self._stopping.looks and (end := self._stopping.first_end(drawn, made, self._known(name, drawn))):
            drawn, finish = drawn[:end], "stop"
        if self._speculation:
            self._speculation.close(name, [*made, *drawn])
        logprobs, routes = self._logprobs(name, len(drawn)), self._routes_of(name, len(drawn))
        return DrawnAnswer(name, np.array(drawn, dtype=np.int32), logprobs, finish, routes)

    def _routes_of(self, name: str, drawn: int) -> np.ndarray | None:
        return None if self._routes is None else self._routes.close(name, drawn)

    def _known(self, name: str, drawn: Sequence[int]) -> int:
        """Return how many of the drawn tokens were there before the last step."""
        return len(drawn) - 1 if self._speculation is None else self._speculation.known(name, len(drawn) - 1)

    def _logprobs(self, name: str, tokens: int) -> np.ndarray:
        """Return the log-probabilities of a request that ended with so many tokens."""
        drawn = self._sampler.drawn(name)
        # behind the answer's end: by the last step's draft, or by the batch that is under way
        most = self._speculation.ahead if self._speculation else self._in_flight.count
        if not 0 <= drawn - tokens <= most:
            raise EngineError(f"the engine made {tokens} tokens of sample {name}, but {drawn} logprobs")
        return self._sampler.close(name, tokens)

    def _stopped(self) -> list[DrawnAnswer]:
        """End the answers whose last token completes a stop string.

        vLLM itself would look for it in the tokens that it drew, and not in those of other engines.
        """
        if not self._stopping.looks:
            return []
        found = {}
        for request in self._scheduler.requests.values():  # one that waits got a token just before
            name, drawn = own_id(request.request_id), request.output_token_ids
            if name not in self._made:
                continue
            if end := self._stopping.first_end(drawn, self._made[name], self._known(name, drawn)):
                found[name] = list(drawn[:end])
        if found:
            self._engine.abort_request(list(found))
        return [self._answer(name, drawn, "stop") for name, drawn in found.items()]

    def unfinished(self) -> dict[str, int]:
        # With tokens under way: they are drawn by the present weights, whatever comes next.
        return {
            own_id(name): request.num_output_tokens + request.num_output_placeholders
            for name, request in self._scheduler.requests.items()
        }

    def abort(self, ids: Sequence[str]) -> None:
        ended = {one.id for one in self._drained}
        self._drained = [one for one in self._drained if one.id not in ids]
        self._engine.abort_request(list(ids))
        for request in ids:
            if request in ended:
                continue
            if self._speculation:
                self._speculation.close(request)
            self._sampler.drop(request)
            if self._routes:
                self._routes.drop(request)
            self._made.pop(request, None)

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        self._drain()
        wanted = set(ids)
        found = [
            (own_id(name), request)
            for name, request in self._scheduler.requests.items()
            if own_id(name) in wanted
        ]
        tokens = {name: np.array(request.output_token_ids, dtype=np.int32) for name, request in found}
        self._engine.abort_request(list(tokens))
        for name in tokens:
            before = self._made.pop(name, ())
            if self._speculation:
                self._speculation.close(name, [*before, *tokens[name].tolist()])
        return [
            DrawnAnswer(
                name, made, self._sampler.close(name, len(made)), routes=self._routes_of(name, len(made))
            )
            for name, made in tokens.items()
        ]  # fmt: skip

    def prepare(self, patch: Patch) -> None:
        self.weights.prepare(self._rank.slicing.patch(patch, self._rank.number) if self._rank else patch)

    def install(self, *, recompute: bool) -> dict[str, int]:
        self.weights.take()
        self._drain()  # meanwhile the weights come
        self.weights.settle()
        self._shared.renew()
        if recompute:
            # All running samples are preempted: they wait without a KV cache, and the next step prefills
            # their prompts and tokens.
            self._engine.reset_prefix_cache(reset_running_requests=True)
        return self.unfinished()

    def sleep(self) -> None:
        """Free the GPU: weights go to main memory, the KV cache is dropped, running samples are preempted.

        On a CPU nothing is freed: to make no steps is enough.
        """
        self._drain()
        if self._sleeps:
            self._engine.sleep(level=1, mode="keep")

    def wake(self) -> None:
        """Bring the weights back. The next step prefills the samples that were running."""
        if self._sleeps:
            self._engine.wake_up()

    def digests(self) -> dict[str, str]:
        return self.weights.digests()

    @property
    def memory_tokens(self) -> int:
        """The tokens that the KV cache holds."""
        cache = self._engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    def pace(self) -> Pace:
        drafted, accepted = self._speculation.counts() if self._speculation else (0, 0)
        return replace(
            self._times.pace(), keeps_bits=self._keeps_bits, drafted=drafted, accepted=accepted,
            shared=self._shared.tokens(),
        )  # fmt: skip

    def close(self) -> None:
        pass  # it ends with its process
