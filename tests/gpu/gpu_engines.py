"""What tests of the engine process on a GPU share: an engine with 16 slots, weights for it, and samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from infra.weights.bits import Bits, Model
from infra.weights.digest import model_digests
from infra.weights.patch import PatchFile
from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from tests.factories import make_spec
from tests.waiting import wait_until

SLOTS, LONGEST = 16, 400


@contextmanager
def gpu_engine(
    model: Path, *, generator: Mapping[str, Any], longest: int = LONGEST, **said: Any
) -> Iterator[RemoteEngine]:
    """An engine in bfloat16 that takes a fifth of the GPU."""
    spec = make_spec(
        generator={"slots": SLOTS, "gpu_memory": 0.2, "gpu_kv_cache_mib": 64, **generator},
        model={"dtype": "bfloat16"},
        sampling={"max_tokens": longest, "max_prompt_tokens": 32}, trainer={"microbatch_tokens": 4096},
        **said,
    )  # fmt: skip
    options = EngineOptions(model=str(model), spec=spec.model_dump_json())
    made = RemoteEngine(options, threading.Event(), deadline_s=300).open()
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.close()


def changed(model: Model, share: float, seed: int) -> Model:
    """A model of which so many bits are others."""
    draw = np.random.default_rng(seed)
    return {
        name: Bits(one.dtype, one.shape,
                   one.data ^ (0x40 * (draw.random(one.data.size) < share)).astype(one.data.dtype))
        for name, one in model.items()
    }  # fmt: skip


def give(
    engine: RemoteEngine, patch: PatchFile, held: Mapping[str, str], *, recompute: bool = False
) -> Mapping[str, int]:
    """Install weights with these digests, and return how many tokens running samples had by then."""
    engine.prepare(patch)
    wait_until(engine.is_ready, what="its being ready")
    installed = engine.install(recompute=recompute)
    wait_until(lambda: engine.digests() is not None, what="what it holds")
    assert engine.digests() == held
    return installed.tokens


def give_first(engine: RemoteEngine, whole: Model) -> None:
    """Install the first weights."""
    give(engine, PatchFile({}, whole, since=None, root="0"), model_digests(whole))


def request(number: int, tokens: int) -> SampleRequest:
    prompt = [2 + number % 400, *range(5, 6 + number % 20)]
    return SampleRequest(f"{number:07d}-00", prompt, tokens, 1000 + number, 1.0, endless=True)


def run(engine: RemoteEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    for one in requests:
        engine.submit(one)
    return rest_of(engine, requests)


def ended(engine: RemoteEngine, count: int) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == count

    wait_until(all_there, what=f"{count} samples")
    return found


def rest_of(engine: RemoteEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    found = ended(engine, len(requests))
    for one in requests:
        assert len(found[one.id].tokens) == len(found[one.id].logprobs) == one.max_tokens
    return found


def same(found: DrawnAnswer, expected: DrawnAnswer, tokens: int | None = None) -> None:
    np.testing.assert_array_equal(found.tokens[:tokens], expected.tokens[:tokens])
    np.testing.assert_array_equal(found.logprobs[:tokens], expected.logprobs[:tokens])
