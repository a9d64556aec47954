"""Decides which bundles are trained next, and how their samples are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schemas.runspec import RunSpec


def trained_next(
    spec: RunSpec, ready: int, tokens: Callable[[], int], *, missing: bool, whole_step: bool
) -> int:
    """Return how many of the complete bundles that are here are trained together now: the first ones.

    `tokens`: of their answers. `missing`: whether the step lacks samples. `whole_step`: whether the loss
    needs all samples of a step together.
    """
    if whole_step:
        return 0 if missing else ready
    if not spec.composes_on_arrival:
        return min(1, ready)
    return ready if not missing or tokens() >= spec.trainer.bundle_tokens else 0


def cut(lengths: Sequence[int], budget: int, parts: int) -> list[int]:
    """Return the sizes of the micro-batches that rows, sorted by length, are cut into.

    Their number is the smallest that keeps each within `budget` tokens, rounded up to a multiple of `parts`
    so that all ranks get equally many. Of such cuts, the one whose largest micro-batch is smallest is taken.
    """
    if not lengths:
        return []
    count = -(-len(_filled(lengths, budget)) // parts) * parts
    least, most = max(lengths[-1], -(-sum(lengths) // count)), budget
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if len(_filled(lengths, middle)) <= count else (middle + 1, most)
    return _filled(lengths, most)


def _filled(lengths: Sequence[int], most: int) -> list[int]:
    """Fill micro-batches one after the other with up to `most` tokens each; return their sizes."""
    sizes = [0]
    held = 0
    for length in lengths:
        if sizes[-1] and held + length > most:
            sizes.append(0)
            held = 0
        sizes[-1] += 1
        held += length
    return sizes
