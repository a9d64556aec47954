"""Linear layers of the engine with weights in eight bits (`infra/weights/eight_bits.py`).

        weights, by row     activations, by token     product
int8    int8 × scale        int8 × scale              sums of integers: exact, on CPUs and GPUs; a CPU without
                                                      VNNI adds them in float32, which takes room and time
fp8     E4M3 × scale        E4M3 × scale              on a GPU of fp8 numbers; on a CPU of the same numbers in
                                                      the model's type, which takes room and saves no time

Each token has a scale of its own, so it does not matter which ones are computed beside it. vLLM's own ways to
round weights as it loads them lay them out anew, and could be neither written in place nor hashed. Here a
parameter holds the rows as they came, and its scales lie beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial, reduce
from typing import Any

import torch

from infra import choices
from infra.route_shapes import route_shape
from infra.weights.eight_bits import EIGHT_BITS, LEAST_SCALE, ON_GPUS, SCALE, has_eight_bits, is_rounded
from producers.engines.engine import lasting_error
from producers.engines.packed_linear import PackedLayer, Product, invariant_product, packed
from producers.engines.scatter import HeldWeights

_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_EXACT = 1024  # products of eight bits whose sum float32 has exactly: it is below 2^24
# vLLM's kernels: compute capability of a GPU from which on they run, and the first that has none any more
_GPUS = {"int8": (75, 100), "fp8": (89, None)}


class EightBitLinear:
    """Computes one linear layer of the engine on a CPU."""

    def __init__(
        self, layer: torch.nn.Module, kind: str, *, invariant: bool, known: dict[tuple[object, ...], bool]
    ) -> None:
        """`known`: what probes have shown, by the weight's shape."""
        self._layer, self._invariant, self._known = layer, invariant, known
        self._pack = partial(integer_product if kind == "int8" else fp8_product, dtype=layer.params_dtype)
        self.product = self.pack(*(one.data for one in self.parameters))

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        weight, scale = self._layer.weight, getattr(self._layer, SCALE)
        assert isinstance(weight, torch.nn.Parameter) and isinstance(scale, torch.nn.Parameter)
        return weight, scale

    def pack(self, *tensors: torch.Tensor) -> Product:
        return self._pack(*tensors)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = self.parameters[0]
        if self._invariant:
            return invariant_product(self.product, x, weight, bias, self._known)
        return self.product(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], weight.shape[0])


