"""Detectors of prompts that are not those that should be trained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from flows.explain.detector import Detector, FaultFound
from flows.explain.run_evidence import RunEvidence
from producers.tokenizing import load_tokenize
from schemas.identity import round_of
from schemas.messages import Prompt

_MOST_PROMPTS = 200_000  # that are compared
_TOKENIZED = 256  # that are tokenized anew
_LONGER = 1.2  # prompts that are missing are long if they have so many times the usual tokens


class OtherTokens(Detector):
    """The tokens of a prompt are not those of its text."""

    name = "other tokens"
    failure = "feeder and trainer load different tokenizers, or revisions of one"
    how = "The text of problems, tokenized by the run's own model, with the tokens of their prompts."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        if run.spec.task.chat or run.spec.task.chat_template:
            return  # the text goes through a template first
        tokenize = load_tokenize(run.handle.record.model)
        looked, wrong = 0, []
        for prompt in run.prompts():
            text = _text_of(prompt, run.spec.task.prompt_field)
            if text is None:
                continue
            looked += 1
            expected = tokenize(text)
            if expected != prompt.tokens.tolist():
                wrong.append((prompt, text, expected))
            if looked >= _TOKENIZED:
                break
        if not wrong:
            return
        prompt, text, expected = min(wrong, key=lambda one: one[0].group)
        yield FaultFound(
            prompt.iteration * run.spec.algorithm.optimizer_steps,
            "prompt",
            "the prompts' tokens were made by another tokenizer than the run's model has",
            [
                f"{len(wrong)} of {looked} prompts have other tokens than their text",
                (
                    f"group {prompt.group}: {text[:80]!r} is {expected[:16]}, and its prompt has "
                    f"{prompt.tokens.tolist()[:16]}"
                ),
            ],
            command=run.command("samples", "--step", "0"),
            certainty=1.0,
        )


class RepeatedPrompts(Detector):
    """A problem comes again before its epoch is over."""

    name = "repeated prompts"
    failure = "a sampler that begins anew, so that some problems are trained again and again"
    how = "The problems of each epoch: none may come twice."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        groups: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for prompt in _bounded(run):
            if not round_of(prompt.group):
                groups[prompt.epoch, prompt.problem_id].append((prompt.group, prompt.iteration))
        again = {key: sorted(set(found)) for key, found in groups.items() if len(set(found)) > 1}
        if not again:
            return
        (epoch, problem), first = min(again.items(), key=lambda one: one[1][1])
        often = max(again.values(), key=len)
        step = first[1][1] * run.spec.algorithm.optimizer_steps
        yield FaultFound(
            step,
            "prompt",
            f"problem {problem[:60]} is trained again within one epoch",
            [
                f"in epoch {epoch} it is group {first[0][0]} and again group {first[1][0]}",
                f"{len(again)} problems come again within their epoch, one of them {len(often)} times",
            ],
            command=run.command("samples", "--step", str(step), "--where", f"problem={problem}"),
            certainty=0.9,
        )


class LostPrompts(Detector):
    """An epoch ends without some problems that an earlier one had."""

    name = "lost prompts"
    failure = "prompts that a resumed run passes over, mostly long ones"
    how = "The problems of each epoch that is over, with those of the first one; how long the missing are."

    def look(self, run: RunEvidence) -> Iterator[FaultFound]:
        epochs: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
        ends: dict[int, int] = {}
        for prompt in _bounded(run):
            if not round_of(prompt.group):
                epochs[prompt.epoch][prompt.problem_id] = prompt.tokens.size, prompt.iteration
                ends[prompt.epoch] = max(ends.get(prompt.epoch, 0), prompt.iteration)
        over = sorted(epochs)[:-1]
        if len(over) < 2:
            return
        whole = epochs[over[0]]
        for epoch in over[1:]:
            if len(whole.keys() - epochs[epoch].keys()) <= 0.02 * len(whole):
                continue
            later = [epochs[one].keys() for one in over if one >= epoch]
            missing = {one: whole[one][0] for one in whole if any(one not in there for there in later)}
            usual = float(np.mean([size for size, _ in whole.values()]))
            mean = float(np.mean(list(missing.values())))
            kind = "long " if mean > _LONGER * usual else ""
            yield FaultFound(
                ends[epoch] * run.spec.algorithm.optimizer_steps,
                "prompt",
                f"{kind}prompts are passed over: epoch {epoch} ended without some of them",
                [
                    (
                        f"{len(missing)} of {len(whole)} problems of epoch {over[0]} are missing since, "
                        f"such as {', '.join(sorted(missing)[:3])}"
                    ),
                    f"they have {mean:.1f} tokens in the mean, all problems {usual:.1f}",
                ],
                command=run.command("logs", "feeder"),
                certainty=0.95,
            )
            return


def _bounded(run: RunEvidence) -> Iterator[Prompt]:
    for number, prompt in enumerate(run.prompts()):
        if number >= _MOST_PROMPTS:
            return
        yield prompt


def _text_of(prompt: Prompt, field: str) -> str | None:
    problem = problem_in(prompt)
    text = problem.get(field) if problem else None
    return text if isinstance(text, str) else None


def problem_in(prompt: Prompt) -> dict[str, Any] | None:
    """Return a prompt's problem; None if it can't be read."""
    try:
        said = json.loads(prompt.problem)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
