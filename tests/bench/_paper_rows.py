"""The paper's results, each beside ours: rows of a name, the paper's figure and ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flows.planning.hardware import hardware_of
from flows.planning.roofline import Efficiency, RooflineEngine
from tests.bench._paper_figures import (
    BREAKDOWN,
    BY_GPUS,
    BY_LENGTH,
    COST_RATIO,
    GPUS,
    GROWN,
    LONGEST,
    MODELS,
    SKEWNESS,
    SPLITS,
    STEP_MS,
    THROUGHPUT,
)  # fmt: skip
from tests.bench._paper_stages import SHAPES, Stages
from tests.bench._paper_systems import Split, algorithm1, async_s, colocated_s, grown, split_of, sync_s

H800, H20 = hardware_of("H800"), hardware_of("H20")
GROWTH_UNIT = 8
GROWTH_ITERATIONS = (5, 30)  # lengths grow between them, from 10K to 20K: the paper does not say


@dataclass(frozen=True)
class PaperRow:
    """A figure of the paper, and ours."""

    figure: str
    name: str
    paper: float
    ours: float

    @property
    def error(self) -> float:
        """Ours over the paper's, less 1."""
        return self.ours / self.paper - 1


def end_to_end(stages: Mapping[str, Stages], lengths: tuple[int, ...] = LONGEST) -> list[PaperRow]:
    """Figure 8: Sync and Async over ColocationRL."""
    rows = []
    for longest in lengths:
        for model in MODELS:
            colocated, sync, asynchronous = THROUGHPUT[model, longest]
            mine, split, base = _cell(stages[model], GPUS[model], longest)
            rows += [
                PaperRow("8", f"Sync, {model}, {longest // 1000}K", sync / colocated, base / mine),
                PaperRow(
                    "8", f"Async, {model}, {longest // 1000}K", asynchronous / colocated,
                    base / async_s(stages[model], H800, split),
                ),
            ]  # fmt: skip
    return rows


def _cell(stages: Stages, gpus: int, longest: float) -> tuple[float, Split, float]:
    """Return the seconds of Sync, Algorithm 1's split, and the seconds of ColocationRL."""
    split = algorithm1(stages, H800, gpus, longest)
    return (
        sync_s(stages, H800, split, longest), split, colocated_s(stages, H800, gpus, longest, "random"),
    )  # fmt: skip


def breakdown(stages: Mapping[str, Stages]) -> list[PaperRow]:
    """Table 3: 72B, 20K, over colocated."""
    mine = stages["72B"]
    sync, split, base = _cell(mine, 128, 20_000)
    scheduled = colocated_s(mine, H800, 128, 20_000, "ranker")
    ours = {"skewness": scheduled, "disaggregated": sync, "async": async_s(mine, H800, split)}
    return [PaperRow("T3", f"+ {name}", BREAKDOWN[name], base / seconds) for name, seconds in ours.items()]


def skewness(stages: Mapping[str, Stages]) -> list[PaperRow]:
    """Figure 9: generation over random FIFO, on five eighths of the GPUs."""
    rows = []
    for model in MODELS:
        gpus = GPUS[model] * 5 // 8
        base = stages[model].generation_s(H800, gpus, 20_000, "random")
        for policy, paper in zip(("ranker", "oracle"), SKEWNESS[model], strict=True):
            ours = stages[model].generation_s(H800, gpus, 20_000, policy) / base
            rows.append(PaperRow("9", f"{policy}, {model}", paper, ours))
    return rows


