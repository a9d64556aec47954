"""Detectors of generators that compute something else than the trainer, or with other weights.

The trainer's log-probabilities of fresh samples differ from those that came with them. Then the run's model is
asked, for one explanation after the other, whether it makes the difference go away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from consumers.batches.training_rows import TrainingRow
from consumers.steps.telling import LARGEST_GAP
from flows.explain.evidence import Evidence
from flows.explain.finding import Detector, Finding
from flows.explain.own_model import tokens_of
from schemas.messages import StepRecord

_LOOKED_AT = 12  # samples by which an explanation is judged
_EXPLAINED = 0.1  # of the difference may be left
_VERSIONS = 16  # older versions that are tried
_PLACES = 8  # tokens that are named

Said = Callable[[TrainingRow], np.ndarray]


class DifferentLogprobs(Detector):
    """Generators and trainer disagree about the log-probabilities of fresh samples."""

    name = "different logprobs"
    failure = (
        "weights that were never delivered, or an older version of them; an output layer that stayed behind; "
        "log-probabilities at another temperature; a token before the prompt that the trainer does not see; a "
        "KV cache that outlived an update; an end that was forced and not drawn"
    )
    how = (
        "`logprob_gap` of each step. Then transformers' own model computes some samples anew under each "
        "explanation; the one that makes the difference go away is the cause."
    )

    def look(self, run: Evidence) -> Iterator[Finding]:
        most = LARGEST_GAP[run.spec.model.dtype]
        wrong = [
            one for one in run.steps if one.metrics.get("gap_tokens") and one.metrics["logprob_gap"] > most
        ]
        if not wrong:
            return
        first = wrong[0]
        rows = [row for row in run.rows(first.step) if not row.sample.reward_error]
        fresh = [row for row in rows if row.sample.versions.size == 1] or rows
        version = int(fresh[0].sample.versions[-1])
        weights = run.weights(version)
        seen = (
            f"the generators' log-probabilities differ by up to {first.metrics['logprob_gap']:.3g} from the "
            f"trainer's on the same weights (at most {most:g} is rounding); so they do in {len(wrong)} of "
            f"{len(run.steps)} steps"
        )
        cause, evidence, places = self._explained(run, _chosen(fresh, run.record(first.step)), version, weights)
        worst = max(fresh, key=lambda row: _gap(row, places.get(row.sample.id)))
        yield Finding(
            first.step, "generation", cause, [seen, *evidence], [first.widest[0] or worst.sample.id],
            [], run.command(f"inspect {{run}} --sample {first.widest[0] or worst.sample.id}"), 1.0,
        )  # fmt: skip

    def _explained(
        self,
        run: Evidence,
        rows: Sequence[TrainingRow],
        version: int,
        weights: dict[str, torch.Tensor] | None,
    ) -> tuple[str, list[str], dict[str, np.ndarray]]:
        unknown = "generators and trainer compute different things with the same weights"
        if weights is None:
            return (
                unknown,
                [f"version {version} of the weights is not kept any more: nobody can tell why"],
                {},
            )
        model = run.own_model
        model.load(weights)
        own = {row.sample.id: model.logprobs(*tokens_of(row)) for row in rows}
        plain = _difference(rows, lambda row: own[row.sample.id])
        if plain <= LARGEST_GAP[run.spec.model.dtype]:
            return (
                "the trainer computes other log-probabilities than transformers' own model",
                ["transformers' own model agrees with the generators: the fault is in the trainer"], own,
            )  # fmt: skip
        for explain in (
            self._last_tokens,
            self._temperature,
            self._before,
            self._versions,
            self._head,
            self._cache,
        ):
            if (found := explain(run, rows, version, weights, own, plain)) is not None:
                return (*found, own)
        return (
            unknown,
            ["no older version, temperature, output layer or prompt makes the difference go away"],
            own,
        )

    def _last_tokens(
        self, run: Evidence, rows: Sequence[TrainingRow], version: int, weights: dict[str, torch.Tensor],
        own: dict[str, np.ndarray], plain: float,
    ) -> tuple[str, list[str]] | None:  # fmt: skip
        """Whether only the last tokens differ."""
        left = max(
            (float(_apart(row, own[row.sample.id])[:-1].max(initial=0.0)) for row in rows), default=0.0
        )
        if left > _EXPLAINED * plain:
            return None
        cut = [row for row in rows if _apart(row, own[row.sample.id])[-1] > _EXPLAINED * plain]
        said = sorted({f"{float(row.sample.logprobs[-1]):.3g}" for row in cut})
        return (
            "the last token of answers was put there, not drawn, and is trained all the same",
            [
                f"all tokens but the last agree to {left:.1e}; {len(cut)} of {len(rows)} samples differ in the "
                f"last one, whose log-probability is said to be {', '.join(said[:3])}; they ended by "
                f"{', '.join(sorted({row.sample.finish for row in cut}))}"
            ],
        )  # fmt: skip

    def _temperature(
        self, run: Evidence, rows: Sequence[TrainingRow], version: int, weights: dict[str, torch.Tensor],
        own: dict[str, np.ndarray], plain: float,
    ) -> tuple[str, list[str]] | None:  # fmt: skip
        """Whether another temperature explains it: 1, or whatever fits best."""
        model = run.own_model
        tried = [1.0, *np.geomspace(0.25, 4.0, 33).tolist()]
        left = {
            t: _difference(rows, lambda row, t=t: model.logprobs(*tokens_of(row), temperature=t))
            for t in tried[:1]
        }
        if left[1.0] > _EXPLAINED * plain:
            some = rows[:3]
            left |= {
                t: _difference(some, lambda row, t=t: model.logprobs(*tokens_of(row), temperature=t))
                for t in tried[1:]
            }
        best = min(left, key=lambda t: left[t])
        if left[best] > _EXPLAINED * plain:
            return None
        return (
            f"the generators say log-probabilities at temperature {best:.3g}; sampling.temperature is "
            f"{run.spec.sampling.temperature:g}",
            [f"at temperature {best:.3g} the difference of {plain:.3g} falls to {left[best]:.1e}"],
        )  # fmt: skip

    def _before(
        self, run: Evidence, rows: Sequence[TrainingRow], version: int, weights: dict[str, torch.Tensor],
        own: dict[str, np.ndarray], plain: float,
    ) -> tuple[str, list[str]] | None:  # fmt: skip
        """Whether a special token before or behind the prompt explains it."""
        model, special = run.own_model, run.special_tokens
        for token, name in special.items():
            for where, prompt in (
                ("before", lambda one, t=token: [t, *one]),
                ("behind", lambda one, t=token: [*one, t]),
            ):
                left = _difference(
                    rows, lambda row, p=prompt: model.logprobs(p(tokens_of(row)[0]), tokens_of(row)[1])
                )
                if left <= _EXPLAINED * plain:
                    return (
                        f"the generators read token {token} ({name}) {where} each prompt, which is not in the "
                        "prompt's tokens: the trainer does not see it",
                        [f"with it the difference of {plain:.3g} falls to {left:.1e}"],
                    )
        return None

    def _versions(
        self, run: Evidence, rows: Sequence[TrainingRow], version: int, weights: dict[str, torch.Tensor],
        own: dict[str, np.ndarray], plain: float,
    ) -> tuple[str, list[str]] | None:  # fmt: skip
        """Whether an older version explains it."""
        model = run.own_model
        for older in dict.fromkeys([0, *range(version - 1, max(-1, version - 1 - _VERSIONS), -1)]):
            found = run.weights(older) if 0 <= older < version else None
            if found is None:
                continue
            model.load(found)
            left = _difference(rows, lambda row: model.logprobs(*tokens_of(row)))
            if left <= _EXPLAINED * plain:
                model.load(weights)
                return self._by_version(run, older, version, plain, left)
        model.load(weights)
        return None

    def _by_version(
        self, run: Evidence, older: int, version: int, plain: float, left: float
    ) -> tuple[str, list[str]]:
        """Tell weights that never came from an older version, by the newest step."""
        said = [f"with the weights of version {older} the difference of {plain:.3g} falls to {left:.1e}"]
        newest = run.steps[-1]
        rows = [row for row in run.rows(newest.step) if row.sample.versions.size == 1][:_LOOKED_AT]
        last = int(rows[0].sample.versions[-1]) if rows else version
        found = run.weights(older)
        if rows and last > version and found is not None:
            run.own_model.load(found)
            if (
                _difference(rows, lambda row: run.own_model.logprobs(*tokens_of(row)))
                <= LARGEST_GAP[run.spec.model.dtype]
            ):
                said.append(
                    f"so it is still in step {newest.step}, which says that version {last} made its samples"
                )
                return f"the generators stay at version {older}: newer weights never reach them", said
        return (
            f"the generators draw with version {older} of the weights and say that it is version {version}",
            said,
        )

    def _head(
        self, run: Evidence, rows: Sequence[TrainingRow], version: int, weights: dict[str, torch.Tensor],
        own: dict[str, np.ndarray], plain: float,
    ) -> tuple[str, list[str]] | None:  # fmt: skip
        """Whether an older output layer, with all else new, explains it."""
        model = run.own_model
        for older in dict.fromkeys([0, *range(version - 1, max(-1, version - 1 - _VERSIONS), -1)]):
            found = run.weights(older) if 0 <= older < version else None
            if found is None:
                continue
            model.load(found)
            head = model.head
            model.load(weights)
            left = _difference(rows, lambda row, h=head: model.logprobs(*tokens_of(row), head=h))
            if left <= _EXPLAINED * plain:
                tied = " (it is tied to the embeddings, which are new)" if model.is_tied else ""
                return (
                    f"the generators' output layer, the head, is still that of version {older}{tied}",
                    [f"with that head and all else of version {version} the difference of {plain:.3g} falls to "
                     f"{left:.1e}"],
                )  # fmt: skip
        return None

    def _cache(
        self, run: Evidence, rows: Sequence[TrainingRow], version: int, weights: dict[str, torch.Tensor],
        own: dict[str, np.ndarray], plain: float,
    ) -> tuple[str, list[str]] | None:  # fmt: skip
        """Whether keys and values of the prompt by older weights explain it."""
        model = run.own_model
        rows = [row for row in rows if row.sample.prompt_tokens.size > 1]
        for older in range(version - 1, max(-1, version - 4), -1):
            found = run.weights(older)
            if found is None or not rows:
                continue
            left = _difference(
                rows, lambda row, old=found: model.after_prompt_of(old, weights, *tokens_of(row))
            )
            if left <= _EXPLAINED * plain:
                return (
                    f"the KV cache of prompts is that of version {older}: it was not reset when version "
                    f"{version} was installed",
                    [f"with the prompt's keys and values by version {older} the difference of {plain:.3g} falls "
                     f"to {left:.1e}"],
                )  # fmt: skip
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


def _gap(row: TrainingRow, said: np.ndarray | None) -> float:
    return 0.0 if said is None else float(_apart(row, said).max())


def _difference(rows: Sequence[TrainingRow], said: Said) -> float:
    """Return the largest difference of a token's log-probability."""
    return max((float(_apart(row, said(row)).max()) for row in rows), default=0.0)
