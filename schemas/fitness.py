"""Checks whether a sample can be trained. Each check says what is wrong, in words for the dead-letter topic.

The trainer trains only samples that are fit; other processes that count samples must use the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from schemas.admission import is_of_run, latest_iteration, oldest_version
from schemas.expert_routes import RouteShape, wrong_routes
from schemas.identity import round_of
from schemas.messages import OfGroup, Prompt, Sample
from schemas.runspec import RunSpec


def fault(
    sample: Sample, spec: RunSpec, vocabulary: float = math.inf, routes: RouteShape | None = None
) -> str:
    """Return why a well-formed sample does not fit the run, whichever weights made it; empty if it does.

    `routes`: shape of the routes that the trainer follows; None: it follows none.
    """
    return (
        _of_place(sample, spec)
        or _of_tokens(sample, spec, vocabulary)
        or wrong_routes(sample.routes, sample.prompt_tokens.size + sample.tokens.size - 1, routes)
    )


def _of_place(sample: Sample, spec: RunSpec) -> str:
    algorithm, resample = spec.algorithm, spec.loss.most_draws
    if sample.size != algorithm.group_size or not 0 <= sample.index < sample.size:
        return f"index {sample.index} of {sample.size} does not fit groups of {algorithm.group_size}"
    if sample.group < 0 or sample.iteration != latest_iteration(sample.group, algorithm):
        return f"group {sample.group} is not of iteration {sample.iteration}"
    if not is_of_run(sample.group, algorithm):
        return f"the run has {algorithm.iterations} iterations, and none of them trains group {sample.group}"
    if round_of(sample.group) > resample:
        return f"its group was drawn again more often than loss.resample allows ({resample})"
    return deal_fault(sample, spec)


def deal_fault(one: OfGroup, spec: RunSpec) -> str:
    """Return why a prompt or a sample can't have been dealt so to steps, bundles and classes; or nothing."""
    algorithm = spec.algorithm
    if not 0 <= one.mini < algorithm.optimizer_steps:
        return f"an iteration has {algorithm.optimizer_steps} optimizer steps, and no step {one.mini}"
    if not 1 <= one.bundle_groups <= algorithm.groups:
        return f"a bundle can't have {one.bundle_groups} groups; an iteration has {algorithm.groups}"
    if algorithm.order == "arrival" and (one.mini, one.bundle) != (0, one.group):
        return "it is bound to an optimizer step or a bundle; in order arrival no group is"
    if not 0 <= one.length_class < spec.lengths.classes:
        return f"there is no length class {one.length_class}"
    if one.predicted <= 0:
        return f"{one.predicted} is no predicted length"
    return ""


def _of_tokens(sample: Sample, spec: RunSpec, vocabulary: float) -> str:
    sampling = spec.sampling
    for name, tokens, most in (
        ("prompt", sample.prompt_tokens, sampling.max_prompt_tokens),
        ("answer", sample.tokens, sampling.max_tokens),
    ):
        if tokens.size == 0:
            return f"the {name} is empty"
        if tokens.size > most:
            return f"the {name} has {tokens.size} tokens; {most} are the most"
        if np.maximum.reduce(tokens.view(np.uint32)) >= vocabulary:  # negative tokens are large there
            return f"a token of the {name} is not in the vocabulary of {vocabulary}"
    if sample.tokens.size < sampling.min_tokens:
        return f"the answer has {sample.tokens.size} tokens; {sampling.min_tokens} are the least"
    return ""


def weights_fault(sample: Sample, spec: RunSpec, trained: int, root_of: Callable[[int], str | None]) -> str:
    """Return why the weights that made a sample are not this run's, or may not make it; empty if all is well.

    `trained`: the newest version. `root_of` returns a version's root, or None if it is not known: then the
    version's samples can't be trained.
    """
    algorithm = spec.algorithm
    oldest = oldest_version(sample.group, algorithm.groups, algorithm.lookahead)
    first, last = int(sample.versions[0]), int(sample.versions[-1])
    if first < oldest:
        return f"weights {first} made it; its iteration allows {oldest} and newer"
    if algorithm.mode == "sync" and last != sample.iteration:
        return f"weights {last} made it; on-policy needs {sample.iteration}"
    if last > trained:
        return f"weights {last} made it; the run's newest are {trained}"
    for version, root in zip(sample.versions.tolist(), sample.roots, strict=True):
        known = root_of(version)
        if known is None:
            return f"weights {version} made it, and nobody knows the root of that version any more"
        if known != root:
            return f"it was made by other weights than version {version} of this run"
    return ""


def contradiction(sample: Sample, other: Sample | Prompt) -> str:
    """Return how a sample differs from another of its group, or from its prompt; empty if it does not."""
    whose = f"sample {other.id} of the same group" if isinstance(other, Sample) else "the admitted prompt"
    for name in ("problem_id", "epoch", "iteration", "mini", "bundle", "bundle_groups"):
        mine, its = getattr(sample, name), getattr(other, name)
        if mine != its:
            return f"its {name} is {mine}, but {its} in {whose}"
    mine, its = sample.prompt_tokens, other.prompt_tokens if isinstance(other, Sample) else other.tokens
    if mine.size != its.size or (mine != its).any():  # takes a third of array_equal's time
        return f"its prompt tokens are not those of {whose}"
    return ""
