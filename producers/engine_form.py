"""The form in which an engine holds weights: in eight bits or as they come, whole or in slices of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.weights.bits import Model
from infra.weights.digest import model_digests
from infra.weights.eight_bits import EIGHT_BITS
from infra.weights.slices import SliceDigests, Slicing
from schemas.generation import GeneratorSection


class EngineForm:
    """Turns weights as they travel into those of an engine, with the hashes that it must find in itself."""

    def __init__(self, folder: Path, engine: GeneratorSection) -> None:
        """`folder`: the model that the run began with."""
        self._eight_bits = EIGHT_BITS.get(engine.eight_bits)
        self._slices = SliceDigests(Slicing.for_engine(folder, engine.layout))

    def rounded(self, model: Model, digests: Mapping[str, str]) -> tuple[Model, Mapping[str, str]]:
        """Return the tensors of verified weights as the engine has them, and their digests."""
        if self._eight_bits is None:
            return model, digests
        found = self._eight_bits.model(model)
        fresh = {name: bits for name, bits in found.items() if model.get(name) is not bits}
        return found, {name: digests[name] for name in found if name not in fresh} | model_digests(fresh)

    def held(self, model: Model, digests: Mapping[str, str]) -> dict[str, str]:
        """Return the digests of what the engine holds of such tensors: of each slice, if it has ranks."""
        return self._slices.of(model, digests)
