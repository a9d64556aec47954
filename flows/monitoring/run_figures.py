"""The figures of a run and of its newest step, by the names that Prometheus knows them by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from consumers.steps.telling import largest_gap
from flows.view.run_view import RunView
from schemas.metrics import METRICS, REWARD_PART

_PLAIN = re.compile(r"[\w .:/+-]{1,64}", re.ASCII)
_MOST = 64  # label values of a family: a user's own loss and reward may name as many things as they like
_LEFT_OUT = {"step", "iteration", "version", "ledger", "finished_at"}  # the run's figures say them


def run_figures(view: RunView, began_at: float) -> Iterator[Metric]:
    """Yield the figures of a run. `began_at`: when this start of the run began."""
    spec, last = view.spec, view.last
    step_at = float((last or {}).get("finished_at") or 0.0)
    values = {
        "steps_total": ("Optimizer steps that were taken.", 0 if last is None else (last["step"] or 0) + 1),
        "planned_steps": (
            "Optimizer steps of the whole run.", spec.algorithm.iterations * spec.algorithm.optimizer_steps
        ),
        "iterations_total": ("Iterations that were begun.", view.iterations_begun()),
        "last_step_timestamp_seconds": (
            "When the newest step was done, or the run was started.", max(began_at, step_at)
        ),
        "still_seconds": ("Time in which nothing moved in the whole run.", view.evidence.still_s),
        "progress_deadline_seconds": ("deadlines.progress_s", spec.deadlines.progress_s),
        "weights_version": ("Newest version of the weights.", view.version),
        "staleness_limit_iterations": (
            "Largest staleness that a sample may have.",
            int(spec.algorithm.most_stale) if spec.algorithm.mode == "async" else 0,
        ),
        "logprob_gap_nats": ("Logprob gap of the newest step that shows it.", view.logprob_gap),
        "logprob_gap_limit_nats": (
            "A larger gap means that something is computed wrongly.", largest_gap(spec)
        ),
        "dead_letters_total": ("Dead letters that there have ever been.", view.dead_letters),
        "samples_to_generate": ("Samples that are admitted and not finished.", view.to_generate),
        "samples_to_train": ("Samples that are finished and not trained.", view.to_train),
        "wanted_generators": (
            "Generators that the run should have, by the times of both sides.", view.wanted_generators
        ),
        "left_out_processes": ("Processes that can't be kept alive.", len(view.left_out)),
        "view_trouble": ("1: these figures are not up to date.", float(bool(view.trouble))),
    }  # fmt: skip
    for name, (text, value) in values.items():
        if value is not None:
            yield _one(f"streamrl_run_{name}", text, view.run, value)
    generated = CounterMetricFamily(
        "streamrl_run_generated_samples_total", "Finished samples by length class.", labels=("run", "class")
    )
    for number, count in enumerate(view.generated):
        generated.add_metric((view.run, str(number)), float(count))
    yield generated
    yield from _step_figures(view)
    yield from _evaluation_figures(view)


def step_figure(metric: str) -> str:
    """Return the name for Prometheus of a metric of a step: with its unit, as Prometheus writes units."""
    name = f"streamrl_step_{metric}"
    if name.endswith("_per_s"):
        return f"{name}econd"
    if name.endswith("_s"):
        return f"{name}econds"
    return f"{name}_ratio" if METRICS[metric].unit.startswith("share") else name


_FAMILIES = (  # metrics of a step whose names end in a name: how they begin, figure, label, meaning
    ("tokens_class_", "streamrl_step_class_tokens", "class", "Tokens of the newest step by length class."),
    (REWARD_PART, "streamrl_step_reward_part", "part", "Means of the parts of its rewards."),
    ("", "streamrl_step_other", "metric", "Other metrics of the newest step, by name."),
)


def _step_figures(view: RunView) -> Iterator[Metric]:
    of_families: list[dict[str, float]] = [{} for _ in _FAMILIES]
    for metric, value in (view.last or {}).items():
        if not isinstance(value, int | float) or metric in _LEFT_OUT:
            continue
        if metric in METRICS:
            yield _one(step_figure(metric), METRICS[metric].meaning, view.run, value)
            continue
        for (begin, *_), found in zip(_FAMILIES, of_families, strict=True):
            if metric.startswith(begin) and _PLAIN.fullmatch(metric.removeprefix(begin)):
                found[metric.removeprefix(begin)] = value
                break
    for (_, name, label, text), found in zip(_FAMILIES, of_families, strict=True):
        family = GaugeMetricFamily(name, text, labels=("run", label))
        for which, value in islice(sorted(found.items()), _MOST):
            family.add_metric((view.run, which), value)
        yield family


def _evaluation_figures(view: RunView) -> Iterator[Metric]:
    row = view.evaluations[-1] if view.evaluations else {}
    for name, text in (
        ("reward", "Mean reward of the newest evaluation."), ("length", "Mean tokens of its answers."),
        ("version", "Version of the weights that was evaluated."), ("failed", "Samples without a reward."),
    ):  # fmt: skip
        value = row.get(name)
        if value is not None:
            yield _one(f"streamrl_evaluation_{name}", text, view.run, float(value))


def _one(name: str, text: str, run: str, value: float) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=("run",))
    family.add_metric((run,), float(value))
    return family
