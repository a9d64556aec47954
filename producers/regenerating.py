"""Samples a run's samples again, and compares tokens and log-probabilities with those that it recorded.

    recorded samples ──► those whose weights changed alike ──► batches ──► engine process ──► compared
    weights of their versions ──► patches ─────────────────────────┘

Seeds, settings, engine and sampler are those of the run. So on the machine where a sample was drawn all bits
are the same.

A sample whose weights changed on the KV cache of older ones (`on_update: continue`) may later have moved to
another generator, which computed its cache anew by newer weights. The log does not say where. But bits show
it: they differ from that token on. Then it is drawn again with its cache computed anew there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from infra.errors import Explained
from infra.weights.bits import Model, model_of
from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engine_form import EngineForm
from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.redrawing import RedrawBatch, RedrawnWeights, begins_of_requests
from producers.engines.remote_redraw import RedrawEngine
from producers.installing import merged_model
from schemas.expert_routes import unpack_routes
from schemas.generation import ENGINES
from schemas.messages import Sample
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    import torch

_MOST_MOVES = 8  # of a sample, whose KV cache is computed anew each time
_KEPT = 3  # versions whose weights are held: those between which samples change

Published = Callable[[int, str], Mapping[str, "torch.Tensor"]]  # a version's tensors, by number and root
RedrawProgress = Callable[[int, int], None]  # samples that are drawn, of how many
_Way = tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]]  # versions, roots, tokens between changes


class RegenerationError(Explained):
    """Samples that can't be sampled again; the message says what is missing."""


@dataclass(frozen=True)
class Redrawn:
    """A recorded sample, and the answer that came of sampling it again."""

    sample: Sample
    answer: DrawnAnswer
    anew: tuple[int, ...] = ()  # tokens before which its KV cache was computed anew, as its bits say

    @cached_property
    def same_tokens(self) -> int:
        """How many of the first tokens are the same."""
        size = min(self.sample.tokens.size, self.answer.tokens.size)
        other = np.flatnonzero(self.sample.tokens[:size] != self.answer.tokens[:size])
        return int(other[0]) if other.size else size

    @property
    def has_tokens(self) -> bool:
        """Whether all tokens are the same, and the answer ended for the same reason."""
        sizes = {self.same_tokens, self.sample.tokens.size, self.answer.tokens.size}
        return len(sizes) == 1 and self.sample.finish == self.answer.finish

    @cached_property
    def first_other(self) -> int | None:
        """The first token that differs, has other bits of its log-probability, or was drawn by other experts.

        None if all are equal.
        """
        ours, theirs = (one.logprobs[: self.same_tokens] for one in (self.answer, self.sample))
        other = np.flatnonzero(ours.view(np.uint32) != theirs.view(np.uint32))
        if other.size:
            return int(other[0])
        return self._first_other_route() if self.has_tokens else self.same_tokens

    def _first_other_route(self) -> int | None:
        """Return the first token that was drawn by other experts; None if there is none, or none is known."""
        prompt, sample = self.sample.prompt_tokens.size, self.sample
        if not sample.routes or self.answer.routes is None:
            return None
        recorded = unpack_routes(sample.routes, prompt + sample.tokens.size - 1)
        if recorded.shape != self.answer.routes.shape:
            return 0
        other = np.flatnonzero((recorded != self.answer.routes).any(axis=(1, 2)))
        return max(0, int(other[0]) + 1 - prompt) if other.size else None

    @property
    def equal(self) -> bool:
        """Whether all bits are the same."""
        return self.first_other is None

    @property
    def apart(self) -> float:
        """The largest difference of a log-probability, up to the first token that differs."""
        ours, theirs = (
            one.logprobs[: self.same_tokens].astype(np.float64) for one in (self.answer, self.sample)
        )
        return float(np.abs(ours - theirs).max(initial=0.0))


