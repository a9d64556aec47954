"""The parts of the page that are text: head, figures, samples, settings. Foreign text is escaped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import yaml

from flows.page.axes import in_words
from flows.page.curve_charts import is_number
from flows.page.page_data import ENDED, FAILED, RUNNING, PageData, versions_here
from flows.page.safe_text import safe
from flows.page.sample_texts import ReadSample
from schemas.messages import WAIT

_PILLS = {RUNNING: "pill live", ENDED: "pill good", FAILED: "pill bad"}


def head(data: PageData, *, live: bool) -> str:
    """Return the run's name, state, progress, and what is missing on the page."""
    spec, totals = data.spec, data.totals
    loss, algorithm = str(getattr(spec.loss, "kind", "")), spec.algorithm
    model = spec.model.path or spec.model.build or ""
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(data.record.created_at))
    facts = [
        f"{loss}, {algorithm.mode}", f"{algorithm.groups} × {algorithm.group_size} samples an iteration",
        f"model {model.rpartition('/')[2]}", f"task {_task(data)}", f"begun {begun}",
        f"fork of {data.record.fork.words}" if data.record.fork else "",
    ]  # fmt: skip
    done = (data.last.get("iteration", -1) + 1) / algorithm.iterations if data.last else 0.0
    parts = [
        f'<header><div class="title"><h1>{safe(data.record.id)}</h1>',
        f'<span class="{_PILLS.get(data.state, "pill warn")}">{safe(data.state)}</span></div>',
        f'<p class="sub">{safe(" · ".join(fact for fact in facts if fact.strip()))}</p>',
    ]
    if data.state != ENDED or done < 1:
        parts.append(
            f'<div class="progress" title="{done:.0%} of the iterations">'
            f'<i style="width:{min(1, done):.1%}"></i></div>'
        )
    if data.said.why:
        kind = "say bad" if data.state == FAILED else "say"
        parts.append(f'<p class="{kind}">{safe(data.said.why)}</p>')
    parts += [
        f'<p class="say">{safe(name)} is left out: {safe(why)}</p>'
        for name, why in _some(data.files.left_out.items())
        if why
    ]
    parts += [f'<p class="say">{safe(text)}</p>' for text in data.missing]
    if live:
        at = time.strftime("%H:%M:%S", time.localtime(data.made_at))
        parts.append(f'<p class="sub" id="live">refreshed at {at}</p>')
    return "".join(parts) + _tiles(data, totals, done) + "</header>"


