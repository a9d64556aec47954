"""The weights of an engine. Several tensors may lie in one parameter (q, k and v; gate and up).

New weights are prepared beside the engine's steps, written between two of them, and hashed beside steps
again. Only bits that differ are written in place. A packed layer (see `packed_linear.py`) gets a new weight
and its packed form, which change places with the old ones between two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch._C import set_num_threads  # vLLM puts a function that does nothing in the place of torch's

from infra.weights.bits import NAMES
from infra.weights.digest import tensor_digest
from infra.weights.patch import Patch, TensorPatch
from producers.engines.engine import EngineError, lasting_error
from producers.engines.expert_places import ParameterIndex, place_of_experts
from producers.engines.packed_linear import PackedLayer, Product
from producers.engines.pinned_uploads import PinnedUploads
from producers.engines.staged_hashes import StagedHashes

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_AT_ONCE = 1 << 22  # changes that go to a GPU together, in the pause, if it has no room for all before


@dataclass(frozen=True)
class Write:
    """New values for a tensor, and the positions that they belong to."""

    target: torch.Tensor  # flat
    positions: torch.Tensor | None  # None: everywhere
    values: torch.Tensor

    @classmethod
    def of(cls, part: TensorPatch, tensor: torch.Tensor, uploads: PinnedUploads) -> Iterator[Write]:
        """Make `tensor` what `part` says."""
        width = part.values.dtype.itemsize
        target = tensor.view(-1).view(_INTEGERS[width])
        values = torch.from_numpy(part.values.view(f"<i{width}" if width > 1 else np.uint8))
        positions = None if part.positions is None else torch.from_numpy(part.positions)
        if target.is_cuda:
            yield from cls.to_gpu(target, positions, values, uploads)
        else:
            yield cls(target, positions, values)

    @classmethod
    def to_gpu(
        cls, target: torch.Tensor, positions: torch.Tensor | None, values: torch.Tensor,
        uploads: PinnedUploads,
    ) -> Iterator[Write]:  # fmt: skip
        """Bring values near a target on a GPU.

        Values for some positions go there now, while there is room, and so do some whole tensors. The other
        ones stay outside, in pinned memory, since a GPU has no room for all weights twice.
        """
        if positions is None and uploads.fit(values.nbytes, target.device, whole=True):
            yield cls(target, None, uploads.upload(values, target.device))
        elif positions is None:
            for place, piece in uploads.pieces(values):
                yield cls(target[place], None, piece)
        elif uploads.fit(positions.nbytes + values.nbytes, target.device):
            places = uploads.upload(positions, target.device)
            yield cls(target, places, uploads.upload(values, target.device))
        else:
            for some in zip(positions.split(_AT_ONCE), values.split(_AT_ONCE), strict=True):
                yield cls(target, *map(uploads.kept, some))

    def do(self) -> None:
        """Write the values."""
        if self.positions is None:
            self.target.copy_(self.values, non_blocking=True)
        else:
            places, values = (
                one.to(self.target.device, non_blocking=True) for one in (self.positions, self.values)
            )
            self.target.index_copy_(0, places.long(), values)


@dataclass
class Swap:
    """The next weight of packed layers; after `do`, the one before."""

    parameter: torch.nn.Parameter
    weight: torch.Tensor

    def do(self) -> None:
        """Let the parameter be the next weight."""
        self.parameter.data, self.weight = self.weight, self.parameter.data


@dataclass
class Repacking:
    """The next product of a packed layer; after `do`, the one before."""

    layer: PackedLayer
    product: Product

    def do(self) -> None:
        """Let the layer compute by the next product."""
        self.layer.product, self.product = self.product, self.layer.product


@dataclass(frozen=True)
class PreparedScatter:
    """The work that is left for the pause."""

    root: str
    parameters: set[str]  # parameters that are written to
    writes: list[Write]
    swaps: list[Swap | Repacking]

    @property
    def on_gpu(self) -> bool:
        return any(write.target.is_cuda for write in self.writes)


class HeldWeights:
    """The weights that an engine computes with."""

    def __init__(
        self, model: torch.nn.Module, shapes: Mapping[str, Sequence[int]], packed: Sequence[PackedLayer],
        first_expert: int = 0, ahead: int = 0,
    ) -> None:  # fmt: skip
        """`shapes`: of all tensors; `first_expert`: of each layer, that this rank holds.

        `ahead`: bytes of a whole version that may go to a GPU before the pause, beside the weights.

        A tensor's rows in its parameter follow from those above it, which a patch may lack.
        """
        self._model, self._shapes, self._first_expert = model, dict(shapes), first_expert
        self._parameters = dict(model.named_parameters())
        names = {parameter: name for name, parameter in self._parameters.items()}
        # a tied head and the embedding have the same parameter, and weights in eight bits have two
        self._packed = [(layer, tuple(names[one] for one in layer.parameters)) for layer in packed]
        self._swapped = {name for _, of_layer in self._packed for name in of_layer}
        self._places: dict[str, tuple[str, ParameterIndex]] = {}
        self._root: str | None = None
        self._prepared: PreparedScatter | None = None
        self._taken: PreparedScatter | None = None
        self._names: defaultdict[str, set[str]] = defaultdict(set)  # tensors that patches had, by parameter
        self._digests: dict[str, str] = {}
        self._voided = set[str]()  # parameters that another rank has in use
        self._uploads, self._hashes = PinnedUploads(ahead=ahead), StagedHashes()
        self._threads = torch.get_num_threads()  # of the engine's own thread

    @torch.no_grad()
    def prepare(self, patch: Patch) -> None:
        """Do all work that need not be done in the pause.

        May be called in another thread than the engine's.
        """
        if patch.since not in (None, self._root):
            raise EngineError(f"the patch is for the weights {patch.since}; the engine holds {self._root}")
        self._prepared = None
        _use_threads(self._threads)
        self._uploads.begin()
        parts: defaultdict[str, list[tuple[ParameterIndex, TensorPatch]]] = defaultdict(list)
        for name, part in patch.parts.items():
            self._shapes.setdefault(name, part.shape)
            parameter, rows = self._place(name)
            parts[parameter].append((rows, part))
            self._names[parameter].add(name)
            self._check(name, part)
        writes, targets = [], dict[str, torch.Tensor]()
        for name in parts:
            data = self._parameters[name].data
            target = data.clone() if name in self._swapped else data
            mine = [
                write for rows, part in parts[name] for write in Write.of(part, target[rows], self._uploads)
            ]
            if name in self._swapped:
                targets[name] = target
                for write in mine:
                    write.do()
            else:
                writes += mine
        self._uploads.finish()
        self._prepared = PreparedScatter(patch.root, set(parts), writes, list(self._swaps(targets)))

    def _swaps(self, targets: Mapping[str, torch.Tensor]) -> Iterator[Swap | Repacking]:
        """Yield what changes places when parameters of packed layers become `targets`."""
        for name, target in targets.items():
            yield Swap(self._parameters[name], target)
        made: dict[tuple[str, ...], Product] = {}
        for layer, names in self._packed:
            if targets.keys().isdisjoint(names):
                continue
            if names not in made:
                made[names] = layer.pack(*(targets.get(name, self._parameters[name].data) for name in names))
            yield Repacking(layer, made[names])

    @torch.no_grad()
    def take(self) -> None:
        """Begin the work of the pause: the engine's own thread calls this between two steps, then `settle`.

        A GPU first ends what was begun with the old weights. It copies the new ones while Python goes on.
        """
        assert self._prepared is not None, "nothing is prepared"
        self._taken, self._prepared = self._prepared, None
        if self._taken.on_gpu:
            torch.cuda.synchronize()
        for write in self._taken.writes:
            write.do()
        for swap in self._taken.swaps:
            swap.do()
        self._root = self._taken.root

    def settle(self) -> None:
        """Wait until the weights are there. Then other streams may read them, and write to the pinned memory
        that they came from."""
        if self._taken is not None and self._taken.on_gpu:
            torch.cuda.synchronize()

    def digests(self) -> dict[str, str]:
        """Return the hash of each tensor that ever came. Only what was written since the last call is hashed.

        May be called in another thread; the replaced weights are freed there.
        """
        written = self._taken.parameters if self._taken else set[str]()
        self._taken = None
        fresh = {name: self.tensor(name) for parameter in written for name in self._names[parameter]}
        self._check_tied_head(fresh)
        on_gpu = {name: tensor for name, tensor in fresh.items() if tensor.is_cuda}
        self._digests |= self._hashes.digests(on_gpu)
        self._digests |= {n: tensor_digest(tensor) for n, tensor in fresh.items() if n not in on_gpu}
        return dict(self._digests)

    def check_filled(self) -> None:
        """Raise EngineError if the model's tensors don't fill a parameter: nobody knows what it holds."""
        filled: defaultdict[str, int] = defaultdict(int)
        for name in filter(self.has, self._shapes):
            parameter, _ = self._place(name)
            # a parameter of the tensor's own name may have padding
            held = self._parameters[name] if parameter == name else self.tensor(name)
            filled[parameter] += held.numel()
        for name, parameter in self._parameters.items():
            if filled[name] < parameter.numel() and name not in self._voided:
                raise lasting_error(
                    f"vLLM's model computes with {name}, and the model has no tensor for it or a part of it: "
                    "vLLM does not compute what the model's config says. Take another model"
                )

    def has(self, name: str) -> bool:
        """Whether the engine has a parameter for a tensor of the model."""
        try:
            return bool(self._place(name))
        except EngineError:
            return False

    def has_parameter(self, name: str) -> bool:
        """Whether the engine has a parameter of a tensor's own name."""
        return name in self._parameters

    @torch.no_grad()
    def void(self, name: str) -> None:
        """Make a tensor NaN that is never written, and that nobody may compute with."""
        parameter = self._parameters[name]
        parameter.data.fill_(float("nan"))
        self._voided.add(name)
        for layer, names in self._packed:
            if name in names:
                layer.product = layer.pack(*(self._parameters[one].data for one in names))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by its Hugging Face name: a view of the weights that the engine computes with."""
        parameter, rows = self._place(name)
        return self._parameters[parameter].data[rows]

    def _place(self, name: str) -> tuple[str, ParameterIndex]:
        """Return the parameter that a tensor lies in, and its rows there."""
        if name not in self._places:
            self._places[name] = self._found(name)
        return self._places[name]

    def _found(self, name: str) -> tuple[str, ParameterIndex]:
        shape = self._shapes[name]
        if name in self._parameters:
            return name, slice(shape[0]) if shape else ()  # vLLM pads the vocabulary
        for fused, parts in getattr(self._model, "packed_modules_mapping", {}).items():
            for number, part in enumerate(parts):
                whole = name.replace(f".{part}.", f".{fused}.")
                if whole != name and whole in self._parameters:
                    above = [name.replace(f".{part}.", f".{other}.") for other in parts[:number]]
                    if lacking := [one for one in above if one not in self._shapes]:
                        raise _refused(name, f"{whole} has {lacking[0]} above it, and the model has not")
                    before = sum(self._shapes[one][0] for one in above)
                    return whole, slice(before, before + shape[0])
        if found := self._place_of_experts(name):
            return found
        raise lasting_error(f"the engine has no parameter for {name}: this model can't be verified")

    def _place_of_experts(self, name: str) -> tuple[str, ParameterIndex] | None:
        refuse = partial(_refused, name)
        return place_of_experts(name, self._shapes[name], self._parameters, refuse, self._first_expert)

    def _check(self, name: str, part: TensorPatch) -> None:
        """Raise EngineError if a tensor comes with another dtype or shape than the engine's."""
        held = self.tensor(name)
        if (NAMES[part.dtype][0], part.shape) != (str(held.dtype).removeprefix("torch."), tuple(held.shape)):
            raise lasting_error(
                f"tensor {name} comes as {part.dtype} {list(part.shape)}; the engine has it as {held.dtype} "
                f"{list(held.shape)}"
            )

    def _check_tied_head(self, fresh: Mapping[str, torch.Tensor]) -> None:
        """Raise EngineError if a tied output head is an old copy of the embedding."""
        head = getattr(getattr(self._model, "lm_head", None), "weight", None)
        embedding = fresh.get("model.embed_tokens.weight")
        if head is None or embedding is None or "lm_head.weight" in {*self._names, *self._voided}:
            return
        if head.data_ptr() != embedding.data_ptr() and not torch.equal(
            head.data[: len(embedding)], embedding
        ):
            raise EngineError(
                "the tied lm_head is stale: it differs from the embedding after a weight update"
            )


def _use_threads(threads: int) -> None:
    """Have this thread compute by as many threads as the engine's own.

    oneDNN lays a packed weight out by their number. Another layout than that of the kernels that the engine
    has ready multiplies wrongly, and says nothing. A thread that has computed nothing yet has as many as
    there are cores, until torch is asked.
    """
    if torch.get_num_threads() != threads:
        set_num_threads(threads)


def _refused(name: str, why: str) -> EngineError:
    """Return the error for a tensor that does not fit its place in the engine."""
    return lasting_error(f"{name} can't be verified: {why}")