def rounded_weight(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in eight bits and the scales of its rows: the bits of `EightBits.rounded`."""
    largest = weight.float().abs().amax(1)
    most = largest.new_tensor(EIGHT_BITS[kind].most)  # by a plain number torch multiplies on GPUs: other bits
    scale = (largest / most).clamp_min(LEAST_SCALE)
    numbers = weight.float() / scale[:, None]
    return (numbers.round() if kind == "int8" else numbers).to(_TYPES[kind]), scale


def integer_product(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Product:
    """Return a function that multiplies by an int8 weight."""
    import vllm._custom_ops as ops

    if not adds_exactly():
        multiply = _exact(weight)
        return lambda x, bias: _scaled(multiply, x, weight, scale, bias)
    if choices.LINEAR.forced() == "mkl" or not ops._supports_onednn:
        return lambda x, bias: _scaled(torch._int_mm, x, weight, scale, bias)
    return _onednn(weight, scale, dtype)


def _onednn(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Product:
    import vllm._custom_ops as ops

    handler = ops.create_onednn_scaled_mm(weight.t(), scale, dtype, True, False, 32)

    def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        numbers, by, _ = ops.onednn_scaled_int8_quant(x.contiguous())
        out = x.new_empty(x.shape[0], scale.shape[0])  # the handler reads the scales where they are
        ops.onednn_scaled_mm(handler, numbers, out, by, None, None, bias)
        return out

    return product


@cache
def adds_exactly() -> bool:
    """Whether this CPU adds products of eight bits exactly.

    Without VNNI oneDNN adds each two of them in 16 bits, and cuts off what does not fit there.
    """
    import vllm._custom_ops as ops

    most, width = torch.full((16, 64), 127, dtype=torch.int8, device="cpu"), 64
    if not bool((torch._int_mm(most, most.t()) == width * 127 * 127).all()):
        return False
    if not ops._supports_onednn:
        return True
    ones = torch.ones(16, width, dtype=torch.float32, device="cpu")  # models are loaded with other defaults
    found = _onednn(most, ones[:, 0].contiguous(), torch.float32)(ones, None)
    return torch.allclose(found, torch.full_like(found, width * 127.0))


def _exact(weight: torch.Tensor) -> Any:
    """Return a function that multiplies by an int8 weight in float32: parts of it, so that sums are exact."""
    parts = [packed(part.float().contiguous()) for part in weight.split(_EXACT, dim=1)]

    def multiply(numbers: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        pieces = (piece.float().contiguous() for piece in numbers.split(_EXACT, dim=1))
        return reduce(torch.add, (part(one, None).double() for part, one in zip(parts, pieces, strict=True)))

    return multiply


def _scaled(
    multiply: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    numbers, by = rounded_weight(x, "int8")
    out = multiply(numbers, weight.t()).float() * by[:, None] * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def fp8_product(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Product:
    """Return a function that multiplies by an fp8 weight as fp8 kernels do, where there are none."""
    whole = packed(weight.to(dtype))

    def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        numbers, by = rounded_weight(x, "fp8")
        out = whole(numbers.to(dtype), None).float() * by[:, None] * scale
        return (out if bias is None else out + bias.float()).to(dtype)

    return product


def on_gpu(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Multiply by a weight in eight bits on a GPU."""
    import vllm._custom_ops as ops

    flat = x.reshape(-1, x.shape[-1])
    if weight.dtype == torch.int8:
        numbers, by, _ = ops.scaled_int8_quant(flat)
    else:
        numbers, by = ops.scaled_fp8_quant(flat, use_per_token_if_dynamic=True)
    out = ops.cutlass_scaled_mm(numbers, weight.t(), by, scale[:, None], x.dtype, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def use_eight_bits(kind: str, dtype: str, *, invariant: bool) -> tuple[str, list[PackedLayer]]:
    """Teach vLLM to hold weights in eight bits.

    Return the name by which an engine's arguments ask for it, and a list of the next engine's layers. It is
    filled while the engine is built; on a GPU it stays empty.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

    check_gpu(kind, dtype)
    layers: list[PackedLayer] = []
    known: dict[tuple[object, ...], bool] = {}
    on_cpu = not choices.cuda()

    class _Method(UnquantizedLinearMethod):
        """Loads a layer's weight as it is in the model's files, and holds it in eight bits then.

        It does so layer by layer: a device never has room for more than one plain weight.
        """

        uses_meta_device = True
        supports_pre_processed_weights = False

        def create_weights(self, layer: Any, *sizes: Any, **more: Any) -> None:
            with torch.device("meta"):
                super().create_weights(layer, *sizes, **more)
            initialize_online_processing(layer)

        def process_weights_after_loading(self, layer: Any) -> None:
            if hasattr(layer, SCALE):
                return  # vLLM calls it again when all layers are loaded
            weight, scale = rounded_weight(layer.weight.data, kind)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            setattr(layer, SCALE, torch.nn.Parameter(scale, requires_grad=False))
            if on_cpu:
                layer.eight_bits = EightBitLinear(layer, kind, invariant=invariant, known=known)
                layers.append(layer.eight_bits)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
            if on_cpu:
                return layer.eight_bits(x, bias)
            return on_gpu(x, layer.weight, layer.weight_scale, bias)

    class _Config(QuantizationConfig):
        """Chooses the layers."""

        def get_name(self) -> Any:
            return name

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16] if on_cpu else [getattr(torch, ON_GPUS)]

        @classmethod
        def get_min_capability(cls) -> int:
            return _GPUS[kind][0] or 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            return cls()

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None
            return _Method() if has_eight_bits(prefix) else UnquantizedLinearMethod()

    name = f"streamrl_{kind}"
    register_quantization_config(name)(_Config)
    return name, layers


def check_no_experts(model: str) -> None:
    """Raise EngineError if a model is a mixture of experts, whose experts nobody rounds."""
    if route_shape(model) is not None:
        raise lasting_error(
            f"generator.quantization: the model in {model} is a mixture of experts, and experts are not "
            "held in eight bits; set none"
        )


def check_rounded(weights: HeldWeights, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise EngineError if vLLM's model computes a layer otherwise that generators send in eight bits."""
    for name, shape in shapes.items():
        if is_rounded(name, shape) and weights.tensor(name).element_size() != 1:
            raise lasting_error(
                f"generator.quantization: vLLM's model holds {name} as {weights.tensor(name).dtype}, and not "
                "in eight bits; set none"
            )


def check_gpu(kind: str, dtype: str) -> None:
    """Raise EngineError if vLLM has no kernels for the GPU, or none that compute in `dtype`."""
    if not choices.cuda():
        return
    if dtype != ON_GPUS:
        raise lasting_error(
            f"generator.quantization {kind} on a GPU needs model.dtype: {ON_GPUS}; it is {dtype}"
        )
    major, minor = torch.cuda.get_device_capability()
    least, beyond = _GPUS[kind]
    if least <= 10 * major + minor and (beyond is None or 10 * major + minor < beyond):
        return
    raise lasting_error(
        f"generator.quantization {kind}: vLLM has no kernels for it on a GPU of compute capability "
        f"{major}.{minor}; set another one, or none"
    )
