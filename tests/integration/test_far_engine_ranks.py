"""An engine of two ranks of which one is on "another machine": reached over TCP, with no memory in common."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from infra.roles.context import RoleContext, Stopped
from infra.runs import create, find
from infra.stores.opening import open_store
from infra.weights.patch import PatchFile
from producers.engines import machine_ranks
from producers.engines.engine import EngineError, FarRanksAsked, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from schemas.rank_layout import RankLayout
from schemas.runspec import RunSpec
from tests.factories import make_context, make_spec, make_tiny_model
from tests.integration.test_tensor_parallel import (
    DEADLINE_S,
    ended,
    give,
    ready,
    request,
    run,
    same_bits,
    started,
    weights,
)
from tests.stacks import words_of
from tests.waiting import wait_until

SPEC = make_spec(
    generator={"slots": 8, "kv_cache_mib": 2, "tensor_parallel": 2}, trainer={"microbatch_tokens": 256},
    sampling={"max_tokens": 200, "max_prompt_tokens": 56}, placement={"engine_ranks": {"elsewhere": 1}},
)  # fmt: skip
RUN = "far-engine-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, and a store in which a run is recorded."""
    folder = tmp_path_factory.mktemp("far")
    make_tiny_model(folder / "model")
    store = open_store(f"file://{folder}/store")
    create(store, SPEC, bootstrap_servers="none", model=str(folder / "model"), run_id=RUN)
    return folder


@contextmanager
def machine(folder: Path) -> Iterator[RoleContext]:
    """The role of the other machine, in a thread."""
    context = make_context(SPEC, folder, role="engine_ranks", run=RUN)
    context.record = find(context.store, RUN)

    def work() -> None:
        with suppress(Stopped):
            machine_ranks.body(1, None, context)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield context
    finally:
        context.stop.set()
        thread.join(300)
        assert not thread.is_alive()


def far_engine(folder: Path, spec: RunSpec = SPEC) -> RemoteEngine:
    options = EngineOptions(
        model=str(folder / "model"), spec=spec.model_dump_json(),
        far=FarRanksAsked(f"file://{folder}/store", RUN, 0),
    )  # fmt: skip
    return ready(RemoteEngine(options, threading.Event(), deadline_s=DEADLINE_S).open())


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RemoteEngine]:
    with machine(folder):
        made = far_engine(folder)
        give(made, folder / "model", weights(folder / "model"))
        yield made
        made.close()
        wait_until(lambda: not far_ranks(), what="the end of the far rank")


def far_ranks() -> list[int]:
    """The processes of ranks that the other machine has started: children of this process."""
    return [one.pid for one in psutil.Process().children() if "rank_process" in str(words_of(one))]


@pytest.mark.thorough
def test_it_has_the_bits_of_an_engine_whose_ranks_are_on_one_machine(
    folder: Path, engine: RemoteEngine
) -> None:
    assert len(far_ranks()) == 1
    model = folder / "model"
    local = started(model)
    try:
        old, new = weights(model), weights(model, change=1, share=0.02)
        requests = [request(number) for number in range(24)]
        for one in (local, engine):
            give(one, model, old, root="old")
        first, here = run(engine, requests), run(local, requests)
        for one in (local, engine):
            give(one, model, new, old, since="old", root="new")
        second, there = run(engine, requests), run(local, requests)
        for name, answer in first.items():
            same_bits(answer, here[name])
            same_bits(second[name], there[name])
        assert any(not np.array_equal(first[one].logprobs, second[one].logprobs) for one in first)
    finally:
        local.close()


def test_a_far_rank_that_is_killed_is_named_and_the_machine_serves_the_next_start(
    folder: Path, engine: RemoteEngine
) -> None:
    (rank,) = far_ranks()
    engine.submit(SampleRequest("0000001-00", [4], 200, 1, 1.0))
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(
        EngineError, match=r"rank 1 of the engine \(on 127.0.0.1\) ended with status -9; the log of `streamrl"
    ):
        ended(engine, 1)
    again = far_engine(folder)
    try:
        give(again, folder / "model", weights(folder / "model"))
        assert set(run(again, [request(3)])) == {request(3).id}
        again.prepare(PatchFile({}, weights(folder / "model"), since=None, root="x"))
        os.kill(again.pid, signal.SIGKILL)
        wait_until(lambda: not far_ranks(), what="the end of the far rank with rank 0")
    finally:
        again.close()


@pytest.mark.thorough
def test_layers_may_be_divided_among_machines(tmp_path: Path) -> None:
    """Hidden states alone cross the network, and bits are those of an engine that has all layers."""
    generator = {"slots": 8, "kv_cache_mib": 2, "pipeline_parallel": 2}
    spec = SPEC.model_copy(update={"generator": make_spec(generator=generator).generator})
    model = make_tiny_model(tmp_path / "model")
    store = open_store(f"file://{tmp_path}/store")
    create(store, spec, bootstrap_servers="none", model=str(model), run_id=RUN)
    requests = [request(number) for number in range(12)]
    alone = started(model, ranks=1)
    try:
        give(alone, model, weights(model, change=1), layout=RankLayout())
        expected = run(alone, requests)
    finally:
        alone.close()
    with machine(tmp_path):
        stretched = far_engine(tmp_path, spec)
        try:
            give(stretched, model, weights(model, change=1), layout=RankLayout(1, 2))
            for name, answer in run(stretched, requests).items():
                same_bits(answer, expected[name])
        finally:
            stretched.close()
