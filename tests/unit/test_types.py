"""All types that safetensors has: any bits survive, and what is no number is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.choices import NUMBA
from infra.stores.opening import open_store
from infra.weights.bits import NAMES, NARROW, Bits, blank_file, empty, file_model, model_of
from infra.weights.codec.chunks import decode_chunk, encode_model
from infra.weights.digest import model_digests
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError

FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("dtype", sorted({*NAMES, *NARROW}))
def test_any_bits_of_any_type_survive(dtype: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    models = []
    for _ in range(2):
        bits = empty(dtype, (16, 4))
        bits.data[:] = draw.integers(0, 256, bits.data.nbytes, np.uint8).view(bits.data.dtype)
        models.append({"w": bits})
    held = {"w": Bits(dtype, (16, 4), models[0]["w"].data.copy())}
    for chunk in encode_model(*models):
        decode_chunk(chunk, held, "it")
    assert model_digests(held) == model_digests(models[1])


@pytest.mark.parametrize("dtype", ["U16", "U32", "U64", "C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_anyone_s_checkpoint_is_published_and_fetched(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, NAMES[dtype][0])
    tensor = torch.arange(32, dtype=torch.uint8).view(kind)
    weights = WeightStore(open_store(f"file://{tmp_path}"), "r-1")
    weights.publish(0, {"w": tensor}, trainer_epoch=0)
    _, file = weights.fetch_file(0)
    found = file_model(file)["w"]
    assert (found.dtype, found.raw.tobytes()) == (dtype, tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "complex64", "float64", "float8_e4m3fnuz"])
def test_files_are_read_as_safetensors_writes_them(name: str, tmp_path: Path) -> None:
    tensors = {"w": torch.arange(16, dtype=torch.uint8).view(getattr(torch, name))}
    save_file(tensors, tmp_path / "x.safetensors")
    found = file_model((tmp_path / "x.safetensors").read_bytes())
    assert model_digests(found) == model_digests(model_of(tensors))
    file = blank_file({"w": (found["w"].dtype, found["w"].shape)})
    file_model(file)["w"].data[:] = found["w"].data
    (tmp_path / "y.safetensors").write_bytes(file)
    assert load_file(tmp_path / "y.safetensors")["w"].dtype == tensors["w"].dtype


@pytest.mark.parametrize("way", NUMBA.ways)
@pytest.mark.parametrize("dtype", sorted(FLOATS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_published(
    way: str, dtype: str, bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBA.variable, way)
    tensor = torch.ones(3000, dtype=torch.float64)
    tensor[2999] = bad
    weights = WeightStore(open_store(f"file://{tmp_path}"), "r-1")
    with pytest.raises(WeightsError, match="NaN or infinity in w"):
        weights.publish(0, {"w": tensor.to(FLOATS[dtype])}, trainer_epoch=0)
    tensor[2999] = 448.0
    weights.publish(0, {"w": tensor.to(FLOATS[dtype])}, trainer_epoch=0)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_each_byte_of_a_small_float_is_judged_as_torch_does(name: str) -> None:
    for byte in range(256):
        tensor = torch.tensor([byte], dtype=torch.uint8).view(getattr(torch, name))
        (bits,) = model_of({"w": tensor}).values()
        assert bits.finite() == bool(torch.isfinite(tensor.float()).all()), (name, byte)


def test_half_of_a_complex_number_that_is_none_is_found() -> None:
    tensor = torch.tensor([1 + 2j, complex(1.0, float("nan"))], dtype=torch.complex64)
    assert not model_of({"w": tensor})["w"].finite()


def test_tensors_that_no_file_can_have_are_said() -> None:
    with pytest.raises(WeightsError, match=r"torch\.complex128 can't be sent"):
        model_of({"w": torch.ones(2, dtype=torch.complex128)})
