"""Writes a plan as a picture, or as a page that holds the picture and the figures."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from flows.planning.step_estimate import MachineSplit
from flows.plans.plan_picture import draw_plan
from flows.plans.plan_rows import (
    best_and_next,
    beyond_settings,
    bubbles_of,
    figure,
    link_lines,
    range_words,
    settings_words,
    sources_of,
    split_words,
)
from flows.plans.planning_inputs import PlanningInputs
from flows.plans.run_plan import RunPlan
from flows.plans.simulated_split import iterations_for, simulated_run
from flows.simulation.simulation_result import Simulation
from flows.simulation.world import simulate

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.3em .9em .3em 0;text-align:left;vertical-align:top;"
    "border-bottom:1px solid #ddd}img{max-width:100%}code{background:#f3f3f3;padding:.1em .3em}"
)


def write_plan_picture(plan: RunPlan, target: Path, seed: int = 0) -> None:
    """Draw one iteration of a plan into a picture (.png), or into a page beside the figures (.html)."""
    split = plan.chosen.split
    generators, trainer = split_words(split)
    first = f"{plan.spec.run}: one iteration of {range_words(plan.step_s, ' s')}"
    title = f"{first}\n{generators}; trainer: {trainer}"
    if target.suffix != ".html":
        draw_iteration(plan.inputs, split, title, target, seed=seed)
        return
    image = io.BytesIO()
    draw_iteration(plan.inputs, split, title, image, seed=seed)
    target.write_text(_page(plan, image.getvalue()))


def draw_iteration(
    inputs: PlanningInputs, split: MachineSplit, title: str, target: Path | Any, *, seed: int = 0
) -> None:
    """Draw a steady iteration of a split."""
    iterations = iterations_for(inputs.spec, split.lookahead, samples=0)
    middle = iterations // 2
    found = simulate(
        simulated_run(
            inputs.spec, split, inputs.workload, iterations=iterations, seed=seed, picture_of=middle
        )
    )
    draw_simulation(found, split, middle, title, target)


def draw_simulation(
    found: Simulation, split: MachineSplit, iteration: int, title: str, target: Path | Any
) -> None:
    """Draw an iteration whose spans were kept."""
    names = [kind.pool.name for kind, count in split.generators for _ in range(count)]
    places = {f"g{place:05d}": name for place, name in enumerate(names)}
    draw_plan(title, found, iteration, places, target, in_turns=split.takes_turns)


def _page(plan: RunPlan, image: bytes) -> str:
    safe = html.escape
    cells = "".join(
        f"<tr><td>{name}</td>"
        + "".join(f"<td>{safe(words)}</td>" for words in split_words(one.split))
        + f"<td>{figure(one.figures.step_s)} s</td><td>{figure(one.figures.samples_per_s)}</td>"
        f"<td>{figure(one.figures.cost_per_1000) if one.split.price else 'no price'}</td></tr>"
        for name, one in best_and_next(plan)
    )
    lines = [
        *([f"The runner-up lost: {plan.why}"] if plan.why else []), *bubbles_of(plan.chosen.figures),
        *link_lines(plan.chosen.split, plan.chosen.figures),
        f"figures from: {'; '.join(sources_of(plan.inputs, plan.chosen.split))}",
        *beyond_settings(plan.chosen.split, plan.spec.placement.store),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Plan of {safe(plan.spec.run)} · StreamRL</title><style>{_STYLE}</style></head><body>"
        f"<h1>Plan of {safe(plan.spec.run)}</h1><p>A step takes {range_words(plan.step_s, ' s')}, "
        f"{range_words(plan.samples_per_s)} samples a second; nine cases of ten lie between.</p>"
        "<table><tr><th></th><th>generators</th><th>trainer</th><th>a step</th><th>samples/s</th>"
        f"<th>1,000 samples cost</th></tr>{cells}</table>"
        f'<p><img alt="one iteration" src="data:image/png;base64,{base64.b64encode(image).decode()}"></p>'
        f"<ul>{''.join(f'<li>{safe(line)}</li>' for line in lines)}</ul>"
        f"<p>Settings: <code>{safe(settings_words(plan))}</code></p></body></html>\n"
    )
