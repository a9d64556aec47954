"""The detector of generators that compute something else than the trainer, or with other weights.

The trainer's log-probabilities of fresh samples differ from those that came with them. Then the run's own
model is asked, for one explanation after the other, whether it makes the difference go away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from consumers.batches.training_rows import TrainingRow
from consumers.steps.telling import largest_gap
from flows.explain.detector import Detector, FaultFound
from flows.explain.own_model import NamedWeights, OwnModel, RoutedAnswer
from flows.explain.run_evidence import RunEvidence
from flows.run.versions_beside import versions_named
from schemas.messages import StepRecord

_LOOKED_AT = 12  # samples by which an explanation is judged
_EXPLAINED = 0.1  # of the difference may be left
_VERSIONS = 16  # older versions that are tried
_CACHES = 3
_STEPS = 4  # steps that are looked into until one has more than rounding can do
_FEW = 0.05  # of a step's samples: so many may be sensitive to rounding
_FAR = 4.0  # times what rounding does to the samples that are looked at
_UNKNOWN = "generators and trainer compute different things with the same weights"
_TRAINER = "the trainer computes other log-probabilities than transformers' own model"
_UNEXPLAINED = (_UNKNOWN, _TRAINER)

Said = Callable[[TrainingRow], np.ndarray]
Cause = tuple[str, list[str]]  # and the evidence for it


@dataclass(frozen=True)
class _Disagreement:
    """Samples whose log-probabilities are not those of the weights that they name."""

    run: RunEvidence
    rows: Sequence[TrainingRow]
    version: int
    weights: NamedWeights
    own: dict[str, np.ndarray]  # by sample: what the run's own model says
    by: float  # the largest difference

    @property
    def model(self) -> OwnModel:
        return self.run.own_model

    def left(self, said: Said, rows: Sequence[TrainingRow] | None = None) -> float:
        """Return the largest difference that is left if generators had computed this."""
        return max((float(_apart(row, said(row)).max()) for row in rows or self.rows), default=0.0)

    def explains(self, left: float) -> bool:
        """Whether so small a rest shows that an explanation is right."""
        return left <= _EXPLAINED * self.by

    def falls(self, left: float) -> str:
        """Return what an explanation does to the difference, in words."""
        return f"the difference of {self.by:.3g} falls to {left:.1e}"

    def older(self, most: int = _VERSIONS) -> Iterator[tuple[int, NamedWeights]]:
        """Yield older versions that are kept: the first one, then the newest ones."""
        newest = range(self.version - 1, max(-1, self.version - 1 - most), -1)
        for number in dict.fromkeys([0, *newest]):
            if number < self.version and (found := self.run.weights(number)) is not None:
                yield number, found


class DifferentLogprobs(Detector):
    """Generators and trainer disagree about the log-probabilities of fresh samples."""

    name = "different logprobs"
    failure = (
        "weights that were never delivered, or an older version of them; an output layer that stayed behind; "
        "log-probabilities at another temperature; a token beside the prompt that the trainer does not see; "
        "a KV cache that outlived an update; an end that was forced and not drawn"
    )
    how = (
        "`logprob_gap` of each step. Then transformers' own model computes some samples anew under each "
        "explanation; the one that makes the difference go away is the cause."
    )

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        most = largest_gap(run.spec)
        wrong = [
            one for one in run.steps if one.metric("gap_tokens") > 0 and one.metric("logprob_gap") > most
        ]
        for first in wrong[:_STEPS]:
            rows = [row for row in run.rows(first.step) if not row.sample.reward_error]
            fresh = [row for row in rows if row.sample.versions.size == 1] or rows
            record = run.record(first.step)
            chosen = _chosen(fresh, record)
            cause, evidence = _cause(run, chosen)
            if cause in _UNEXPLAINED and _may_be_rounding(run, chosen, record, most):
                continue
            seen = (
                f"the generators' log-probabilities differ by up to {first.metric('logprob_gap'):.3g} from "
                f"the trainer's on the same weights (at most {most:g} is rounding); so they do in "
                f"{len(wrong)} of {len(run.steps)} steps"
            )
            command = run.command("inspect", "--sample", first.widest[0])
            if cause == _UNKNOWN and run.is_step_file:
                more, command = _elsewhere(run, first.step, int(chosen[0].sample.versions[-1]))
                evidence = [*evidence, more]
            yield FaultFound(
                first.step, "generation", cause, [seen, *evidence], [first.widest[0]], [], command, 1.0
            )
            return


def _elsewhere(run: RunEvidence, step: int, version: int) -> tuple[str, str]:
    """Return what a step file lacks to tell the cause, and the command that goes on where the run is."""
    likely = {version - 1, 0, version}
    missing = [one for one in sorted(likely) if 0 <= one <= version and run.weights(one) is None]
    if not missing:
        return (
            "where the run is, more versions can be tried than this file has",
            run.handle.command("explain"),
        )
    lacks = (
        f"the step file has no weights of {versions_named(missing)}, which generators may have had; where "
        "the run is, a file can be made with them"
    )
    return lacks, run.command("bundle", "--step", str(step), "--regenerate")


def _may_be_rounding(
    run: RunEvidence, rows: Sequence[TrainingRow], record: StepRecord, most: float
) -> bool:  # fmt: skip
    """Whether a difference that nothing explains may come from 16 bits.

    Few tokens are so sensitive that rounding moves them by much more than all others. A trainer or generator
    that computes wrongly is wrong about many samples, or by far more than rounding can do to these.
    """
    if run.spec.model.dtype == "float32":
        return False
    rounding = max(float(run.own_model.rounding(RoutedAnswer.of(row)).max()) for row in rows)
    gaps = np.nan_to_num(record.gaps)
    return bool(np.mean(gaps > most) <= _FEW and gaps.max(initial=0.0) <= _FAR * max(most, rounding))


def _cause(run: RunEvidence, rows: Sequence[TrainingRow]) -> Cause:
    version = int(rows[0].sample.versions[-1])
    weights = run.weights(version)
    if weights is None:
        lacks = "is not in the step file" if run.is_step_file else "is not kept any more: nobody can tell why"
        return _UNKNOWN, [f"version {version} of the weights {lacks}"]
    run.own_model.load(weights)
    own = {row.sample.id: run.own_model.logprobs(RoutedAnswer.of(row)) for row in rows}
    by = max(float(_apart(row, own[row.sample.id]).max()) for row in rows)
    if by <= largest_gap(run.spec):
        return _TRAINER, ["transformers' own model agrees with the generators: the fault is in the trainer"]
    found = _Disagreement(run, rows, version, weights, own, by)
    for explain in (_last_tokens, _temperature, _beside_the_prompt, _version, _head, _cache):
        if (cause := explain(found)) is not None:
            return cause
    return _UNKNOWN, ["no older version, temperature, output layer or prompt makes the difference go away"]


def _last_tokens(found: _Disagreement) -> Cause | None:
    """Whether only the last tokens differ."""
    apart = {row.sample.id: _apart(row, found.own[row.sample.id]) for row in found.rows}
    left = max(float(one[:-1].max(initial=0.0)) for one in apart.values())
    if not found.explains(left):
        return None
    cut = [row for row in found.rows if not found.explains(float(apart[row.sample.id][-1]))]
    said = sorted({f"{float(row.sample.logprobs[-1]):.3g}" for row in cut})
    ends = ", ".join(sorted({row.sample.finish for row in cut}))
    evidence = (
        f"all tokens but the last agree to {left:.1e}; {len(cut)} of {len(found.rows)} samples differ in the "
        f"last one, whose log-probability is said to be {', '.join(said[:3])}; they ended by {ends}"
    )
    return "the last token of answers was put there, not drawn, and is trained all the same", [evidence]


def _temperature(found: _Disagreement) -> Cause | None:
    """Whether another temperature explains it: 1, or whatever fits best."""

    def left(temperature: float, rows: Sequence[TrainingRow]) -> float:
        return found.left(
            lambda row: found.model.logprobs(RoutedAnswer.of(row), temperature=temperature), rows
        )

    some = found.rows[:3]
    best = min([1.0, *np.geomspace(0.25, 4.0, 33).tolist()], key=lambda one: left(one, some))
    if not found.explains(rest := left(best, found.rows)):
        return None
    wanted = found.run.spec.sampling.temperature
    cause = (
        f"the generators say log-probabilities at temperature {best:.3g}; sampling.temperature is {wanted:g}"
    )
    return cause, [f"at temperature {best:.3g} {found.falls(rest)}"]


def _beside_the_prompt(found: _Disagreement) -> Cause | None:
    """Whether a special token before or behind the prompt explains it."""

    def left(before: list[int], behind: list[int]) -> float:
        def said(row: TrainingRow) -> np.ndarray:
            return found.model.logprobs(RoutedAnswer.of(row).with_prompt(before, behind))

        return found.left(said)

    for token, name in found.run.special_tokens.items():
        for where, rest in (("before", left([token], [])), ("behind", left([], [token]))):
            if found.explains(rest):
                cause = (
                    f"the generators read token {token} ({name}) {where} each prompt, which is not in the "
                    "prompt's tokens: the trainer does not see it"
                )
                return cause, [f"with it {found.falls(rest)}"]
    return None


def _version(found: _Disagreement) -> Cause | None:
    """Whether an older version explains it; and whether generators stay at it."""
    plain: Said = lambda row: found.model.logprobs(RoutedAnswer.of(row))  # noqa: E731
    try:
        for number, weights in found.older():
            found.model.load(weights)
            if not found.explains(rest := found.left(plain)):
                continue
            said = [f"with the weights of version {number} {found.falls(rest)}"]
            newest = found.run.steps[-1].step
            rows = [row for row in found.run.rows(newest) if row.sample.versions.size == 1][:_LOOKED_AT]
            last = int(rows[0].sample.versions[-1]) if rows else found.version
            if last > found.version and found.explains(found.left(plain, rows)):
                said.append(
                    f"so it is still in step {newest}, which says that version {last} made its samples"
                )
                return f"the generators stay at version {number}: newer weights never reach them", said
            return (
                f"the generators draw with version {number} of the weights, and say that it is version "
                f"{found.version}"
            ), said
    finally:
        found.model.load(found.weights)
    return None


def _head(found: _Disagreement) -> Cause | None:
    """Whether an older output layer, with all else new, explains it."""
    for number, weights in found.older():
        found.model.load(weights)
        head = found.model.head
        found.model.load(found.weights)
        rest = max(
            float(_apart(row, found.model.logprobs(RoutedAnswer.of(row), head=head)).max())
            for row in found.rows
        )
        if found.explains(rest):
            tied = " (it is tied to the embeddings, which are new)" if found.model.is_tied else ""
            cause = f"the generators' output layer, the head, is still that of version {number}{tied}"
            return cause, [f"with that head and all else of version {found.version} {found.falls(rest)}"]
    return None


def _cache(found: _Disagreement) -> Cause | None:
    """Whether keys and values of the prompt by older weights explain it."""
    rows = [row for row in found.rows if row.sample.prompt_tokens.size > 1]
    for number, weights in found.older(_CACHES) if rows else ():
        rest = max(
            float(
                _apart(row, found.model.after_prompt_of(weights, found.weights, RoutedAnswer.of(row))).max()
            )
            for row in rows
        )
        if found.explains(rest):
            cause = (
                f"the KV cache of prompts is that of version {number}: it was not reset when version "
                f"{found.version} was installed"
            )
            return cause, [f"with the prompt's keys and values by version {number} {found.falls(rest)}"]
    return None


def _chosen(rows: Sequence[TrainingRow], record: StepRecord) -> list[TrainingRow]:
    """Return some samples of a step: those with the widest gap, and others from all over it."""
    places = list(zip(record.partitions.tolist(), record.offsets.tolist(), strict=True))
    gaps = dict(zip(places, np.nan_to_num(record.gaps).tolist(), strict=False))
    widest = sorted(rows, key=lambda row: -gaps.get((row.partition, row.offset), 0.0))[: _LOOKED_AT // 2]
    others = [row for row in rows if all(row is not one for one in widest)]
    return [*widest, *others[:: max(1, 2 * len(others) // _LOOKED_AT)]]


def _apart(row: TrainingRow, said: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.abs(row.sample.logprobs.astype(np.float64) - said)
    return found
