"""A server of vLLM on a GPU as a generator's engine: versions and deltas while it draws, and logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.engine import DrawnAnswer, engine_of
from producers.engines.on_server import ServedEngine
from producers.engines.server_link import KEY_VARIABLE
from tests.bench._gpu_model import sized_model
from tests.factories import make_spec
from tests.gpu.gpu_engines import changed, request
from tests.servers import KEY, VllmServer
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sized_model(tmp_path_factory.mktemp("model"), "tiny", "cpu")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    server = VllmServer(model, tmp_path_factory.mktemp("server"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        try:
            server.start(dtype="bfloat16", gpu_memory_utilization="0.2", kv_cache_memory_bytes=str(64 << 20))
            spec = make_spec(
                generator={"engine": "served", "urls": server.url, "slots": 16}, model={"dtype": "bfloat16"},
                sampling={"max_tokens": 200, "max_prompt_tokens": 32}, trainer={"microbatch_tokens": 512},
            )  # fmt: skip
            made = engine_of(str(model), spec)
            assert isinstance(made, ServedEngine)
            yield made
            made.close()
        finally:
            server.stop()


def give(engine: ServedEngine, patch: PatchFile, held: dict[str, str]) -> dict[str, int]:
    engine.prepare(patch.read())
    tokens = engine.install(recompute=False)
    assert engine.digests() == held
    return tokens


def rest(engine: ServedEngine, count: int) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}

    def enough() -> bool:
        found.update({one.id: one for one in engine.step(0.05)})
        return len(found) == count

    wait_until(enough, what=f"{count} answers", deadline_s=60)
    return found


def test_a_version_and_a_delta_change_what_is_drawn(engine: ServedEngine, model: Path) -> None:
    old = ModelFolder(model).bits()
    new, requests = changed(old, 0.02, 1), [request(number, 150) for number in range(12)]
    found = []
    for patch, held in (
        (PatchFile({}, old, since=None, root="0"), old),
        (PatchFile(old, new, since="0", root="1"), new),
        (PatchFile(new, old, since="1", root="2"), old),
    ):
        give(engine, patch, model_digests(held))
        for one in requests:
            engine.submit(one)
        found.append(rest(engine, len(requests)))
    first, second, third = found
    assert any(not np.array_equal(one.tokens, second[name].tokens) for name, one in first.items())
    assert any(np.array_equal(one.tokens, third[name].tokens) for name, one in first.items())


def test_weights_change_while_samples_are_drawn(engine: ServedEngine, model: Path) -> None:
    old = ModelFolder(model).bits()
    new, requests = changed(old, 0.02, 2), [request(number, 199) for number in range(12)]
    give(engine, PatchFile({}, old, since=None, root="0"), model_digests(old))
    for one in requests:
        engine.submit(one)
    wait_until(lambda: not engine.step(0.0) and min(engine.unfinished().values()) > 3, what="some tokens")
    tokens = give(engine, PatchFile(old, new, since="0", root="1"), model_digests(new))
    assert tokens and all(3 < count < 199 for count in tokens.values())
    assert all(len(one.tokens) == len(one.logprobs) == 199 for one in rest(engine, len(requests)).values())
