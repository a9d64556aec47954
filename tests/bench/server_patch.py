"""Seconds until a server of vLLM has prepared a patch: in the memory of one machine, and over HTTP.

A real server on this machine, with a model of random weights in float32. Over HTTP the generator's side takes
the server for one on another machine, so the bytes go through loopback. Preparing is a part of both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from infra.weights.patch import patch_pieces
from producers.engines.engine import engine_of
from producers.engines.on_server import ServedEngine
from producers.engines.server_link import KEY_VARIABLE
from tests.factories import make_patch, make_spec, make_tiny_model
from tests.servers import KEY, VllmServer

_WAYS = {"in memory": None, "over HTTP": "another machine"}


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench server_patch", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--width", type=int, default=256 if quick else 768, help="of the model's layers")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)
    os.environ[KEY_VARIABLE] = KEY
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name:
        model = make_tiny_model(
            Path(name) / "model", layers=16, width=given.width, heads=given.width // 64
        )  # fmt: skip
        server = VllmServer(model, Path(name))
        try:
            return _measured(server.start(), model, given.repeats)
        finally:
            server.stop()


def _measured(server: VllmServer, model: Path, repeats: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = {name: one.detach() for name, one in net.named_parameters()}
    spec = make_spec(
        generator={"engine": "served", "urls": server.url, "slots": 8}, trainer={"microbatch_tokens": 256},
        sampling={"max_tokens": 200, "max_prompt_tokens": 56},
    )  # fmt: skip
    engine = engine_of(str(model), spec)
    assert isinstance(engine, ServedEngine)
    found: dict[str, Any] = {}
    try:
        for way, machine in _WAYS.items():
            found[way] = _way(engine, tensors, machine, repeats)
            print(f"{way}: {found[way]}", flush=True)
    finally:
        engine.close()
    return found


def _way(
    engine: ServedEngine, tensors: dict[str, torch.Tensor], machine: str | None, repeats: int
) -> dict[str, Any]:  # fmt: skip
    seconds, size = [], 0
    for number in range(repeats):
        patch = make_patch(tensors, f"{machine} {number}").read()
        size = sum(len(piece) for piece in patch_pieces(patch))
        if machine is not None:
            engine._facts = msgspec.structs.replace(engine._facts, machine=machine)
        began = time.perf_counter()
        engine.prepare(patch)
        seconds.append(time.perf_counter() - began)
        engine.install(recompute=False)
        engine.digests()  # hashed beside: it must not go on during the next patch
    best = min(seconds)
    return {"mb": size / 1e6, "seconds": seconds, "mb_per_s": size / 1e6 / best}
