"""The part of StreamRL that runs in a server of vLLM: it takes patches of weights, and says what is held.

POST /start_weight_update, /update_weights, /finish_weight_update ──► prepared in a thread beside steps
POST /collective_rpc install_patch, while the server is paused ──► put in place, hashed in the thread

`server_door.py` lets in those calls alone that come from the generator that the server belongs to.

`vllm serve` imports this module in its worker, before it loads the model. The import adds a backend to vLLM's
weight transfer, and on CPUs makes vLLM use layers whose weights can be replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import distributed
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from infra import choices
from infra.weights.folder import ModelFolder
from infra.weights.patch import read_patch
from infra.weights.slices import Slicing
from producers.engines.cpu_activations import use_vectors, use_vectors_in
from producers.engines.cpu_attention import use_one_stretch
from producers.engines.engine import EngineError
from producers.engines.held_slices import check_slices
from producers.engines.plain_experts import check_experts, use_plain_experts
from producers.engines.prefill_bits import use_one_kernel
from producers.engines.scatter import HeldWeights
from producers.engines.server_facts import BACKEND, ID_PREFIX, WeightsState
from producers.engines.server_settings import read_facts
from producers.engines.shared_names import meeting_without_name, remove_meeting_names, without_names
from producers.engines.staged_patch import StagedPatch
from producers.engines.vllm_in_process import packed_linears
from schemas.importing import said
from schemas.rank_layout import RankLayout

_SPARE = 64 << 20  # bytes that a patch may have beside twice the model's
_SUFFIX = 9  # vLLM appends a dash and 8 characters to a request's id
_PACKED = [] if choices.cuda() else packed_linears(invariant=True)
if not choices.cuda():
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    use_plain_experts(invariant=True)
    use_one_stretch()
    use_vectors()
    # vLLM ends its workers by SIGKILL
    _CPUSHMDistributed._init_cpu_shm = without_names(_CPUSHMDistributed._init_cpu_shm)
elif os.environ.get("VLLM_BATCH_INVARIANT") == "1":
    use_one_kernel()
distributed.FileStore = meeting_without_name(distributed.FileStore)


@dataclass
class PatchTarget(WeightTransferInitInfo):
    """The tensors that a model has, as the generator's files have them, and how ranks divide them."""

    shapes: dict[str, list[int]]
    heads: int
    kv_heads: int


@dataclass
class PatchPlace(WeightTransferUpdateInfo):
    """The place of a patch: a file in the memory of a process on this machine."""

    file: str


