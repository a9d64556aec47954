"""Every decision that looks at the machine can be forced, and is both ways here; the docs name them all."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from consumers.learners import collective
from consumers.learners.fixed_point import FixedPointSum
from infra import choices
from infra.choices import ALL, CORES, DEVICE, NUMBA, Choice, ChoiceError
from infra.weights import versions
from infra.weights.inspection import convert
from tests.training import taken

ROOT = Path(__file__).parents[2]
OWN = [choice for choice in ALL if not choice.library]


@pytest.mark.parametrize("choice", ALL, ids=lambda choice: choice.variable)
def test_the_docs_name_it_with_all_its_ways(choice: Choice) -> None:
    rows = [line for line in (ROOT / "docs/processors.md").read_text().splitlines() if line.startswith("| `")]
    row = next((row for row in rows if row.startswith(f"| `{choice.variable}`")), "")
    assert all(f"`{way}`" in row for way in choice.ways), f"docs/processors.md: {choice.variable}"
    assert row


@pytest.mark.parametrize("choice", OWN, ids=lambda choice: choice.variable)
def test_only_what_is_known_is_taken(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    for said in choice.ways or ("1", "64"):
        monkeypatch.setenv(choice.variable, f" {said} ")
        assert choice.forced() == said
    for said in ("", " "):
        monkeypatch.setenv(choice.variable, said)
        assert choice.forced() is None
    for said in ("other", "-1", "0", "9" * 5000):
        monkeypatch.setenv(choice.variable, said)
        with pytest.raises(ChoiceError, match=f"{choice.variable}="):
            choice.forced()


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_can_be_hidden_and_asked_for(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv(DEVICE.variable, raising=False)
    assert collective.device().type == ("cuda" if there else "cpu")
    monkeypatch.setenv(DEVICE.variable, "cpu")
    assert collective.device().type == "cpu"
    monkeypatch.setenv(DEVICE.variable, "cuda")
    if there:
        assert collective.device().type == "cuda"
    else:
        with pytest.raises(ChoiceError, match="STREAMRL_DEVICE=cuda, and torch sees no GPU"):
            collective.device()


@pytest.mark.parametrize(("said", "threads"), [("1", 1), ("8", 2), ("1000", 8)])
def test_cores_are_as_many_as_is_said(said: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES.variable, said)
    assert choices.cores() == int(said)
    assert versions._threads() == threads


def test_without_numba_loops_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NUMBA.variable, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not choices.compiles()
    monkeypatch.setenv(NUMBA.variable, "compiled")
    with pytest.raises(ChoiceError, match="STREAMRL_NUMBA=compiled, and numba can't be imported"):
        choices.compiles()


def loaded(name: str) -> ModuleType:
    """A module once more, as the environment is now."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(name: str, monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """A module of loops, compiled and plain."""
    found = []
    for way in NUMBA.ways:
        monkeypatch.setenv(NUMBA.variable, way)
        found.append(loaded(name))
    return found


def compiled(function: Any) -> bool:
    return hasattr(function, "py_func")


def test_what_a_plan_costs_is_the_same_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    samples, generators, draws = 12, 2, 3
    beliefs = np.sort(rng.uniform(50, 400, (samples, 16)), axis=1)
    lengths = rng.uniform(50, 400, (draws, samples))
    tables = np.tile(0.01 + 0.001 * np.arange(6), (generators, 1))
    where = np.where(np.arange(samples) < 4, np.arange(samples) % generators, -1)
    found = []
    for module in both("producers.dispatch.makespan", monkeypatch):
        counts = np.zeros(samples, np.int64)
        ends = module.makespans(
            lengths, beliefs, np.arange(samples), where.copy(), np.zeros(samples), tables,
            np.full(generators, 4), np.zeros(generators), 0.5, 3.0, counts,
        )  # fmt: skip
        found.append((ends.tolist(), counts.tolist(), compiled(module.makespans)))
    (one, first, yes), (other, second, no) = found
    assert one == pytest.approx(other, rel=1e-12)
    assert first == second
    assert (yes, no) == (True, False)


@pytest.mark.parametrize("way", NUMBA.ways)
def test_fp32_becomes_the_nearest_bf16_both_ways(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUMBA.variable, way)
    rng = np.random.default_rng(0)
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16) + rng.choice([0, 0x7FFF, 0x8000, 0x8001], 1 << 16)
    source = torch.from_numpy(halves.astype(np.uint32).view(np.float32))
    source = source[~source.isnan()]
    found = torch.empty(source.numel(), dtype=torch.bfloat16)
    convert(source, found)
    assert torch.equal(found.view(torch.int16), source.to(torch.bfloat16).view(torch.int16))
    convert(torch.tensor([math.nan]), found[:1])
    assert found[0].isnan()


@pytest.mark.parametrize("way", NUMBA.ways)
def test_exact_sums_are_the_same_both_ways(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUMBA.variable, way)
    noise = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1000, generator=noise) * 10**power for power in (-6, -3, 0, 3)]
    one = FixedPointSum(1000, torch.device("cpu"))
    for gradient in gradients:
        mine = gradient.clone()
        assert taken(one, mine)
        assert not mine.any()
    exact = sum((g.double() * 2**32).round() for g in gradients) / 2**32 / 7.0
    found = torch.empty(1000, dtype=torch.float64)
    one.mean_into(found, 7.0)
    assert torch.equal(found, exact)
    for bad in (math.nan, math.inf, -(2.0**31)):
        assert not taken(FixedPointSum(2, torch.device("cpu")), torch.tensor([1.0, bad]))