def splits(stages: Mapping[str, Stages]) -> list[PaperRow]:
    """Figure 10: the share of GPUs that generate, and the gain over halves."""
    rows = []
    for model, (share, gain) in SPLITS.items():
        gpus = GPUS[model]
        found = algorithm1(stages[model], H800, gpus, 20_000)
        even = split_of(stages[model], H800, gpus, gpus // 2, 20_000)
        rows += [
            PaperRow("10", f"share that generates, {model}", share, found.generating / gpus),
            PaperRow("10", f"gain over halves, {model}", gain, even.slower_s / found.slower_s),
        ]
    return rows


def growth(stages: Mapping[str, Stages]) -> list[PaperRow]:
    """Figure 11: how often the balancer of a run adds a unit while lengths grow from 10K to 20K."""
    mine = stages["7B"]
    split = algorithm1(mine, H800, GROWN[0], 10_000)
    begin, end = GROWTH_ITERATIONS
    shares = np.clip((np.arange(end + 6) - begin) / (end - begin), 0, 1)
    steps = grown(mine, H800, split, GROWTH_UNIT, [float(10_000 + 10_000 * share) for share in shares])
    added = sum(verdict.change for _, verdict in steps)
    ends = GROWN[0] + added * GROWTH_UNIT
    return [PaperRow("11", f"GPUs after {added} steps (paper: {len(GROWN) - 1})", GROWN[-1], ends)]


def costs(stages: Mapping[str, Stages]) -> list[PaperRow]:
    """Figure 12: throughput by cost, H20 generating and H800 training, over all H800."""
    mine, rows = stages["7B"], []
    assert H800.price is not None, "H800 has a price"
    assert H20.price is not None, "H20 has a price"
    alone, mixed = 4 * H800.price, 4 * H20.price + 2 * H800.price
    for longest, paper in COST_RATIO.items():
        base = async_s(mine, H800, algorithm1(mine, H800, 32, longest))
        both = max(mine.generation_s(H20, 32, longest, "ranker"), mine.training_s(H800, 16, longest))
        rows.append(PaperRow("12", f"by cost, {longest // 1000}K", paper, base * alone / (both * mixed)))
    return rows


def scaling(stages: Mapping[str, Stages]) -> list[PaperRow]:
    """Figure 2: both stages by GPUs and by the longest answer; not counted among the ratios."""
    mine, rows = stages["7B"], []
    first = 8_000
    gen, train = _stage_seconds(mine, 8, first)
    for gpus, (of_gen, of_train) in list(BY_GPUS.items())[1:]:
        rows += [
            PaperRow("2", f"generation, {gpus} GPUs", of_gen, _stage_seconds(mine, gpus, first)[0] / gen),
            PaperRow("2", f"training, {gpus} GPUs", of_train, _stage_seconds(mine, gpus, first)[1] / train),
        ]  # fmt: skip
    gen, train = _stage_seconds(mine, 32, 1_000)
    for longest, (of_gen, of_train) in list(BY_LENGTH.items())[1:]:
        ours, trains = _stage_seconds(mine, 32, longest)
        rows += [
            PaperRow("2", f"generation, {longest // 1000}K", of_gen, ours / gen),
            PaperRow("2", f"training, {longest // 1000}K", of_train, trains / train),
        ]
    return rows


def _stage_seconds(stages: Stages, gpus: int, longest: float) -> tuple[float, float]:
    return stages.generation_s(H800, gpus, longest, "random"), stages.training_s(H800, gpus, longest)


def step_curve(context: float = 1_500) -> list[PaperRow]:
    """Figure 6: a step of 7B on one H800, by the vLLM of 2025; the context is a guess."""
    engine = RooflineEngine(SHAPES["7B"], H800, efficiency=Efficiency(layer_s=120e-6))
    return [
        PaperRow("6", f"ms of a step, batch {batch}", paper, engine.step_s(batch, context) * 1000)
        for batch, paper in STEP_MS.items()
    ]


def absolute(stages: Mapping[str, Stages]) -> list[PaperRow]:
    """Figure 8's seconds of an iteration, which nothing is fitted on."""
    rows = []
    for (model, longest), paper in THROUGHPUT.items():
        sync, split, base = _cell(stages[model], GPUS[model], longest)
        ours = (base, sync, async_s(stages[model], H800, split))
        for name, rate, seconds in zip(("Coloc", "Sync", "Async"), paper, ours, strict=True):
            rows.append(PaperRow("8s", f"{name}, {model}, {longest // 1000}K", 1024 / rate, seconds))
    return rows


ALL = (end_to_end, breakdown, skewness, splits, growth, costs)