def _some(items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return list(items)[:20]


def _task(data: PageData) -> str:
    task = data.spec.task
    for name in ("python", "jsonl", "dataset"):
        if found := getattr(task, name, None):
            return str(found).rpartition("/")[2] if name != "dataset" else str(found)
    return ""


def _tiles(data: PageData, totals: dict[str, object], done: float) -> str:
    tiles = [
        _tile("reward", _figure(data.last.get("reward")), f"first step {_figure(totals['reward_first'])}")
    ]
    rated = [row for row in data.evaluations if is_number(row.get("reward"))]
    if rated:
        error = rated[-1].get("reward_error")
        spread = f"± {error:.2g}, " if isinstance(error, float) and is_number(error) else ""
        tiles.append(
            _tile(
                "held-out reward",
                _figure(rated[-1]["reward"]),
                f"{spread}first weights {_figure(rated[0]['reward'])}",
            )
        )
    iterations = data.spec.algorithm.iterations
    tiles.append(
        _tile(
            "iterations",
            f"{round(done * iterations)} of {iterations}",
            f"{_count(totals['steps'])} optimizer steps",
        )
    )
    tiles.append(_tile("samples", _count(totals["samples"]), f"{_figure(totals['samples_per_s'])} a second"))
    tiles.append(_tile("tokens", _count(totals["tokens"]), f"{_figure(totals['tokens_per_s'])} a second"))
    tiles += _work_tiles(data) + _health_tiles(data, totals)
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _work_tiles(data: PageData) -> list[str]:
    """Return the shares of the time in which trainer and generators worked."""
    tiles = []
    for role, name in (("trainer", "trainer works"), ("generator", "generators work")):
        shares = data.files.time.side_shares(role)
        waits = {cause: share for cause, share in shares.items() if cause.startswith(WAIT)}
        if shares:
            longest = max(waits, key=lambda cause: waits[cause], default="")
            why = f"{waits[longest]:.0%} {longest}" if longest else "never waits"
            tiles.append(_tile(name, f"{1 - sum(waits.values()):.0%}", why))
    return tiles


def _health_tiles(data: PageData, totals: dict[str, object]) -> list[str]:
    gap, limit = (
        totals["logprob_gap"],
        {"float32": 1e-3, "bfloat16": 0.15}.get(data.spec.model.dtype, math.inf),
    )
    wrong = isinstance(gap, float) and gap > limit
    tiles = [
        _tile("staleness", _figure(totals["staleness"]), f"at most {_figure(totals['staleness_max'])}"),
        _tile("logprob gap", _figure(gap), "largest on the same weights", "bad" if wrong else ""),
    ]
    failed = totals["rewards_failed"]
    if failed:
        tiles.append(_tile("samples without reward", _count(failed), "", "bad"))
    if data.facts is not None:
        dead = data.facts.dead_letters
        tiles.append(
            _tile("dead letters", _count(dead), "records not used" if dead else "", "warn" if dead else "")
        )
    return tiles


def _tile(name: str, value: str, more: str, kind: str = "") -> str:
    return (
        f'<div class="tile {kind}"><div class="name">{safe(name)}</div>'
        f'<div class="value">{safe(value)}</div><div class="more">{safe(more)}</div></div>'
    )


def _figure(value: object) -> str:
    return in_words(float(value)) if isinstance(value, int | float) else "–"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else _figure(value)


def samples_section(samples: Sequence[ReadSample], missing: str) -> str:
    """Return the samples to read."""
    if not samples:
        text = missing or "There is no optimizer step yet."
        return f'<h2>Samples to read</h2><div class="card full"><p class="none">{safe(text)}</p></div>'
    cards = "".join(_sample(one) for one in samples)
    title = f'Samples to read <span class="unit">of step {samples[0].step:d}</span>'
    return f'<h2>{title}</h2><div class="samples">{cards}</div>'


def _sample(one: ReadSample) -> str:
    reward = "no reward" if one.reward_error or not is_number(one.reward) else f"{one.reward:.3g}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in one.parts.items() if is_number(value))
    cut = "cut off" if one.finish == "length" else "stopped"
    meta = [f"{one.length} tokens, {one.predicted:.0f} predicted", cut, f"weights {one.version}",
            f"problem {one.problem}", one.id]  # fmt: skip
    error = f'<p class="say bad">{safe(one.reward_error)}</p>' if one.reward_error else ""
    return (
        f'<article class="sample"><div class="top"><b>{safe(reward)}</b>'
        f'<span class="meta">{safe(one.why)}</span><span class="meta">{safe(parts)}</span></div>'
        f'<pre class="prompt">{_visible(one.prompt)}</pre>'
        f"<pre>{_visible(one.completion)}</pre>{error}"
        f'<div class="meta">{safe(" · ".join(meta))}</div></article>'
    )


def _visible(text: str) -> str:
    return safe(text) or '<span class="unit">empty</span>'


def processes_section(data: PageData) -> str:
    """Return what each process does, by its last heartbeat."""
    if data.facts is None or not data.facts.processes:
        return ""
    rows = "".join(
        f"<tr><td>{safe(one.name)}</td><td>{safe(one.host)}</td><td>{safe(one.doing)}</td></tr>"
        for one in data.facts.processes
    )
    at = time.strftime("%H:%M:%S", time.localtime(data.facts.at))
    return _details(
        "processes",
        f"Processes, at {at}",
        f"<table><tr><th>process</th><th>machine</th><th>does</th></tr>{rows}</table>",
    )


def balance_section(data: PageData) -> str:
    """Return the changes of the number of generators, the newest first."""
    if data.facts is None or not data.facts.balance:
        return ""
    changes = data.facts.balance[::-1]
    names = "".join(f"<th>{safe(name)}</th>" for name in changes[0])
    rows = "".join(
        f"<tr>{''.join(f'<td>{safe(said)}</td>' for said in one.values())}</tr>" for one in changes
    )
    title = f"Balance: {changes[0].get('generators', '')} generators after iteration "
    return _details(
        "balance", title + changes[0].get("iteration", ""), f"<table><tr>{names}</tr>{rows}</table>"
    )


def settings_section(data: PageData) -> str:
    """Return the run file with all defaults, and the versions of packages."""
    text = yaml.safe_dump(data.spec.model_dump(mode="json"), sort_keys=False)
    rows = "".join(
        f"<tr><td>{safe(name)}</td><td>{safe(value)}</td></tr>" for name, value in versions_here().items()
    )
    return _details(
        "settings",
        "Settings: the run file with all defaults",
        f'<pre style="max-height:none">{safe(text)}</pre>',
    ) + _details("versions", "Versions of packages, where this page was made", f"<table>{rows}</table>")


def letters_section(data: PageData) -> str:
    """Return the last dead letter, if there is one."""
    if data.facts is None or not data.facts.last_dead:
        return ""
    return _details(
        "letters", f"Dead letters: {data.facts.dead_letters}", f"<pre>{safe(data.facts.last_dead)}</pre>"
    )


def result_section(data: PageData) -> str:
    """Return the table of held-out rewards before and after, if the run has ended."""
    rows = data.summary.get("result")
    if not isinstance(rows, list) or not rows or data.state != ENDED:
        return ""
    lines = []
    for row in rows[:20]:
        error = f" ± {row['gain_error']:.3f}" if is_number(row.get("gain_error")) else ""
        gain = f"{row['gain']:+.3f}{error}" if is_number(row.get("gain")) else "–"
        cells = (_figure(row.get("before")), _figure(row.get("after")), gain)
        lines.append(
            f"<tr><td>{safe(str(row.get('what')))}</td><td class=\"n\">{row.get('problems', 0):d}</td>"
            + "".join(f'<td class="n">{safe(cell)}</td>' for cell in cells) + "</tr>"
        )  # fmt: skip
    names = "".join(f'<th class="n">{name}</th>' for name in ("problems", "before", "after", "gain"))
    return (
        '<figure class="card full"><figcaption>Held-out reward, first weights and last</figcaption>'
        f"<table><tr><th></th>{names}</tr>{''.join(lines)}</table></figure>"
    )


def _details(name: str, title: str, inside: str) -> str:
    return f'<details id="{name}"><summary>{safe(title)}</summary>{inside}</details>'


def more_charts(cards: Sequence[str]) -> str:
    """Return the charts of all other metrics, folded away."""
    if not cards:
        return ""
    return _details(
        "metrics", f"All other metrics ({len(cards)})", f'<div class="cards">{"".join(cards)}</div>'
    )