class PatchTransfer(WeightTransferEngine[PatchTarget, PatchPlace]):
    """Takes patches, writes them into the weights in place, and hashes what is held then."""

    init_info_cls = PatchTarget
    update_info_cls = PatchPlace
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._beside = ThreadPoolExecutor(1, "beside", initializer=self._use_own_gpu)
        self._held: HeldWeights | None = None
        self._slicing: Slicing | None = None
        self._checked = False
        self._staged: StagedPatch | None = None
        self._root: str | None = None
        self._preparing: Future[str] | None = None
        self._hashing: Future[dict[str, str]] | None = None

    def _use_own_gpu(self) -> None:
        """Have the thread beside steps work on this rank's GPU, and take no memory of the first one."""
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def init_transfer_engine(self, init_info: PatchTarget) -> None:
        """Begin anew: the next patch has to have all tensors whole."""
        self._settle()
        self._drop_staged()
        check_experts(self.model)
        if not choices.cuda():
            use_vectors_in(self.model)
        ranks, shapes = get_tensor_model_parallel_world_size(), dict[str, Sequence[int]](init_info.shapes)
        if ranks > 1:
            self._slicing = Slicing(RankLayout(ranks), init_info.heads, init_info.kv_heads)
            shapes = self._slicing.shapes(shapes, get_tensor_model_parallel_rank())
        self._held = HeldWeights(self.model, shapes, _PACKED)
        self._check_slices()
        self._held.check_filled()
        self._root = self._preparing = self._hashing = None

    def _check_slices(self) -> None:
        """See that vLLM has divided the weights that it has loaded as we would; later it has others."""
        if self._slicing is None or self._checked:
            return
        assert self._held is not None
        folder = ModelFolder(self.model_config.model)
        check_slices(self._held, folder, self._slicing, get_tensor_model_parallel_rank())
        self._checked = True

    def start_weight_update(self) -> None:
        """Begin a patch. One that was never finished is dropped."""
        self._drop_staged()

    def patch_limit(self) -> int:
        """Return how many bytes a patch can have: each rank gets that of whole tensors."""
        ranks = get_tensor_model_parallel_world_size()
        return 2 * ranks * sum(one.nbytes for one in self.model.parameters()) + _SPARE

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Open a patch. vLLM's own method would also wait for a GPU, which CPUs have none of."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PatchPlace) -> None:
        """Open a patch: all ranks map the same memory."""
        self._drop_staged()
        self._staged = StagedPatch(update_info.file, self.patch_limit())

    def finish_weight_update(self) -> None:
        """Prepare the patch that has come, in a thread beside steps. `install` puts it in place.

        This never raises, since vLLM would let no other update begin after that; `state` says what was wrong.
        """
        staged, self._staged, held, slicing = self._staged, None, self._held, self._slicing
        self._settle()
        if staged is None or held is None:
            self._preparing = None
            if staged is not None:
                staged.close()
            return

        rank = get_tensor_model_parallel_rank()

        def prepare() -> str:
            try:
                patch = read_patch(staged.path)
                held.prepare(patch if slicing is None else slicing.patch(patch, rank))
                return patch.root
            finally:
                staged.close()

        self._preparing = self._beside.submit(prepare)

    def install(self, root: str) -> None:
        """Put the prepared patch in place. The server is paused."""
        assert self._held is not None and self._preparing is not None, "nothing is prepared"
        if (prepared := self._preparing.result()) != root:
            raise EngineError(f"the weights {root} shall be installed; {prepared} are prepared")
        if self._hashing is not None:
            self._hashing.result()
        self._held.take()
        self._held.settle()
        self._root, self._preparing = root, None
        self._hashing = self._beside.submit(self._held.digests)

    def state(self) -> WeightsState:
        """Return the state of weights."""
        prepared, digests, error = None, None, ""
        if self._preparing is not None and self._preparing.done():
            if failed := self._preparing.exception():
                error = f"weights can't be prepared: {said(failed)}"
            else:
                prepared = self._preparing.result()
        if self._hashing is not None and self._hashing.done():
            if failed := self._hashing.exception():
                error = f"weights can't be hashed: {said(failed)}"
            else:
                digests = self._hashing.result()
        return WeightsState(root=self._root, prepared=prepared, digests=digests, error=error)

    def shutdown(self) -> None:
        """End the thread."""
        self._drop_staged()
        self._beside.shutdown(wait=False, cancel_futures=True)

    def _settle(self) -> None:
        """Wait until the thread has nothing to do: it writes into what is prepared next."""
        for one in (self._preparing, self._hashing):
            if one is not None:
                one.exception()

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None


WeightTransferEngineFactory.register_engine(BACKEND, PatchTransfer)


_Answer = dict[str, Any]


def _answered(work: Callable[[], object]) -> _Answer:
    """Return a result as JSON has it, or the error: an exception would end other parts of the server."""
    try:
        return {"result": msgspec.to_builtins(work())}
    except Exception as error:
        return {"error": str(error) if isinstance(error, EngineError) else said(error)}


class ServedWorker:
    """Methods that a worker of vLLM gets. `POST /collective_rpc` calls them; each returns JSON."""

    weight_transfer_engine: Any
    model_runner: Any
    vllm_config: Any
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool

    def server_facts(self) -> _Answer:
        """Return the facts about this server. All ranks have met when they are asked for."""
        remove_meeting_names()
        transfers = isinstance(self.weight_transfer_engine, PatchTransfer)
        return _answered(lambda: read_facts(self.vllm_config, self.model_runner, transfers=transfers))

    def patch_limit(self) -> _Answer:
        """Return how many bytes a patch can have."""
        return _answered(lambda: self._transfer().patch_limit())

    def end_update(self) -> _Answer:
        """End an update of weights that another generator has left unfinished."""

        def end() -> None:
            if self._weight_update_active:
                self.finish_weight_update()

        return _answered(end)

    def drawn_tokens(self) -> _Answer:
        """Return the tokens of each unfinished request. The server is paused, so the numbers stay."""
        runner = self.model_runner
        return _answered(
            lambda: {
                name[len(ID_PREFIX) : -_SUFFIX]: len(request.output_token_ids)
                for name, request in runner.requests.items()
                if name.startswith(ID_PREFIX)
            }
        )

    def weights_state(self) -> _Answer:
        """Return the state of the weights."""
        return _answered(lambda: self._transfer().state())

    def install_patch(self, root: str) -> _Answer:
        """Put the prepared weights in place. The server is paused."""
        return _answered(lambda: self._transfer().install(root))

    def _transfer(self) -> PatchTransfer:
        if not isinstance(self.weight_transfer_engine, PatchTransfer):
            raise EngineError(f'it lacks --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'')
        return self.weight_transfer_engine
