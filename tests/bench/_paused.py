"""New weights for one engine, over and over, while it decodes, in a process of its own.

Beside our way, in turn: a safetensors file read, loaded by vLLM, packed and hashed, all in the pause.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load, save

from infra.weights.bits import Bits
from infra.weights.digest import model_digests, tensor_digest
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.engine import SampleRequest
from producers.engines.vllm_in_process import VllmEngine

_SLOTS, _TOKENS = 8, 240
_FEW = 5  # steps that are measured at least

Model = dict[str, Bits]
Result = TypeVar("Result")


class Paused:
    """One engine at work."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._engine = VllmEngine(
            str(model), dtype=dtype, slots=_SLOTS, max_model_len=_TOKENS + 8, kv_cache_mib=128
        )
        self._weights: Model = {
            name: Bits(bits.dtype, bits.shape, bits.data.copy())
            for name, bits in ModelFolder(model).bits().items()
        }
        self._draw, self._number, self._begun = np.random.default_rng(0), 0, 0
        self._engine.prepare(PatchFile({}, self._weights, since=None, root="0").read())
        self._engine.install(recompute=False)
        self._engine.digests()

    def measure(self, changed: float) -> dict[str, float]:
        """Milliseconds of one update: our way, beside steps, and the way before."""
        _, alone = self._beside_steps(lambda: None)
        new = self._moved(changed)
        file, patch_ms = _timed(
            lambda: PatchFile(self._weights, new, since=str(self._number), root=str(self._number + 1))
        )
        self._number += 1
        prepare_ms, preparing = self._beside_steps(lambda: self._engine.prepare(file.read()))
        _, pause_ms = _timed(lambda: self._engine.install(recompute=False))
        _, first = _timed(self._engine.step)
        verify_ms, verifying = self._beside_steps(self._engine.digests)
        if self._engine.digests() != model_digests(new):
            raise AssertionError("the engine holds other weights")
        self._weights = new
        usual = float(np.median(alone))
        return {
            "pause_ms": pause_ms, "before_ms": self._before(new), "patch_ms": patch_ms,
            "prepare_ms": prepare_ms, "verify_ms": verify_ms, "first_over_alone": first / usual,
            "beside_over_alone": float(np.median(preparing + verifying)) / usual,
        }  # fmt: skip

    def _before(self, new: Model) -> float:
        """Everything in the pause, as it was once done here: read, loaded by vLLM, packed and hashed."""
        held = self._engine.weights
        tensors = {name: held.tensor(name).clone() for name in new}
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(save(tensors))
            file.flush()

            def install() -> dict[str, str]:
                with torch.no_grad():
                    held._model.load_weights(list(load(Path(file.name).read_bytes()).items()))
                for layer, _ in held._packed:
                    layer.product = layer.pack(*(one.data for one in layer.parameters))
                return {name: tensor_digest(held.tensor(name)) for name in tensors}

            digests, took = _timed(install)
        if digests != model_digests(new):
            raise AssertionError("vLLM holds other weights")
        return took

    def _moved(self, changed: float) -> Model:
        """Weights of which so many have another last bit."""

        def moved(bits: Bits) -> Bits:
            pick = self._draw.random(bits.data.size, np.float32) < changed
            return Bits(bits.dtype, bits.shape, bits.data ^ pick.astype(bits.data.dtype))

        return {name: moved(bits) for name, bits in self._weights.items()}

    def _beside_steps(self, work: Callable[[], object]) -> tuple[float, list[float]]:
        """How long some work takes in a thread, and how long the steps that are made meanwhile."""
        steps: list[float] = []
        with ThreadPoolExecutor(1) as beside:
            done = beside.submit(_timed, work)
            while not done.done() or len(steps) < _FEW:
                if not self._engine.unfinished():
                    self._begin()
                steps.append(_timed(self._engine.step)[1])
        return done.result()[1], steps

    def _begin(self) -> None:
        for number in range(_SLOTS):
            params = self._engine._params(_TOKENS)
            params.ignore_eos = True
            self._begun += 1
            self._engine._add(SampleRequest(f"{self._begun:07d}-00", [4, 5, 6], _TOKENS, number, 0.0), params)


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What it makes, and its milliseconds."""
    began = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - began) * 1e3


def main(folder: str, dtype: str, shares: str, rounds: int) -> None:
    """Print rows: medians over rounds, by share of the weights that change."""
    paused, found = Paused(Path(folder), dtype), defaultdict(list)
    for _ in range(rounds + 1):  # the first one warms up
        for share in json.loads(shares):
            found[share].append(paused.measure(share))
    rows = []
    for share, some in found.items():
        medians = {name: float(np.median([one[name] for one in some[1:]])) for name in some[0]}
        rows.append({"changed": share} | {name: round(value, 2) for name, value in medians.items()})
    print("RESULT", json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