class Regenerating:
    """Samples recorded samples of a run again."""

    def __init__(self, model: str, spec: RunSpec, published: Published) -> None:
        """`model`: the folder of the model that the run began with."""
        self._model, self._spec, self._published = model, spec, published
        self._base = ModelFolder(model)
        self._form = EngineForm(self._base.path, spec.generator)
        self._kept: dict[str, tuple[Model, Mapping[str, str]]] = {}  # with digests, by root, the newest last
        self._engine: RedrawEngine | None = None
        self._root: str | None = None  # of the weights that the engine holds

    def again(
        self, samples: Sequence[Sample], progress: RedrawProgress = lambda done, total: None
    ) -> list[Redrawn]:
        """Sample these samples again. Return them in the order in which they came."""
        found: dict[str, Redrawn] = {}
        for batch in batches_of(samples, self._spec.generator.slots):
            found |= {one.sample.id: self._as_moved(one) for one in self._drawn(batch)}
            progress(len(found), len(samples))
        return [found[one.id] for one in samples]

    def close(self) -> None:
        """End the engine process."""
        if self._engine is not None:
            self._engine.close()

    def _open_engine(self) -> RedrawEngine:
        """Start the engine process, once the first weights are there: that takes a while."""
        if self._engine is None:
            spec = without_speculation(self._spec)
            options = EngineOptions(model=self._model, spec=spec.model_dump_json())
            self._engine = RedrawEngine(options, start_s=self._spec.deadlines.start_s).open()
        return self._engine

    def _as_moved(self, found: Redrawn) -> Redrawn:
        """Return a sample with an equal answer if it has one with its KV cache computed anew somewhere."""
        mixed = self._spec.generator.on_update == "continue" and found.sample.versions.size > 1
        tried, anew = found, list[int]()
        while mixed and len(anew) < _MOST_MOVES and (at := tried.first_other) is not None:
            if at <= max(anew, default=0) or at >= found.sample.tokens.size:
                break  # what was computed anew there did not help
            anew.append(at)
            tried = next(self._drawn([found.sample], anew))
        return tried if tried.equal else found

    def _drawn(self, samples: Sequence[Sample], anew: Sequence[int] = ()) -> Iterator[Redrawn]:
        """Draw samples whose weights changed alike.

        `anew`: tokens before which the KV cache of the only sample is computed anew.
        """
        patches: list[PatchFile] = []  # they are there as long as these objects
        wanted = list(zip(samples[0].versions.tolist(), samples[0].roots, strict=True))
        first = None if wanted[0][1] == self._root else self._patch(*wanted[0], patches)
        starts = [one.version_starts.tolist() for one in samples]
        begins = begins_of_requests([one[1] if len(one) > 1 else 0 for one in starts])
        weights = dict(zip(starts[0], wanted, strict=True))
        changes = sorted({*starts[0][1:], *anew})
        held = [weights[max(one for one in weights if one <= at)] for at in changes]
        others = [self._patch(version, root, patches) for version, root in held]
        always = self._spec.generator.on_update == "recompute"
        batch = RedrawBatch(
            first=first, begins=begins, changes=[begins[0] + at for at in changes],
            requests=[self._request(one) for one in samples],
            weights=others, recompute=[always or at in anew for at in changes],
        )  # fmt: skip
        answers = self._open_engine().draw(batch)
        if answers is not None:
            yield from (Redrawn(*pair, tuple(anew)) for pair in zip(samples, answers, strict=True))
            return
        self._root = None  # nobody knows how far it came
        if len(samples) == 1:
            raise RegenerationError(f"the engine gave no answer to sample {samples[0].id}")
        for one in samples:
            yield from self._drawn([one])

    def _request(self, sample: Sample) -> SampleRequest:
        return SampleRequest(
            sample.id, sample.prompt_tokens.tolist(), self._spec.sampling.max_tokens, sample.seed,
            sample.predicted,
        )  # fmt: skip

    def _patch(self, version: int, root: str, patches: list[PatchFile]) -> RedrawnWeights:
        """Return the difference to the weights that the engine holds by then."""
        new, digests = self._weights(version, root)
        old, _ = self._kept.get(self._root or "", (None, None))
        since = self._root if old is not None else None
        patches.append(PatchFile(old or {}, new, since=since, root=root))
        self._root = root
        return RedrawnWeights(str(patches[-1].path), self._form.held(new, digests))

    def _weights(self, version: int, root: str) -> tuple[Model, Mapping[str, str]]:
        """Return what an engine takes of a version's weights, with digests."""
        found = self._kept.pop(root, None)
        if found is None:
            tensors = self._published(version, root)
            lora = self._spec.model.lora
            whole = model_of(tensors) if lora is None else merged_model(self._spec.model, self._base, tensors)
            found = self._form.rounded(whole, model_digests(whole))
        self._kept[root] = found
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return found


def batches_of(samples: Sequence[Sample], slots: int) -> Iterator[list[Sample]]:
    """Yield samples that can be drawn together: their weights changed alike, and an engine has slots for all.

    The oldest weights come first, and among samples of one kind the longest.
    """
    ways: defaultdict[_Way, list[Sample]] = defaultdict(list)
    for one in samples:
        between = np.diff(one.version_starts[1:]).tolist()
        ways[(tuple(one.versions.tolist()), tuple(one.roots), tuple(between))].append(one)
    for _, alike in sorted(ways.items(), key=lambda item: item[0]):
        alike.sort(key=lambda one: (-one.tokens.size, one.id))
        for first in range(0, len(alike), slots):
            yield alike[first : first + slots]


def without_speculation(spec: RunSpec) -> RunSpec:
    """Return settings by which each step of the engine draws one token of each sample.

    Guesses do not change what is drawn, but then no step ends where weights changed.
    """
    settings = ENGINES.loaded(spec.generator)
    if "speculation" not in type(settings).model_fields:
        return spec
    return spec.model_copy(update={"generator": settings.model_copy(update={"speculation": False})})
